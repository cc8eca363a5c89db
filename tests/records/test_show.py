"""Runs as text: aligned, as wide as the terminal, with every caution, whatever is missing."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe
from frostlab.records.finding.annotations import add_note, add_tag
from frostlab.records.finding.index import Summary, read_run
from frostlab.records.finding.listing import runs_table
from frostlab.records.finding.show import show, show_json
from frostlab.text import hms
from run_made import (
    CAUTION,
    CLOCKS,
    RESULT,
    SERIES,
    SHAPE,
    START,
    TELEMETRY,
    evaluation_event,
    write_events,
)

RUN = Summary("imdb-gpt-1", Path("imdb-gpt-1"), "finished", seed=3, treatment="oelm", steps=1200)
RUN = replace(RUN, metric="accuracy", value=0.81234, report={"accuracy": 0.8, "loss": 0.5})
RUN = replace(RUN, step_ms=40.123, total_seconds=3725.4)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.5, "0:01:00"),
        (3725.4, "1:02:05"),
        (360_000, "100:00:00"),
        (-61, "-0:01:01"),
        (None, "–"),
        (float("nan"), "–"),
        ("3", "–"),
    ],
)
def test_seconds_as_hours(seconds: Any, text: str) -> None:
    assert hms(seconds) == text


def test_the_table() -> None:
    runs = [
        RUN,
        replace(RUN, name="imdb-published", caution=CAUTION, seed=12),
        Summary("torn", Path("torn"), "damaged", error="result.json is not a JSON object"),
    ]
    text = """
name            status    treatment  seed  steps  best              report  step ms    total
imdb-gpt-1      finished  oelm          3   1200  accuracy=0.8123   0.8       40.12  1:02:05
imdb-published  finished  oelm         12   1200  accuracy=0.8123*  0.8*      40.12  1:02:05
torn            damaged   –             –      –  –                 –             –        –
* checkpoint selected on the reporting split
torn: result.json is not a JSON object
"""
    assert runs_table(runs) == text.strip()
    assert runs_table([]) == "no runs"


def test_each_caution_has_its_own_mark() -> None:
    runs = [replace(RUN, caution=text) for text in ("a", "b", "a", None)]
    caution = "scale tiny; stand-in: docstrings for tinystories; selected on the reporting split"
    marked = runs_table([replace(runs[0], caution=caution)], width=80)
    assert all(len(line) <= 80 for line in marked.splitlines())
    assert caution in " ".join(marked.split())
    lines = runs_table(runs).splitlines()
    marks = [line.split("0.8123")[1][0] for line in lines[1:5]]
    assert marks == ["*", "†", "*", " "]
    assert lines[5:] == ["* a", "† b"]
    many = runs_table([replace(RUN, caution=text) for text in "abcdef"])
    assert many.endswith("* a\n† b\n‡ c\n§ d\n[5] e\n[6] f")


def test_a_name_stays_whole_and_a_treatment_gives_way() -> None:
    runs = [replace(RUN, name=f"{i}-" + "n" * 30, treatment="t" * 40) for i in range(2)]
    runs.append(replace(RUN, name="bell\a\nline", error="e\n" * 90))
    assert " " + "t" * 40 + " " in runs_table(runs).splitlines()[1]
    lines = runs_table(runs, width=100).splitlines()
    assert lines[1].startswith("0-" + "n" * 30 + " ")
    assert " " + "t" * 27 + "… " in lines[1]
    assert lines[3].startswith(r"bell\x07\nline ")
    assert lines[4].startswith(r"bell\x07\nline: e\ne")
    many = [replace(RUN, error="failed")] * 13
    assert runs_table(many).endswith("\nand 3 more with an error")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_table_fits_and_says_what_it_leaves_out(width: int) -> None:
    settings = [{"optim.lr": lr, "train.batch": 8, "model.preset": "p" * 50} for lr in (1e-3, 0.1)]
    runs = [
        replace(RUN, settings=values, tags=("keep",), notes=("a long remark " * 9,), error="e" * 99)
        for values in settings
    ]
    text = runs_table(runs, width=width)
    assert max(map(len, text.splitlines())) <= width
    head = text.splitlines()[0]
    assert ("--wide also shows" in text) is any(
        name not in head for name in ("status", "note", "step ms", "total")
    )
    assert "optim.lr" in head
    assert "train.batch" not in head, "it is the same in both"
    asked = runs_table(runs, ["model.preset", "train.batch"], width).splitlines()
    assert "train.batch" in asked[0]
    assert "optim.lr" not in asked[0]
    long = [replace(run, name="n" * 70 + "-s3") for run in runs]
    cut = runs_table(long, width=width).splitlines()
    assert max(map(len, cut)) <= width
    assert ("…" in cut[1].split()[0]) is (width < 100)
    assert cut[1].split()[0].endswith("-s3")
    assert ("n" * 70 + "-s3") in runs_table(long)


def test_a_wide_column_does_not_keep_out_narrow_ones() -> None:
    paths = ("/data/films/of-the-year", "/data/news.csv", None)
    settings = [{"data.path": path, "model.preset": "p" * 20 + str(path)} for path in paths]
    runs = [replace(RUN, settings=values) for values in settings]
    runs[2] = replace(runs[2], status="interrupted")
    head, first, second, third, *_ = runs_table(runs, width=90).splitlines()
    assert "model.preset" not in head
    for name in ("status", "treatment", "seed"):
        assert name in head, "there is room for it"
    assert "  films/of-the-year  " in first, "the folder that all paths share is left out"
    assert "  news.csv  " in second
    assert "interrupted" in third
    assert "/data/news.csv" in runs_table(runs), "a wide table has the whole path"
    narrow = runs_table(runs, width=72).splitlines()[0]
    assert "status" in narrow, "the best value of an interrupted run is preliminary"
    assert "seed" not in narrow


def write_run(folder: Path) -> Recipe:
    folder.mkdir()
    changes = {"treatment": "oelm", "train": {"batch": 8, "epochs": 2}, "seed": 3}
    recipe = Recipe.model_validate(changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    environment = {"host": {"cpu": "Some CPU", "name": "here"}, "gpu": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    said = {"recipe_digest": recipe.digest, "seed": 3, "treatment": "oelm"}
    write_events(
        folder,
        START | said | {"at": 1e9, "data": "docstrings"},
        {"kind": "note", "at": 1e9, "step": 4, "text": "one thread, not two"},
        evaluation_event(10, {"accuracy": 0.7}),
        {"kind": "resume", "at": 1e9, "step": 10, **SHAPE},
    )
    clocks = CLOCKS | {"total_seconds": 3725.4, "train_seconds": 3000, "validation_seconds": 600.0}
    clocks |= {"epoch_seconds": [1800, 1900.5], "data_seconds": 12}
    clocks |= {"step_ms": {"count": 15, "median": 40.1, "mean": 41.25, "p95": 50, "cv": 0.1}}
    gpu = dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz", "power_watts"))
    gpu |= {"temperature_c": 40.0, "utilisation_percent": None, "memory_used_bytes": None}
    result = RESULT | said | {
        "best": {"metric": "accuracy", "value": 0.75, "step": 20},
        "report": {"accuracy": 0.74, "loss": 0.5},
        "clocks": clocks,
        "steps": 20,
        "telemetry": TELEMETRY | {"gpu_utilisation_percent": SERIES | {"mean": 93.0}},
        "device_memory_peak": 2 << 30,
        "gpu_before": gpu,
        "gpu_after": gpu | {"temperature_c": 62.0},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return recipe


def test_a_run_is_shown_in_fixed_form(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "a")
    assert show(tmp_path / "a").splitlines() == [
        "run a",
        "  started  2001-09-09 01:46:40+00:00",
        "  status   finished",
        "  steps    20",
        "  resumes  1",
        "",
        "configuration",
        f"  digest     {recipe.digest}",
        "  data       docstrings",
        "  model      gpt",
        "  treatment  oelm",
        "  seed       3",
        "  differences from the defaults:",
        "    treatment     oelm",
        "    train.batch   8",
        "    train.epochs  2",
        "    seed          3",
        "",
        "results",
        "  best     accuracy 0.75 at step 20",
        "  report   accuracy 0.74, loss 0.5",
        "  caution  checkpoint selected on the reporting split",
        "",
        "clocks",
        "  total               1:02:05 (3725 s)",
        "  train               0:50:00 (3000 s)",
        "  validation          0:10:00 (600 s)",
        "  per evaluation      0:00:00 (0.4 s), 0:00:01 (0.6 s)",
        "  data                0:00:12 (12 s)",
        "  data during train   0:00:00 (0 s)",
        "  checkpoints         0:00:01 (1 s)",
        "  set-up              0:00:00 (0.25 s)",
        "  per epoch           0:30:00 (1800 s), 0:31:40 (1900 s)",
        "  step                median 40.1, mean 41.25, p95 50 ms, cv 0.1; "
        "5 warm-up steps not counted",
        "  tokens/s            1.235e+04",
        "  examples/s          80.25",
        "  packing_efficiency  –",
        "  padding_share       0.5",
        "  tokens              6000",
        "",
        "wall clock",
        "                   s  share",
        "  total        14.00  100 %",
        "  starting      2.00   14 %",
        "  data          0.50    4 %",
        "  building      0.50    4 %",
        "  setup         0.25    2 %",
        "  first steps   0.25    2 %",
        "  new shapes    0.50    4 %",
        "  steps         7.00   50 %",
        "  validation    1.00    7 %",
        "  checkpoints   1.00    7 %",
        "  report        0.75    5 %",
        "  other         0.25    2 %",
        "  turn          0.00    0 %",
        "",
        "parameters",
        "  total      2,000  100.0%",
        "  trainable  1,500  75.0%",
        "  frozen     500  25.0%",
        "",
        "machine",
        "  memory           1.5 GiB at the peak",
        "  GPU memory       2 GiB at the peak",
        "  load             1.5 on average",
        "  GPU utilisation  93 % on average",
        "  GPU temperature  40 °C before, 62 after",
        "",
        "environment",
        "  Some CPU, on here",
        "",
        "notes",
        "  step 4: one thread, not two",
    ]


@pytest.mark.parametrize(
    ("task", "more", "n"),
    [
        ("language", {"tokens": 1379}, "n = 44 examples with 1,379 tokens"),
        ("envelope", {"subjects": 1}, "n = 1 subject, 44 windows"),
    ],
)
def test_n_has_its_units(task: str, more: dict[str, int], n: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    tune = {"source": "a file", "examples": 44, "digest": "d", **more}
    data = {"task": task, "digest": "d", "labels": None, "notes": [], "splits": {"tune": tune}}
    (tmp_path / "a" / "data.json").write_text(json.dumps(data))
    assert f"accuracy 0.75 at step 20 ({n})" in show(tmp_path / "a")


@pytest.mark.parametrize("recorded", [True, False], ids=["data.json", "recipe.yaml"])
def test_clocks_of_eeg_without_scores_count_samples(recorded: bool, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    if recorded:
        data = {"task": "envelope", "digest": "d", "labels": None, "notes": [], "splits": {}}
        (tmp_path / "a" / "data.json").write_text(json.dumps(data))
    else:
        recipe = {"data": {"name": "eeg-simulated"}}
        (tmp_path / "a" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [line.split() for line in show(tmp_path / "a").splitlines()]
    assert ["samples/s", "1.235e+04"] in lines
    assert ["samples", "6000"] in lines
    assert not any(line[:1] == ["tokens"] for line in lines)


def test_a_run_fits_a_terminal_and_has_notes_tags_and_n(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_run(folder)
    add_note(folder, "too   slow")
    add_tag(folder, "keep")
    predictions = {"split": "report", "labels": [0] * 1200, "classes": [1] * 1200}
    (folder / "predictions.json").write_text(json.dumps(predictions))
    tune = {"source": "a file", "examples": 300, "digest": "d"}
    data = {"task": "classification", "digest": "d", "labels": [0, 1], "notes": []}
    (folder / "data.json").write_text(json.dumps({**data, "splits": {"tune": tune}}))
    whole = show(folder).splitlines()
    assert "  best     accuracy 0.75 at step 20 (n = 300)" in whole
    assert "  report   accuracy 0.74, loss 0.5 (n = 1,200)" in whole
    assert "  tags     keep" in whole
    assert whole[-1].endswith(": too slow")
    for width in (60, 80):
        lines = show(folder, width).splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split())
    assert " " * 22 + "steps not counted" in show(folder, 80).splitlines()
    assert show_json(folder)["notes"][-1]["text"] == "too slow"
    assert show_json(folder)["tags"] == ["keep"]


def test_a_recipe_changed_after_the_run_is_noticed(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "a")
    later = Recipe.model_validate({"seed": 4})
    (tmp_path / "a" / "recipe.yaml").write_text(yaml.safe_dump(later.to_dict()))
    line = f"  digest     {recipe.digest}, but recipe.yaml now has {later.digest}"
    assert line in show(tmp_path / "a").splitlines()


def test_a_recipe_no_longer_valid_is_shown_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / "recipe.yaml").write_text("train: {speed: 3, when: 2024-01-01}\n")
    found = show_json(tmp_path / "a")
    assert list(found["differences"]) == ["train.speed", "train.when"]
    assert "    train.when   2024-01-01" in show(tmp_path / "a").splitlines()


def test_an_unfinished_run_says_its_best(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_run(folder)
    (folder / "result.json").unlink()
    with open(folder / "events.jsonl", "a") as file:
        file.write("garbage\nnull\n{torn")
    lines = show(folder).splitlines()
    assert "  status          interrupted" in lines
    assert "  best so far  accuracy 0.7 at step 10" in lines
    assert "  damaged events  2: line 5 is not a JSON object" in lines
    assert "  total              –" in lines


def test_an_event_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with open(tmp_path / "a" / "events.jsonl", "a") as file:
        file.write(json.dumps(evaluation_event(12, {"accuracy": "x"})) + "\n")
    reason = "line 5: metrics.accuracy should be a number or an object, but is 'x'"
    assert f"  damaged events  1: {reason}" in show(tmp_path / "a").splitlines()
    assert show_json(tmp_path / "a")["damaged_events"] == [reason]


def test_annotations_that_cannot_be_read_give_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_run(folder)
    assert show_json(folder)["damaged_annotations"] is None
    (folder / "annotations.json").write_text("[")
    reason = f"{folder / 'annotations.json'} is not a JSON object; delete it to begin a new one"
    assert show(folder).splitlines()[-1] == f"  {reason}"
    assert show_json(folder)["damaged_annotations"] == reason


def test_all_of_a_run_as_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    found = show_json(tmp_path / "a")
    assert json.loads(json.dumps(found)) == found
    assert found["result"]["clocks"]["total_seconds"] == 3725.4
    assert [event["step"] for event in found["evaluations"]] == [10]
    assert found["status"] == read_run(tmp_path / "a").status == "finished"
    monkeypatch.chdir(tmp_path / "a")
    assert show_json(Path("."))["name"] == "a"
    with pytest.raises(BadInput, match="is not a run: it has neither events.jsonl nor result"):
        show_json(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_missing_or_damaged_it_is_shown(tmp_path: Path, seed: int) -> None:
    folder, chance = tmp_path / "a", random.Random(seed)
    write_run(folder)
    result = json.loads((folder / "result.json").read_text())
    for place in (result, result["clocks"], result["best"], result["parameters"]):
        for key in chance.sample(sorted(place), len(place) // 2):
            if place is not result or key != "status":
                place[key] = chance.choice([None, "x", [], [None], {}, {"a": None}, 3, True])
    (folder / "result.json").write_text(json.dumps(result))
    for path in chance.sample(sorted(folder.glob("[er]*[nl]")), 2):
        data = path.read_bytes()
        path.write_bytes(data[: chance.randrange(len(data))])
    text = show(folder)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    sections = ["configuration", "results", "clocks", "parameters", "environment"]
    optional = {"machine", "notes"}
    assert [title for title in titles if title not in optional] == ["run a", *sections]
    assert runs_table([read_run(folder)]).count("\n") >= 1
