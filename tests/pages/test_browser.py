"""A report in a real browser, opened from its file: with and without scripts, wide and narrow."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from browsing import AXE, CHROMIUM, Browser, Tab
from cases import slow_unless
from frostlab.pages.write import PAGE, report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed"),
]
COUNT = "document.querySelectorAll('figure[data-chart]').length"
PAIRED = "document.querySelector('#paired-differences .live')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def tuned_page(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison with learning rates and timed steps."""
    folder = tmp_path_factory.mktemp("reported") / "tuned"
    shutil.copytree(tuned, folder)
    return report(folder)


def draw_all(tab: Tab) -> int:
    """Scroll to every figure, so that all are drawn, and return their number."""
    count = int(tab.js(COUNT))
    for number in range(count):
        tab.js(f"document.querySelectorAll('figure[data-chart]')[{number}].scrollIntoView()")
        tab.wait(f"document.querySelectorAll('figure[data-chart]')[{number}]"
                 ".querySelector('.live svg') !== null")  # fmt: skip
    tab.wait(f"document.documentElement.dataset.drawn === String({COUNT})")
    tab.js("window.scrollTo(0, 0)")
    return count


def brightness(colour: str) -> int:
    return sum(int(number) for number in re.findall(r"\d+", colour)[:3])


@pytest.mark.parametrize("which", slow_unless(["tuned_page"], ["reported", "tuned_page"]))
def test_figures_are_drawn_live_and_nothing_leaves_the_file(
    browser: Browser, which: str, request: pytest.FixtureRequest
) -> None:
    made: Path = request.getfixturevalue(which)
    page = made if made.is_file() else made / PAGE
    tab = browser.open(page)
    assert draw_all(tab) >= 1
    figures = tab.js("""[...document.querySelectorAll('figure[data-chart]')].map(figure => ({
        name: figure.id,
        live: figure.querySelector('.live').getBoundingClientRect().width,
        still: figure.querySelector('.still').getBoundingClientRect().width,
        marks: figure.querySelectorAll('.live svg [class*=mark-]:not([class*=mark-group]) > *')
            .length}))""")
    for figure in figures:
        assert figure["live"] > 300, figure
        assert figure["still"] == 0, figure
        assert figure["marks"] > 3, figure
    assert tab.problems == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
    assert {url for url in tab.requests if url.startswith("file")} == {page.resolve().as_uri()}
    tab.close()


def test_a_request_would_be_blocked_and_noticed(
    browser: Browser, reported: Path, tmp_path: Path
) -> None:
    text = (reported / PAGE).read_text(encoding="utf-8")
    image = '<img src="https://example.org/a.png" alt="">'
    (tmp_path / PAGE).write_text(text.replace("</main>", f"{image}</main>"), encoding="utf-8")
    tab = browser.open(tmp_path / PAGE)
    draw_all(tab)
    assert "Content Security Policy" in json.dumps(tab.problems)
    tab.close()


def test_an_arm_can_be_hidden(browser: Browser, reported: Path) -> None:
    tab = browser.open(reported / PAGE)
    draw_all(tab)
    marks = f"{PAIRED}.querySelectorAll('.mark-symbol path').length"
    box = "document.querySelector('input[name=arm][value=oelm]')"
    before = tab.js(marks)
    tab.js(f"{box}.click()")
    tab.wait(f"{marks} === {before // 2}")  # one of the two arms that differ from the baseline
    assert "oelm-random" in tab.js(f"{PAIRED}.textContent")
    tab.js(f"{box}.click()")
    tab.wait(f"{marks} === {before}")
    assert tab.problems == []
    tab.close()


def test_pointing_at_a_mark_shows_its_numbers(browser: Browser, reported: Path) -> None:
    tab = browser.open(reported / PAGE)
    draw_all(tab)
    x, y = tab.js(f"""(() => {{
        const mark = {PAIRED}.querySelector('.mark-symbol path');
        mark.scrollIntoView({{block: 'center'}});
        const box = mark.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
    tab.move(x - 3, y - 3)
    tab.move(x, y)
    tab.wait("document.querySelector('#vg-tooltip-element.visible') !== null")
    text = tab.js("document.querySelector('#vg-tooltip-element').textContent")
    assert "seed" in text
    assert re.search(r"[+-]0\.\d|0", text)
    style = "getComputedStyle(document.querySelector('#vg-tooltip-element'))"
    assert tab.js(f"{style}.position") == "fixed"
    assert tab.js(f"{style}.backgroundColor") != "rgba(0, 0, 0, 0)"
    tab.close()


def test_curves_can_be_zoomed(browser: Browser, reported: Path) -> None:
    tab = browser.open(reported / PAGE)
    draw_all(tab)
    figure = tab.js("""(() => {
        for (const figure of document.querySelectorAll('figure[data-chart]'))
          if (figure.querySelector('script').textContent.includes('"bind":"scales"'))
            return figure.id;
    })()""")
    assert figure
    live = f"document.querySelector('#{figure} .live')"
    ticks = f"[...{live}.querySelectorAll('.role-axis-label text')].map(e => e.textContent).join()"
    before = tab.js(ticks)
    x, y = tab.js(f"""(() => {{ {live}.scrollIntoView({{block: 'center'}});
        const box = {live}.querySelector('svg').getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
    tab.move(x, y)
    for _ in range(5):
        tab.wheel(x, y, -120)
    tab.wait(f"{ticks} !== {json.dumps(before)}")
    assert tab.problems == []
    tab.close()


@pytest.mark.parametrize("dark", slow_unless([True], [False, True]))
def test_the_button_switches_the_theme(browser: Browser, reported: Path, dark: bool) -> None:
    tab = browser.open(reported / PAGE, dark=dark)
    draw_all(tab)
    look = f"""[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.body).color,
        getComputedStyle({PAIRED}.querySelector('.role-axis-label text')).fill]"""
    for is_dark in (dark, not dark, dark):
        paper, ink, label = tab.js(look)
        assert (brightness(paper) < brightness(ink)) == is_dark
        assert (brightness(paper) < brightness(label)) == is_dark
        tab.js("document.getElementById('theme').click()")
    tab.close()


def test_it_prints(browser: Browser, reported: Path) -> None:
    """Drawings are printed as in the file, in black on white, also from a dark page."""
    tab = browser.open(reported / PAGE, dark=True)
    draw_all(tab)
    tab.js("document.getElementById('theme').click(), document.getElementById('theme').click()")
    assert tab.js("document.documentElement.dataset.theme") == "dark"
    data = tab.pdf()
    assert data.startswith(b"%PDF-")
    assert len(data) > 20_000
    assert re.search(rb"/Type ?/Page\b", data)
    tab.command("Emulation.setEmulatedMedia", media="print")
    shown = tab.js("""[...document.querySelectorAll('figure[data-chart]')].map(figure =>
        [figure.querySelector('.still').offsetHeight > 50,
         figure.querySelector('.live').offsetHeight > 0])""")
    assert shown
    assert all(both == [True, False] for both in shown)
    paper, ink = tab.js("""[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.still svg text')).fill]""")
    assert (brightness(paper), brightness(ink)) == (3 * 255, 0)
    assert not tab.js("document.querySelector('.controls').offsetHeight")
    tab.close()


def test_without_scripts_figures_and_tables_are_there(browser: Browser, reported: Path) -> None:
    tab = browser.open(reported / PAGE, scripts=False)
    seen = tab.js("""({
        figures: [...document.querySelectorAll('figure[data-chart] .still svg')].map(svg =>
            [svg.getBoundingClientRect().width, svg.querySelectorAll('path').length]),
        live: document.querySelectorAll('.live svg').length,
        tables: [...document.querySelectorAll('table')].map(table => table.offsetHeight),
        controls: document.querySelector('.controls').offsetHeight,
        text: document.querySelector('main').innerText})""")
    assert len(seen["figures"]) == tab.js(COUNT) >= 1
    assert all(width > 300 and paths > 3 for width, paths in seen["figures"])
    assert seen["tables"]
    assert all(height > 20 for height in seen["tables"])
    assert (seen["live"], seen["controls"]) == (0, 0)
    verdict = json.loads((reported / "evidence.json").read_text())["verdicts"]["oelm"]
    assert verdict["word"] in seen["text"]
    tab.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_phone_need_not_scroll_sideways(browser: Browser, reported: Path, scripts: bool) -> None:
    tab = browser.open(reported / PAGE, width=390, scripts=scripts)
    if scripts:
        draw_all(tab)
    assert tab.js("document.documentElement.scrollWidth") <= 390
    small = tab.js("""[...document.querySelectorAll('figure svg text')]
        .filter(text => text.getBoundingClientRect().width > 0)
        .map(text => [text.textContent, text.getBoundingClientRect().height])
        .filter(([words, height]) => height < 9)""")
    assert small == [], "text in a figure is too small to read"
    tab.close()


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core, which `make axe` fetches")
@pytest.mark.parametrize(
    ("which", "dark"),
    slow_unless(
        [("reported", False), ("tuned_page", True)],
        [(which, dark) for which in ("reported", "tuned_page") for dark in (False, True)],
    ),
)
def test_accessibility(
    browser: Browser, which: str, dark: bool, request: pytest.FixtureRequest
) -> None:
    made: Path = request.getfixturevalue(which)
    tab = browser.open(made if made.is_file() else made / PAGE, dark=dark)
    draw_all(tab)
    tab.js(AXE.read_text(encoding="utf-8"))
    found = json.loads(
        tab.js("""axe.run().then(result => JSON.stringify(result.violations
        .map(rule => [rule.impact, rule.id, rule.nodes.map(node => node.html.slice(0, 200))])))""")
    )
    serious = [rule for rule in found if rule[0] in ("serious", "critical")]
    assert serious == []
    tab.close()


def test_texts_of_records_stay_text(browser: Browser, reported: Path, tmp_path: Path) -> None:
    """Markup in a record is shown, not run; a long name of an arm still switches its marks."""
    evil = (
        "</script></title><script>document.title='ran'</script><img src=x onerror=alert(1)>\"'../"
    )
    name = "x-オエルム-" + "x" * 93
    shutil.copytree(reported, tmp_path, dirs_exist_ok=True)
    for file in ("evidence.json", "comparison.json", "plan.json"):
        path = tmp_path / file
        path.write_text(path.read_text().replace('"oelm"', json.dumps(name)))
    values = json.loads((tmp_path / "evidence.json").read_text())
    values["oelm"] = values.pop(name)  # the key of the OELM arm's name
    values["plan"]["about"] = values["caution"] = evil
    values["verdicts"][name]["notes"] = [evil]
    (tmp_path / "evidence.json").write_text(json.dumps(values))
    tab = browser.open(report(tmp_path), width=390)
    draw_all(tab)
    assert "ran" not in tab.js("document.title").split()
    assert evil in tab.js("document.querySelector('main').textContent")
    assert tab.js("document.querySelectorAll('img').length") == 0
    marks = f"{PAIRED}.querySelectorAll('.mark-symbol path').length"
    before = tab.js(marks)
    tab.js("document.querySelectorAll('input[name=arm]')[1].click()")
    tab.wait(f"{marks} === {before // 2}")
    assert tab.problems == []
    assert tab.js("document.documentElement.scrollWidth") <= 390
    tab.close()


def test_a_figure_file_is_drawn_with_its_own_font(
    browser: Browser, reported: Path, tmp_path: Path
) -> None:
    """With a name that no installed font has, only the embedded font can have these widths."""
    text = (reported / "figures" / "paired-differences.svg").read_text(encoding="utf-8")
    other = re.sub(r'"Liberation Sans[^"]*"', '"No Such Font"', text)
    bare = re.sub("<style>.*</style>", "", other)
    assert other != text != bare
    measured = []
    for name, content in (("own", other), ("none", bare)):
        path = tmp_path / f"{name}.svg"
        path.write_text(content, encoding="utf-8")
        tab = browser.open(path)
        statuses = tab.js("document.fonts.ready.then(() => [...document.fonts].map(f => f.status))")
        measured.append(tab.js("[...document.querySelectorAll('text')].map("
                               "text => [text.textContent, text.getComputedTextLength(), "
                               "parseFloat(getComputedStyle(text).fontSize)])"))  # fmt: skip
        assert tab.problems == []
        assert statuses == (["loaded"] * len(statuses) if name == "own" else [])
        tab.close()
    own, none = measured
    digits = [width / (len(text) * size) for text, width, size in own if text.isdigit()]
    assert digits
    assert digits == pytest.approx([0.556] * len(digits), abs=0.004), "an em of Liberation Sans"
    assert sum(width for _, width, _ in own) != pytest.approx(sum(w for _, w, _ in none), rel=0.01)
