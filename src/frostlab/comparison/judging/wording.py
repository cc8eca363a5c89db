"""Texts about the interval of an effect (the difference or ratio of two arms).

A cost is how much worse one arm is than the other.
"""

from typing import Literal

from frostlab.comparison.judging.statistics import Paired
from frostlab.comparison.plan import Rules

Answer = Literal["yes", "no", "not shown"]  # whether a cost above the margin is excluded


def excluded_costs(answer: Answer, largest: float | None, rules: Rules) -> str:
    """Say which costs an interval excludes, from a `Margin`'s answer and its largest cost."""
    limit = rules.margin_text()
    if answer == "yes":
        return f"a cost above {limit} is excluded"
    if largest is None:
        return "no cost is excluded"
    size = f"{largest:.4g} ×" if rules.log else f"{largest:.3g}"
    return f"a cost of up to {size} is not excluded (margin: {limit})"


def effect_text(pair: Paired | None, family: int = 1, level: float | None = None) -> str:
    """Format the effect and its interval: "+0.012 (95 %: +0.004 to +0.02)" or "0.93 × (…)".

    `level` is the false-alarm rate of a whole `family` of statements; None: the pair's own rate.
    """
    if pair is None:
        return "no pair of values"
    number, effect = ("{:.4g}", "{:.4g} ×") if pair.log else ("{:+.4g}", "{:+.4g}")
    if pair.n < 2:
        return effect.format(pair.effect)
    confidence = f"{100 * (1 - (pair.alpha if level is None else level)):.4g} %"
    together = f" over {family} statements" if family > 1 else ""
    ends = f"{number.format(pair.low)} to {number.format(pair.high)}"
    return f"{effect.format(pair.effect)} ({confidence}{together}: {ends})"


def size_text(effect: float, log: bool) -> str:
    """Format the size of an effect: "0.012", or "3.4 %" for a ratio."""
    return f"{100 * effect:.3g} %" if log else f"{effect:.3g}"
