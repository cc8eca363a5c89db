"""The best evaluation so far, and how many have passed since."""

import math
from dataclasses import dataclass

from frostlab.recipe import LOWER_IS_BETTER, Metric


@dataclass
class Best:
    """The best value of a metric; `since` counts evaluations that did not improve on it."""

    metric: Metric
    value: float | None = None
    step: int | None = None
    since: int = 0

    def see(self, value: float, step: int) -> bool:
        """Take in an evaluation; say whether it is the best so far. NaN never is."""
        better = self.value is None or reaches(self.metric, value, self.value, strictly=True)
        if math.isnan(value) or not better:
            self.since += 1
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations have passed without improvement."""
        return patience is not None and self.since >= patience


def reaches(metric: Metric, value: float, target: float, strictly: bool = False) -> bool:
    """Whether a value is as good as a target, or strictly better."""
    if strictly and value == target:
        return False
    return value <= target if metric in LOWER_IS_BETTER else value >= target
