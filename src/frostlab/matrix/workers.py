"""Executors on this machine: this process itself, and warm workers bound to devices.

A worker is a process that imports torch once and then trains one run after another. If it dies,
only its run is affected, and the next run gets a new worker.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from frostlab.errors import BadInput
from frostlab.launcher import AT_ONCE, COMMAND, TURNS, command
from frostlab.matrix.queue import Ended, Reason
from frostlab.matrix.task import Outcome, Task, run_task
from frostlab.storage import open_append
from frostlab.training.progress import Display, Lines, Nowhere, Screen

_GRACE_SECONDS = 60.0  # time for a run to finish its step and write a checkpoint
_CLOSE_SECONDS = 10.0  # time for a worker to end if it is idle or was asked to stop before


@dataclass(frozen=True)
class Slot:
    """A device, and how many runs may share it."""

    device: str  # as the user named it: cuda:1, or cpu
    at_once: int = 1
    # how many of them may take steps at the same time, while others start or end; None: all
    training: int | None = None
    # environment variables of its workers, such as CUDA_VISIBLE_DEVICES
    variables: Mapping[str, str] = field(default_factory=dict)


class InProcess:
    """An executor for one task at a time in this process.

    A progress bar is shown if the screen can redraw it.
    """

    def __init__(self, data_dir: Path | None, screen: Screen | None = None) -> None:
        self._data_dir, self._screen = data_dir, screen or Nowhere()
        self._task: Task | None = None

    def free(self) -> int:
        """Return 1 if no task was started."""
        return int(self._task is None)

    def start(self, task: Task) -> None:
        """Keep a task until `wait` runs it."""
        self._task = task

    def wait(self, seconds: float) -> list[Ended]:
        """Run the task that was started."""
        task, self._task = self._task, None
        if task is None:
            time.sleep(seconds)
            return []
        display = Display(self._screen, task.about) if self._screen.is_live else None
        return [(task, run_task(task, self._data_dir, display, raises=True))]

    def running(self) -> dict[Path, str]:
        """Return the task that was started."""
        return {} if self._task is None else {self._task.path: "this process"}

    def stop(self, paths: Iterable[Path]) -> None:
        """Forget a task that `wait` has not run yet; a run that trains catches signals itself."""
        self._task = None

    def close(self, reason: Reason = "done") -> None:
        """Do nothing."""


class _Worker:
    """A worker process, the connection to it, and its task.

    `turns` is the folder through which the runs of a device take turns (`_make_turns`), or None if
    no device needs it.
    """

    def __init__(
        self, slot: Slot, turns: Path | None, data_dir: Path | None, logs: Path | None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.slot = slot
        self.task: Task | None = None
        self.began = 0.0  # when it was given the task
        self.asked_to_stop = False
        self.connection, theirs = context.Pipe()
        variables = {**slot.variables, AT_ONCE: str(slot.at_once), COMMAND: command()}
        if turns is not None and slot.training is not None:
            variables[TURNS] = str(turns)
        self.process = context.Process(target=_serve, args=(theirs, variables, data_dir, logs))
        self.process.start()
        theirs.close()

    def send(self, task: Task) -> bool:
        """Send a task; return False if the worker has died."""
        self.began = time.monotonic()
        try:
            self.connection.send(task)
        except OSError:
            return False
        self.task = task
        return True


class LocalWorkers:
    """An executor with warm workers on the devices of this machine.

    Args:
        logs: a folder in which every run gets a file with its output; None: nothing is kept.
        usable: a function that returns whether runs may start on a device now.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        data_dir: Path | None,
        logs: Path | None = None,
        usable: Callable[[str], bool] = lambda device: True,
    ) -> None:
        self._slots, self._data_dir, self._logs = list(slots), data_dir, logs
        self._usable = usable
        self._workers: list[_Worker] = []
        self._turns = _make_turns(self._slots)

    def _room(self) -> dict[str, int]:
        """Return how many more tasks each device takes now."""
        busy = [worker.slot.device for worker in self._workers if worker.task is not None]
        return {
            slot.device: slot.at_once - busy.count(slot.device)
            for slot in self._slots
            if self._usable(slot.device)
        }

    def free(self) -> int:
        """Return how many more tasks the devices take."""
        return sum(self._room().values())

    def start(self, task: Task) -> None:
        """Give a task to the device with the most room: to an idle worker, or to a new one."""
        room = self._room()
        slot = max(self._slots, key=lambda slot: room.get(slot.device, -1))
        for worker in [w for w in self._workers if w.slot == slot and w.task is None]:
            if worker.send(task):
                return
            self._remove(worker)
        turns = None if self._turns is None else Path(self._turns.name, slot.device)
        worker = _Worker(slot, turns, self._data_dir, self._logs)
        self._workers.append(worker)
        if not worker.send(task):  # it has died at once; `wait` reports it
            worker.task = task

    def wait(self, seconds: float) -> list[Ended]:
        """Return the tasks whose worker has sent an outcome, or has died."""
        waited: dict[Any, _Worker] = {}
        for worker in self._workers:
            waited |= {worker.connection: worker, worker.process.sentinel: worker}
        if not waited:
            time.sleep(seconds)
            return []
        ready = multiprocessing.connection.wait(list(waited), seconds)
        ended: list[Ended] = []
        for worker in dict.fromkeys(waited[item] for item in ready):
            task = worker.task
            try:
                outcome = worker.connection.recv() if worker.connection.poll() else None
            except (EOFError, OSError):
                outcome = None
            worker.task, worker.asked_to_stop = None, False
            if outcome is None:  # the process has ended
                self._remove(worker)
                seconds = time.monotonic() - worker.began
                outcome = Outcome("crashed", _how_it_died(worker.process.exitcode), seconds)
            if task is not None:
                ended.append((task, outcome))
        return ended

    def running(self) -> dict[Path, str]:
        """Return the device of every running task."""
        return {w.task.path: w.slot.device for w in self._workers if w.task is not None}

    def stop(self, paths: Iterable[Path]) -> None:
        """Send SIGTERM to the workers of these tasks."""
        wanted = set(paths)
        for worker in self._workers:
            if worker.task is not None and worker.task.path in wanted:
                worker.asked_to_stop = True
                worker.process.terminate()

    def close(self, reason: Reason = "done") -> None:
        """End all workers.

        Workers that train are sent SIGTERM: their run stops after a step or, if it was asked to
        stop before, at once.
        """
        for worker in self._workers:
            if reason != "done" and worker.task is not None:
                worker.process.terminate()
            else:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
        for worker in list(self._workers):
            graceful = worker.task is not None and not worker.asked_to_stop
            with contextlib.suppress(OSError):
                worker.connection.send(None)  # the worker ends when its run has stopped
            worker.process.join(_GRACE_SECONDS if graceful else _CLOSE_SECONDS)
            self._remove(worker)
        if self._turns is not None:
            self._turns.cleanup()

    def _remove(self, worker: _Worker) -> None:
        if worker.process.is_alive() and worker.connection.closed is False:
            worker.process.join(0.5)  # it may end a moment after its pipe was closed
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)


def _make_turns(slots: Sequence[Slot]) -> tempfile.TemporaryDirectory[str] | None:
    """Make a folder for each device where not all runs may take steps at once (`Slot.training`).

    The folder has as many files as runs may take steps at once; a run takes steps only while it
    has locked one of the files (`launcher.Turn`). Return the temporary folder that holds these
    folders, or None if there is no such device.
    """
    if all(slot.training is None for slot in slots):
        return None
    folder = tempfile.TemporaryDirectory(prefix="frostlab-turns-")
    for slot in slots:
        for number in range(slot.training or 0):
            path = Path(folder.name, slot.device, str(number))
            path.parent.mkdir(exist_ok=True)
            path.touch()
    return folder


def _how_it_died(code: int | None) -> str:
    """Describe the end of a worker by its exit code."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


# Inside a worker


def _serve(
    connection: Connection, variables: Mapping[str, str], data_dir: Path | None, logs: Path | None
) -> None:
    """Run the tasks that arrive until None arrives or the parent has ended."""
    os.environ.update(variables)  # before torch looks for devices
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # else Ctrl-C would reach a worker twice: directly, and through the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    active = _stop_before_training()
    import frostlab.training.run  # noqa: F401  (imports torch before the first task)

    first = True
    with contextlib.suppress(EOFError, OSError):
        while (task := connection.recv()) is not None:
            active.set()
            with output_to(logs, task):
                outcome = _attempt(task, data_dir, logs is not None)
            active.clear()
            connection.send(outcome)
            _clean_up()
            if first:
                gc.freeze()  # what the first run has imported stays: later collections are fast
            first = False


def _attempt(task: Task, data_dir: Path | None, logged: bool) -> Outcome:
    display = Display(Lines()) if logged else None
    try:
        return run_task(task, data_dir, display)
    except KeyboardInterrupt:  # a signal while the run was being built, or a second signal
        return Outcome("stopped", "stopped")


def _stop_before_training() -> threading.Event:
    """Set a handler of SIGTERM for the times when no run catches it.

    Return an event, which `_serve` sets while the worker has a task: a signal then ends the task,
    else the worker.
    """
    active = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if active.is_set():
            raise KeyboardInterrupt
        os._exit(0)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return active


@contextlib.contextmanager
def output_to(logs: Path | None, task: Task) -> Iterator[None]:
    """Append the output of this process to the log of a task, in a folder of logs."""
    if logs is None:
        yield
        return
    try:
        file = open_append(logs / f"{task.path.name}.log")
    except (OSError, BadInput):  # a full disk; the run itself reports it
        yield
        return
    with file:
        kept = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            for number, handle in zip((1, 2), kept, strict=True):
                os.dup2(handle, number)
                os.close(handle)


def _clean_up() -> None:
    """Free what a run has left in memory, so that the next one finds the device as it was."""
    gc.collect()
    from frostlab.devices import release_cached_memory

    release_cached_memory()


def _end_with_parent() -> None:
    """Wait for the end of the parent, then stop this worker's run and end the worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)
