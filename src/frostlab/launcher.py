"""Environment variables by which torchrun or a queue informs a process about the other processes.

torchrun starts the processes of one run. A queue, such as that of `frostlab matrix`, trains many
runs in worker processes.
"""

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from frostlab.errors import BadInput
from frostlab.storage import Lock

# A queue sets these for its workers.
AT_ONCE = "FROSTLAB_RUNS_AT_ONCE"  # how many runs may share the worker's device
COMMAND = "FROSTLAB_COMMAND"  # the command that started the queue
# A folder of lock files, e.g. five if five runs may take steps at the same time. A run takes steps
# only while it holds one of the locks. TURNS is set only if more runs share the device than it has
# lock files.
TURNS = "FROSTLAB_TURNS"
_MOST_PROCESSES = 10**6


def rank() -> int:
    """Return the index of this process among all processes of a run, from 0."""
    return _integer("RANK", 0, 0)


def local_rank() -> int:
    """Return the index of this process among the run's processes on this machine, from 0."""
    return _integer("LOCAL_RANK", 0, 0)


def world_size() -> int:
    """Return the number of the run's processes."""
    return _integer("WORLD_SIZE", 1, 1)


def local_world_size() -> int:
    """Return the number of the run's processes on this machine."""
    return _integer("LOCAL_WORLD_SIZE", world_size(), 1)


def runs_at_once() -> int:
    """Return how many runs a queue lets share this process's device; 1 without a queue."""
    return _integer(AT_ONCE, 1, 1)


class Turn:
    """The permission of a run to take training steps on a device that it shares with other runs.

    It is the lock of one of the files in the folder `TURNS`, so the system releases it if the
    process dies. If `TURNS` is not set, every run may take steps at any time.
    """

    def __init__(self) -> None:
        folder = os.environ.get(TURNS)
        self._folder = None if folder is None else Path(folder)
        self._lock: Lock | None = None

    def take(self) -> bool:
        """Take a turn if one is free; return whether this run may take steps."""
        if self._folder is None or self._lock is not None:
            return True
        with suppress(FileNotFoundError):  # the queue has ended and has removed the folder
            for path in sorted(self._folder.iterdir()):
                lock = Lock(path)
                if lock.acquire(seconds=0):
                    self._lock = lock
                    return True
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.release()


def command() -> str:
    """Return the command that started this process or, in a worker, the command of its queue."""
    return os.environ.get(COMMAND) or shlex.join(sys.orig_argv)


def check_variables() -> None:
    """Refuse invalid numbers in the variables that torchrun and a queue set for a process."""
    for variable in (rank, local_rank, world_size, local_world_size, runs_at_once):
        variable()


def _integer(name: str, default: int, least: int) -> int:
    """Return the whole number in an environment variable, or the default if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if least <= value <= _MOST_PROCESSES:
        return value
    raise BadInput(
        f"the environment variable {name} is {text!r:.40}, but should be a whole number from "
        f"{least} to {_MOST_PROCESSES}; unset it unless torchrun or a queue starts the program"
    )
