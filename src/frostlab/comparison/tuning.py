"""Nuisance settings, such as the learning rate, chosen for every arm on an equal budget."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.comparison.plan import TUNING_SEED, Plan, Tune
from frostlab.comparison.runner import Runner, Task, Tuned, turns
from frostlab.errors import BadInput
from frostlab.recipe.settings import LOWER_IS_BETTER
from frostlab.records.folder import RunRecord, finished_status


def tune_all(plan: Plan, folder: Path, runner: Runner) -> list[dict[str, Any]]:
    """What is tuned, one setting after another, each at the best of those before."""
    made: list[dict[str, Any]] = []
    for tune in plan.tune:
        made.append(_Tuning(plan, tune, chosen(plan, made), folder, runner).result())
    return made


def chosen(plan: Plan, tuning: Sequence[Mapping[str, Any]]) -> Tuned:
    """What every arm is run with, by arm and setting."""
    return {arm.name: {each["key"]: each["best"][arm.name] for each in tuning} for arm in plan.arms}


@dataclass(frozen=True)
class _Tuning:
    """Each arm's best value of one setting, on the tune split, with seeds used nowhere else."""

    plan: Plan
    tune: Tune
    before: Tuned  # what has been chosen already
    folder: Path
    runner: Runner

    def result(self) -> dict[str, Any]:
        """If any arm's best lies on an edge the grid grows by one value there, for all, once."""
        values, extended = list(self.tune.values), False
        while True:
            curves = self._curves(values)
            best = {name: _best(curve, self.plan.rules.metric) for name, curve in curves.items()}
            low, high = (
                any(value == edge for value in best.values()) for edge in (values[0], values[-1])
            )
            if extended or not (low or high):
                edges = {name: value in (values[0], values[-1]) for name, value in best.items()}
                return {"key": self.tune.key, "values": values, "extended": extended,
                        "best": best, "on_edge": edges, "curves": curves}  # fmt: skip
            step = values[1] / values[0] if values[0] else 3.0
            below = self._possible(values[0] / step) if low and values[0] else []
            above = self._possible(values[-1] * step) if high else []
            values, extended = [*below, *values, *above], True

    def _possible(self, value: float) -> list[float]:
        """A value, if a recipe can have it."""
        rounded = float(f"{value:.3g}")
        try:
            self.plan.recipe_of(self.plan.baseline, TUNING_SEED, {self.tune.key: rounded})
        except BadInput:
            return []
        return [rounded]

    def _curves(self, values: Sequence[float]) -> dict[str, list[dict[str, Any]]]:
        """What every value gave every arm: the mean over the tuning seeds, and each."""
        tasks = dict(self._tasks(values))
        self.runner.run_all(list(tasks.values()))
        curves: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in self.plan.arms}
        for arm in self.plan.arms:
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

    def _tasks(self, values: Sequence[float]) -> Iterator[tuple[tuple[str, float, int], Task]]:
        key = self.tune.key
        several = f"-{key}" if len(self.plan.tune) > 1 else ""
        for number in range(self.tune.seeds):
            for value in values:
                for arm in turns(self.plan.arms, number):
                    seed, tuned = TUNING_SEED + number, {**self.before[arm.name], key: value}
                    yield (arm.name, value, number), Task(
                        f"{arm.name}@{value:g}", seed, self.plan.recipe_of(arm, seed, tuned),
                        self.folder / "tuning" / f"{arm.name}{several}-{value:g}-s{seed}",
                        f"tuning {arm.name} {key} {value:g}",
                    )  # fmt: skip


def _score(path: Path) -> float | None:
    """The best evaluation on the tune split, if the run finished."""
    if finished_status(path) != "finished":
        return None
    return RunRecord(path).result.best.value


def _best(curve: list[dict[str, Any]], metric: str) -> float:
    """The value with the best mean; one whose run failed is never it, unless all did."""
    sign = 1.0 if metric in LOWER_IS_BETTER else -1.0
    known = [point for point in curve if point["mean"] is not None]
    return float(min(known or curve, key=lambda point: sign * (point["mean"] or 0.0))["value"])
