"""How much longer one arm takes than the baseline, how sure that is, and when it is sure enough.

Rounds come in pairs, the second in the reverse order of the first: their mean is free of a steady
drift. After some pairs every arm is built anew, in another order: two copies of one model differ by
where their memory lies, and no number of rounds would tell. Builds are taken as independent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FEWEST = 8  # builds
_MORE = 4  # builds after the width is reached: a calm spell must not be all that counts
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


def paired_logs(arm: Sequence[float], base: Sequence[float], pairs: int = 1) -> NDArray[np.float64]:
    """One value a build: the mean of log(arm / baseline) over its pairs of rounds."""
    logs = np.log(np.asarray(arm, float) / np.asarray(base, float))
    return logs.reshape(-1, 2 * pairs).mean(axis=1)


def ratio_of(arm: Sequence[float], base: Sequence[float], pairs: int = 1) -> Ratio:
    """The paired ratio with its 95 % interval, from at least two builds of some pairs each."""
    logs = paired_logs(arm, base, pairs)
    middle = float(logs.mean())
    half = _quantile(len(logs)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@cache
def _quantile(builds: int) -> float:
    return float(stats.t.ppf((1 + _LEVEL) / 2, builds - 1))


class Rule:
    """When to stop: all intervals are narrow enough, and have been for a while, or time is up."""

    def __init__(self, seconds: float, width: float) -> None:
        self.seconds, self.width = seconds, width
        self._left: int | None = None  # builds still to time once the width is reached

    def stopped_by(self, builds: int, ratios: Iterable[Ratio], elapsed: float) -> str | None:
        """What ends the timing after a build, or None; never before the second."""
        if builds < 2:
            return None
        if self._left is not None:
            self._left -= 1
        elif builds >= FEWEST and all(ratio.width < self.width for ratio in ratios):
            self._left = _MORE
        if self._left == 0:
            return "width"
        return "time" if elapsed >= self.seconds else None
