"""The training runs of every arm, with a grid search over settings that are not compared.

A setting such as the learning rate is tuned for each arm (variant of the recipe). Every arm gets
the same grid, and every value of the grid is trained with every seed. So a run is both a trial and
a result: for each seed, the value is chosen by the scores of the *other* seeds, on the split that
also selects checkpoints. The choice never sees the result that it is judged by.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from frostlab.comparison.evidence import TunedSetting, TuningPoint
from frostlab.comparison.plan import Arm, Plan, Tune
from frostlab.comparison.runner import Finished, Runner, Task, alternated
from frostlab.comparison.statistics import t_critical
from frostlab.errors import BadInput
from frostlab.recipe.settings import LOWER_IS_BETTER
from frostlab.records.folder import RunRecord, finished_status

Trial = tuple[tuple[str, float], ...]  # values of the tuned settings, by dotted key
UNTUNED: Trial = ()


@dataclass(frozen=True)
class Trials:
    """All runs of a comparison, and the trial that was chosen for every arm and seed."""

    records: dict[tuple[str, Trial, int], RunRecord]  # by arm, trial and seed
    trials: dict[str, tuple[Trial, ...]]  # by arm, in the order in which they were tried
    chosen: dict[str, dict[int, Trial]]  # by arm and seed: the best over the other seeds
    best: dict[str, Trial]  # by arm: the best over all seeds
    settings: tuple[TunedSetting, ...]
    unproven: dict[str, str]  # by arm: why its tuning proves nothing

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
    """Train every arm with every seed and every trial.

    Settings are tuned in the plan's order, each with the best values of the earlier ones. `stored`
    holds the grids of an earlier call by setting, with which the search goes on.
    """
    search = _Search(plan, folder, runner)
    if not plan.tune:
        search.run({arm.name: [UNTUNED] for arm in plan.arms})
        return search.result([])
    before = dict.fromkeys((arm.name for arm in plan.arms), UNTUNED)
    searched = []
    for tune in plan.tune:
        searched.append(search.grid(tune, before, stored.get(tune.key)))
        before = {arm: search.best(arm, trials) for arm, trials in search.trials.items()}
    return search.result(searched)


@dataclass(frozen=True)
class _Searched:
    """One setting after the search over its grid."""

    tune: Tune
    before: dict[str, Trial]  # by arm: the values of the settings tuned earlier
    values: tuple[float, ...]
    extended: bool
    ends: tuple[bool, bool]  # whether a value beyond the lower and the upper end would be valid


class _Search:
    """The runs so far, and their scores on the split that selects checkpoints."""

    def __init__(self, plan: Plan, folder: Path, runner: Runner | Finished) -> None:
        self.plan, self.folder, self.runner = plan, folder, runner
        self.trials: dict[str, list[Trial]] = {arm.name: [] for arm in plan.arms}
        self.records: dict[tuple[str, Trial, int], RunRecord] = {}
        self.scores: dict[tuple[str, Trial, int], float | None] = {}
        self.lower_is_better = plan.rules.metric in LOWER_IS_BETTER

    def run(self, trials: Mapping[str, Sequence[Trial]]) -> None:
        """Train every arm's trials with every seed, unless they were trained before."""
        tasks = dict(self._tasks(trials))
        self.runner.run_all(list(tasks.values()))
        self.records |= {key: RunRecord(task.path) for key, task in tasks.items()}
        self.scores |= {key: _score(self.records[key]) for key in tasks}
        for arm, own in trials.items():
            self.trials[arm] += [trial for trial in own if trial not in self.trials[arm]]

    def _tasks(
        self, trials: Mapping[str, Sequence[Trial]]
    ) -> Iterator[tuple[tuple[str, Trial, int], Task]]:
        """Yield each run with its key; every second seed takes the arms in reverse order."""
        for index, seed in enumerate(self.plan.seeds):
            for number in range(max(map(len, trials.values()))):
                for arm in alternated(self.plan.arms, index):
                    if number < len(trials[arm.name]):
                        trial = trials[arm.name][number]
                        yield (
                            (arm.name, trial, seed),
                            trial_task(self.plan, self.folder, arm, trial, seed),
                        )

    def grid(
        self, tune: Tune, before: dict[str, Trial], stored: Sequence[float] | None
    ) -> _Searched:
        """Train every value of a grid; extend the grid once if an arm's best value is at an end.

        The grid is extended for all arms, by one value at that end.
        """
        values, extended = (
            list(stored or tune.values),
            stored is not None and len(stored) > len(tune.values),
        )
        while True:
            self.run(
                {
                    arm: [with_value(before[arm], tune.key, value) for value in values]
                    for arm in before
                }
            )
            below, above = self._beyond(tune, values)
            best = {arm: self._best_value(arm, tune.key, before[arm], values) for arm in before}
            low, high = (end in best.values() for end in (values[0], values[-1]))
            more = ([below] if low and below is not None else [],
                    [above] if high and above is not None else [])  # fmt: skip
            if extended or not any(more):
                ends = below is not None, above is not None
                return _Searched(tune, before, tuple(values), extended, ends)
            values, extended = [*more[0], *values, *more[1]], True

    def _beyond(self, tune: Tune, values: Sequence[float]) -> tuple[float | None, float | None]:
        """Return the next value below and above a grid; None where the recipe allows no value."""
        # The first ratio of the grid; a grid that begins at 0 has no such ratio.
        step = values[1] / values[0] if values[0] else 3.0
        below = values[0] / step if values[0] else None
        return tuple(
            value if value is not None and self._is_valid(tune.key, value) else None
            for value in (below and float(f"{below:.3g}"), float(f"{values[-1] * step:.3g}"))
        )  # type: ignore[return-value]

    def _is_valid(self, key: str, value: float) -> bool:
        try:
            self.plan.recipe_of(self.plan.baseline, self.plan.seeds[0], {key: value})
        except BadInput:
            return False
        return True

    def best(self, arm: str, trials: Sequence[Trial], left_out: int | None = None) -> Trial:
        """Return the trial with the best mean score, without the seed `left_out`.

        If `left_out` is the only seed, it is used. A run that did not finish is worse than any
        score.
        """
        seeds = [seed for seed in self.plan.seeds if seed != left_out] or list(self.plan.seeds)

        def rank(trial: Trial) -> tuple[int, float]:
            scores = [self.scores[arm, trial, seed] for seed in seeds]
            present = [score for score in scores if score is not None]
            mean = fmean(present) if present else 0.0
            return len(scores) - len(present), mean if self.lower_is_better else -mean

        return min(trials, key=rank)

    def _best_value(self, arm: str, key: str, before: Trial, values: Sequence[float]) -> float:
        trials = [with_value(before, key, value) for value in values]
        return dict(self.best(arm, trials))[key]

    def result(self, searched: Sequence[_Searched]) -> Trials:
        """Choose a trial for every arm and seed, and describe the searches."""
        chosen = {
            arm: {seed: self.best(arm, trials, left_out=seed) for seed in self.plan.seeds}
            for arm, trials in self.trials.items()
        }
        settings = tuple(self._described(each, chosen) for each in searched)
        return Trials(
            records=self.records,
            trials={arm: tuple(trials) for arm, trials in self.trials.items()},
            chosen=chosen,
            best={arm: self.best(arm, trials) for arm, trials in self.trials.items()},
            settings=settings,
            unproven=self._unproven(settings),
        )

    def _described(
        self, searched: _Searched, chosen: Mapping[str, Mapping[int, Trial]]
    ) -> TunedSetting:
        key, values = searched.tune.key, searched.values
        best = {
            arm: self._best_value(arm, key, before, values)
            for arm, before in searched.before.items()
        }
        return TunedSetting(
            key=key,
            values=values,
            extended=searched.extended,
            best=best,
            on_edge={
                arm: (value == values[0] and searched.ends[0])
                or (value == values[-1] and searched.ends[1])
                for arm, value in best.items()
            },
            curves={
                arm: tuple(
                    self._point(arm, with_value(before, key, value), value, chosen[arm])
                    for value in values
                )
                for arm, before in searched.before.items()
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
        """Return why an arm's tuning proves nothing, for the arms of which that is true."""
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
    """Return a run's best value on the split that selects checkpoints; None if it failed."""
    if finished_status(record.folder) != "finished":
        return None
    value = record.result.best.value
    return value if value is not None and math.isfinite(value) else None


def with_value(before: Trial, key: str, value: float) -> Trial:
    """Return a trial with one more setting."""
    return (*before, (key, value))


def trial_task(plan: Plan, folder: Path, arm: Arm, trial: Trial, seed: int) -> Task:
    """Return the run of an arm with a trial's settings and a seed."""
    label = "".join(f"@{_short(key, trial)}={value:g}" for key, value in trial)
    return Task(
        arm=f"{arm.name}{label}",
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
