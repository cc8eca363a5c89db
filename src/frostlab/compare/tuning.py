"""A nuisance setting, such as the learning rate, chosen for every arm on an equal budget."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from frostlab.compare.plan import TUNING_SEED, Plan
from frostlab.compare.runner import Runner, Task, turns
from frostlab.errors import BadInput
from frostlab.recipe import LOWER_IS_BETTER
from frostlab.records.places import finished_status
from frostlab.records.record import RunRecord


def tune(plan: Plan, folder: Path, runner: Runner) -> dict[str, Any]:
    """Each arm's best value of what is tuned, on the tune split, with seeds used nowhere else.

    If any arm's best lies on an edge the grid grows by one value there, for all arms, once.
    """
    assert plan.tune is not None
    values, extended = list(plan.tune.values), False
    while True:
        curves = _curves(plan, folder, runner, values)
        best = {name: _best(curve, plan.rules.metric) for name, curve in curves.items()}
        low, high = (
            any(value == edge for value in best.values()) for edge in (values[0], values[-1])
        )
        if extended or not (low or high):
            edges = {name: value in (values[0], values[-1]) for name, value in best.items()}
            return {"key": plan.tune.key, "values": values, "extended": extended, "best": best,
                    "on_edge": edges, "curves": curves}  # fmt: skip
        step = values[1] / values[0] if values[0] else 3.0
        below = _possible(plan, values[0] / step) if low and values[0] else []
        above = _possible(plan, values[-1] * step) if high else []
        values, extended = [*below, *values, *above], True


def _possible(plan: Plan, value: float) -> list[float]:
    """A value, if a recipe can have it."""
    rounded = float(f"{value:.3g}")
    try:
        plan.recipe_of(plan.baseline, TUNING_SEED, rounded)
    except BadInput:
        return []
    return [rounded]


def _curves(
    plan: Plan, folder: Path, runner: Runner, values: Sequence[float]
) -> dict[str, list[dict[str, Any]]]:
    """What every value gave every arm: the mean over the tuning seeds, and each."""
    tasks = dict(_tuning_tasks(plan, folder, values))
    runner.run_all(list(tasks.values()))
    curves: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in plan.arms}
    for arm in plan.arms:
        for value in values:
            each = [
                _score(task.path)
                for (name, tried, _), task in tasks.items()
                if name == arm.name and tried == value
            ]
            known = [score for score in each if score is not None]
            mean = sum(known) / len(known) if len(known) == len(each) else None
            curves[arm.name].append({"value": value, "mean": mean, "each": each})
    return curves


def _tuning_tasks(
    plan: Plan, folder: Path, values: Sequence[float]
) -> Iterator[tuple[tuple[str, float, int], Task]]:
    assert plan.tune is not None
    for number in range(plan.tune.seeds):
        for value in values:
            for arm in turns(plan.arms, number):
                seed = TUNING_SEED + number
                yield (arm.name, value, number), Task(
                    f"{arm.name}@{value:g}", seed, plan.recipe_of(arm, seed, value),
                    folder / "tuning" / f"{arm.name}-{value:g}-s{seed}",
                    f"tuning {arm.name} {plan.tune.key} {value:g}",
                )  # fmt: skip


def _score(path: Path) -> float | None:
    """The best evaluation on the tune split, if the run finished."""
    if finished_status(path) != "finished":
        return None
    value = RunRecord(path).result["best"]["value"]
    return None if value is None else float(value)


def _best(curve: list[dict[str, Any]], metric: str) -> float:
    """The value with the best mean; one whose run failed is never it, unless all did."""
    sign = 1.0 if metric in LOWER_IS_BETTER else -1.0
    known = [point for point in curve if point["mean"] is not None]
    return float(min(known or curve, key=lambda point: sign * (point["mean"] or 0.0))["value"])
