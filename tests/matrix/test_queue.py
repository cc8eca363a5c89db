"""The queue: what an attempt that did not finish means. Its executor here only pretends."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from frostlab.matrix.queue import Queue, Reason
from frostlab.matrix.task import Kind, Outcome, Task
from frostlab.recipe.load import recipe_from
from frostlab.storage import Lock
from tiny import tiny

RECIPE = recipe_from(tiny())


class Pretended:
    """An executor whose tasks end in given ways, one way an attempt."""

    def __init__(self, ways: dict[str, list[Kind]], room: int = 2) -> None:
        self.ways, self.room = ways, room
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.closed: Reason | None = None
        self._running: list[Task] = []

    def free(self) -> int:
        return self.room - len(self._running)

    def start(self, task: Task) -> None:
        assert self.free() > 0
        self.started.append(task.name)
        self._running.append(task)

    def wait(self, seconds: float) -> list[tuple[Task, Outcome]]:
        ended, self._running = self._running, []
        return [(task, Outcome(self.ways[task.name].pop(0), "words", 1.0)) for task in ended]

    def running(self) -> dict[Path, str]:
        return {task.path: "here" for task in self._running}

    def stop(self, paths: Iterable[Path]) -> None:
        self.stopped += [path.name for path in paths]

    def close(self, reason: Reason = "done") -> None:
        self.closed = reason


def tasks(folder: Path, names: Iterable[str]) -> list[Task]:
    return [Task(name, RECIPE, folder / name, name) for name in names]


def ends(queue: Queue, folder: Path, names: str) -> dict[str, str]:
    return {task.name: outcome.kind for task, outcome in queue.outcomes(tasks(folder, names))}


def test_a_crash_is_tried_once_more_and_costs_only_its_own_run(tmp_path: Path) -> None:
    executor = Pretended({
        "a": ["crashed", "finished"], "b": ["crashed", "crashed"], "c": ["finished"],
        "d": ["failed"], "e": ["diverged"],
    })  # fmt: skip
    said: list[str] = []
    found = ends(Queue(executor, say=said.append), tmp_path, "abcde")
    assert found == {
        "a": "finished", "b": "crashed", "c": "finished", "d": "failed", "e": "diverged",
    }  # fmt: skip
    assert sorted(executor.started) == ["a", "a", "b", "b", "c", "d", "e"]
    assert said == [f"{name}: words; the run is tried once more" for name in "ab"]
    assert executor.closed == "done"


def test_a_lost_machine_does_not_count_as_a_crash(tmp_path: Path) -> None:
    executor = Pretended({"a": ["lost", "lost", "lost", "crashed", "finished"]})
    assert ends(Queue(executor), tmp_path, "a") == {"a": "finished"}


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = ["No space left on device", "No space left on device", None]
    monkeypatch.setattr("frostlab.matrix.queue.disk_problem", lambda folder: problems.pop(0))
    monkeypatch.setattr("frostlab.matrix.queue._DISK_SECONDS", 0.0)
    monkeypatch.setattr("frostlab.matrix.queue._POLL_SECONDS", 0.0)
    executor, said = Pretended({"a": ["blocked", "finished"], "b": ["finished"]}, room=1), []
    assert ends(Queue(executor, say=said.append), tmp_path, "ab") == {
        "a": "finished",
        "b": "finished",
    }
    assert executor.started == ["a", "a", "b"], "no other run begins in the meantime"
    assert not problems
    assert said == [
        "a: words; runs wait until the disk can be written",
        "the disk can be written again; the runs go on",
    ]


def test_a_disk_that_is_always_full_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostlab.matrix.queue._MOST_BLOCKED", 3)
    monkeypatch.setattr("frostlab.matrix.queue._DISK_SECONDS", 0.0)
    monkeypatch.setattr("frostlab.matrix.queue._POLL_SECONDS", 0.0)
    executor = Pretended({"a": ["blocked"] * 3})
    assert ends(Queue(executor), tmp_path, "a") == {"a": "blocked"}


class Clocked(Pretended):
    """An executor whose waiting advances a clock of its own; it notes when tasks start."""

    def __init__(self, ways: dict[str, list[Kind]]) -> None:
        super().__init__(ways, room=1)
        self.now = 100.0
        self.times: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def start(self, task: Task) -> None:
        super().start(task)
        self.times.append(self.now)

    def wait(self, seconds: float) -> list[tuple[Task, Outcome]]:
        self.now += seconds
        return super().wait(seconds)


@pytest.mark.parametrize("grows", [False, True])
def test_a_disk_with_too_little_room_is_tried_ever_more_rarely(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file can be written at once, but a checkpoint cannot, unless space becomes free."""
    executor, free = Clocked({"a": ["blocked"] * 12 + ["finished"]}), iter(range(10**9))
    monkeypatch.setattr("frostlab.matrix.queue.time", executor)
    monkeypatch.setattr(
        "frostlab.matrix.queue._free_in", lambda _: (next(free) << 21) if grows else 5 << 20
    )
    assert ends(Queue(executor), tmp_path, "a") == {"a": "finished"}
    gaps = [after - before for before, after in pairwise(executor.times)]
    if grows:
        assert max(gaps) < 5
    else:
        for number, gap in enumerate(gaps):
            assert gap == pytest.approx(min(300, 2 * (2**number - 1)), abs=2.5)


def test_after_a_run_that_ended_a_full_disk_is_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: list[Kind] = ["blocked"] * 4
    executor = Clocked({"a": [*blocked, "finished"], "b": [*blocked, "finished"]})
    monkeypatch.setattr("frostlab.matrix.queue.time", executor)
    ends(Queue(executor), tmp_path, "ab")
    assert executor.times[6] - executor.times[5] < 3


def test_a_task_that_is_added_again_has_all_attempts_again(tmp_path: Path) -> None:
    executor = Pretended({"a": ["crashed", "crashed", "crashed", "finished"]}, room=1)
    again = tasks(tmp_path, "a")
    queue = Queue(executor, each_turn=lambda: queue.add(take(again, executor.started)))
    assert ends(queue, tmp_path, "a") == {"a": "finished"}
    assert executor.started == ["a"] * 4


def take(again: list[Task], started: list[str]) -> list[Task]:
    """Return the task once, after it has crashed twice."""
    return [again.pop()] if again and len(started) == 2 else []


class Slow(Pretended):
    """Tasks end only after they were asked to stop."""

    def wait(self, seconds: float) -> list[tuple[Task, Outcome]]:
        return super().wait(seconds) if self.stopped else []


def test_asked_to_stop_it_begins_nothing_more(tmp_path: Path) -> None:
    executor = Slow({"a": ["finished"], "b": ["crashed"], "c": []})
    said: list[str] = []
    queue = Queue(executor, asked_to_stop=lambda: bool(executor.started), say=said.append)
    assert ends(queue, tmp_path, "abc") == {"a": "finished", "b": "stopped"}
    assert executor.stopped == ["a", "b"]
    assert said == [
        "stopping: each run ends after a step, with a checkpoint; a second request ends them now"
    ]


def test_one_run_can_be_stopped_and_others_added(tmp_path: Path) -> None:
    executor = Slow({"a": ["stopped"], "b": ["finished"], "d": ["finished"]}, room=1)

    def turn() -> None:
        if executor.started == ["a"] and not executor.stopped:
            assert queue.drop(tmp_path / "a")  # runs
            assert queue.drop(tmp_path / "c")  # waits
            assert not queue.drop(tmp_path / "x")
            queue.add(tasks(tmp_path, "d"))

    queue = Queue(executor, each_turn=turn)
    assert ends(queue, tmp_path, "abc") == {"a": "stopped", "b": "finished", "d": "finished"}


def test_a_run_that_dies_while_it_is_stopped_counts_as_stopped(tmp_path: Path) -> None:
    executor, said = Slow({"a": ["crashed"]}, room=1), list[str]()

    def turn() -> None:
        if executor.started and not executor.stopped:
            queue.drop(tmp_path / "a")

    queue = Queue(executor, each_turn=turn, say=said.append)
    assert ends(queue, tmp_path, "a") == {"a": "stopped"}
    assert executor.started == ["a"]
    assert said == []


def test_a_folder_that_a_dying_process_holds_waits(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lock = Lock(tmp_path / "a" / "run.lock")
    assert lock.acquire(0)
    executor = Pretended({"a": ["finished"], "b": ["finished"]}, room=1)

    def turn() -> None:
        if "b" in executor.started:
            lock.release()

    assert len(ends(Queue(executor, each_turn=turn), tmp_path, "ab")) == 2
    assert executor.started == ["b", "a"]


def test_an_interruption_between_two_outcomes_kills_the_rest(tmp_path: Path) -> None:
    executor = Pretended({"a": ["finished"], "b": ["finished"]})
    queue = Queue(executor)

    def interrupted() -> None:
        with queue.session(tasks(tmp_path, "ab")) as outcomes:
            for _ in outcomes:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert executor.closed == "killed"


def test_tasks_that_are_added_after_a_stop_do_not_hold_up_the_end(tmp_path: Path) -> None:
    executor = Pretended({"a": ["stopped"]})
    turns = 0

    def add() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            queue.add(tasks(tmp_path, "b"))
        assert turns < 10, "it does not end"

    queue = Queue(executor, asked_to_stop=lambda: turns >= 2, each_turn=add)
    executor.wait = lambda seconds: [] if turns < 3 else Pretended.wait(executor, seconds)  # type: ignore[method-assign]
    assert ends(queue, tmp_path, "a") == {"a": "stopped"}
    assert executor.started == ["a"]
