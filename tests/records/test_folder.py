"""A run's folder is written key by key as its schema says, and read once, typed."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostlab.errors import BadInput, FrostlabError
from frostlab.records import SCHEMA
from frostlab.records import events as events_file
from frostlab.records.events import LatestEvents, effective, effective_values, read_events
from frostlab.records.folder import RunFolder, RunRecord, given_folder, own_folder
from frostlab.records.schema import (
    EVENTS,
    EvaluationEvent,
    Event,
    NoteEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
)
from frostlab.storage import Lock
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
                     frozen_verified=0, epoch=0.5, seconds=0.1, total_seconds=1.0)  # fmt: skip
        folder.event("resume", 3, **SHAPE)
    record = RunRecord(tmp_path / "run")
    assert [event.kind for event in record.events()] == ["start", "resume"]
    assert record.events(EvaluationEvent) == [], "it came after the step that was resumed from"
    assert record.events(StartEvent) == [record.start]
    assert record.start.known == {}
    assert [event.step for event in record.events(ResumeEvent)] == [3]


def still_counts(event: Event, step: int) -> bool:
    """Whether an event before a resume at a step counts, in as many words as the docs."""
    if event.kind in ("start", "resume", "note"):
        return True
    if event.kind == "end" or (isinstance(event, EvaluationEvent) and event.checkpoint is not None):
        return False
    return event.step < step if event.kind == "stage" else event.step <= step


STAGE: dict[str, Any] = {
    "at": 0.0, "name": "1", "steps": 9, "patience": None, "train": None, "freeze": [],
    "changed": [], "added": [], "trainable": 1, "total": 1, "lr": 0.1, "best_before": None,
    "supervise": None,
}  # fmt: skip
KINDS = ["checkpoint", "evaluation", "report", "stage", "note", "end", "resume", "resume", "resume"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 6)), max_size=30))
def test_events_that_a_resume_repeated_are_dropped(drawn: list[tuple[str, int]]) -> None:
    """In any order of steps, as a loop over all earlier events would."""
    evaluation: dict[str, Any] = {
        "at": 0.0, "split": "tune", "metrics": {}, "frozen_verified": 0, "epoch": 0.0,
        "seconds": 0.0, "total_seconds": 0.0,
    }  # fmt: skip
    make: dict[str, Callable[[int], Event]] = {
        "checkpoint": lambda step: EVENTS["checkpoint"](at=0.0, step=step, best=None),
        "evaluation": lambda step: EvaluationEvent(step=step, **evaluation),
        "report": lambda step: EvaluationEvent(step=step, checkpoint=1, **evaluation),
        "stage": lambda step: EVENTS["stage"](step=step, **STAGE),
        "note": lambda step: EVENTS["note"](at=0.0, step=step, text="a note"),
        "end": lambda step: EVENTS["end"](at=0.0, step=step, status="failed", error=None),
        "resume": lambda step: EVENTS["resume"](at=0.0, step=step, **SHAPE),
    }
    events = [make[kind](step) for kind, step in drawn]
    expected: list[Event] = []
    for event in events:
        if isinstance(event, ResumeEvent):
            expected = [earlier for earlier in expected if still_counts(earlier, event.step)]
        expected.append(event)
    assert list(map(id, effective(events))) == list(map(id, expected))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "events.jsonl"
        lines = [json.dumps({"kind": event.kind, **asdict(event)}) for event in events]
        path.write_text("".join(f"{line}\n" for line in lines))
        assert list(read_events(path)) == events
        latest = LatestEvents(path)
        assert list(iter(lambda: latest.next(Event), None)) == expected[::-1]
        for kinds in ((Event,), (EvaluationEvent, NoteEvent)):
            wanted = [event for event in expected if isinstance(event, kinds)]
            values = [values for _, values in effective_values(path, *kinds)]
            assert values == [{"kind": event.kind, **asdict(event)} for event in wanted]
            assert list(read_events(path, *kinds)) == [e for e in events if isinstance(e, kinds)]


def test_a_run_that_was_resumed_often_is_read_in_proportion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resume does not look at all events before it again."""
    least, looked = events_file._least_resume, list[int]()

    def look(kind: str, step: int, checkpoint: object) -> float:
        looked.append(step)
        return least(kind, step, checkpoint)

    monkeypatch.setattr(events_file, "_least_resume", look)
    events: list[Event] = []
    for turn in range(200):
        steps = range(turn * 40, turn * 40 + 50)
        events += [EVENTS["checkpoint"](at=0.0, step=step, best=None) for step in steps]
        events.append(EVENTS["resume"](at=0.0, step=turn * 40 + 40, **SHAPE))
    assert len(effective(events)) < len(events)
    assert len(looked) < 3 * len(events)


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
    said = "has schema 1, and this frostlab reads 7$"
    with pytest.raises(BadInput, match=f"^{record.folder}/result.json {said}"):
        _ = record.result
    with pytest.raises(BadInput, match=f"^{record.folder}/events.jsonl line 1 {said}"):
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


SECRET = "not to be touched"


def test_writes_do_not_leave_the_folder_through_links(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run").folder
    outside = tmp_path / "outside"
    for name in ("events.jsonl", "run.lock"):
        outside.write_text(SECRET)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
        with pytest.raises(BadInput, match="cannot be written"):
            RunFolder(folder).open()
        assert outside.read_text() == SECRET
        (folder / name).unlink()
    os.mkfifo(folder / "events.jsonl")
    with pytest.raises(BadInput, match="events.jsonl is not a regular file"):
        RunFolder(folder).open()
    (folder / "events.jsonl").unlink()
    RunFolder(folder).open().close()  # the lock was released


def test_a_link_at_a_guessed_temporary_name_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / f".run.{os.getpid()}.tmp").symlink_to(outside)
    RunFolder.create(tmp_path / "run", {}, **STARTED).close()
    assert not list(outside.iterdir())
    assert (tmp_path / "run" / "events.jsonl").is_file()


def test_opening_a_folder_removes_files_of_a_killed_process(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run").folder
    (folder / ".result.json.0123.tmp").write_text("half")
    (folder / ".flow-start.safetensors.0123.tmp").mkdir()
    RunFolder(folder).open().close()
    assert {path.name for path in folder.iterdir()} == {"events.jsonl", "result.json", "run.lock"}


def test_an_unfinished_line_of_any_length_is_cut_off(tmp_path: Path) -> None:
    for size in (5, 3 << 20):
        folder = write_run(tmp_path / str(size)).folder
        before = (folder / "events.jsonl").read_bytes()
        (folder / "events.jsonl").write_bytes(before + b"x" * size)
        RunFolder(folder).open().close()
        assert (folder / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["../../x", "/x", ".x", "a/b", "a\nb", "x" * 300, "..", "\ud800"])
def test_a_run_has_a_plain_name(tmp_path: Path, name: str) -> None:
    for resume in (True, False):
        with pytest.raises(BadInput, match="the run's name"):
            own_folder(tmp_path / "runs", name, resume, "d1")


HUGE = "9" * 400
BAD_FILES = {
    "empty": b"",
    "truncated": b'{"a": ',
    "deep": b"[" * 2000,
    "deep object": b'{"a":' * 2000 + b"1" + b"}" * 2000,
    "not text": b"\xff\xfe\x00",
    "another type": b"[]",
}


@pytest.mark.parametrize("file", ["result", "digests", "environment", "predictions"])
@pytest.mark.parametrize("bad", [*BAD_FILES, "pipe", "zeros", "folder"])
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, file: str, bad: str) -> None:
    path = tmp_path / f"{file}.json"
    if bad == "pipe":
        os.mkfifo(path)
    elif bad == "zeros":
        path.symlink_to("/dev/zero")
    elif bad == "folder":
        path.mkdir()
    else:
        path.write_bytes(BAD_FILES[bad])
    with pytest.raises(BadInput, match=f"^{path}[: ]") as caught:
        getattr(RunRecord(tmp_path), file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", HUGE])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: str) -> None:
    folder = write_run(tmp_path / "run").folder
    text = json.dumps(RESULT).replace('"total_seconds": 9.5', f'"total_seconds": {number}')
    (folder / "result.json").write_text(text)
    with pytest.raises(BadInput, match=r"result.json: clocks.total_seconds should be a"):
        _ = RunRecord(folder).result
    (folder / "environment.json").write_text(f'{{"host": {{"memory": [{number}]}}}}')
    with pytest.raises(BadInput, match=r"environment.json: host.memory.0 should be a"):
        _ = RunRecord(folder).environment
    line = json.dumps(step_event(2)).replace('"ms": [4.5]', f'"ms": [{number}]')
    with (folder / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInput, match=r"events.jsonl line 4: ms.0 should be a"):
        RunRecord(folder).events()


@pytest.mark.parametrize(
    "checkpoint",
    ["../elsewhere", "checkpoints/..", "/x", "checkpoints/step-1", "checkpoints/step-000000020/.."],
)
def test_a_checkpoint_outside_the_run_is_refused(tmp_path: Path, checkpoint: str) -> None:
    record = write_run(tmp_path / "run", checkpoint=checkpoint)
    with pytest.raises(BadInput, match="result.json: checkpoint should be checkpoints/step-N"):
        _ = record.result


def test_a_long_line_is_refused_without_reading_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run").folder
    with (folder / "events.jsonl").open("ab") as file:
        file.truncate(64 << 20)  # zeros, without an end of line
    with pytest.raises(BadInput, match="events.jsonl line 4 is longer than 16 MiB"):
        RunRecord(folder).events()


def test_a_run_that_was_killed_while_it_was_created_is_removed(tmp_path: Path) -> None:
    def unfinished(name: str, age: float = 3600.0) -> Path:
        path = tmp_path / f".{name}.0123456789abcdef.tmp"
        path.mkdir()
        (path / "run.lock").touch()
        (path / "recipe.yaml").write_text("seed: 1")
        os.utime(path, (time.time() - age, time.time() - age))
        return path

    killed, young, locked = unfinished("killed"), unfinished("young", 1.0), unfinished("locked")
    another = tmp_path / ".delta.0123456789abcdef.tmp"
    another.mkdir()
    (another / "delta.json").touch()
    outside = unfinished("outside").rename(tmp_path / "outside")
    (tmp_path / ".link.0123456789abcdef.tmp").symlink_to(outside)
    os.utime(another, (1, 1))
    with Lock(locked / "run.lock"):
        RunFolder.create(tmp_path / "run", {}, **STARTED).close()
    assert not killed.exists()
    assert all((path / "recipe.yaml").exists() for path in (young, locked, outside))
    assert (another / "delta.json").exists()


def test_a_notebook_shows_the_result_escaped(tmp_path: Path) -> None:
    record = write_run(
        tmp_path / "run", caution="<b>tiny</b>", status="failed", error="no & memory"
    )
    shown = record._repr_html_()
    assert "<b>" not in shown
    assert '<p style="color: #d1242f">&lt;b&gt;tiny&lt;/b&gt;</p>' in shown
    assert "no &amp; memory" in shown
    assert "imdb, treatment oelm, seed 3: failed" in shown
    assert "0.8 at step 20 of 30" in shown
    assert "best validation accuracy" in shown, "the run may have no tune split"
    assert "1,500 of 2,000" in shown
    (tmp_path / "run" / "result.json").unlink()
    assert "not finished" in RunRecord(tmp_path / "run")._repr_html_()


def test_an_event_whose_kind_is_no_text_is_left_out_of_the_values(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": ["step"], "step": 1}\n{"kind": {"a": 1}, "step": 2}\n')
    assert list(effective_values(path, StepEvent)) == []
