"""How much longer one arm takes than the baseline, how sure that is, and when it is sure enough.

Rounds come in pairs, the second in the reverse order of the first: their mean is free of a steady
drift. Pairs are then taken as independent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FEWEST = 10  # pairs of rounds
_MORE = 5  # pairs after the width is reached: a calm spell must not be all that counts
_LEVEL = 0.95


@dataclass(frozen=True)
class Ratio:
    """An arm's time over the baseline's: below 1 the arm is faster."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The interval's full width, relative to the estimate."""
        return (self.high - self.low) / self.estimate

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def paired_logs(arm: Sequence[float], base: Sequence[float]) -> NDArray[np.float64]:
    """One value a pair of rounds: the mean of log(arm / baseline) of a round and its reverse."""
    logs = np.log(np.asarray(arm, float) / np.asarray(base, float))
    return logs.reshape(-1, 2).mean(axis=1)


def ratio_of(arm: Sequence[float], base: Sequence[float]) -> Ratio:
    """The paired ratio with its 95 % interval, from at least two pairs of rounds."""
    logs = paired_logs(arm, base)
    middle = float(logs.mean())
    half = _quantile(len(logs)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@cache
def _quantile(pairs: int) -> float:
    return float(stats.t.ppf((1 + _LEVEL) / 2, pairs - 1))


class Rule:
    """When to stop: all intervals are narrow enough, and have been for a while, or time is up."""

    def __init__(self, seconds: float, width: float) -> None:
        self.seconds, self.width = seconds, width
        self._left: int | None = None  # pairs still to take once the width is reached

    def stopped_by(self, pairs: int, ratios: Iterable[Ratio], elapsed: float) -> str | None:
        """What ends the timing after a pair of rounds, or None; never before the second pair."""
        if pairs < 2:
            return None
        if self._left is not None:
            self._left -= 1
        elif pairs >= FEWEST and all(ratio.width < self.width for ratio in ratios):
            self._left = _MORE
        if self._left == 0:
            return "width"
        return "time" if elapsed >= self.seconds else None
