"""Front and back layers against the output: the ratios that told of a front that did not learn."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frostlab.flow.facts import Report

WANTED = {"front_ratio": 0.1, "weight_change": 0.01, "pearson": 0.3}  # more than this
WORDS = ((0.01, "vanishing"), (0.1, "weak"), (0.5, "fair"))


@dataclass(frozen=True)
class Ends:
    """Front: layers 0 and 1; back: the last two; output: the head. NaN where there is none.

    A tensor's gradient size is max |g| at the last report, a group's the mean over its tensors.
    Weight change is the mean over front tensors of |range - first range| / first range, where a
    tensor had a range (all ones has none); one report alone tells of no change.
    """

    front: float
    back: float
    output: float
    weight_change: float

    @property
    def front_ratio(self) -> float:
        """Gradient of the front over that of the output."""
        return _over(self.front, self.output)

    @property
    def back_ratio(self) -> float:
        """Gradient of the back over that of the output."""
        return _over(self.back, self.output)

    @property
    def word(self) -> str:
        """Vanishing, weak, fair or good."""
        ratio = self.front_ratio
        if math.isnan(ratio):
            return "unknown"
        return next((word for limit, word in WORDS if ratio < limit), "good")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the ratios and their word."""
        return asdict(self) | {
            "front_ratio": self.front_ratio, "back_ratio": self.back_ratio, "word": self.word
        }  # fmt: skip


def ends_of(reports: Sequence[Report]) -> Ends:
    """See the ends at the last report, and the front's weights since the first."""
    if not reports:
        return Ends(math.nan, math.nan, math.nan, math.nan)
    first, last = reports[0].ranges, reports[-1].ranges
    changes = [
        abs(last[name] - start) / start for name, start in first.items() if name in last and start
    ]
    change = sum(changes) / len(changes) if changes and len(reports) > 1 else math.nan
    return Ends(**reports[-1].largest, weight_change=change)


def front_ratios(reports: Sequence[Report]) -> dict[int, float]:
    """The front's gradient over the output's by step; NaN where either is unknown."""
    return {r.step: Ends(**r.largest, weight_change=math.nan).front_ratio for r in reports}


def _over(size: float, output: float) -> float:
    return size / output if output else math.nan
