"""Tuning of settings that are not compared, such as the learning rate, by grid search.

Every arm (variant of the recipe) gets the same grid and the same seeds, so the budget is equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frostlab.comparison.evidence import TunedSetting, TuningPoint
from frostlab.comparison.plan import TUNING_SEED, Plan, Tune
from frostlab.comparison.runner import Runner, Task, Tuned, alternated
from frostlab.errors import BadInput
from frostlab.recipe.settings import LOWER_IS_BETTER
from frostlab.records.folder import RunRecord, finished_status


def tune_all(plan: Plan, folder: Path, runner: Runner) -> list[TunedSetting]:
    """Tune the plan's settings in order, each with the best values of the earlier settings."""
    settings: list[TunedSetting] = []
    for tune in plan.tune:
        settings.append(_Search(plan, tune, tuned_values(plan, settings), folder, runner).result())
    return settings


def tuned_values(plan: Plan, settings: Sequence[TunedSetting]) -> Tuned:
    """Return the best value of each tuned setting, by arm and setting."""
    return {
        arm.name: {setting.key: setting.best[arm.name] for setting in settings} for arm in plan.arms
    }


@dataclass(frozen=True)
class _Search:
    """A grid search over one setting, with seeds reserved for tuning.

    Values are scored on the tune split, which also selects each run's best checkpoint.
    """

    plan: Plan
    tune: Tune
    before: Tuned  # best values of the settings tuned earlier
    folder: Path
    runner: Runner

    def result(self) -> TunedSetting:
        """Search the grid; if an arm's best value is at an end, extend the grid and search again.

        The grid is extended for all arms, by one value at that end, and only once.
        """
        values, extended = list(self.tune.values), False
        while True:
            curves = self._curves(values)
            best = {arm: _best(curve, self.plan.rules.metric) for arm, curve in curves.items()}
            low, high = (edge in best.values() for edge in (values[0], values[-1]))
            if extended or not (low or high):
                return TunedSetting(
                    key=self.tune.key,
                    values=tuple(values),
                    extended=extended,
                    best=best,
                    on_edge={arm: value in (values[0], values[-1]) for arm, value in best.items()},
                    curves=curves,
                )
            # Extend by the first ratio of the grid; a grid that begins at 0 has no such ratio.
            step = values[1] / values[0] if values[0] else 3.0
            below = self._if_valid(values[0] / step) if low and values[0] else []
            above = self._if_valid(values[-1] * step) if high else []
            values, extended = [*below, *values, *above], True

    def _if_valid(self, value: float) -> list[float]:
        """Return a list with the value, rounded, or an empty list if the recipe refuses it."""
        rounded = float(f"{value:.3g}")
        try:
            self.plan.recipe_of(self.plan.baseline, TUNING_SEED, {self.tune.key: rounded})
        except BadInput:
            return []
        return [rounded]

    def _curves(self, values: Sequence[float]) -> dict[str, tuple[TuningPoint, ...]]:
        """Run every value with every tuning seed, and return each arm's scores by value."""
        tasks = dict(self._tasks(values))
        self.runner.run_all(list(tasks.values()))
        return {
            arm.name: tuple(
                _point(value, [
                    _score(task.path)
                    for (name, tried, _), task in tasks.items()
                    if name == arm.name and tried == value
                ])
                for value in values
            )
            for arm in self.plan.arms
        }  # fmt: skip

    def _tasks(self, values: Sequence[float]) -> Iterator[tuple[tuple[str, float, int], Task]]:
        """Yield each run with a key: arm, value and number of the tuning seed."""
        key = self.tune.key
        infix = f"-{key}" if len(self.plan.tune) > 1 else ""
        for number in range(self.tune.seeds):
            seed = TUNING_SEED + number
            for value in values:
                for arm in alternated(self.plan.arms, number):
                    tuned = {**self.before[arm.name], key: value}
                    yield (
                        (arm.name, value, number),
                        Task(
                            arm=f"{arm.name}@{value:g}",
                            number=seed,
                            recipe=self.plan.recipe_of(arm, seed, tuned),
                            path=self.folder / "tuning" / f"{arm.name}{infix}-{value:g}-s{seed}",
                            about=f"tuning {arm.name} {key} {value:g}",
                        ),
                    )


def _point(value: float, scores: Sequence[float | None]) -> TuningPoint:
    present = [score for score in scores if score is not None]
    mean = sum(present) / len(present) if len(present) == len(scores) else None
    return TuningPoint(value, mean, tuple(scores))


def _score(path: Path) -> float | None:
    """Return a run's best value of the metric on the tune split; None if it did not finish."""
    if finished_status(path) != "finished":
        return None
    return RunRecord(path).result.best.value


def _best(curve: Sequence[TuningPoint], metric: str) -> float:
    """Return the value with the best mean score, among the values without a failed run.

    If every value has a failed run, return the first value.
    """
    sign = 1.0 if metric in LOWER_IS_BETTER else -1.0
    finished = [point for point in curve if point.mean is not None]
    return min(finished or curve, key=lambda point: sign * (point.mean or 0.0)).value
