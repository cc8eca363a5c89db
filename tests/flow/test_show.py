"""A flow for people: the table, the map in the terminal, the page and its pictures."""

import importlib
import json
import math
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import frostlab as fl
from cases import slow_unless
from flowing import adamw, loss_at, tiny_gpt, watched
from frostlab.flow.diagnosis import findings_of, front_ratios, sentence_of
from frostlab.flow.figures import BROKEN, FROZEN, NUMBER, UNREACHED, ZERO, Cell, grid_of, rows_of
from frostlab.flow.measurements import Report
from frostlab.flow.show import SHADES, flow_map_text, flow_page, page_of
from fuzz.targets_pages import small_flow

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def faulty() -> fl.Flow:
    """A frozen query, detached norms, a part that nothing moves, a NaN at the end."""
    model = tiny_gpt()
    fl.freeze(model, "layers[0].query")
    lost = {id(p) for p in model.blocks[2].up.parameters()}
    kept = [p for p in model.parameters() if id(p) not in lost and p.requires_grad]
    model.blocks[1].norm1.register_forward_hook(lambda m, args, made: made.detach())
    model.blocks[1].norm2.register_forward_hook(lambda m, args, made: made.detach())

    def loss(step: int) -> Tensor:
        spoilt = model.head.weight.sum() * (math.nan if step == 12 else 0.0)
        return loss_at(model, step) + spoilt

    flow = watched(model, torch.optim.AdamW(kept, lr=1e-3), loss, steps=13, every_n_steps=1)
    flow.model = "GPT <b>&"
    return flow


@pytest.fixture(scope="module")
def page(faulty: fl.Flow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = flow_page(faulty, tmp_path_factory.mktemp("flow") / "new" / "folder")
    assert [path.name for path in made] == ["flow.html", "flow.png"]
    return made[0]


def row(text: str, name: str) -> str:
    (found,) = re.findall(rf"^{re.escape(name)} .*$", text, re.MULTILINE)
    return found


def test_the_map_of_a_terminal_marks_what_is_no_number(faulty: fl.Flow) -> None:
    text = flow_map_text(faulty)
    name, gradient, ratio, *words = row(text, "layers[0].query").split()
    assert (name, gradient, ratio) == ("layers[0].query", "·" * 13, "·" * 13)
    assert " ".join(words) == "frozen on purpose"
    assert row(text, "layers[1].norm").split()[1] == "-" * 13
    assert row(text, "layers[2].up").split()[2] == "0" * 13
    assert row(text, "head").split()[1][-1] == "!"
    assert "0 zero   - no gradient arrived   · frozen   ! NaN or infinity" in text
    assert len(text.splitlines()) == len(faulty.parts) + 7
    assert flow_map_text(fl.Flow("GPT", "SGD")) == "GPT: no step has been measured yet"


def test_shades_are_logarithms(faulty: fl.Flow) -> None:
    """Every shade of the map begins where the legend says."""
    text = flow_map_text(faulty)
    (legend,) = re.findall(r"^gradient norm: (.*)$", text, re.MULTILINE)
    marks = dict(mark.split() for mark in legend.split("  "))
    assert list(marks) == list(SHADES)
    seen = set()
    for part in faulty.parts:
        drawn, series = row(text, part.name).split()[1], faulty.series(part.name, "gradient")
        for shade, value in zip(drawn, series.values(), strict=True):
            if shade in marks:
                seen.add(shade)
                at = SHADES.index(shade)
                assert value > 0.66 * float(marks[shade])  # a legend has one digit
                assert at == 7 or value < 1.5 * float(marks[SHADES[at + 1]])
    assert {SHADES[0], SHADES[-1]} < seen


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_the_map_fits_a_terminal(faulty: fl.Flow, width: int) -> None:
    lines = flow_map_text(faulty, width).splitlines()
    assert max(map(len, lines[1:])) <= width
    assert ("frozen on purpose" in "\n".join(lines)) == (width >= 80)


def made_flow(values: list[list[float]], layers: int) -> fl.Flow:
    """A flow of such gradients, a row a report; weights are 2, updates half the gradients."""
    flow = watched(tiny_gpt(layers=layers), adamw(tiny_gpt()), steps=0)
    size = len(flow.parts)
    flow._reports = [
        Report(
            i + 1,
            {"gradient": tuple(v), "weight": (2.0,) * size, "update": tuple(x / 2 for x in v),
             "before_clip": (math.nan,) * size},
            (1e-3,),
            broken=tuple(j for j, x in enumerate(v) if math.isnan(x)),
        )
        for i, v in enumerate(values)
    ]  # fmt: skip
    return flow


def test_columns_are_medians_and_lose_nothing_that_is_broken() -> None:
    size = len(watched(tiny_gpt(), adamw(tiny_gpt()), steps=0).parts)
    values = [[float(step)] * size for step in (1, 2, 9, 4, 5, 6, 0, 0, 0, 7)]
    values[4][1] = math.nan
    flow = made_flow(values, 3)
    rows = rows_of(flow, 100)
    grid = grid_of(flow, "gradient", rows, 4)
    assert (grid.steps, grid.reports_a_column) == ((3, 6, 9, 10), 3)
    assert grid.cells[0] == (Cell(NUMBER, 2.0), Cell(NUMBER, 5.0), Cell(ZERO, 0.0), Cell(NUMBER, 7))
    assert [cell.kind for cell in grid.cells[1]] == [NUMBER, BROKEN, ZERO, NUMBER]
    assert grid_of(flow, "ratio", rows, 4).cells[0][0] == Cell(NUMBER, 0.5)
    assert (grid.low, grid.high) == (2.0, 7.0)
    assert "one report per column" in flow_map_text(flow, 40)
    assert "each column is the median of 4 reports" in flow_map_text(made_flow(values * 4, 3), 40)


def test_many_parts_are_joined_into_layers_and_alarms_stay_alone(faulty: fl.Flow) -> None:
    rows = rows_of(faulty, 10)
    names = [each.name for each in rows]
    assert "layers[0]" in names
    at = next(each for each in rows if each.name == "layers[0]")
    joined = grid_of(faulty, "gradient", [at], 99).cells[0][0].value
    own = [faulty.reports[0].of("gradient", i) for i in at.parts]
    assert joined == pytest.approx(math.hypot(*(x for x in own if not math.isnan(x))))
    assert len(own) == 7
    text = "\n".join(names)
    assert names.index("layers[1].norm") > names.index("layers[1]")
    assert "layers[0].query" not in text  # frozen on purpose is no alarm


def test_a_small_scale_and_no_number_at_all() -> None:
    flow = watched(tiny_gpt(), adamw(tiny_gpt()), steps=0)
    size = len(flow.parts)
    flow = made_flow([[0.0] * size, [0.0] * size], 3)
    assert row(flow_map_text(flow), "head").split()[1:3] == ["00", "00"]
    flow = made_flow([[10.0**-i for i in range(size)]], 3)
    grid = grid_of(flow, "gradient", rows_of(flow, 99), 9)
    assert grid.low == pytest.approx(1e-8)  # of the largest


def test_the_sentence_and_findings(faulty: fl.Flow) -> None:
    assert "NaN or infinity was first seen at step 13, in head" in sentence_of(faulty)
    model = tiny_gpt()
    healthy = watched(model, adamw(model))
    assert sentence_of(healthy) == f"all {len(healthy.parts)} parts that should learn do"
    assert [each.word for each in findings_of(healthy)] == ["learning"]
    fl.freeze(model, "query")
    groups = [
        {"params": [p for p in model.parameters() if p is not model.head.weight]},
        {"params": [model.head.weight], "lr": 0.0},
    ]
    flow = watched(model, torch.optim.AdamW(groups, lr=1e-3))
    count = len(flow.parts) - 3
    assert sentence_of(flow) == (
        f"1 of {count} parts does not learn: head; 3 are frozen on purpose"
    )
    first, *rest = findings_of(flow)
    assert (first.word, first.parts) == ("not learning", ("head",))
    assert {each.word for each in rest} == {"learning", "frozen on purpose"}


def test_the_page_needs_nothing_and_shows_the_numbers(faulty: fl.Flow, page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text)
    assert not re.search(r"<script|@import|<link(?! rel=\"icon\" href=\"data:)", text)
    assert "Gradient flow of GPT &lt;b&gt;&amp;" in text
    assert "<b>" not in text
    tips = [unescape(tip) for tip in re.findall(r"<title>([^<]*)</title></path>", text)]
    for quantity in ("gradient", "ratio"):
        value = faulty.series("layers[1].value", quantity)[7]
        assert f"layers[1].value, step 7: {value:.3g}" in tips
    assert "layers[0].query, step 3: frozen" in tips
    assert "head, step 13: NaN or infinity" in tips
    assert len([tip for tip in tips if ", step " in tip]) == 2 * len(faulty.parts) * 13
    assert f"step 3: {faulty.norms()[3]:.3g}" in tips
    assert f"step 3: {front_ratios(faulty.reports)[3]:.3g}" in tips
    assert unescape(sentence_of(faulty)) in unescape(text)
    for finding in findings_of(faulty):
        assert (finding.why in unescape(text)) == (finding.word != "learning")
        assert finding.hint in unescape(text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) >= 2
    assert {name.split("-")[0] for name in ids} == {"gradient", "ratio"}  # of one chart each


def test_the_picture_is_a_picture(page: Path) -> None:
    data = page.with_name("flow.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 700
    assert height > 300
    assert len(data) < 100_000
    image = pytest.importorskip("PIL.Image").open(page.with_name("flow.png"))
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert (255, 255, 255) in colours
    assert len(colours) > 50


def scaled() -> fl.Flow:
    """A layer whose gradients are multiplied by a factor that Adam undoes."""
    model = tiny_gpt(layers=5)
    for parameter in model.blocks[2].parameters():
        parameter.register_hook(lambda g: g * 300.0)
    return watched(model, adamw(model, lr=1e-4), lambda _: loss_at(model, 0))


@pytest.mark.slow
def test_the_page_alarms_of_what_its_table_alarms_of(faulty: fl.Flow, tmp_path: Path) -> None:
    model = tiny_gpt()
    early = watched(model, adamw(model, lr=0.0), steps=1, every_n_steps=1)
    for number, flow in enumerate((faulty, early, scaled())):
        text = flow_page(flow, tmp_path / str(number))[0].read_text()
        said = re.findall(r'<strong class="alarm">(.*?)</strong>', text)
        shown = re.findall(r'<td class="alarm">(.*?)</td>', text)
        words = {verdict.word for verdict in flow.verdicts().values() if verdict.alarming}
        assert set(said) == set(shown) == words
    assert "scaled away by the optimizer" in text


def test_rows_keep_their_order_in_the_page(faulty: fl.Flow, page: Path) -> None:
    shown = re.findall(r">([\w.\[\]]+)</text>", page.read_text())
    names = [part.name for part in faulty.parts]
    assert [name for name in shown if name in names] == names * 2


def test_without_altair_one_line_names_the_extra(
    faulty: fl.Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("frostlab.flow.figures", "frostlab.flow.show"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(fl.FrostlabError, match=r"pip install 'frostlab\[report\]'$"):
        flow_page(faulty, tmp_path)
    assert not list(tmp_path.iterdir())
    shown = importlib.import_module("frostlab.flow.show")
    assert "gradient norm" in shown.flow_map_text(faulty)
    assert "update/weight" in faulty.table()


def test_what_cannot_be_drawn_is_refused(faulty: fl.Flow, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="no step has been measured yet"):
        flow_page(fl.Flow("GPT", "SGD"), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(fl.BadInput, match="file: File exists"):
        flow_page(faulty, tmp_path / "file")


_LOOK = """<!doctype html><body><iframe id=f width=%d height=2000></iframe><script>
const f = document.getElementById("f");
f.onload = () => { const d = f.contentDocument, s = getComputedStyle(d.body);
  document.title = JSON.stringify({wide: d.documentElement.scrollWidth, ink: s.color,
    paper: s.backgroundColor, verdict: d.querySelector(".verdict").innerText,
    charts: [...d.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width),
    label: getComputedStyle(d.querySelector("svg text")).fill}) };
f.srcdoc = %s;
</script>"""


def brightness(colour: str) -> int:
    return sum(int(number) for number in re.findall(r"\d+", colour)[:3])


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
@pytest.mark.parametrize(
    ("scheme", "width"), slow_unless([("dark", 360)], [("light", 1000), ("dark", 360)])
)
def test_a_browser_shows_the_page(
    faulty: fl.Flow, page: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    """Without a network, in light and dark, on a desk and on a phone."""
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    (tmp_path / "look.html").write_text(_LOOK % (width, text))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'user'}", "--window-size=1100,900",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--dump-dom",
        f"file://{tmp_path / 'look.html'}",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (title,) = re.findall(r"<title>(.*?)</title>", made.stdout.replace("&lt;", "<"))[:1]
    seen = json.loads(unescape(title))
    assert seen["verdict"] == sentence_of(faulty)
    assert seen["wide"] <= width
    assert len(seen["charts"]) == 4
    assert 250 < min(seen["charts"]) <= max(seen["charts"]) < width
    assert (brightness(seen["ink"]) < brightness(seen["paper"])) == (scheme == "light")
    assert seen["label"] == seen["ink"]


def test_kinds_of_cells(faulty: fl.Flow) -> None:
    rows = {each.name: each for each in rows_of(faulty, 99)}
    chosen = [rows[name] for name in ("layers[0].query", "layers[1].norm", "layers[2].up", "head")]
    grid = grid_of(faulty, "gradient", chosen, 99)
    assert [line[0].kind for line in grid.cells] == [FROZEN, UNREACHED, NUMBER, NUMBER]
    assert grid_of(faulty, "ratio", chosen, 99).cells[2][0].kind == ZERO


def test_the_table_shows_frozen_parts_without_numbers() -> None:
    model = tiny_gpt()
    fl.freeze(model, "query")
    flow = watched(model, adamw(model))
    lines = {line.split()[0]: line.split()[1:] for line in flow.table().splitlines() if line}
    assert lines["layers[0].query"] == ["–", "–", "–", "–", "frozen", "on", "purpose"]
    assert lines["layers[0].key"][-1] == "learning"
    assert "before clip" not in flow.table()
    assert flow.table().splitlines()[-1].startswith("front/output gradient ")


EVIL = "</title></style></svg></text>]]><img src=x onerror=\"document.title='ran'\"><script>\
document.title='ran'</script>&\"'`\x1b[31m\x00\u202e\ud800\nlayers[0]"


def spoilt(**changes: Any) -> fl.Flow:
    flow = small_flow(EVIL)
    flow.model = flow.optimizer = EVIL
    flow._reports = [replace(report, **changes) for report in flow.reports]
    return flow


def test_hostile_names_are_shown_not_obeyed(tmp_path: Path) -> None:
    flow = spoilt()
    for text in (flow.table(), flow_map_text(flow), flow_map_text(flow, 200)):
        assert all(line.isprintable() for line in text.split("\n"))
    text = flow_page(flow, tmp_path)[0].read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert 'http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;;' in text
    assert r"&lt;script&gt;document.title=" in text
    assert r"\x1b[31m\x00\u202e\ud800\nlayers[0]" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
@pytest.mark.parametrize("planted", slow_unless([True], [False, True]))
def test_a_browser_runs_no_script_in_the_page(tmp_path: Path, planted: bool) -> None:
    """Not that of a name, and not one that somebody has put into the file."""
    page = flow_page(spoilt(), tmp_path)[0]
    if planted:
        script = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
        page.write_text(page.read_text().replace("<main>", f"<main>{script}"))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom",
        f"file://{page}",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (title,) = re.findall(r"<title>(.*?)</title></?[sh]", made.stdout, re.DOTALL)[:1] or [""]
    assert title.startswith("Gradient flow of &lt;/title&gt;")
    assert made.stdout.count("<svg") == 4
    assert "Numbers of step 2" in made.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "<script>"}, {"step": True}, {"step": 10**400}, {"step": -1}, {"values": None},
        {"values": {}}, {"largest": {"front": "<script>"}}, {"largest": {"x": 1.0}},
        {"ranges": {"a": "1"}}, {"broken": (7,)}, {"rates": ("<b>",)}, {"entropy": {"a": 3}},
        {"unreached": 0.5},
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_before_it_reaches_a_page(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = small_flow().save(tmp_path / "flow.json")
    stored = json.loads(path.read_text())
    stored["reports"][-1].update(changes)
    path.write_text(json.dumps(stored))
    with pytest.raises(fl.BadInput, match=r"flow\.json.*(reports|step|values|largest|broken)"):
        fl.load_flow(path)


@pytest.mark.slow
def test_hundreds_of_parts_are_drawn_in_part(tmp_path: Path) -> None:
    flow = small_flow()
    facts = flow.parts[0]
    flow.parts = tuple(replace(facts, name=f"part{letters}x") for letters in range(600))
    values = {name: (numbers[0],) * 600 for name, numbers in flow.reports[0].values.items()}
    flow._reports = [replace(report, values=values) for report in flow.reports]
    text = flow_page(flow, tmp_path)[0].read_text()
    assert "Only the first 200 rows are drawn." in text
    assert "part599x" in text


@pytest.mark.slow
def test_pictures_replace_links(faulty: fl.Flow, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "flow"
    folder.mkdir()
    for name in ("flow.png", "flow.html"):
        (folder / name).symlink_to(outside)
    flow_page(faulty, folder)
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.iterdir())
    (folder / "flow.png").unlink()
    (folder / "flow.png").mkdir()
    with pytest.raises(fl.BadInput, match="flow: Is a directory"):
        flow_page(faulty, folder)


def test_a_notebook_shows_the_maps_or_without_altair_the_numbers(
    faulty: fl.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = faulty._repr_html_()
    assert shown.count("<svg") == 2
    assert "<script" not in shown
    assert "Gradient flow of GPT &lt;b&gt;&amp;" in shown
    assert sentence_of(faulty) in unescape(shown)
    monkeypatch.setitem(sys.modules, "altair", None)
    shown = faulty._repr_html_()
    assert "<svg" not in shown
    assert shown.count("<tr>") == 1 + len(faulty.parts)
    assert "no step has been measured yet" in fl.Flow("GPT", "SGD")._repr_html_()


def test_the_page_names_its_run_and_its_numbers_fit_a_phone(tmp_path: Path) -> None:
    flow = small_flow()
    assert "Run <strong>" not in page_of(flow)
    flow.run = "my <run>, stage 2"
    path = flow.save(tmp_path / "flow.json")
    text = page_of(fl.load_flow(path))
    assert "Run <strong>my &lt;run&gt;, stage 2</strong>" in text
    titles = re.findall(r'<td data-title="([^"]*)">', text)
    assert titles == ["gradient", "weight", "update", "update/weight"] * len(flow.parts)
