"""Turns: more runs share a device than take steps on it; the others start or end meanwhile."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import frostlab as fl
from frostlab.launcher import TURNS, Turn
from frostlab.matrix.queue import Queue
from frostlab.matrix.task import Task
from frostlab.matrix.workers import LocalWorkers, Slot
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord, finished_status
from frostlab.storage import Lock
from tiny import tiny


def wait_until(condition: Any, seconds: float = 250) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.02)


def kinds(run: Path) -> list[str]:
    return [event.kind for event in RunRecord(run).events()]


def turns_in(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    files = [folder / str(number) for number in range(count)]
    for file in files:
        file.touch()
    return files


def turns_of(workers: LocalWorkers) -> Path:
    assert workers._turns is not None
    return Path(workers._turns.name)


def test_a_turn_is_taken_once_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TURNS, raising=False)
    assert Turn().take(), "without a queue"
    turns_in(tmp_path / "turns", 2)
    monkeypatch.setenv(TURNS, str(tmp_path / "turns"))
    third = Turn()
    with Turn() as first:
        with Turn() as second:
            assert (first.take(), second.take(), second.take()) == (True, True, True)
            assert not third.take()
        assert third.take()
    monkeypatch.setenv(TURNS, str(tmp_path / "gone"))
    assert Turn().take(), "the queue has ended"


def test_a_run_is_ready_before_its_turn_and_its_times_leave_the_waiting_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = turns_in(tmp_path / "turns", 1)
    monkeypatch.setenv(TURNS, str(tmp_path / "turns"))
    run, seconds = tmp_path / "run", 1.0
    asked, take = threading.Event(), Turn.take

    def noted(turn: Turn) -> bool:
        asked.set()
        return take(turn)

    monkeypatch.setattr(Turn, "take", noted)
    with Lock(file):
        thread = threading.Thread(target=lambda: fl.run(tiny(), out=run))
        thread.start()
        wait_until(asked.is_set)
        time.sleep(seconds)
        assert "stage" not in kinds(run), "no step before its turn"
    thread.join(250)
    clocks = RunRecord(run).result.clocks
    assert clocks.wall.turn > seconds / 2
    parts = sum(value for key, value in vars(clocks.wall).items() if key != "total")
    assert parts == pytest.approx(clocks.wall.total, abs=0.01)
    assert clocks.total_seconds + clocks.wall.turn < clocks.wall.total
    assert 0 < clocks.train_seconds <= clocks.total_seconds
    assert Turn().take(), "given back after the run"


@pytest.mark.slow
def test_runs_of_a_queue_take_turns_and_a_killed_one_gives_its_turn_back(tmp_path: Path) -> None:
    recipe = recipe_from(tiny(train={"batch": 32, "steps": 200, "threads": 1}))
    tasks = [
        Task(str(seed), recipe.model_copy(update={"seed": seed}), tmp_path / str(seed), str(seed))
        for seed in range(4)
    ]
    killed: list[int] = []

    def kill_first() -> None:
        """Kill the first worker that trains, while it has the turn."""
        for task in tasks if not killed else ():
            if (task.path / "events.jsonl").exists() and "stage" in kinds(task.path):
                for child in psutil.Process().children():
                    names = [Path(file.path) for file in child.open_files()]
                    if task.path / "events.jsonl" in names:
                        killed.append(child.pid)
                        child.kill()

    workers = LocalWorkers([Slot("cpu", 3, training=1)], None)
    turns = turns_of(workers)
    ended = list(Queue(workers, each_turn=kill_first).outcomes(tasks))
    assert killed
    assert [outcome.kind for _, outcome in ended] == ["finished"] * 4
    spans = []
    for task in tasks:
        events = RunRecord(task.path).events()
        # of a run that was killed, only the second attempt counts
        begin = max(event.at for event in events if event.kind in ("stage", "resume"))
        steps = [event.at for event in events if event.kind == "step" and event.at >= begin]
        spans += [(min(steps), max(steps))] if steps else []
        assert RunRecord(task.path).result.runs_at_once == 3
    assert len(spans) >= 3
    for (_, end), (begin, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert end <= begin
    assert not turns.exists()


def test_a_run_that_waits_for_its_turn_can_be_stopped(tmp_path: Path) -> None:
    recipe = recipe_from(tiny(train={"batch": 32, "steps": 10, "threads": 1}))
    task = Task("a", recipe, tmp_path / "a", "a")
    workers = LocalWorkers([Slot("cpu", 2, training=1)], None)
    with Lock(turns_of(workers) / "cpu" / "0"):
        workers.start(task)
        wait_until(lambda: (task.path / "events.jsonl").exists())
        (worker,) = workers._workers
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGTERM)
        ended: list[Any] = []
        wait_until(lambda: ended.extend(workers.wait(0.1)) or ended)
    workers.close()
    assert [outcome.kind for _, outcome in ended] == ["stopped"]
    assert finished_status(task.path) in ("stopped", None)
