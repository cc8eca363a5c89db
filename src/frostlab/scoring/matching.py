"""How often the right stretch of speech is told from a wrong one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from frostlab.scoring.correlation import pearson
from frostlab.scoring.recording import Floats


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
