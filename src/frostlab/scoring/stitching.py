"""Whole recordings through a model that sees windows: where windows start, and their average."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostlab.errors import BadInput
from frostlab.scoring.recording import Floats


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
