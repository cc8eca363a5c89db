"""What arms do to the gradients of watched runs: the front against the output, and its steps."""

import math
from frostlab.compare.verdict import Records
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from frostlab.compare.plan import Plan
from frostlab.compare.statistics import paired, spread
from frostlab.compare.words import effect, markdown, mean_and_std
from frostlab.flow import Flow, flows_of
from frostlab.records.record import RunRecord

_FRONT = (0, 1)  # layers
_SAID = {
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "update": "front update/weight",
}


def gradient_flow(plan: Plan, records: Records) -> dict[str, Any]:
    """By arm, what the last stage of its watched runs measured, and its ratio to the baseline's.

    Nothing where runs were not watched.
    """
    if plan.recipe_of(plan.baseline, plan.seeds[0]).watch is None:
        return {}
    measured = {
        arm.name: {
            seed: _measure(records[arm.name, seed].folder)
            for seed in plan.seeds
            if records[arm.name, seed].status == "finished"
        }
        for arm in plan.arms
    }
    base = measured[plan.baseline.name]
    return {
        name: {quantity: _quantity(mine, base, quantity) for quantity in _SAID}
        for name, mine in measured.items()
    }


def _measure(folder: Path) -> dict[str, float]:
    flow = list(flows_of(folder).values())[-1]
    ends = flow.ends()
    found = {
        "front_ratio": ends.front_ratio,
        "weight_change": ends.weight_change,
        "update": _update(flow),
    }
    return {name: value for name, value in found.items() if math.isfinite(value) and value > 0}


def _update(flow: Flow) -> float:
    """The median over reports of the median update/weight of the front's parts."""
    front = [i for i, part in enumerate(flow.parts) if part.layer in _FRONT]
    steps = []
    for report in flow.reports:
        known = [r for r in map(report.ratio, front) if not math.isnan(r)]
        steps += [median(known)] if known else []
    return median(steps) if steps else math.nan


def _quantity(
    mine: Mapping[int, dict[str, float]], base: Mapping[int, dict[str, float]], name: str
) -> dict[str, Any]:
    values = {seed: found[name] for seed, found in mine.items() if name in found}
    both = [seed for seed in values if name in base.get(seed, {})]
    ratio = paired([values[s] for s in both], [base[s][name] for s in both], log=True)
    return {
        "spread": vars(spread(list(values.values()))) if values else None,
        "against": None if mine is base else asdict(ratio),
    }


def gradients_page(evidence: dict[str, Any]) -> str:
    """The measurements as a part of a comparison's page; nothing where there are none."""
    found = evidence.get("flow", {})
    if not found:
        return ""
    head = ["arm", *(cell for said in _SAID.values() for cell in (said, "ratio [95 %]"))]
    rows = [
        [name, *(cell for each in quantities.values()
                 for cell in (mean_and_std(each["spread"]), effect(each["against"])))]
        for name, quantities in found.items()
    ]  # fmt: skip
    said = (
        "Means over seeds, and ratios to the baseline paired over them. Front: layers 0 and 1. "
        "Gradients are the largest of each tensor at the last measured step, as the source took "
        "them; update/weight is the median over the front's parts and all measured steps."
    )
    return f"## Gradients\n\n{said}\n\n{markdown(head, rows)}"
