"""How often the rule is wrong where the truth is known."""

import numpy as np
import pytest
from scipy import stats

from frostlab.comparison.plan import Rules, rules_for
from frostlab.comparison.statistics import flip_p, paired, seen_by_rule, t_test
from frostlab.comparison.verdict import judge

TRIALS = 2_000
SEEDS = 6


def most(rate: float, trials: int = TRIALS) -> float:
    """The count that a true rate exceeds once in a thousand."""
    return stats.binom.ppf(0.999, trials, rate)


def least(rate: float, trials: int = TRIALS) -> float:
    return stats.binom.ppf(0.001, trials, rate)


def words(values: np.ndarray, rules: Rules) -> list[list[str]]:
    """Verdicts of comparisons of a baseline and arms: values are (trials, arms, seeds)."""
    found = []
    for trial in values.tolist():
        arms = {str(i): dict(enumerate(each)) for i, each in enumerate(trial)}
        found.append([verdict.word for verdict in judge(arms, "0", rules).values()])
    return found


@pytest.mark.parametrize("metric", ["accuracy", "step_ms"])
def test_equal_arms_are_seldom_told_apart(metric: str) -> None:
    values = np.random.default_rng(1).normal(0, 0.05, (TRIALS, 3, SEEDS))
    values = np.exp(values) if metric == "step_ms" else 0.7 + values
    found = words(values, rules_for(metric))
    assert {word for trial in found for word in trial} == {"better", "worse", "no difference found"}
    alarms = sum("better" in trial or "worse" in trial for trial in found)
    assert TRIALS * 0.01 < alarms <= most(0.05)


def test_the_rule_is_both_tests_after_holm() -> None:
    values = np.random.default_rng(2).normal(0, 1, (300, 3, SEEDS))
    values[:, 1] += 1.5
    differences = values[:, 1:] - values[:, :1]
    p = t_test(differences)[2]
    smaller, larger = np.minimum(p[:, :1], p[:, 1:]), np.maximum(p[:, :1], p[:, 1:])
    by_holm = np.where(p == smaller, 2 * p, np.maximum(2 * smaller, larger)) <= 0.05
    decided = by_holm & (flip_p(differences) <= 0.05)
    found = words(values, Rules(metric="m", lower_is_better=False))
    assert [
        [word != "no difference found" for word in trial] for trial in found
    ] == decided.tolist()
    assert 20 < decided.sum() < 580


@pytest.mark.parametrize("n", [5, 6, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, (TRIALS, n))
    zero = np.zeros(n)
    found = [paired(each, zero) for each in differences]
    assert least(0.95) <= sum(each.low <= 0.3 <= each.high for each in found) <= most(0.95)


def test_what_could_have_been_seen_is_seen_in_80_of_100() -> None:
    """The spread is known here; the simulated answer itself is off by about 1 in 100."""
    rng = np.random.default_rng(4)
    effect = seen_by_rule(SEEDS, 0.05)
    values = np.stack([np.zeros((TRIALS, SEEDS)), rng.normal(effect, 1, (TRIALS, SEEDS))], 1)
    found = words(values, Rules(metric="m", lower_is_better=False))
    better = sum(word == "better" for (word,) in found)
    assert least(0.78) <= better <= most(0.82)
