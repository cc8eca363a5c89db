"""A run's folder is written key by key as its schema says, and read once, typed."""

import json
from pathlib import Path
from typing import Any

import pytest

from frostlab.errors import BadInput, FrostlabError
from frostlab.reader import SCHEMA
from frostlab.records.folder import RunFolder, RunRecord, given_folder, own_folder
from frostlab.records.schema import EvaluationEvent, ResumeEvent, StartEvent, StepEvent
from run_made import RESULT, SHAPE, START, evaluation_event, step_event, write_events

STARTED = {key: value for key, value in START.items() if key not in ("kind", "at", "step")}


def write_run(folder: Path, schema: int = SCHEMA, **result: Any) -> RunRecord:
    folder.mkdir(parents=True)
    start = START | {"schema": schema}
    write_events(folder, start, step_event(1), evaluation_event(1, {"accuracy": 0.5}))
    (folder / "result.json").write_text(json.dumps(RESULT | {"schema": schema} | result))
    return RunRecord(folder)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}, **STARTED) as folder:
        folder.event("evaluation", 5, split="tune", metrics={"loss": float("nan")}, best=False,
                     frozen_verified=0)  # fmt: skip
        folder.event("resume", 3, **SHAPE)
    record = RunRecord(tmp_path / "run")
    assert [event.kind for event in record.events()] == ["start", "resume"]
    assert record.events(EvaluationEvent) == [], "it came after the step that was resumed from"
    assert record.events(StartEvent) == [record.start]
    assert record.start.known == {}
    assert [event.step for event in record.events(ResumeEvent)] == [3]


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        ("end", {"status": "finished", "eror": None}, "eror"),
        ("end", {"status": "finished"}, "error"),
        ("flow", {"rates": [], "ends": []}, "ranges"),
    ],
)
def test_a_key_that_is_wrong_or_missing_is_a_bug(
    tmp_path: Path, kind: str, values: dict[str, Any], key: str
) -> None:
    with RunFolder.create(tmp_path / "run", {}, **STARTED) as folder:
        before = (tmp_path / "run" / "events.jsonl").read_text()
        with pytest.raises(TypeError, match=f"'{key}'"):
            folder.event(kind, 1, **values)
        with pytest.raises(FrostlabError, match="halt is not a kind of event"):
            folder.event("halt", 1)
    assert (tmp_path / "run" / "events.jsonl").read_text() == before


def test_records_are_typed_and_read_once(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", report={"accuracy": None, "layers": {"1": {"loss": 2.0}}})
    assert record.result.clocks.step_ms.median == 4.5  # type: ignore[union-attr]
    assert record.metrics == {"accuracy": None}
    assert record.layers == {1: {"loss": 2.0}}
    assert record.result.telemetry.gpu_power_watts is None
    (block,) = record.events(StepEvent)
    assert (block.norm, block.loss) == ([None], [1.0])
    for name in ("result.json", "events.jsonl"):
        (tmp_path / "run" / name).unlink()
    assert record.result is record.result
    assert record.events() == record.events() != []


def test_a_folder_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run-s0", schema=1)
    said = "its records have schema 1, this frostlab reads 2$"
    with pytest.raises(BadInput, match=f"^{record.folder}/result.json: {said}"):
        _ = record.result
    with pytest.raises(BadInput, match=f"^{record.folder}/events.jsonl line 1: {said}"):
        record.events()
    with pytest.raises(BadInput, match=said):
        given_folder(record.folder, True, "d1", {})
    assert own_folder(tmp_path, "run-s0", True, "d1") == (tmp_path / "run-s0-2", False)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (step_event(2, loss=["x"]), "line 4: loss.0 should be a number, but is 'x'"),
        (step_event(2, kind="stop"), "line 4: kind should be one of start, .*, but is 'stop'"),
        ({"at": 1.0}, "line 4: kind should be one of .*, but is None"),
        (evaluation_event(2, {}, spilt="tune"), "line 4: spilt is not a key; did you mean `split`"),
    ],
)
def test_an_event_that_does_not_fit_is_named(
    tmp_path: Path, event: dict[str, Any], reason: str
) -> None:
    folder = write_run(tmp_path / "run").folder
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(BadInput, match=f"^{folder}/events.jsonl {reason}"):
        RunRecord(folder).events()


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run").folder
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "st')
    assert len(RunRecord(folder).events()) == 3


@pytest.mark.parametrize("name", ["result", "digests", "environment"])
def test_a_file_that_is_damaged_or_absent_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=rf"^{tmp_path}/{name}.json does not exist \(yet\)$"):
        getattr(RunRecord(tmp_path), name)
    (tmp_path / f"{name}.json").write_text('{"data":')
    with pytest.raises(BadInput, match=f"^{tmp_path}/{name}.json is not a JSON object$"):
        getattr(RunRecord(tmp_path), name)
