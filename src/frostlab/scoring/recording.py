"""What scoring needs to know of a recording, whoever loaded it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from frostlab.errors import BadInput

Floats = NDArray[np.float64]


class Recording(Protocol):
    """EEG and the envelope heard meanwhile, aligned in time and sampled at one rate."""

    @property
    def name(self) -> str: ...
    @property
    def subject(self) -> str: ...
    @property
    def eeg(self) -> NDArray[Any]: ...  # (samples, channels)
    @property
    def envelope(self) -> NDArray[Any]: ...  # (samples,)
    @property
    def other(self) -> NDArray[Any] | None: ...  # the ignored speaker's envelope, (samples,)


R = TypeVar("R", bound=Recording)


def by_subject(recordings: Sequence[R]) -> dict[str, list[R]]:
    """Each subject's recordings, both in the order they came; every name once."""
    found: dict[str, list[R]] = {}
    names: set[str] = set()
    for recording in recordings:
        if recording.name in names:
            raise BadInput(f"two recordings are called {recording.name}; names must differ")
        names.add(recording.name)
        found.setdefault(recording.subject, []).append(recording)
    if not found:
        raise BadInput("there is no recording here; at least one is needed")
    return found


def to_samples(seconds: float, rate: float, what: str) -> int:
    """A length in seconds as a whole number of samples, at least one."""
    samples = round(seconds * rate)
    if samples < 1:
        raise BadInput(
            f"{what} of {seconds:g} s is less than a sample at {rate:g} Hz; "
            f"the shortest is {1 / rate:.3g} s"
        )
    return samples
