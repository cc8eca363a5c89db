"""Comparisons: paired statistics over seeds, and verdicts in plain words."""

from frostlab.compare.rules import Rules, rules_for
from frostlab.compare.statistics import holm, mcnemar, noninferior, paired, spread
from frostlab.compare.verdict import Verdict, judge

__all__ = [
    "Rules",
    "Verdict",
    "holm",
    "judge",
    "mcnemar",
    "noninferior",
    "paired",
    "rules_for",
    "spread",
]
