"""Pearson's r, its mean by Fisher's z, and what r is by chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

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


_LARGEST = 1 - 1e-12  # arctanh of it is finite
_FLAT = 64 * float(np.finfo(np.float32).eps)  # of its own size: what rounding makes of a constant


def centred(values: ArrayLike) -> Floats:
    """Mean 0 and length 1 along the last axis; all 0 where the values are constant."""
    x = np.asarray(values, np.float64)
    mean = x.mean(-1, keepdims=True)
    size = np.abs(x).max(-1, keepdims=True)
    x = x - mean
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    flat = length <= _FLAT * size * np.sqrt(x.shape[-1])
    return np.where(flat, 0.0, x / np.where(flat, 1.0, length))


def pearson(a: ArrayLike, b: ArrayLike) -> Floats:
    """Pearson's r along the last axis; 0 where a side is constant and so says nothing."""
    return np.clip((centred(a) * centred(b)).sum(-1), -1, 1)


def fisher(r: ArrayLike) -> Floats:
    """Fisher's z of r, finite even for r = ±1."""
    return np.arctanh(np.clip(np.asarray(r, np.float64), -_LARGEST, _LARGEST))


def fisher_mean(r: ArrayLike, axis: int = 0) -> Floats:
    """The mean of correlations, taken over z."""
    return np.tanh(fisher(r).mean(axis))


def shifted_pearson(prediction: ArrayLike, envelope: ArrayLike) -> Floats:
    """r of the prediction with the envelope moved by 0, 1, 2 … samples, its end put in front.

    A circular shift keeps mean and spread, so that one cross-correlation, by FFT, is all of them.
    """
    a, b = centred(prediction), centred(envelope)
    crossed = np.fft.rfft(a) * np.conj(np.fft.rfft(b))
    return np.clip(np.fft.irfft(crossed, len(a)), -1, 1)


def draw_shifts(
    samples: int, away: int, count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """`count` different shifts, each at least `away` samples from 0 whichever way round."""
    return random.choice(np.arange(away, samples - away + 1), count, replace=False)


@dataclass(frozen=True)
class Null:
    """What r is by chance: quantiles of r with mismatched envelopes, and p of the r found.

    p is (1 + how many reach r) / (1 + how many there are).
    """

    low: float  # 5 of 100 are below
    median: float
    high: float  # 5 of 100 are above
    p: float


def null_of(r: float, drawn: Floats) -> Null:
    """Set r beside correlations drawn by chance."""
    low, median, high = (float(x) for x in np.quantile(drawn, (0.05, 0.5, 0.95)))
    return Null(low, median, high, float((1 + (drawn >= r).sum()) / (1 + len(drawn))))


@dataclass(frozen=True)
class Tally:
    """Decisions that were right (a tie is half a one), of how many, from how many windows."""

    right: float
    decisions: int
    windows: int

    @property
    def accuracy(self) -> float | None:
        """The share that was right; none where nothing could be decided."""
        return self.right / self.decisions if self.decisions else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Wilson's interval; windows, not decisions, are what chance drew."""
        if not self.decisions:
            return None
        n, share = self.windows, self.right / self.decisions
        z = float(special.ndtri((1 + confidence) / 2))
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        reach = z / (1 + z * z / n) * float(np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2))
        return max(0.0, middle - reach), min(1.0, middle + reach)

    def __add__(self, more: "Tally") -> "Tally":
        return Tally(
            self.right + more.right, self.decisions + more.decisions, self.windows + more.windows
        )


def match_mismatch(prediction: ArrayLike, envelope: ArrayLike, window: int, gap: int) -> Tally:
    """Is a window's prediction nearer to its own envelope than to one `gap` samples beyond it?

    Windows follow one another without overlap. Each is asked in both orders, where they fit: the
    wrong stretch after the window, and before it.
    """
    x, y = (np.asarray(values, np.float64) for values in (prediction, envelope))
    samples, away = len(y), window + gap
    starts = np.arange(0, samples - window + 1, window)
    right, decisions, asked = 0.0, 0, np.zeros(len(starts), bool)
    own = pearson(_windows(x, starts, window), _windows(y, starts, window))
    for shift in (away, -away):
        fits = (starts + shift >= 0) & (starts + shift + window <= samples)
        said = _windows(x, starts[fits], window)
        wrong = pearson(said, _windows(y, starts[fits] + shift, window))
        right += _wins(own[fits], wrong)
        decisions += int(fits.sum())
        asked |= fits
    return Tally(right, decisions, int(asked.sum()))


def attended(prediction: ArrayLike, envelope: ArrayLike, other: ArrayLike, window: int) -> Tally:
    """Is a window's prediction nearer to the attended speaker than to the other one?"""
    starts = np.arange(0, np.shape(envelope)[0] - window + 1, window)
    said, own, theirs = (
        _windows(np.asarray(values, np.float64), starts, window)
        for values in (prediction, envelope, other)
    )
    right = _wins(pearson(said, own), pearson(said, theirs))
    return Tally(right, len(starts), len(starts))


def _windows(values: Floats, starts: np.ndarray, window: int) -> Floats:
    if not len(starts):
        return np.zeros((0, window))
    return np.lib.stride_tricks.sliding_window_view(values, window)[starts]


def _wins(own: Floats, wrong: Floats) -> float:
    return float((own > wrong).sum() + 0.5 * (own == wrong).sum())


def window_starts(samples: int, length: int, hop: int) -> NDArray[np.int64]:
    """Where windows start so that every sample is in one: each `hop`, the last one at the end."""
    if samples < length:
        raise BadInput(f"a recording of {samples} samples is shorter than a window of {length}")
    if not 1 <= hop <= length:
        raise BadInput(f"windows of {length} samples must start every 1 to {length}, not {hop}")
    last = samples - length
    return np.unique(np.append(np.arange(0, last, hop), last))


def stitch(windows: ArrayLike, starts: ArrayLike, samples: int) -> Floats:
    """One signal (samples,) from windows (n, T): where they overlap, their weighted mean.

    The weight is a squared sine over the window, so that a sample counts most where the window
    knows both its past and its future. It is nowhere 0: what one window alone covers is its own.
    """
    parts = np.asarray(windows, np.float64)
    places = np.asarray(starts, np.int64)
    if parts.ndim != 2 or places.shape != parts.shape[:1]:
        raise BadInput(f"windows {parts.shape} need one start each, not starts {places.shape}")
    length = parts.shape[1]
    outside = places[(places < 0) | (places + length > samples)]
    if len(outside):
        raise BadInput(
            f"a window of {length} samples from {outside[0]} is not within {samples} samples"
        )
    taper = np.sin(np.pi * (np.arange(length) + 0.5) / length) ** 2
    total, weight = np.zeros(samples), np.zeros(samples)
    for part, start in zip(parts, places, strict=True):
        total[start : start + length] += taper * part
        weight[start : start + length] += taper
    if not weight.all():
        raise BadInput(f"no window covers sample {int(np.argmin(weight))} of {samples}")
    return total / weight
