"""Agreement of decoded and true envelopes: Pearson's r, its chance level, and right decisions.

A decision chooses, of two envelopes, the one that correlates more with the decoded envelope.
`stitch` joins the windows that a decoder predicts into one signal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from frostlab.errors import BadInput

Floats = NDArray[np.float64]
_LARGEST = 1 - 1e-12  # r is clipped to ± this value, so that Fisher's z of it is finite
_FLAT = 64 * float(np.finfo(np.float32).eps)  # smaller relative deviations are rounding errors


class Recording(Protocol):
    """EEG and the envelope of the speech that the subject heard, sampled at the same times."""

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
    """Group recordings by subject, in the given order; refuse recordings of the same name."""
    subjects: dict[str, list[R]] = {}
    names: set[str] = set()
    for recording in recordings:
        if recording.name in names:
            raise BadInput(f"two recordings are called {recording.name}; names must differ")
        names.add(recording.name)
        subjects.setdefault(recording.subject, []).append(recording)
    if not subjects:
        raise BadInput("there is no recording here; at least one is needed")
    return subjects


def to_samples(seconds: float, rate: float, what: str) -> int:
    """Convert seconds to a number of samples; refuse a number that rounds to 0."""
    samples = round(seconds * rate)
    if samples < 1:
        raise BadInput(
            f"{what} of {seconds:g} s rounds to no sample at {rate:g} Hz; "
            f"one sample is {1 / rate:.3g} s"
        )
    return samples


def pearson(a: ArrayLike, b: ArrayLike) -> Floats:
    """Return Pearson's r along the last axis; 0 if either input is constant."""
    return np.clip((unit_norm(a) * unit_norm(b)).sum(-1), -1, 1)


def segment_pearson(prediction: ArrayLike, envelope: ArrayLike, segment: int) -> Floats:
    """Return r of every segment of `segment` samples; the first begins at the first sample.

    Segments follow each other without gaps. The samples after the last whole segment are left out.
    A recording that is shorter than a segment is one segment.
    """
    samples = np.shape(envelope)[0]
    length = min(segment, samples)
    starts = np.arange(0, samples - length + 1, length)
    x, y = (
        _windows(np.asarray(values, np.float64), starts, length)
        for values in (prediction, envelope)
    )
    return pearson(x, y)


def unit_norm(values: ArrayLike) -> Floats:
    """Return values with mean 0 and norm 1 along the last axis; constant values become 0."""
    x = np.asarray(values, np.float64)
    mean = x.mean(-1, keepdims=True)
    size = np.abs(x).max(-1, keepdims=True)
    x = x - mean
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    flat = length <= _FLAT * size * np.sqrt(x.shape[-1])
    return np.where(flat, 0.0, x / np.where(flat, 1.0, length))


def fisher_z(r: ArrayLike) -> Floats:
    """Return Fisher's z, the inverse hyperbolic tangent of r; it is finite even for r = ±1."""
    return np.arctanh(np.clip(np.asarray(r, np.float64), -_LARGEST, _LARGEST))


def fisher_mean(r: ArrayLike) -> Floats:
    """Return the mean of correlations, averaged as Fisher's z."""
    return np.tanh(fisher_z(r).mean(0))


def shifted_pearson(prediction: ArrayLike, envelope: ArrayLike) -> Floats:
    """Return r of the prediction with the envelope shifted circularly by 0, 1, 2 … samples.

    A circular shift keeps mean and variance, so one FFT cross-correlation gives r at every shift.
    """
    a, b = unit_norm(prediction), unit_norm(envelope)
    product = np.fft.rfft(a) * np.conj(np.fft.rfft(b))
    return np.clip(np.fft.irfft(product, len(a)), -1, 1)


def draw_shifts(
    samples: int, away: int, count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draw `count` different circular shifts of at least `away` samples in either direction."""
    return random.choice(np.arange(away, samples - away + 1), count, replace=False)


@dataclass(frozen=True)
class Null:
    """Null distribution of r: quantiles of r with mismatched envelopes, and the p value of r.

    Envelopes are mismatched by a circular shift. p is (1 + number of mismatched r that are at least
    r) / (1 + number of mismatched r).
    """

    low: float  # the 5 % quantile
    median: float  # the 50 % quantile
    high: float  # the 95 % quantile
    p: float  # the p value of r


def null_distribution(r: float, mismatched: Floats) -> Null:
    """Return the null distribution of r, given the values of r with mismatched envelopes."""
    low, median, high = (float(x) for x in np.quantile(mismatched, (0.05, 0.5, 0.95)))
    return Null(low, median, high, float((1 + (mismatched >= r).sum()) / (1 + len(mismatched))))


@dataclass(frozen=True)
class Tally:
    """Counts of right decisions (a tie counts half), of all decisions, and of windows.

    In a decision, the prediction in a window is compared with two envelopes. The right one is the
    envelope of the window or of the attended speaker.
    """

    right: float  # number of right decisions; a tie counts half
    decisions: int  # number of decisions
    windows: int  # number of windows with a decision

    @property
    def accuracy(self) -> float | None:
        """Share of right decisions; None if there are no decisions."""
        return self.right / self.decisions if self.decisions else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Return Wilson's interval of the accuracy; None if there are no decisions.

        The sample size is the number of windows: decisions in one window are not independent.
        """
        if not self.decisions:
            return None
        n, share = self.windows, self.right / self.decisions
        z = float(special.ndtri((1 + confidence) / 2))
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * float(np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.right + other.right,
            self.decisions + other.decisions,
            self.windows + other.windows,
        )


def match_mismatch(prediction: ArrayLike, envelope: ArrayLike, window: int, gap: int) -> Tally:
    """Count how often a prediction correlates more with its own than with a mismatched envelope.

    Windows do not overlap. A window has up to two mismatched envelopes, from the same recording:
    one begins `gap` samples after the window, and one ends `gap` samples before the window.
    """
    x, y = (np.asarray(values, np.float64) for values in (prediction, envelope))
    samples, distance = len(y), window + gap
    starts = np.arange(0, samples - window + 1, window)
    right, decisions, used = 0.0, 0, np.zeros(len(starts), bool)
    matched = pearson(_windows(x, starts, window), _windows(y, starts, window))
    for shift in (distance, -distance):
        fits = (starts + shift >= 0) & (starts + shift + window <= samples)
        predicted = _windows(x, starts[fits], window)
        mismatched = pearson(predicted, _windows(y, starts[fits] + shift, window))
        right += _count_larger(matched[fits], mismatched)
        decisions += int(fits.sum())
        used |= fits
    return Tally(right, decisions, int(used.sum()))


def match_attended(
    prediction: ArrayLike, envelope: ArrayLike, other: ArrayLike, window: int
) -> Tally:
    """Count windows whose prediction correlates more with `envelope` than with `other`.

    These are the envelopes of the attended and of the ignored speaker.
    """
    starts = np.arange(0, np.shape(envelope)[0] - window + 1, window)
    predicted, attended, ignored = (
        _windows(np.asarray(values, np.float64), starts, window)
        for values in (prediction, envelope, other)
    )
    right = _count_larger(pearson(predicted, attended), pearson(predicted, ignored))
    return Tally(right, len(starts), len(starts))


def _windows(values: Floats, starts: np.ndarray, window: int) -> Floats:
    if not len(starts):
        return np.zeros((0, window))
    return np.lib.stride_tricks.sliding_window_view(values, window)[starts]


def _count_larger(matched: Floats, mismatched: Floats) -> float:
    """Count the entries where `matched` is larger; a tie counts half."""
    return float((matched > mismatched).sum() + 0.5 * (matched == mismatched).sum())


def window_starts(samples: int, length: int, hop: int) -> NDArray[np.int64]:
    """Return window starts every `hop` samples; the last window ends with the recording."""
    if samples < length:
        raise BadInput(f"a recording of {samples} samples is shorter than a window of {length}")
    if not 1 <= hop <= length:
        raise BadInput(
            f"windows of {length} samples must start every 1 to {length} samples, not {hop}"
        )
    last = samples - length
    return np.unique(np.append(np.arange(0, last, hop), last))


def stitch(windows: ArrayLike, starts: ArrayLike, samples: int) -> Floats:
    """Join windows (n, T) into one signal (samples,), with a weighted mean where they overlap.

    The weight is a squared sine over the window: it is largest in the middle, where the decoder saw
    both past and future. The weight is never 0, so samples in a single window do not change.
    """
    values = np.asarray(windows, np.float64)
    first = np.asarray(starts, np.int64)
    if values.ndim != 2 or first.shape != values.shape[:1]:
        raise BadInput(f"windows {values.shape} need one start each, not starts {first.shape}")
    length = values.shape[1]
    outside = first[(first < 0) | (first + length > samples)]
    if len(outside):
        raise BadInput(
            f"a window of {length} samples from {outside[0]} is not within {samples} samples"
        )
    taper = np.sin(np.pi * (np.arange(length) + 0.5) / length) ** 2
    total, weight = np.zeros(samples), np.zeros(samples)
    for window, start in zip(values, first, strict=True):
        total[start : start + length] += taper * window
        weight[start : start + length] += taper
    if not weight.all():
        raise BadInput(f"no window covers sample {int(np.argmin(weight))} of {samples}")
    return total / weight
