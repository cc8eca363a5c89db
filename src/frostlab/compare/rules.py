"""The rules of a comparison: fixed before the first run, never after the first look."""

from typing import Annotated

from pydantic import Field

from frostlab.errors import BadInput, nearest
from frostlab.recipe import LOWER_IS_BETTER, METRICS
from frostlab.recipe.treatment import Positive, Strict

LEAST_SEEDS = 5  # with fewer pairs an arm is never called better or worse
DEFAULT_SEEDS = 6  # from here on the sign-flip test can reach 5 %
_TIMES = ("_seconds", "_ms")
_SMALLER = (*_TIMES, "_bytes")


class Rules(Strict):
    """What is compared, and what it takes to call an arm better or worse.

    `minimum_effect` is the smallest effect of interest, in the metric's unit or, on log scale, as
    a ratio − 1. `noninferior` is the limit of "no more than 1.05 times as bad". `looks` is how
    many looks were planned, `look` which of them this is.
    """

    metric: Annotated[str, Field(min_length=1)]
    lower_is_better: bool
    log: bool = False
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    minimum_effect: Annotated[float, Field(gt=0)] | None = None
    noninferior: Annotated[float, Field(ge=1)] | None = None
    looks: Positive = 1
    look: Positive = 1

    @property
    def level(self) -> float:
        """The false-alarm rate that this look may spend."""
        return spent(self.alpha, self.look, self.looks)

    @property
    def risk(self) -> float:
        """What all looks so far have spent: alpha at most, unless one look was planned and more
        were taken."""
        return sum(spent(self.alpha, k, self.looks) for k in range(1, self.look + 1))

    def history(self) -> str | None:
        """Say that the comparison was, or may be, looked at more than once."""
        if self.look == 1:
            if self.looks == 1:
                return None
            return f"look 1 of {self.looks} planned: it spends {self.level:.4g} of {self.alpha:.4g}"
        said = f"look {self.look}, looked at before: this look spends {self.level:.4g}"
        if self.risk <= self.alpha:
            return f"{said}, all looks together at most {self.alpha:.4g}"
        return (
            f"{said}; one look was planned and it had spent all of {self.alpha:.4g}, "
            f"so together the looks so far raise a false alarm in up to {self.risk:.2%}"
        )


def spent(alpha: float, look: int, looks: int = 1) -> float:
    """The share of alpha that look number `look` spends where `looks` were planned.

    A plan of one look spends alpha on it. Any other look k spends alpha / 2**k: these sum to less
    than alpha however many are taken, so a plan of two or more looks can be extended without end.
    A plan of one look cannot: its first look spent everything, and with every later look the sum
    grows, to less than 1.5 alpha.
    """
    return alpha if look == looks == 1 else alpha / 2**look


def rules_for(
    metric: str,
    *,
    alpha: float = 0.05,
    minimum_effect: float | None = None,
    noninferior: float | None = None,
    looks: int = 1,
    look: int = 1,
) -> Rules:
    """Rules with the direction and the scale of a known metric: perplexity and times are ratios."""
    higher = {name for names in METRICS.values() for name in names} - set(LOWER_IS_BETTER)
    lower = metric in LOWER_IS_BETTER or metric.endswith(_SMALLER)
    if not lower and metric not in higher:
        known = (*LOWER_IS_BETTER, *sorted(higher))
        raise BadInput(
            f"metric `{metric}` has no known direction (known: {', '.join(known)}, and what ends "
            f"in {', '.join(_SMALLER)}){nearest(metric, known)}"
        )
    return Rules(
        metric=metric,
        lower_is_better=lower,
        log=metric == "perplexity" or metric.endswith(_SMALLER),
        alpha=alpha,
        minimum_effect=minimum_effect,
        noninferior=noninferior,
        looks=looks,
        look=look,
    )
