"""Gradient flow of the arms: how large the first two layers' gradients and changes are.

An arm is a variant of the compared recipe. The first two layers are called the front. A part is
all weights of one role, such as query, in one layer. A report holds the numbers of one measured
step.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from frostlab.comparison.evidence import QUANTITIES, Effect, Quantity, Summary, stored
from frostlab.comparison.judging.pairing import Runs
from frostlab.comparison.judging.statistics import paired
from frostlab.flow.measurements import Flow, flows_of

_FRONT = (0, 1)  # indices of the front layers


def gradient_flow(runs: Runs) -> dict[str, dict[str, Quantity]]:
    """Return the gradient-flow quantities by arm; empty unless every arm's recipe has `watch`."""
    plan = runs.plan
    if any(plan.recipe_of(arm, plan.seeds[0]).watch is None for arm in plan.arms):
        return {}
    measured = {
        arm.name: {
            seed: _measure_flow(runs.records[arm.name, seed].folder)
            for seed in plan.seeds
            if runs.finished(arm.name, seed)
        }
        for arm in plan.arms
    }
    baseline = measured[plan.baseline.name]
    return {
        arm: {name: _quantity(own, baseline, name) for name in QUANTITIES}
        for arm, own in measured.items()
    }


def _measure_flow(folder: Path) -> dict[str, float]:
    """Return those gradient-flow quantities of a run's last stage that are positive and finite.

    The quantities are the gradient size of the front layers relative to the head's, the relative
    change of the front weights' range, and the update/weight ratio of the front layers.
    """
    flow = list(flows_of(folder).values())[-1]
    ends = flow.depth_ratios()
    values = (ends.front_ratio, ends.weight_change, _front_update(flow))
    return {
        name: value
        for name, value in zip(QUANTITIES, values, strict=True)
        if math.isfinite(value) and value > 0
    }


def _front_update(flow: Flow) -> float:
    """Return the update/weight ratio of the front: the median over its parts, then over reports."""
    front = [i for i, part in enumerate(flow.parts) if part.layer in _FRONT]
    medians = []
    for report in flow.reports:
        ratios = [ratio for ratio in map(report.ratio, front) if not math.isnan(ratio)]
        medians += [median(ratios)] if ratios else []
    return median(medians) if medians else math.nan


def _quantity(
    own: Mapping[int, dict[str, float]], baseline: Mapping[int, dict[str, float]], name: str
) -> Quantity:
    """Summarize one quantity over an arm's seeds, and compare it with the baseline by seed."""
    values = {seed: flow[name] for seed, flow in own.items() if name in flow}
    both = [seed for seed in values if name in baseline.get(seed, {})]
    ratio = paired([values[s] for s in both], [baseline[s][name] for s in both], log=True)
    return Quantity(
        summary=Summary.of(list(values.values())) if values else None,
        against=None if own is baseline else stored(Effect, ratio),
    )
