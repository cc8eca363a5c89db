"""What the figures show, as plain rows that any chart can draw."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from frostlab.errors import BadInput
from frostlab.scoring.correlation import centred
from frostlab.scoring.scores import EnvelopeScores

Rows = list[dict[str, Any]]


def subject_rows(decoders: Mapping[str, EnvelopeScores]) -> Rows:
    """r of each subject under each decoder, with what chance gives there."""
    return [
        {"decoder": name, "subject": each.subject, "r": each.r, "p": each.null.p,
         "chance_low": each.null.low, "chance_high": each.null.high}
        for name, scores in decoders.items()
        for each in scores.subjects
    ]  # fmt: skip


def excerpt_rows(
    signals: Mapping[str, ArrayLike],
    rate: float,
    *,
    start: float = 0.0,
    seconds: float = 10.0,
    points: int = 400,
) -> Rows:
    """A stretch of signals, e.g. envelope and prediction, each with mean 0 and spread 1 in it.

    Longer ones than `points` are thinned by the mean over neighbours, which leaves no aliases.
    """
    rows: Rows = []
    for name, values in signals.items():
        signal = np.asarray(values, np.float64)
        first = round(start * rate)
        shown = signal[first : first + round(seconds * rate)]
        if first < 0 or len(shown) < 2:
            raise BadInput(
                f"no stretch from {start:g} s in {name}, which ends at {len(signal) / rate:g} s"
            )
        block = -(-len(shown) // points)
        shown = shown[: len(shown) // block * block].reshape(-1, block).mean(1)
        scaled = centred(shown) * np.sqrt(len(shown))
        times = (first + (np.arange(len(shown)) + 0.5) * block - 0.5) / rate
        rows += [
            {"signal": name, "second": float(t), "value": float(value)}
            for t, value in zip(times, scaled, strict=True)
        ]
    return rows


def kernel_rows(weights: ArrayLike, rate: float, *, first: int = 0, most: int = 8) -> Rows:
    """The strongest filters' courses over time, from weights (filters, channels, taps).

    Each is the leading singular vector over time, times its singular value: the one course that
    explains most of what the filter does on all channels. Its largest value is positive.
    """
    kernels = np.asarray(weights, np.float64)
    if kernels.ndim != 3:
        raise BadInput(f"kernels must be (filters, channels, taps), not {kernels.shape}")
    strongest = np.argsort(-np.linalg.norm(kernels, axis=(1, 2)), kind="stable")[:most]
    rows: Rows = []
    for place in strongest:
        _, sizes, courses = np.linalg.svd(kernels[place], full_matrices=False)
        course = sizes[0] * courses[0]
        course = course * (np.sign(course[np.abs(course).argmax()]) or 1.0)
        rows += [
            {"filter": int(place), "ms": 1000 * (first + tap) / rate, "weight": float(value)}
            for tap, value in enumerate(course)
        ]
    return rows


def channel_rows(importance: ArrayLike, channels: Sequence[str]) -> Rows:
    """Each channel's importance, the largest first."""
    values = np.asarray(importance, np.float64)
    if values.shape != (len(channels),):
        raise BadInput(f"{len(channels)} channels need as many values, not {values.shape}")
    if not np.isfinite(values).all():
        raise BadInput("channel importance has values that are not finite")
    order = np.argsort(-values, kind="stable")
    return [{"channel": channels[i], "importance": float(values[i])} for i in order]
