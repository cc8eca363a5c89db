"use strict";
// Draws the charts again so that they can be pointed at and zoomed, hides the arms that the reader
// switches off, and switches between light and dark. Without this script the page shows the same
// figures as pictures.
(() => {
  const root = document.documentElement;
  const views = new Map();
  const hidden = new Set();

  function draw(figure) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const live = figure.querySelector(".live");
    const options = { actions: false, renderer: "svg", tooltip: { theme: "custom" } };
    vegaEmbed(live, spec, options).then(
      (result) => {
        views.set(figure.id, result.view);
        figure.querySelector(".still").hidden = true;
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
      if (box.checked) hidden.delete(box.value); else hidden.add(box.value);
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
