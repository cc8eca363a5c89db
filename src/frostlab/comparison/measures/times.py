"""Times of the arms: of the compared runs, of extra whole runs, and of interleaved steps.

An arm is a variant of the compared recipe. The extra runs alternate between the arms (rounds).
Interleaved steps are short blocks of steps that the arms take in turn. Only they show which arm is
faster, so no verdict is drawn from whole runs, whether they alternated or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from frostlab.comparison.evidence import (
    Effect,
    Evidence,
    RoundTimes,
    RunSummary,
    Summary,
    stored,
)
from frostlab.comparison.measures.performance import paired_runs
from frostlab.comparison.plan import Plan
from frostlab.comparison.statistics import paired


@dataclass(frozen=True)
class ArmTimes:
    """The times of one arm, in seconds; None if they are not known."""

    total: Summary | None  # of a whole run
    epochs: float | None  # number of epochs of a run; below 1 for a run shorter than an epoch
    per_epoch: Summary | None  # training alone, over all epochs of all runs
    scaled: bool  # whether `per_epoch` is scaled from runs shorter than an epoch
    per_step: float | None  # mean time of a step after warm-up, in the compared runs
    validation: float | None  # a run's evaluations on the split that selects the checkpoint
    evaluation: Summary | None  # one of these evaluations
    evaluations: float | None  # number of these evaluations in a run
    utilisation: float | None  # of the GPU, in percent
    step: float | None  # an interleaved step
    step_cv: float | None  # coefficient of variation of the blocks of interleaved steps
    rounds: RoundTimes | None  # whole runs that alternate between the arms


@dataclass(frozen=True)
class TotalGap:
    """The difference in time between whole runs of an arm and the baseline, paired."""

    of: str  # `alternating rounds` (paired by round) or `whole runs` (paired by seed)
    seconds: Effect  # difference
    ratio: Effect

    @property
    def saved(self) -> float | None:
        """The share of the baseline's time that the arm saves, (T_base − T_arm) / T_base."""
        return None if self.ratio.effect is None else 1 - self.ratio.effect


def arm_times(evidence: Evidence, arm: str) -> ArmTimes:
    """Return the times of one arm, from its runs that can be paired and its interleaved steps."""
    runs = paired_runs(evidence, arm)
    timed = None if evidence.timing is None else evidence.timing.arms[arm]
    epochs = [seconds for run in runs for seconds in run.epoch_seconds]
    scaled = [run.train_seconds / run.epochs for run in runs if run.epochs]
    evaluations = [seconds for run in runs for seconds in run.evaluation_seconds]
    blocks = _summary(() if timed is None else timed.blocks)
    return ArmTimes(
        total=evidence.arms[arm].seconds,
        epochs=_mean([run.epochs for run in runs]),
        per_epoch=_summary(epochs or scaled),
        scaled=not epochs and bool(scaled),
        per_step=_mean([run.step_ms / 1e3 for run in runs if run.step_ms is not None]),
        validation=_mean([run.validation_seconds for run in runs]),
        evaluation=_summary(evaluations),
        evaluations=_mean([len(run.evaluation_seconds) for run in runs]),
        utilisation=_mean([run.gpu_utilisation for run in runs
                           if run.gpu_utilisation is not None]),
        step=None if timed is None else timed.ms / 1e3,
        step_cv=None if blocks is None else blocks.cv,
        rounds=evidence.rounds.get(arm),
    )  # fmt: skip


def total_gap(evidence: Evidence, arm: str) -> TotalGap | None:
    """Compare the total times of an arm and the baseline, with 95 % confidence.

    The alternating runs are compared if there are at least two rounds and all of them finished;
    else the runs of the comparison itself are paired by seed. Return None without a pair, or if a
    time is 0.
    """
    rounds = [evidence.rounds.get(name) for name in (arm, evidence.baseline)]
    if all(own is not None and own.finished and len(own.seconds) > 1 for own in rounds):
        own, base = ([*times.seconds] for times in rounds if times is not None)
        return _gap("alternating rounds", own, base)
    by_seed = [
        {run.seed: run.total_seconds for run in paired_runs(evidence, name)}
        for name in (arm, evidence.baseline)
    ]
    seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
    own, base = ([times[seed] for seed in seeds] for times in by_seed)
    return _gap("whole runs", own, base)


def _gap(of: str, own: Sequence[float], base: Sequence[float]) -> TotalGap | None:
    if not own or min(*own, *base) <= 0:
        return None
    return TotalGap(
        of, stored(Effect, paired(own, base)), stored(Effect, paired(own, base, log=True))
    )


def whole_run_note(evidence: Evidence) -> str:
    """Say how the runs were trained, and that their times are no evidence about speed."""
    at_once = f"shared the machine, up to {evidence.jobs} at a time"
    taken = (
        "were trained at different times" + (f" and {at_once}" if evidence.jobs > 1 else "")
        if evidence.plan.runs
        else "were trained one after another"
        if evidence.jobs == 1
        else at_once
    )
    return f"whole runs {taken}, so their times do not show which arm is faster"


def gap_note(evidence: Evidence, gap: TotalGap) -> str:
    """Say why no verdict is drawn from the total times."""
    if gap.of == "alternating rounds":
        return (
            "whole runs alternated between the arms, but without copies of the baseline as "
            "controls, so no verdict is drawn"
        )
    return whole_run_note(evidence)


def round_times(plan: Plan, rounds: Mapping[tuple[str, int], RunSummary]) -> dict[str, RoundTimes]:
    """Return the times of the alternating whole runs by arm, and their ratio to the baseline's."""
    if not rounds:
        return {}
    baseline = plan.baseline.name
    times = {}
    for arm in (arm.name for arm in plan.arms):
        runs = [rounds[arm, number] for number in range(plan.rounds)]
        pairs = [
            (run.total_seconds, base.total_seconds)
            for number, run in enumerate(runs)
            if run.finished and (base := rounds[baseline, number]).finished
        ]
        ratio = paired(*zip(*pairs, strict=True), log=True) if pairs and arm != baseline else None
        summary = _summary([run.total_seconds for run in runs if run.finished])
        times[arm] = RoundTimes(
            seconds=tuple(run.total_seconds for run in runs),
            cv=None if summary is None else summary.cv,
            paired=None if ratio is None else stored(Effect, ratio),
            finished=all(run.finished for run in runs),
        )
    return times


def _summary(values: Sequence[float]) -> Summary | None:
    return Summary.of(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
