"""What can go wrong, one class an idea; each message is one line a user can act on."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class FrostlabError(Exception):
    """Anything frostlab refuses or finds wrong."""


class BadInput(FrostlabError, ValueError):
    """A value that cannot be used; the message names it, the place and the nearest valid one."""


class UnknownArchitecture(BadInput):
    """A module whose place in the anatomy is not known."""


class FrozenWeightsMoved(FrostlabError):
    """Frozen weights are no longer what they were when they were audited."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(self.names[:5])
        more = f" and {len(self.names) - 5} more" if len(self.names) > 5 else ""
        count = len(self.names)
        super().__init__(f"{count} frozen tensor{'s' * (count != 1)} moved: {shown}{more}")


class StaleOptimizer(FrostlabError):
    """An optimizer holds parameters that a later freeze or thaw replaced."""


class LeftOutOfOptimizer(UserWarning):
    """Weights that became trainable after the optimizer was built, and that it does not hold."""


class NothingLearns(UserWarning):
    """Every parameter is frozen: training would change nothing."""


def nearest(value: str, choices: Iterable[str], likeness: float = 0.5) -> str:
    """Return "; did you mean `x`?" for the closest choice, or "" when none is that much alike."""
    found = difflib.get_close_matches(value.lower(), list(choices), n=1, cutoff=likeness)
    return f"; did you mean `{found[0]}`?" if found else ""


def optional(module: str, purpose: str) -> Any:
    """Import a package of the `data` extra, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadInput(
            f"{purpose} needs the package {module}: pip install 'frostlab[data]'"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
