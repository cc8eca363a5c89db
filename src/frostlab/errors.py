"""Errors and warnings that users see, and helpers that keep their messages to one line."""

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any


class FrostlabError(Exception):
    """Base class of frostlab's own errors."""


class BadInput(FrostlabError, ValueError):
    """An invalid value; the message says where it is and, if possible, suggests a valid one."""


class Unavailable(BadInput):
    """A data set, tokenizer or model that is not on this machine and cannot be downloaded."""


class UnknownArchitecture(BadInput):
    """A model or module whose parts frostlab cannot identify."""


class FrozenWeightsMoved(FrostlabError):
    """Frozen weights changed after `fl.audit` had recorded them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(_tensors(self.names, "frozen", "moved"))


class TrainableWeightsStayed(FrostlabError):
    """Trainable weights have not changed since `fl.audit` recorded them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(_tensors(self.names, "trainable", "did not move"))


class StaleOptimizer(FrostlabError):
    """An optimizer still holds parameters that freeze, thaw or merge_adapters has replaced."""


class LeftOutOfOptimizer(UserWarning):
    """Weights that became trainable after the optimizer was built, so it does not update them."""


class DamagedCache(UserWarning):
    """A folder of the cache has a missing, changed or unknown file, so it is built again."""


class DamagedCheckpoint(UserWarning):
    """A checkpoint does not match its checksums, so the run continues from an older one."""


class UnfinishedRun(UserWarning):
    """A run has not finished, so its best weights so far are used."""


class NothingLearns(UserWarning):
    """Every parameter is frozen: training would change nothing."""


def _tensors(names: tuple[str, ...], state: str, verb: str) -> str:
    """Return "2 frozen tensors moved: a, b"; at most five names are listed."""
    count = f"{len(names)} {state} tensor{'s' * (len(names) != 1)}"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{count} {verb}: {', '.join(names[:5])}{more}"


def nearest(value: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Return "; did you mean `x`?" for the closest choice, or "" if none is close."""
    matches = difflib.get_close_matches(value.lower(), list(choices), n=1, cutoff=cutoff)
    return f"; did you mean `{matches[0]}`?" if matches else ""


def require(package: str, extra: str, purpose: str) -> Any:
    """Import an optional package, or raise a one-line error.

    The error names the extra to install or, if the package is installed, why the import failed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            reason = f"{package} is installed but cannot be imported ({first_line(error)})"
            raise BadInput(f"{purpose}: {reason}") from error
        raise BadInput(
            f"{purpose} needs the package {package}: pip install 'frostlab[{extra}]'"
        ) from error


def check_registration(function: str, name: object, registered: object) -> None:
    """Refuse to register something under an unusable name, or something that is not a function.

    `function` is the name of the public function that was called, for the message.
    """
    if not isinstance(name, str) or not name or name != name.strip():
        raise BadInput(f"{function}: {name!r} is not a name")
    if not callable(registered):
        raise BadInput(f"{function}: {registered!r:.60} is not a function")


def same_function(function: Any, other: Any) -> bool:
    """Return whether two functions have the same module and name.

    Running a notebook's cell again defines its functions again, with the same module and name.
    """
    missing = object()
    return all(
        getattr(function, key, missing) == getattr(other, key, None)
        for key in ("__module__", "__qualname__")
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
