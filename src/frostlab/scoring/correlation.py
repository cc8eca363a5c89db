"""Pearson's r, its mean by Fisher's z, and what r is by chance."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostlab.scoring.recording import Floats

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
