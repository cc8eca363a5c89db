"use strict";
// Draws the charts again so that they can be pointed at and zoomed, hides the arms that the reader
// switches off, and switches between light and dark. Without this script the page shows the same
// figures as pictures.
(() => {
  const root = document.documentElement;
  const views = new Map();
  const hidden = new Set();
  const PANELS = 640; // a screen with at least as many pixels has room for panels side by side
  const MARGIN = 80; // pixels next to a plot for the axis and its labels

  function draw(figure) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const live = figure.querySelector(".live");
    const room = figure.clientWidth;
    // On a narrow screen the plot is drawn narrower, and its text keeps its size.
    if (typeof spec.width === "number" && room < spec.width + MARGIN && (spec.layer || spec.mark)) {
      Object.assign(spec, { width: room, autosize: { type: "fit-x", contains: "padding" } });
    }
    // On such a screen, panels are drawn below each other.
    if (spec.spec && room < PANELS) {
      Object.assign(spec, { columns: 1 });
      spec.spec.width = Math.min(spec.spec.width, room - 2 * MARGIN);
    }
    const options = { actions: false, renderer: "svg", tooltip: { theme: "custom" }, logLevel: 1 };
    vegaEmbed(live, spec, options).then(
      (result) => {
        views.set(figure.id, result.view);
        // For a screen reader the drawing is one image with the figure's words.
        live.querySelector("svg").setAttribute("aria-hidden", "true");
        const still = figure.querySelector(".still");
        for (const name of ["role", "aria-label"]) live.setAttribute(name, still.getAttribute(name));
        still.hidden = true;
        live.hidden = false;
        hide(result.view);
        root.dataset.drawn = String(views.size);
      },
      (error) => { live.remove(); console.error(figure.id + ": " + error); },
    );
  }

  function hide(view) {
    try {
      view.signal("hidden_arms", [...hidden]).run();
    } catch (error) { /* a figure without arms */ }
  }

  for (const box of document.querySelectorAll("input[name=arm]")) {
    box.addEventListener("change", () => {
      for (const name of [box.value, box.dataset.label]) {
        if (box.checked) hidden.delete(name); else hidden.add(name);
      }
      for (const view of views.values()) hide(view);
    });
  }

  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark" ||
      (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = dark ? "light" : "dark";
  });

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  for (const figure of document.querySelectorAll("figure[data-chart]")) watcher.observe(figure);
  for (const control of document.querySelectorAll(".controls")) control.hidden = false;
})();
