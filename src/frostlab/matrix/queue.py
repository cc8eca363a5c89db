"""The queue of runs: it starts tasks on an executor, retries crashes, and waits if a disk is full.

A task is one training run. An executor runs tasks somewhere: in this process, in worker processes
on this machine's devices, on a Ray cluster or through Slurm. The queue decides which task is next,
and whether one that did not finish is tried again. Comparisons and matrices use this one queue.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

from frostlab.matrix.task import Outcome, Task, disk_problem
from frostlab.records.finding.index import LOCK
from frostlab.storage import is_locked

_POLL_SECONDS = 0.2  # time between two checks for signals and requests
_DISK_SECONDS = 2.0  # wait between two attempts to write to a full or read-only disk
# A disk can have room for a small file but not for a checkpoint. Each time that it stops runs
# again, they wait twice as long, up to this, unless space has become free: this many bytes, and
# this share of what was free.
_LONGEST_WAIT = 300.0
_ROOM, _ROOM_SHARE = 1 << 20, 0.1
_MOST_BLOCKED = 100  # most attempts at one task that fail because of a full or read-only disk
_ATTEMPTS = 2  # a crash is retried once
Ended = tuple[Task, Outcome]
# why an executor is closed: its tasks have ended, the user wants them to end now, or an error
Reason = Literal["done", "killed", "failed"]


class Executor(Protocol):
    """A place where tasks run."""

    def free(self) -> int:
        """Return how many more tasks can be started now."""

    def start(self, task: Task) -> None:
        """Start a task."""

    def wait(self, seconds: float) -> list[Ended]:
        """Return the tasks that have ended; if none has, wait for one, up to so many seconds."""

    def running(self) -> dict[Path, str]:
        """Return the folder of each running task → the device, node or job on which it runs."""

    def stop(self, paths: Iterable[Path]) -> None:
        """Ask tasks to stop after a step, with a checkpoint."""

    def close(self, reason: Reason = "done") -> None:
        """Release what the executor holds, and end tasks that still run.

        The exception is `failed` on Slurm: jobs go on, because the same command, started again,
        finds them.
        """


def _nothing() -> None:
    """Do nothing."""


def _free_in(folder: Path) -> int:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


class Queue:
    """Tasks that wait for a place, in order; `outcomes` runs them all.

    Args:
        asked_to_stop: a function that returns whether the queue should stop.
        each_turn: a function that is called several times a second, and after every end of a task;
            while a task runs in this process, it is not called.
        say: a function that shows a line.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        asked_to_stop: Callable[[], bool] = lambda: False,
        each_turn: Callable[[], None] = _nothing,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.executor = executor
        self.waiting: list[Task] = []
        self.disk: str | None = None  # why no task is started: the disk cannot be written
        self._asked_to_stop, self._each_turn, self._say = asked_to_stop, each_turn, say
        self._crashes: Counter[Path] = Counter()
        self._blocked: Counter[Path] = Counter()
        self._unwanted: set[Path] = set()  # folders of tasks that `drop` has asked to stop
        self._next_probe = 0.0
        self._in_a_row = 0  # how often a full disk stopped runs since one ended in another way
        self._free = 0  # bytes that were free when it last stopped a run
        self._wait_until = 0.0

    def outcomes(self, tasks: Sequence[Task]) -> Generator[Ended, None, None]:
        """Yield each task with its last outcome when it ends.

        After a request to stop, running tasks are asked to end, and tasks that wait are skipped. A
        second request raises KeyboardInterrupt, and the running tasks are killed.
        """
        self.waiting += tasks
        stopping = False
        reason: Reason = "failed"
        try:
            while True:
                self._each_turn()  # it may add tasks, even after the last task has ended
                if stopping:
                    self.waiting.clear()
                if not (self.waiting or self.executor.running()):
                    break
                if self._asked_to_stop() and not stopping:
                    stopping = True
                    self.waiting.clear()
                    running = list(self.executor.running())
                    if running:
                        self._say("stopping: each run ends after a step, with a checkpoint; a "
                                  "second request ends them now")  # fmt: skip
                    self.executor.stop(running)
                if not stopping:
                    self._start()
                for task, outcome in self.executor.wait(_POLL_SECONDS):
                    unwanted = stopping or task.path in self._unwanted
                    if unwanted and outcome.kind in ("crashed", "blocked", "lost"):
                        yield task, Outcome("stopped", outcome.text, outcome.seconds)
                    elif unwanted or self._is_last(task, outcome):
                        yield task, outcome
                    self._unwanted.discard(task.path)
            reason = "done"
        except KeyboardInterrupt:
            reason = "killed"
            raise
        finally:
            self.executor.close(reason)

    @contextmanager
    def session(self, tasks: Sequence[Task]) -> Iterator[Iterator[Ended]]:
        """Yield `outcomes`, and close it afterwards; a KeyboardInterrupt kills the running tasks.

        A signal may arrive while the caller works on an outcome, where `outcomes` would not see it.
        """
        outcomes = self.outcomes(tasks)
        try:
            yield outcomes
        except KeyboardInterrupt as error:
            outcomes.throw(error)
        finally:
            outcomes.close()

    def _start(self) -> None:
        """Start tasks while there is room; skip folders that a dying process still locks."""
        if not self.waiting or not self.executor.free() or not self._disk_is_fine():
            return
        for task in list(self.waiting):
            if not self.executor.free():
                return
            if not is_locked(task.path / LOCK):
                self.waiting.remove(task)
                self.executor.start(task)

    def _disk_is_fine(self) -> bool:
        if self.disk is None:
            return True
        if time.monotonic() < self._next_probe:
            return False
        folder = self.waiting[0].path.parent
        has_room = _free_in(folder) >= self._free + max(_ROOM, _ROOM_SHARE * self._free)
        must_wait = time.monotonic() < self._wait_until and not has_room
        if must_wait or disk_problem(folder) is not None:
            self._next_probe = time.monotonic() + _DISK_SECONDS
            return False
        self._say("the disk can be written again; the runs go on")
        self.disk = None
        return True

    def _is_last(self, task: Task, outcome: Outcome) -> bool:
        """Return whether an outcome ends a task; if it does not, the task waits for another try."""
        if outcome.kind == "blocked":
            self._blocked[task.path] += 1
            if self._blocked[task.path] >= _MOST_BLOCKED:
                return True
            if self.disk is None:
                self._say(f"{task.about}: {outcome.text}; runs wait until the disk can be written")
                delay = _DISK_SECONDS * (2 ** min(self._in_a_row, 10) - 1)
                self._wait_until = time.monotonic() + min(_LONGEST_WAIT, delay)
                self._in_a_row += 1
            self.disk, self._free = outcome.text, _free_in(task.path.parent)
            self._next_probe = time.monotonic() + _POLL_SECONDS
            self.waiting.insert(0, task)
            return False
        self._in_a_row = 0
        if outcome.kind == "crashed":
            self._crashes[task.path] += 1
            if self._crashes[task.path] >= _ATTEMPTS:
                return True
            self._say(f"{task.about}: {outcome.text}; the run is tried once more")
        elif outcome.kind != "lost":
            return True
        else:
            self._say(f"{task.about}: {outcome.text}; the run goes on elsewhere")
        self.waiting.insert(0, task)
        return False

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks to the end of a live queue; tasks that failed before get all attempts again."""
        tasks = list(tasks)
        for task in tasks:
            self._crashes.pop(task.path, None)
            self._blocked.pop(task.path, None)
        self.waiting += tasks

    def drop(self, path: Path) -> bool:
        """Stop a task that runs, or forget one that waits; return False for any other task."""
        for task in self.waiting:
            if task.path == path:
                self.waiting.remove(task)
                return True
        if path not in self.executor.running():
            return False
        self._unwanted.add(path)
        self.executor.stop([path])
        return True
