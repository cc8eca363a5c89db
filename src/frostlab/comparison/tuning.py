"""The training runs of every arm, with a grid search over settings that are not compared.

A setting such as the learning rate is tuned for each arm (variant of the recipe). Every arm gets
the same grid, and every value of the grid is trained with every seed; several settings are tuned
together, in all combinations of their values. So a run is both a trial and a result: for each
seed, the values are chosen by the scores of the *other* seeds, on the split that also selects
checkpoints. So a seed's own run, whose result is compared, has no part in the choice. With a single
seed, its own score on that split decides.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from frostlab.comparison.evidence import TunedSetting, TuningPoint
from frostlab.comparison.judging.statistics import t_critical
from frostlab.comparison.plan import Arm, Plan
from frostlab.comparison.runner import ArmTask, Finished, Runner, alternated
from frostlab.errors import BadInput
from frostlab.recipe.settings import metric_facts
from frostlab.records.finding.index import is_run
from frostlab.records.folder import RunRecord

Trial = tuple[tuple[str, float], ...]  # one combination of values: (dotted key, value), …
Grids = dict[str, tuple[float, ...]]  # setting → its values


@dataclass(frozen=True)
class Trials:
    """All runs of a comparison, and the trial that was chosen for every arm and seed."""

    records: dict[tuple[str, Trial, int], RunRecord]  # (arm, trial, seed) → run
    trials: tuple[Trial, ...]  # the same for every arm
    chosen: dict[str, dict[int, Trial]]  # arm → seed → best trial over the other seeds
    best: dict[str, Trial]  # arm → best trial over all seeds
    settings: tuple[TunedSetting, ...]  # the search of each tuned setting
    unproven: dict[str, str]  # arm → why no verdict can follow from its tuning

    def results(self) -> dict[tuple[str, int], RunRecord]:
        """Return the run of the chosen trial by arm and seed."""
        return {
            (arm, seed): self.records[arm, trial, seed]
            for arm, by_seed in self.chosen.items()
            for seed, trial in by_seed.items()
        }


def run_trials(
    plan: Plan, folder: Path, runner: Runner | Finished, stored: Mapping[str, Sequence[float]]
) -> Trials:
    """Train every arm with every seed and every combination of tuned values.

    If an arm's best value is at an end of a grid, the grid is extended by one value at that end,
    once, for all arms, unless the recipe refuses the value. `stored` holds the grids of an earlier
    call, which replace the planned ones.
    """
    planned = {tune.key: tune.values for tune in plan.tune}
    grids: Grids = {key: tuple(stored.get(key, values)) for key, values in planned.items()}
    search = _Search(plan, folder, runner)
    search.run(grids)
    extended = {
        key: search.extended(key, values) if len(values) == len(planned[key]) else values
        for key, values in grids.items()
    }
    if extended != grids:
        search.run(extended)
    return search.result(extended, planned)


class _Search:
    """The runs so far, and their scores on the split that selects checkpoints."""

    def __init__(self, plan: Plan, folder: Path, runner: Runner | Finished) -> None:
        self.plan, self.folder, self.runner = plan, folder, runner
        self.trials: tuple[Trial, ...] = ()
        self.records: dict[tuple[str, Trial, int], RunRecord] = {}
        self.scores: dict[tuple[str, Trial, int], float | None] = {}
        self.lower_is_better = metric_facts(plan.rules.metric).lower_is_better

    def run(self, grids: Grids) -> None:
        """Train every combination of values with every arm and seed, unless that was done."""
        self.trials = tuple(
            tuple(zip(grids, values, strict=True)) for values in product(*grids.values())
        )
        tasks = {
            (arm.name, trial, seed): trial_task(self.plan, self.folder, arm, trial, seed)
            for index, seed in enumerate(self.plan.seeds)
            for trial in self.trials
            for arm in alternated(self.plan.arms, index)
        }
        self.runner.run_all(list(tasks.values()))
        self.records |= {key: RunRecord(task.path) for key, task in tasks.items()}
        self.scores |= {key: _score(self.records[key]) for key in tasks}

    def best(self, arm: str, left_out: int | None = None) -> Trial:
        """Return the trial with the best mean score over all seeds but `left_out`.

        If `left_out` is the only seed, it is used. Trials in which more runs have a score come
        first; the mean score decides among trials with equally many.
        """
        seeds = [seed for seed in self.plan.seeds if seed != left_out] or list(self.plan.seeds)

        def rank(trial: Trial) -> tuple[int, float]:
            scores = [self.scores[arm, trial, seed] for seed in seeds]
            present = [score for score in scores if score is not None]
            mean = fmean(present) if present else 0.0
            return len(scores) - len(present), mean if self.lower_is_better else -mean

        return min(self.trials, key=rank)

    def extended(self, key: str, values: tuple[float, ...]) -> tuple[float, ...]:
        """Return the grid, extended by a value at each end that is best for some arm.

        A value that the recipe refuses is not added.
        """
        best = {dict(self.best(arm.name))[key] for arm in self.plan.arms}
        below, above = self._beyond(key, values)
        return (
            *([below] if values[0] in best and below is not None else []),
            *values,
            *([above] if values[-1] in best and above is not None else []),
        )

    def _beyond(self, key: str, values: Sequence[float]) -> tuple[float | None, float | None]:
        """Return the next value below and above a grid; None where there is no valid value."""
        # The ratio of the first two values; a grid that begins at 0 has no such ratio.
        step = values[1] / values[0] if values[0] else 3.0
        below = self._if_valid(key, values[0] / step) if values[0] else None
        return below, self._if_valid(key, values[-1] * step)

    def _if_valid(self, key: str, value: float) -> float | None:
        """Return a value rounded to three digits, or None if the recipe refuses it."""
        rounded = float(f"{value:.3g}")
        try:
            self.plan.recipe_of(self.plan.baseline, self.plan.seeds[0], {key: rounded})
        except BadInput:
            return None
        return rounded

    def result(self, grids: Grids, planned: Grids) -> Trials:
        """Choose a trial for every arm and seed, and describe the search of every setting."""
        names = [arm.name for arm in self.plan.arms]
        chosen = {arm: {seed: self.best(arm, seed) for seed in self.plan.seeds} for arm in names}
        settings = tuple(
            self._described(key, values, len(values) > len(planned[key]), chosen)
            for key, values in grids.items()
        )
        return Trials(
            records=self.records,
            trials=self.trials,
            chosen=chosen,
            best={arm: self.best(arm) for arm in names},
            settings=settings,
            unproven=self._unproven(settings),
        )

    def _described(
        self,
        key: str,
        values: tuple[float, ...],
        extended: bool,
        chosen: Mapping[str, Mapping[int, Trial]],
    ) -> TunedSetting:
        """Describe one setting, at each arm's best values of the other settings."""
        below, above = self._beyond(key, values)
        best = {arm: dict(self.best(arm)) for arm in chosen}
        return TunedSetting(
            key=key,
            values=values,
            extended=extended,
            best={arm: own[key] for arm, own in best.items()},
            on_edge={
                arm: (own[key] == values[0] and below is not None)
                or (own[key] == values[-1] and above is not None)
                for arm, own in best.items()
            },
            curves={
                arm: tuple(
                    self._point(arm, tuple((own | {key: value}).items()), value, chosen[arm])
                    for value in values
                )
                for arm, own in best.items()
            },
        )

    def _point(
        self, arm: str, trial: Trial, value: float, chosen: Mapping[int, Trial]
    ) -> TuningPoint:
        seeds = self.plan.seeds
        scores = [self.scores[arm, trial, seed] for seed in seeds]
        present = [score for score in scores if score is not None]
        complete, n = len(present) == len(scores), len(present)
        half = t_critical(n, 0.05) * stdev(present) / math.sqrt(n) if complete and n > 1 else None
        mean = fmean(present) if complete else None
        return TuningPoint(
            value=value,
            mean=mean,
            low=None if mean is None or half is None else mean - half,
            high=None if mean is None or half is None else mean + half,
            scores=tuple(scores),
            results=tuple(
                self.records[arm, trial, seed].metrics.get(self.plan.rules.metric) for seed in seeds
            ),
            chosen=sum(choice == trial for choice in chosen.values()),
        )

    def _unproven(self, settings: Sequence[TunedSetting]) -> dict[str, str]:
        """Return the arms whose tuning proves nothing, with the reason."""
        reasons: dict[str, str] = {}
        for setting in settings:
            for arm in setting.best:
                if setting.on_edge[arm]:
                    reasons.setdefault(
                        arm,
                        f"the best {setting.key} of {arm}, {setting.best[arm]:g}, is at an end of "
                        "the grid, so a better one may lie beyond",
                    )
                if all(point.mean is None for point in setting.curves[arm]):
                    reasons[arm] = f"at every {setting.key} tried, a run of {arm} did not finish"
        return reasons


def _score(record: RunRecord) -> float | None:
    """Return a finished run's best score on the split that selects checkpoints, if it is finite."""
    if record.ending != "finished":
        return None
    value = record.result.best.value
    return value if value is not None and math.isfinite(value) else None


def chosen_trials(plan: Plan, folder: Path) -> Trials:
    """Return the finished runs that a plan lists in `runs`, as trials without tuned settings."""
    untuned: Trial = ()
    paths = {
        (arm, seed): Path(os.path.abspath(folder / path))
        for arm, by_seed in plan.runs.items()
        for seed, path in by_seed.items()
    }
    for path in paths.values():
        if not is_run(path):
            raise BadInput(f"{path} is not a run any more; the comparison in {folder} needs it")
    return Trials(
        records={(arm, untuned, seed): RunRecord(path) for (arm, seed), path in paths.items()},
        trials=(untuned,),
        chosen={arm: dict.fromkeys(by_seed, untuned) for arm, by_seed in plan.runs.items()},
        best=dict.fromkeys(plan.runs, untuned),
        settings=(),
        unproven={},
    )


def trial_task(plan: Plan, folder: Path, arm: Arm, trial: Trial, seed: int) -> ArmTask:
    """Return the task of training an arm with a trial's values and a seed."""
    label = "".join(f"@{_short(key, trial)}={value:g}" for key, value in trial)
    return ArmTask(
        name=f"{arm.name}{label}",
        number=seed,
        recipe=plan.recipe_of(arm, seed, dict(trial)),
        path=folder / "runs" / f"{arm.name}{label}-s{seed}",
        about=f"{arm.name}{label} seed {seed}",
    )


def _short(key: str, trial: Trial) -> str:
    """Return the last part of a key if no other key of the trial has it, else the whole key."""
    last = key.rpartition(".")[2]
    same = [other for other, _ in trial if other.rpartition(".")[2] == last]
    return last if len(same) == 1 else key
