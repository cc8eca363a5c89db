"""The report of one run: its words, numbers and figures come from the run's records."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from eeg_made import RATE, people
from frostlab.charts import still
from frostlab.envelopes.scores import score_recordings
from frostlab.envelopes.scores_json import scores_file
from frostlab.errors import BadInput
from frostlab.flow.measurements import parts_event, report_event
from frostlab.pages.content import Cell, Document, Figure, Paragraph, Table
from frostlab.pages.document import page
from frostlab.pages.one_run import eeg_run
from frostlab.pages.one_run.run_figures import is_wide, thinned
from frostlab.pages.one_run.run_report import document, sources
from frostlab.pages.write import PAGE, is_current, report
from frostlab.records.finding.annotations import add_note, add_tag
from fuzz.targets_pages import small_flow
from run_made import RESULT, SHAPE, START, evaluation_event, step_event, write_events
from walking import complaints

RECIPE: dict[str, Any] = {
    "about": "a made run", "data": {"name": "sst2", "length": 16}, "model": {"kind": "gpt"},
    "treatment": {"freeze": ["query"]}, "optim": {"lr": 1e-3, "clip": None}, "watch": None,
    "seed": 3,
}  # fmt: skip
SPLIT = {
    "source": "made", "examples": 4, "classes": [3, 1], "lengths": {"least": 1, "median": 2.5,
    "most": 9, "cut": 0}, "note": "", "tokens": 12, "recordings": None,
}  # fmt: skip
EVENTS = [
    START,
    {"kind": "stage", "at": 100.0, "step": 0, "name": "1", "steps": 30, "patience": None,
     "train": None, "freeze": [], "changed": [], "added": [], "trainable": 1500, "total": 2000,
     "lr": 1e-3, "best_before": None, "supervise": None},
    *(step_event(step) for step in range(1, 31)),
    evaluation_event(10, {"accuracy": 0.5, "loss": 0.9}),
    evaluation_event(20, {"accuracy": 0.8, "loss": 0.6}),
    evaluation_event(30, {"accuracy": 0.7, "loss": 0.7}, best=False),
    evaluation_event(30, {"accuracy": 0.1}, checkpoint=20, split="report"),
]  # fmt: skip


def made(folder: Path, events: list[dict[str, Any]] = EVENTS, **result: Any) -> Path:
    """Write the records of a run; the result with these changes."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "result.json").write_text(json.dumps(RESULT | result))
    data = {"labels": ["no", "yes"], "splits": {"train": SPLIT, "report": SPLIT}, "notes": []}
    (folder / "data.json").write_text(json.dumps(data))
    environment = {"device_name": "CPU", "versions": {"torch": "2.0"}, "host": {"cpu": "X"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    write_events(folder, *events)
    return folder


def plain_text(block: Paragraph) -> str:
    return "".join(piece.text if isinstance(piece, Cell) else piece for piece in block.pieces)


def alarms(shown: Document) -> list[str]:
    return [plain_text(block) for block in shown.first
            if isinstance(block, Paragraph) and block.alarm]  # fmt: skip


def figure(shown: Document, name: str) -> Figure:
    (found,) = [figure for figure in shown.figures if figure.name == name]
    return found


def table(shown: Document, name: str) -> list[list[str]]:
    (found,) = [table for table in shown.tables if table.name == name]
    return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in found.rows]


def test_every_number_of_the_page_is_in_a_record_and_torch_stays_out(tmp_path: Path) -> None:
    folder = made(tmp_path / "my-run")
    predictions = {"split": "report", "labels": [0, 0, 1, 1], "classes": [0, 1, 1, 1]}
    (folder / "predictions.json").write_text(json.dumps(predictions))
    samples = {"samples": [{"prompt": "On 3 May", "text": " it\nsnowed.", "ended": "end"}],
               "max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 0}  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(samples))
    add_note(folder, "a second try")
    add_tag(folder, "paper")
    code = (
        "import sys; from frostlab.pages.write import report; report(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert complaints(folder / PAGE) == []
    text = (folder / PAGE).read_text()
    assert "80.00%" in text
    assert "a second try" in text
    assert " it\nsnowed.</a>" in text
    assert is_current(folder)
    for name in ("training", "confusion", "times", "classes"):
        assert (folder / "figures" / f"{name}.svg").stat().st_size > 1000
    rows = (folder / "tables" / "confusion.csv").read_text()
    assert "no,yes,0.5,1" in rows


def test_the_first_screen_has_the_result_and_its_curve(tmp_path: Path) -> None:
    shown = document(made(tmp_path / "run"), "en")
    texts = [plain_text(block) for block in shown.first if isinstance(block, Paragraph)]
    assert "Caution: checkpoint selected on the reporting split." in texts
    assert 'Trained: gpt on sst2, treatment {"freeze": ["query"]}, seed 3.' in texts
    assert "Result: accuracy 0.00% on the report split." in texts
    best = "Best accuracy on the split that selects the checkpoint: 80.00% at step 20 of 30."
    assert best in texts
    (curve,) = [block for block in shown.first if isinstance(block, Figure)]
    evaluations = [row for row in curve.rows if row["curve"] == "accuracy"]
    assert [(row["step"], row["value"]) for row in evaluations] == [(10, 0.5), (20, 0.8), (30, 0.7)]
    assert [row["step"] for row in evaluations if row["best"]] == [20]
    losses = [row for row in curve.rows if row["curve"] == "training loss"]
    assert [row["loss"] for row in losses] == [1 / step for step in range(1, 31)]


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    resume = {"kind": "resume", "at": 200.0, "step": 2, **SHAPE}
    again = [START, *(step_event(step) for step in (1, 2, 3, 4)), resume,
             step_event(3, loss=[0.01])]  # fmt: skip
    shown = document(made(tmp_path / "run", again), "en")
    rows = figure(shown, "training").rows
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 0.01)]


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped"])
def test_a_run_that_did_not_finish_says_so_in_red(status: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", status=status, error="no memory <b>", report=None)
    shown = document(folder, "en")
    (first, *_) = alarms(shown)
    assert status.removesuffix("ed") in first
    assert first.endswith(": no memory <b>.")
    words_only = tuple(block for block in shown.first if isinstance(block, Paragraph))
    assert "no memory &lt;b&gt;" in page(replace(shown, first=words_only, sections=()))


def test_a_run_without_a_result_shows_its_curve(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    (folder / "result.json").unlink()
    shown = document(folder, "en")
    assert alarms(shown) == ["The run was interrupted, so it has no result yet."]
    assert len(figure(shown, "training").rows) == 33
    assert {section.name for section in shown.sections} >= {"curves", "data", "configuration"}
    assert sources(folder) == (), "the run may go on"


def test_records_of_another_schema_and_damaged_lines(tmp_path: Path) -> None:
    folder = made(tmp_path / "other", schema=1)
    with pytest.raises(BadInput, match="schema"):
        report(folder)
    assert not (folder / PAGE).exists()
    folder = made(tmp_path / "torn")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": "x"}\n')
    shown = document(folder, "en")
    (problem,) = shown.problems
    assert "events.jsonl line" in problem
    assert len(figure(shown, "training").rows) == 33


def test_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    best = {**RESULT["best"], "metric": bad}
    stages = [{**RESULT["stages"][0], "name": bad, "metrics": {bad: 0.5}}] * 2
    events = [START, step_event(1), evaluation_event(1, {bad: 0.5})]
    folder = made(tmp_path / f"{bad.replace('/', '')} '\"", events, best=best, stages=stages,
                  report={bad: 1.0}, caution=bad)  # fmt: skip
    text = page(document(folder, "en"))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


# Stages

LAYERS = {"1": {"loss": 3.0, "perplexity": 20.0}, "2": {"loss": 2.5, "perplexity": None}}


def stage(number: int, perplexity: float, accuracy: float, **changes: Any) -> dict[str, Any]:
    metrics = {"perplexity": perplexity, "loss": 2.0, "token_accuracy": accuracy, "layers": LAYERS}
    best = {"metric": "perplexity", "value": perplexity, "step": 10 * number, "epoch": 2.0}
    return {"name": f"phase {number}", "steps": 10, "epochs": 3.0, "stopped_early": True,
            "best": best, "metrics": metrics, "seconds": 4.0 + number, "trainable": 10,
            "total": 20} | changes  # fmt: skip


def test_stages_have_a_table_with_a_change_that_is_positive_when_better(tmp_path: Path) -> None:
    stages = [stage(1, 978.89, 0.1635), stage(2, 975.51, 0.1620)]
    best = {"metric": "perplexity", "value": 975.51, "step": 20}
    events = [START, EVENTS[1], step_event(1),
              evaluation_event(5, {"perplexity": 1000.0}, total_seconds=2.0),
              evaluation_event(10, {"perplexity": 978.89}, total_seconds=4.5),
              {**EVENTS[1], "step": 10, "name": "phase 2"},
              evaluation_event(20, {"perplexity": 975.51}, total_seconds=9.0)]  # fmt: skip
    shown = document(made(tmp_path / "run", events, best=best, stages=stages), "en")
    first, second, change = table(shown, "stages")
    assert first == ["phase 1", "10", "16.35%", "978.9", "2", "3", "2", "5 s", "patience"]
    assert second[2:4] == ["16.20%", "975.5"]
    assert change[2:4] == ["-0.15 points", "+3.38"]
    assert change[-2] == "9.5 s", "of all stages"
    in_time = figure(shown, "stages-in-time").rows
    assert [(row["start"], row["end"]) for row in in_time if "start" in row] == [(0, 5), (5, 11)]
    points = [(row["stage"], row["seconds"]) for row in in_time if "seconds" in row]
    assert points == [("1: phase 1", 2.0), ("1: phase 1", 4.5), ("2: phase 2", 9.0)]
    by_layer = figure(shown, "layers").rows
    assert [(row["stage"], row["layer"], row["value"]) for row in by_layer] == [
        ("1: phase 1", 1, 20.0), ("2: phase 2", 1, 20.0)
    ]  # fmt: skip
    assert figure(shown, "training").chart.to_dict(), "a chart that can be drawn"


def test_early_exits_are_drawn_by_layer(tmp_path: Path) -> None:
    best = {"metric": "perplexity", "value": 9.0, "step": 20}
    folder = made(tmp_path / "run", best=best, stages=[stage(1, 9.0, 0.5)])
    exits = [{"layer": 1, "perplexity": 30.0}, {"layer": 2, "perplexity": 9.5}]
    (folder / "exits.json").write_text(json.dumps({"exits": exits}))
    rows = figure(document(folder, "en"), "layers").rows
    assert [row["value"] for row in rows if row["stage"].startswith("early exits")] == [30.0, 9.5]


# Gradient flow


def test_a_watched_run_shows_its_flow_and_alarms(tmp_path: Path) -> None:
    flow = small_flow()
    flow.parts = (flow.parts[0], replace(flow.parts[1], missing=("head",)))
    head = {"kind": "flow_parts", "at": 1.0, "step": 0, "stage": "1"}
    events = [
        START, EVENTS[1], head | parts_event(flow, 1, ["layers[0].query"]),
        *({"kind": "flow", "at": 2.0, "step": r.step} | report_event(r, flow.parts)
          for r in flow.reports),
        step_event(1),
    ]  # fmt: skip
    folder = made(tmp_path / "run", events)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"watch": {"every_n_steps": 1}}))
    targets = [
        {"name": "front_ratio", "value": 0.05, "wanted": 0.1, "reached": False},
        {"name": "perplexity", "value": 30.0, "wanted": 20.0, "reached": False},
    ]
    (folder / "targets.json").write_text(json.dumps({"targets": targets}))
    shown = document(folder, "en")
    assert "Target missed: front ratio 0.05, wanted above 0.1." in alarms(shown)
    assert "Target missed: perplexity 30, wanted below 20." in alarms(shown)
    assert any(text.startswith("Gradient flow: ") and "head" in text for text in alarms(shown))
    cells = figure(shown, "flow-gradient").rows
    assert {(cell["row"], cell["step"]) for cell in cells} == {
        (part.name, step) for part in flow.parts for step in (1, 2)
    }
    assert figure(shown, "flow-front").rows[0]["output"] == 0.4
    (folder / PAGE).write_text(page(shown))
    assert complaints(folder / PAGE, ["layers[0].query", "clip at 1.0"]) == []


# EEG

PEOPLE = people(3, 1)


@pytest.fixture
def listener(tmp_path: Path) -> Path:
    """An EEG run with scores, envelopes and the weights of its first layer."""
    decoded = {recording.name: recording.eeg[:, 0] for recording in PEOPLE}
    scores = score_recordings(decoded, PEOPLE, RATE)
    summary = scores.to_dict()["summary"] | {"digest": scores.digest}
    best = {"metric": "pearson", "value": 0.5, "step": 20}
    folder = made(tmp_path / "listener", scores={"report": {"model": summary}}, best=best,
                  report={"pearson": 0.5, "ridge": 0.6, "chance": 0.01})  # fmt: skip
    content = scores_file({"report": {"model": scores}}, {"best_r": 0.9})
    (folder / "scores.json").write_text(json.dumps(content))
    np.savez(folder / "decoded.npz", **decoded)
    checkpoint = folder / RESULT["checkpoint"]
    checkpoint.mkdir(parents=True)
    weights = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    weights[:, 1] *= 10
    save_file({"cnn.0.conv.weight": weights}, checkpoint / "model.safetensors")
    (folder / "model").mkdir()
    (folder / "model" / "inputs.json").write_text(json.dumps({"channels": ["Cz", "Fz", "<b>"]}))
    return folder


def test_an_eeg_run_shows_subjects_traces_and_electrodes(listener: Path) -> None:
    shown = document(listener, "en")
    assert not shown.problems
    points = figure(shown, "subjects-report").rows
    assert [row["subject"] for row in points] == ["s0", "s1", "s2"]
    assert all(row["chance_low"] < row["chance_high"] for row in points)
    (row,) = table(shown, "scores")
    assert row[0] == "held-out EEG of training subjects"
    assert row[6] == "3"
    assert {row["signal"] for row in figure(shown, "trace-report").rows} == {"decoded"}
    np.savez(listener / "heard.npz", **{person.name: person.envelope for person in PEOPLE})
    trace = figure(document(listener, "en"), "trace-report")
    assert {row["signal"] for row in trace.rows} == {"heard", "decoded"}
    electrodes = figure(shown, "electrodes")
    assert electrodes.rows[0]["channel"] == "Fz", "the one with the largest weights"
    (listener / PAGE).write_text(page(shown))
    assert complaints(listener / PAGE) == []
    text = (listener / PAGE).read_text()
    assert "a linear decoder has" in text
    assert "<b>" not in text


def test_weights_of_a_frozen_first_layer_are_found(listener: Path) -> None:
    rows = figure(document(listener, "en"), "electrodes").rows
    frozen = listener / "checkpoints" / "frozen-1"
    frozen.mkdir()
    stored = listener / RESULT["checkpoint"] / "model.safetensors"
    stored.rename(frozen / "frozen.safetensors")
    save_file({"head": np.zeros(1, np.float32)}, stored)
    assert figure(document(listener, "en"), "electrodes").rows == rows


def test_arms_that_decode_eeg_are_drawn_together(listener: Path, tmp_path: Path) -> None:
    np.savez(listener / "heard.npz", **{person.name: person.envelope for person in PEOPLE})
    for name in ("first", "second", "damaged"):
        shutil.copytree(listener, tmp_path / "compared" / name)
    (tmp_path / "compared" / "damaged" / "decoded.npz").write_bytes(b"no archive")
    runs = {"one": "first", "<b>": "second", "three": "damaged", "four": "../listener"}
    shown = {figure.name: figure for figure in eeg_run.of_arms(tmp_path / "compared", runs)}
    assert list(shown) == ["subjects-report", "trace-report", "electrodes-one", "electrodes--b-"]
    points = shown["subjects-report"].rows
    assert {row["decoder"] for row in points} == {"one", "<b>", "three"}
    assert {row["subject"] for row in points} == {"s0", "s1", "s2"}
    assert {row["signal"] for row in shown["trace-report"].rows} == {"one", "<b>", "heard"}
    assert "&lt;b&gt;" in still(shown["trace-report"].chart)


def test_what_is_damaged_is_a_problem_of_an_eeg_page(listener: Path) -> None:
    path = listener / "scores.json"
    path.write_text(path.read_text().replace('"subject": "s0"', '"subject": "s9"'))
    (listener / "decoded.npz").write_bytes(b"no archive")
    (listener / RESULT["checkpoint"] / "model.safetensors").write_bytes(b"no weights")
    shown = document(listener, "en")
    assert [problem.split(": ")[-1] for problem in shown.problems] != []
    assert len(shown.problems) == 3
    assert all(name not in {figure.name for figure in shown.figures}
               for name in ("subjects-report", "trace-report", "electrodes"))  # fmt: skip


# Charts


def test_a_long_series_is_thinned_by_means() -> None:
    rows = thinned([(step, float(step)) for step in range(1, 1001)] + [(1001, None)], most=10)
    assert [row["step"] for row in rows] == list(range(100, 1001, 100))
    assert rows[0]["value"] == 50.5
    assert thinned([(1, None), (2, float("nan"))]) == []
    assert is_wide([0.1, 2.0])
    assert not is_wide([0.0, 2.0])
    assert not is_wide([])


def test_tables_of_a_run_leave_out_what_is_not_known(tmp_path: Path) -> None:
    shown = document(made(tmp_path / "run"), "en")
    (facts,) = [block for block in shown.tables if block.name == "parameters"]
    assert isinstance(facts, Table)
    assert not [row for row in facts.rows if isinstance(row[1], Cell) and not row[1].file]
    names = [row[0] for row in table(shown, "settings")]
    assert "optim.lr" in names
    assert "optim.clip" not in names
