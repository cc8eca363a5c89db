"""What went wrong, as a status and one line; anything else is a bug and keeps its traceback."""

import errno
from dataclasses import dataclass

import torch

from frostlab.errors import FrostlabError
from frostlab.recipe import Recipe
from frostlab.training.loop import Stopped
from frostlab.training.step import Diverged

_ALLOCATOR = "DefaultCPUAllocator"  # the CPU's out of memory is a plain RuntimeError


class RunFailed(FrostlabError):
    """A run that did not finish; its record says how far it came."""


@dataclass(frozen=True)
class Failure:
    """A status for the record, and the error for the caller."""

    status: str
    error: BaseException


def failure_of(error: BaseException, recipe: Recipe) -> Failure:
    """What a user can act on, as one line; what nobody expected, as it is."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, Stopped | KeyboardInterrupt):
        return Failure("stopped", RunFailed("stopped; `--resume` goes on"))
    if isinstance(error, Diverged):
        return Failure("diverged", RunFailed(line))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _ALLOCATOR in line:
        half = f"train.batch {recipe.train.batch} or data.length {recipe.data.length}"
        return Failure("failed", RunFailed(f"out of memory; a lower {half}, or train.accumulate"))
    if isinstance(error, OSError):
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else ""
        return Failure("failed", RunFailed(f"{where}{error.strerror or line}{full}"))
    if isinstance(error, FrostlabError):
        return Failure("failed", RunFailed(line))
    return Failure("failed", error)
