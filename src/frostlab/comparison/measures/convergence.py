"""Convergence: the steps, epochs and seconds that each arm's runs took to reach a target.

An arm is a variant of the compared recipe, trained with several seeds. The target is the recipe's
`evaluate.target`, if it is for the compared metric. Else it is a value that only the baseline's
runs decide: the mean of the best values that they had halfway through their evaluations. A run
reaches the target at the first evaluation whose value is at least as good; only evaluations on the
split that selects the checkpoint count. Runs that did not finish never count as having reached it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

from frostlab.comparison.evidence import (
    CONVERGED,
    ArmConvergence,
    Convergence,
    Effect,
    Summary,
    stored,
)
from frostlab.comparison.judging.pairing import Runs
from frostlab.comparison.judging.statistics import Paired, paired
from frostlab.comparison.plan import Rules
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent
from frostlab.text import typed


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation of a run while it trains."""

    value: float
    spent: dict[str, float]  # steps, epochs and seconds until then: the keys of `CONVERGED`


_Curves = Mapping[int, Sequence[_Evaluation]]  # seed → evaluations of the finished run


def convergence(runs: Runs, rules: Rules) -> Convergence | None:
    """Return how soon the arms reached a target; None if no finished baseline run has a value."""
    plan = runs.plan
    curves = {
        arm.name: {
            seed: _evaluations(runs.records[arm.name, seed], rules.metric)
            for seed in runs.seeds_of(arm.name)
            if runs.finished(arm.name, seed)
        }
        for arm in plan.arms
    }
    baseline = curves[plan.baseline.name]
    evaluations = min((len(curve) for curve in baseline.values() if curve), default=0)
    if not evaluations:
        return None
    target, origin = _recipe_target(runs, rules) or _baseline_target(baseline, evaluations, rules)
    arrivals = {
        arm: {
            seed: spent
            for seed, curve in by_seed.items()
            if (spent := _arrival(curve, target, rules)) is not None
        }
        for arm, by_seed in curves.items()
    }
    level = rules.level / max(1, len(plan.others))  # so that all arms' intervals hold at once
    return Convergence(
        metric=rules.metric,
        target=target,
        place=origin,
        evaluations=evaluations,
        arms={arm.name: _arm(runs, arm.name, arrivals, level) for arm in plan.arms},
    )


def _evaluations(record: RunRecord, metric: str) -> list[_Evaluation]:
    """Return a run's evaluations on the split that selects the checkpoint, in order."""
    return [
        _Evaluation(value, {"steps": event.step, "epochs": event.epoch,
                            "seconds": event.total_seconds})
        for event in record.events(EvaluationEvent)
        if event.checkpoint is None  # the final report names its checkpoint
        and (value := typed(event.metrics.get(metric), int, float)) is not None
    ]  # fmt: skip


def _recipe_target(runs: Runs, rules: Rules) -> tuple[float, str] | None:
    """Return the recipe's target for the compared metric, and its origin in words."""
    recipe = runs.plan.recipe_of(runs.plan.baseline, runs.plan.seeds[0])
    target = recipe.evaluate.target
    if target is None or recipe.metric != rules.metric:
        return None
    return target, "evaluate.target of the recipe"


def _baseline_target(baseline: _Curves, evaluations: int, rules: Rules) -> tuple[float, str]:
    """Return the mean of the best values that the baseline's runs had halfway, and its origin.

    A run that is behind the mean can still reach it at a later evaluation. For a metric that is
    compared as a ratio, the mean is geometric.
    """
    number = math.ceil(evaluations / 2)
    best = min if rules.lower_is_better else max
    values = [
        best(evaluation.value for evaluation in curve[:number])
        for curve in baseline.values()
        if curve
    ]
    mean, kind = (geometric_mean, "geometric mean") if rules.log else (fmean, "mean")
    steps = {curve[number - 1].spent["steps"] for curve in baseline.values() if curve}
    at = f", at step {steps.pop():,.0f}" if len(steps) == 1 else ""
    return mean(values), (
        f"the {kind} of the best values that the baseline's runs had reached by evaluation "
        f"{number} of {evaluations}{at}; no other arm's runs were used to choose it"
    )


def _arrival(
    curve: Sequence[_Evaluation], target: float, rules: Rules
) -> Mapping[str, float] | None:
    """Return what a run had spent when it first reached the target, or None."""
    for evaluation in curve:
        value = evaluation.value
        is_better = value < target if rules.lower_is_better else value > target
        if is_better or math.isclose(value, target):  # a mean of equal values may be rounded
            return evaluation.spent
    return None


def _arm(
    runs: Runs, arm: str, arrivals: Mapping[str, Mapping[int, Mapping[str, float]]], level: float
) -> ArmConvergence:
    """Summarize an arm's arrivals at the target, and compare them with the baseline's."""
    own, base = arrivals[arm], arrivals[runs.plan.baseline.name]
    ratios = {}
    if arm != runs.plan.baseline.name:
        counted = _counted(runs, arm) & _counted(runs, runs.plan.baseline.name)
        counted -= {pair.seed for pair in runs.refused if pair.arm == arm}
        missed = sum((seed in base) - (seed in own) for seed in sorted(counted))
        both = [seed for seed in sorted(counted) if seed in own and seed in base]
        for key in CONVERGED:
            of_arm, of_base = ([spent[seed][key] for seed in both] for spent in (own, base))
            if (ratio := _ratio(of_arm, of_base, missed, level)) is not None:
                ratios[key] = ratio
    return ArmConvergence(
        runs=len(_counted(runs, arm)),
        reached=len(own),
        spent={key: Summary.of([spent[key] for spent in own.values()]) for key in CONVERGED}
        if own
        else {},
        ratios=ratios,
    )


def _counted(runs: Runs, arm: str) -> set[int]:
    """Return the seeds whose run finished or diverged; other runs may still reach the target."""
    known = ("finished", "diverged")
    return {seed for seed in runs.seeds_of(arm) if runs.summaries[arm, seed].status in known}


def _ratio(own: Sequence[float], base: Sequence[float], missed: int, level: float) -> Effect | None:
    """Return the paired ratio of what both arms spent; None without a pair, or if a value is 0.

    `missed` is the number of seeds with which only the baseline reached the target, minus the
    number with which only the arm did. If all ratios are equal, as when every run arrives at the
    same evaluation, the noise is not known, so there is no interval.
    """
    if not own or min(*own, *base) <= 0:
        return None
    pair: Paired = paired(own, base, log=True, alpha=level)
    if pair.n > 1 and pair.std == 0:
        pair = replace(pair, low=math.nan, high=math.nan, p=math.nan)
    elif pair.n > 1 and missed:
        pair = pair.without_bound(above=missed > 0)
    return stored(Effect, pair)
