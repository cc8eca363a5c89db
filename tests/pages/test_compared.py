"""The words and tables of a comparison's report say what the records say, and doubts are red."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comparing import RECORDS, Change, changed, plant
from frostlab.comparison.evidence import read_evidence
from frostlab.comparison.oelm_json import answers
from frostlab.pages.content import (
    FORMATS,
    Block,
    Cell,
    Document,
    Listing,
    Paragraph,
    Table,
    resolve,
)
from frostlab.pages.one_comparison.compared import document
from frostlab.records.finding.annotations import add_note, add_tag
from frostlab.text import hms


def pieces_of(block: Block) -> Iterator[str | Cell]:
    if isinstance(block, Paragraph):
        yield from (block.lead, *block.pieces)
    elif isinstance(block, Listing):
        yield from block.pieces
    elif isinstance(block, Table):
        for row in block.rows:
            yield from row


def text_of(block: Block) -> str:
    return "".join(
        piece if isinstance(piece, str) else piece.text
        for piece in (block.pieces if isinstance(block, Paragraph) else pieces_of(block))
    )


def section(report: Document, name: str) -> tuple[Block, ...]:
    return next((part.blocks for part in report.sections if part.name == name), ())


def table(report: Document, name: str) -> Table:
    return next(block for block in report.tables if block.name == name)


def column(report: Document, name: str, title: str) -> list[str | Cell]:
    own = table(report, name)
    return [row[own.head.index(title)] for row in own.rows]


def texts(cells: list[str | Cell]) -> list[str]:
    return [cell.text if isinstance(cell, Cell) else cell for cell in cells]


def red(blocks: tuple[Block, ...]) -> str:
    """Return the paragraphs and cells that are shown in red."""
    paragraphs = [
        text_of(block) for block in blocks if isinstance(block, Paragraph) and block.alarm
    ]
    cells = [
        piece.text
        for block in blocks
        for piece in pieces_of(block)
        if isinstance(piece, Cell) and piece.alarm
    ]
    return "\n".join([*paragraphs, *cells])


@pytest.mark.parametrize("which", ["compared", "tuned", "spoken"])
def test_every_cell_is_its_record_in_its_format(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    report = document(folder, "en")
    blocks = [*report.blocks(), *(block for part in report.record for block in part.blocks)]
    linked = [
        piece
        for block in blocks
        for piece in pieces_of(block)
        if isinstance(piece, Cell) and piece.file is not None
    ]
    assert len(linked) > 200
    files = {name: json.loads((folder / name).read_text()) for name in {c.file for c in linked}}
    for cell in linked:
        assert cell.text == FORMATS[cell.format](resolve(files[cell.file], cell.pointer)), cell


def test_no_two_files_of_a_report_have_one_name(tuned: Path) -> None:
    report = document(tuned, "en")
    names = [block.name for block in (*report.tables, *report.figures)]
    assert len(names) == len(set(names))


def test_performance_and_time_are_those_of_the_records(tuned: Path) -> None:
    report = document(tuned, "en")
    evidence, compared, timing = (json.loads((tuned / name).read_text()) for name in RECORDS)
    base, oelm = compared["baseline"], compared["oelm_freeze"]
    assert texts(column(report, "performance", "final loss")) == [
        f"{arm['performance']['while_training']['final_loss']:.4g}" for arm in (base, oelm)
    ]
    share = oelm["vs_baseline"]["retained"]["share"]
    assert texts(column(report, "performance", "retained")) == ["–", f"{share:.1%}"]
    parameters = evidence["arms"]["oelm"]["parameters"]
    trainable = f"{parameters['trainable'] / parameters['total']:.1%}"
    assert texts(column(report, "performance", "trainable")) == ["100.0%", trainable]
    rows = {row[0]: texts(list(row[1:])) for row in table(report, "run-times").rows}
    keys = {arm: timing["timing"][arm] for arm in ("baseline", "oelm_freeze")}
    assert rows["total, h:mm:ss"] == [hms(own["total_seconds"]) for own in keys.values()]
    assert rows["per step, in turns"] == [f"{1e3 * own['step']:.4g} ms" for own in keys.values()]
    saved = oelm["vs_baseline"]["time_saved_percent"]
    assert rows["time saved"] == ["", f"{saved['saved']} [{saved['low']}, {saved['high']}]"]
    names = texts(column(report, "step-times", "arm"))
    assert names.count("A/A control") == len(evidence["timing"]["arms"]) - 2
    ceiling = texts(column(report, "step-times", "FLOPs allow"))[names.index("oelm")]
    assert ceiling == f"{evidence['timing']['arms']['oelm']['ceiling']:.4g}"
    assert f"{evidence['timing']['control']['ratio']:.4f}" in "".join(
        map(text_of, section(report, "time"))
    )


def _word(word: str, **margin: Any) -> Change:
    def change(values: dict[str, Any]) -> None:
        verdict = values["verdicts"]["oelm"]
        verdict["word"] = word
        verdict["margin"] = margin and {
            "limit": 1.1, "cost": 0.01, "probability_above": 0.5, "largest": 0.125, **margin,
        }  # fmt: skip
        verdict["margin"] = verdict["margin"] or None

    return change


@pytest.mark.parametrize(
    "change",
    [
        _word("better"),
        _word("worse"),
        _word("worse", answer="yes"),
        _word("no difference found"),
        _word("no difference found", answer="yes"),
        _word("no difference found", answer="not shown"),
        _word("no difference found", answer="not shown", largest=None),
        _word("did not finish"),
        lambda values: values["arms"]["oelm"].update(parameters=None),
        lambda values: values["arms"]["baseline"].update(parameters={"total": 9, "trainable": 9}),
        lambda values: values.update(orthogonality=None),
        lambda values: values.update(equal_norms=True),
    ],
)
def test_the_five_questions_have_the_answers_of_the_page(
    compared: Path, tmp_path: Path, change: Change
) -> None:
    folder = changed(compared, tmp_path, change)
    evidence = read_evidence(folder / "evidence.json")
    assert evidence is not None
    about, *items = section(document(folder, "en"), "questions")
    assert "oelm" in text_of(about)
    assert [(item.lead, text_of(item)) for item in items] == answers(evidence)


def test_questions_of_the_plan_come_first_and_the_five_only_with_oelm(
    compared: Path, tmp_path: Path
) -> None:
    verdict = json.loads((compared / "evidence.json").read_text())["verdicts"]["oelm"]
    asked = [{"question": "Is it <b>?", "of": "gain", "verdict": verdict}]
    folder = changed(compared, tmp_path / "a", lambda values: values.update(contrasts=asked))
    (answer,) = section(document(folder, "en"), "questions")
    assert isinstance(answer.lead, Cell)
    assert answer.lead.text == "Is it <b>?"
    assert verdict["sentence"] in text_of(answer)
    assert "from the first stage to the last" in text_of(answer)
    folder = changed(compared, tmp_path / "b", lambda values: values.update(oelm=None))
    assert section(document(folder, "en"), "questions") == ()


def test_the_first_screen_says_what_was_found(compared: Path, tmp_path: Path) -> None:
    folder = changed(compared, tmp_path, _word("no difference found", answer="yes"))
    report = document(folder, "en")
    verdict = json.loads((folder / "evidence.json").read_text())["verdicts"]["oelm"]
    first = next(b for b in report.first if isinstance(b, Paragraph) and b.lead == "oelm:")
    assert not first.alarm
    text = text_of(first)
    assert text.startswith("no difference found on accuracy, ")
    assert FORMATS["effect"](verdict["paired"]) in text
    assert "over 5 paired seeds; a cost above 1.1 × the errors is excluded" in text
    assert f"{verdict['could_have_seen']:.4g} would be found in 8 of 10" in text


def _fail(values: dict[str, Any]) -> None:
    run = values["arms"]["oelm"]["runs"][1]
    run.update(status="failed", error="CUDA out of memory", metrics={}, attempts=2)


def _assay(values: dict[str, Any]) -> None:
    verdict = values["verdicts"]["oelm"] | {"word": "no difference found"}
    values["assay"] = {"steps": 3, "of": 6, "verdict": verdict}


def _looks(values: dict[str, Any]) -> None:
    look = {"at": 1.0, "folder": "before", "metric": "accuracy", "seeds": 5, "spent": 0.05}
    values.update(look=2, earlier_looks=[look])


DOUBTS: dict[str, tuple[Change, str]] = {
    "a warning": (lambda values: values.update(caution="leaked labels"), "leaked labels"),
    "short runs": (lambda values: values["plan"].update(quick=True), "quick comparison"),
    "a verdict": (
        lambda values: values["verdicts"]["oelm"].update(
            word="unproven", sentence="oelm is unproven."
        ),
        "oelm is unproven.",
    ),
    "a confound": (
        lambda values: values["confounds"].update(oelm=["optim.lr 0.1 → 0.2"]),
        "oelm is confounded: it also differs from baseline in optim.lr 0.1 → 0.2.",
    ),
    "settings together": (
        lambda values: values["verdicts"]["oelm"].update(together=["model.head", "model.width"]),
        "model.head, model.width differ together",
    ),
    "a missed harm": (_assay, "was not found, so this comparison cannot see a harm"),
    "looks": (_looks, "Too many looks at the results: look 2 at this question"),
    "a pair": (
        lambda values: values.update(
            refused_pairs=[{"arm": "oelm", "seed": 3, "reason": "other data"}]
        ),
        "oelm, seed 3, is not paired: other data.",
    ),
    "a missing run": (
        lambda values: values["verdicts"]["oelm"].update(notes=["oelm, seed 1: diverged"]),
        "oelm, seed 1: diverged.",
    ),
}


@pytest.fixture(scope="module")
def undoubted(compared: Path) -> str:
    return red(document(compared, "en").first)


@pytest.mark.parametrize("doubt", DOUBTS)
def test_doubts_are_red_on_the_first_screen(
    compared: Path, undoubted: str, tmp_path: Path, doubt: str
) -> None:
    change, text = DOUBTS[doubt]
    assert text not in undoubted
    assert text in red(document(changed(compared, tmp_path, change), "en").first)


def test_remarks_and_planned_looks_are_not_red(compared: Path, tmp_path: Path) -> None:
    notes = ["for other test examples of the same kind: +1 (95 %: +0 to +2)", "look 1 of 3 planned"]
    folder = changed(
        compared, tmp_path, lambda values: values["verdicts"]["oelm"].update(notes=notes)
    )
    report = document(folder, "en")
    assert not any(note in red(report.first) for note in notes)
    shown = "\n".join(map(text_of, section(report, "verdicts")))
    assert all(note in shown for note in notes)


def test_a_long_list_of_doubts_is_cut_on_the_first_screen_only(
    compared: Path, tmp_path: Path
) -> None:
    pairs = [{"arm": "oelm", "seed": seed, "reason": f"reason {seed}"} for seed in range(40)]
    folder = changed(compared, tmp_path, lambda values: values.update(refused_pairs=pairs))
    report = document(folder, "en")
    assert "reason 5" in red(report.first)
    assert "reason 39" not in red(report.first)
    assert "Further doubts" in red(report.first)
    assert "reason 39" in red(section(report, "differences"))


def test_unproven_times_are_red(tuned: Path, tmp_path: Path) -> None:
    def unproven(values: dict[str, Any]) -> None:
        timing = values["timing"]
        timing.update(proven=False, reasons=["other processes on the GPU"])
        for arm in timing["arms"].values():
            arm.update(word=arm["word"] and "unproven")

    def proven(values: dict[str, Any]) -> None:
        values["timing"].update(proven=True, reasons=[])

    for name, change, is_red in (("a", unproven, True), ("b", proven, False)):
        report = document(changed(tuned, tmp_path / name, change), "en")
        paragraphs = [block for block in report.first if isinstance(block, Paragraph)]
        first = [block.lead for block in paragraphs if block.alarm]
        assert ("Time of a step, oelm:" in first) is is_red
        assert ("other processes on the GPU" in red(report.first)) is is_red
        names = texts(column(report, "step-times", "arm"))
        ratio = column(report, "step-times", "ratio to the baseline")[names.index("oelm")]
        assert isinstance(ratio, Cell)
        assert ratio.alarm is is_red
    rows = {row[0]: row[1:] for row in table(report, "run-times").rows}
    assert rows["time saved"][1].alarm  # whole runs have no control


def test_failed_runs_are_shown_as_failed_and_red(compared: Path, tmp_path: Path) -> None:
    folder = changed(compared, tmp_path, _fail)
    values = json.loads((folder / "comparison.json").read_text())
    values["overview"][1]["status"] = "4 of 5 runs finished"
    plant(folder / "comparison.json", overview=values["overview"])
    report = document(folder, "en")
    assert "4 of 5 runs finished" in red(report.first)
    runs = table(report, "runs")
    status = runs.head.index("status")
    marked = [row for row in runs.rows if row[status].alarm]
    assert len(marked) == 1
    assert texts(list(marked[0][status : status + 3])) == ["failed", "CUDA out of memory", "2"]
    assert all(cell.alarm for cell in marked[0][status : status + 3])
    assert len(runs.rows) == 15
    assert "4 of 5" in red((table(report, "training"),))


def test_a_confounded_arm_is_red_in_the_tables(compared: Path, tmp_path: Path) -> None:
    folder = changed(compared, tmp_path, DOUBTS["a confound"][0])
    report = document(folder, "en")
    for name in ("performance", "target", "runs", "further-numbers"):
        assert "oelm (confounded)" in red((table(report, name),)), name


def test_tuned_values_at_an_end_of_the_grid_are_red(tuned: Path, tmp_path: Path) -> None:
    def at_an_end(values: dict[str, Any]) -> None:
        values["tuning"][0]["on_edge"] = {"baseline": False, "oelm": True}

    folder = changed(tuned, tmp_path, at_an_end)
    report = document(folder, "en")
    tuning = json.loads((folder / "evidence.json").read_text())["tuning"][0]
    rows = table(report, "tuned-values").rows
    assert len(rows) == sum(map(len, tuning["curves"].values()))
    best = {row[0]: row for row in rows if row[-1] != ""}
    assert [best[arm][1].text for arm in tuning["best"]] == [
        f"{value:.4g}" for value in tuning["best"].values()
    ]
    assert best["baseline"][-1] == "best"
    assert best["oelm"][-1] == Cell("best, at an end of the grid", alarm=True)
    assert "(at an end of the grid)" in red(section(report, "differences"))


def test_notes_and_tags_of_the_comparison_and_its_runs(compared: Path, tmp_path: Path) -> None:
    assert section(document(compared, "en"), "notes") == ()
    evidence = json.loads((compared / "evidence.json").read_text())
    folder = changed(compared, tmp_path / "c")
    run = folder / evidence["arms"]["oelm"]["runs"][0]["folder"]
    run.mkdir(parents=True)
    add_note(folder, "for the paper")
    add_tag(run, "keep")
    add_note(run, "GPU was shared")
    report = document(folder, "en")
    assert texts(column(report, "notes", "note")) == ["for the paper", "GPU was shared", ""]
    assert texts(column(report, "notes", "tags")) == ["", "", "keep"]


def test_notes_outside_the_comparison_are_not_read(compared: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    add_note(secret, "a secret")

    def outside(values: dict[str, Any]) -> None:
        values["arms"]["oelm"]["runs"][0]["folder"] = "../secret"

    folder = changed(compared, tmp_path / "c", outside)
    assert section(document(folder, "en"), "notes") == ()


def test_data_environment_rules_and_methods(compared: Path) -> None:
    report = document(compared, "en")
    evidence = json.loads((compared / "evidence.json").read_text())
    splits = evidence["data"]["splits"]
    assert texts(column(report, "splits", "examples")) == [
        f"{split['examples']:,}" for split in splits.values()
    ]
    for split, own in splits.items():
        assert texts(column(report, "classes", split)) == list(map(str, own["classes"]))
        lengths = next(row for row in table(report, "lengths").rows if row[0] == split)
        assert lengths[1].text == f"{own['lengths']['least']:.4g}"
    facts = {row[0]: row[1].text for row in table(report, "environment").rows}
    assert facts["machine"] == evidence["made"]["machine"]
    assert facts["torch"] == evidence["made"]["versions"]["torch"]
    rules = {row[0]: row[1] for row in table(report, "rules").rows}
    assert rules["seeds"].text == "0, 1, 2, 3, 4"
    assert rules["confidence of the statements about the metric"].text == "95 %"
    settings = {row[0]: row[1].text for row in table(report, "settings").rows}
    assert settings["train.batch"] == "16"
    assert "tokenizer" not in settings
    paragraph, entry = section(report, "methods")
    assert "orthogonal, frozen; the rest trains" in text_of(paragraph)
    assert "All rules were fixed before the runs." in text_of(paragraph)
    assert "except for those that a treatment changes. " in text_of(paragraph)
    assert text_of(entry).startswith("@software{frostlab,\n")
    assert text_of(entry).count("{") == text_of(entry).count("}")


def test_methods_of_arms_with_other_models(compared: Path, tmp_path: Path) -> None:
    def vary(values: dict[str, Any]) -> None:
        values["plan"]["vary"] = ["model.layers"]

    paragraph, _ = section(document(changed(compared, tmp_path / "c", vary), "en"), "methods")
    assert "arms whose models differ start from different weights" in text_of(paragraph)


def test_methods_of_runs_chosen_after_the_fact(compared: Path, tmp_path: Path) -> None:
    def choose(values: dict[str, Any]) -> None:
        plan = values["plan"]
        runs = {arm["name"]: {seed: f"{seed}" for seed in plan["seeds"]} for arm in plan["arms"]}
        plan.update(runs=runs, clock=None, assay=False, rounds=0, tune=[], contrasts=[])

    report = document(changed(compared, tmp_path / "chosen", choose), "en")
    text = text_of(section(report, "methods")[0])
    assert "All rules were fixed after the runs had ended." in text


def test_a_language_model_is_compared_by_ratios(spoken: Path) -> None:
    report = document(spoken, "en")
    effect = column(report, "performance", "against the baseline")[1]
    assert isinstance(effect, Cell)
    assert effect.text.endswith("×")
    assert "ratios to baseline" in text_of(section(report, "methods")[0])


def test_arms_show_the_texts_they_generated_side_by_side(spoken: Path, tmp_path: Path) -> None:
    from frostlab.pages.document import page

    shown = table(document(spoken, "en"), "samples")
    prompts, arms, generated, _ = zip(*(texts(list(row)) for row in shown.rows), strict=True)
    assert arms == ("baseline", "oelm") * 3
    assert prompts[:2] == ("(a new text)",) * 2
    assert prompts[2] == prompts[3] != prompts[4] == prompts[5]
    assert len(set(generated)) > 1
    folder = tmp_path / "copy"
    shutil.copytree(spoken, folder)
    (path,) = folder.glob("runs/*oelm*s0/samples.json")
    values = json.loads(path.read_text())
    values["samples"][0]["text"] = "<script>alert(1)</script>\x1b\nnext"
    path.write_text(json.dumps(values))
    text = page(document(folder, "en"))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b\nnext</a>" in text
    assert "<pre>@software{frostlab,\n  title = " in text, "lines of an entry stay lines"
    path.write_text("{}")
    assert column(document(folder, "en"), "samples", "arm") == ["baseline"] * 3


def test_nothing_of_a_long_or_hostile_name_is_obeyed(compared: Path, tmp_path: Path) -> None:
    from frostlab.pages.document import page

    evil = '<script>alert(1)</script>"\n\x1b[31m' + "x" * 300

    def spoil(values: dict[str, Any]) -> None:
        values["caution"] = evil
        values["verdicts"]["oelm"].update(notes=[evil], sentence=evil, word="unproven")
        values["arms"]["oelm"]["does"] = evil
        values["made"]["command"] = evil
        values["made"]["versions"][evil] = evil
        _fail(values)
        values["arms"]["oelm"]["runs"][1]["error"] = evil

    text = page(document(changed(compared, tmp_path, spoil), "en"))
    assert "<script>alert(1)" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 8
