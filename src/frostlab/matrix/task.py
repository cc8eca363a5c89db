"""A task of the queue, which is one training run, and the outcome of an attempt at it."""

import errno
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from frostlab.errors import BadInput, FrostlabError, first_line
from frostlab.recipe.recipe import Recipe, differences
from frostlab.records.events import start_of
from frostlab.records.folder import RunRecord, finished_status
from frostlab.storage import write_whole
from frostlab.text import number

if TYPE_CHECKING:
    from frostlab.training.progress import Display

# blocked: the disk is full or read-only; crashed: the run's process died; lost: its machine died;
# refused: bad input, so that another attempt would end the same way
Kind = Literal[
    "finished", "diverged", "stopped", "failed", "blocked", "crashed", "lost", "refused"
]  # fmt: skip
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_PROBE_BYTES = 1 << 16  # written to find out whether a disk can be written


@dataclass(frozen=True)
class Task:
    """One training run."""

    name: str  # the run's name in its record
    recipe: Recipe
    path: Path  # the run's folder
    about: str  # name in progress lines


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt at a task."""

    kind: Kind
    text: str  # the metric, or the problem in one line
    seconds: float = 0.0


def is_done(task: Task) -> bool:
    """Return whether a task's run finished or diverged; refuse the folder of another recipe."""
    if finished_status(task.path) in ("finished", "diverged"):
        if RunRecord(task.path).result.recipe_digest != task.recipe.digest:
            raise BadInput(_of_another_recipe(task))
        return True
    return False


def check_begun(task: Task) -> None:
    """Refuse a folder with an unfinished run of another recipe."""
    start = start_of(task.path)
    if start is not None and start.recipe_digest != task.recipe.digest:
        raise BadInput(_of_another_recipe(task))


def _of_another_recipe(task: Task) -> str:
    keys = ""
    with suppress(OSError, FrostlabError):
        stored = RunRecord(task.path).recipe.to_dict()
        keys = ", ".join(differences(stored, task.recipe.to_dict()))
    differ = f" ({keys} differ)" if keys else ""
    return f"{task.path} holds a run of another recipe{differ}; choose another folder"


def run_task(
    task: Task,
    data_dir: Path | None,
    display: "Display | None" = None,
    *,
    raises: bool = False,
) -> Outcome:
    """Run a task, or resume it, and return its outcome.

    With `raises`, bad input and bugs outside of training raise their error, so that they end the
    program, and a full disk counts as a failure. Without it, all of these are outcomes, because
    other tasks can go on, and the queue can wait until the disk has room.
    """
    from frostlab.training.run import RunFailed, is_out_of_memory, run

    began = time.monotonic()

    def outcome(kind: Kind, text: str) -> Outcome:
        return Outcome(kind, text, time.monotonic() - began)

    try:
        if is_done(task):  # a worker that outlived its driver has trained it
            diverged = finished_status(task.path) == "diverged"
            return outcome("diverged" if diverged else "finished", "it was done already")
        record = run(
            task.recipe, name=task.name, out=task.path, resume=task.path.exists(),
            data_dir=data_dir, progress=display or False,
        )  # fmt: skip
    except RunFailed as error:
        if error.errno in _DISK and not raises:
            return outcome("blocked", str(error))
        status = finished_status(task.path)
        if status == "stopped":
            return outcome("stopped", str(error))
        return outcome("diverged" if status == "diverged" else "failed", str(error))
    except Exception as error:
        if not raises and (problem := disk_problem_in(error)) is not None:
            return outcome("blocked", problem)
        known = isinstance(error, FrostlabError)
        if raises and (known or finished_status(task.path) != "failed"):
            raise
        if isinstance(error, BadInput):
            return outcome("refused", str(error))
        if is_out_of_memory(error):  # when the model was built
            return outcome("failed", "out of memory; choose a smaller model")
        if not known:
            with suppress(OSError):
                write_whole(task.path / "traceback.txt", traceback.format_exc())
        return outcome("failed", f"{type(error).__name__}: {first_line(error)}")
    metric = task.recipe.metric
    return outcome("finished", f"{metric} {number(record.metrics[metric])}")


def disk_problem_in(error: BaseException) -> str | None:
    """Return the message of an error that a full or read-only disk caused; None for others."""
    for inner in _chain(error):
        if isinstance(inner, OSError) and inner.errno in _DISK:
            return f"{error}" if isinstance(error, FrostlabError) else str(inner)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def disk_problem(folder: Path) -> str | None:
    """Return why nothing can be written in a folder now; None if it can be written."""
    path = folder / f".probe.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return None
