"""The numbers of each arm: means of its metrics, its times, and its row of the overview table.

An arm is a variant of the compared recipe; the baseline is the arm that others are compared with.
A run can be paired unless it differs from the baseline's run of the same seed in more than the plan
declares (`Evidence.refused_pairs`). There are three kinds of times: of the compared runs; of
extra whole runs that alternate between the arms (rounds); and of interleaved steps, for which the
arms take turns to train short blocks of steps. Only interleaved steps show which arm is faster, so
no verdict is drawn from whole runs, whether they alternated or not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean, geometric_mean
from typing import Any

from frostlab.comparison.evidence import (
    Effect,
    Evidence,
    RoundTimes,
    RunSummary,
    Summary,
    stored,
)
from frostlab.comparison.judging.statistics import paired
from frostlab.comparison.plan import Plan, scale_of
from frostlab.matrix.show import OverviewRow
from frostlab.text import NONE

_SIZES = {("gpt", 6, 512): "Medium-512"}  # (kind, layers, width) → name in the OELM study
_KINDS = {"gpt": "GPT", "decoder": "Decoder", "conformer": "Conformer"}

# Metrics


def mean_of(evidence: Evidence, arm: str, metric: str) -> float | None:
    """Return the mean of a metric over an arm's runs that finished and can be paired.

    It is the geometric mean for a metric that is compared as a ratio, such as perplexity. So if two
    arms have the same seeds, their means have the ratio that the comparison states.
    """
    return mean(_values(evidence, arm, metric).values(), metric)


def mean(values: Iterable[float | None], metric: str) -> float | None:
    """Return the mean of a metric's values that are known; None if there are none.

    The mean is geometric if the metric is compared as a ratio and all values are above 0.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    is_ratio = scale_of(metric)["log"] and min(known) > 0
    return geometric_mean(known) if is_ratio else fmean(known)


def retained(evidence: Evidence, arm: str, metric: str | None = None) -> Effect | None:
    """Return the share of the baseline's metric that an arm retains: above 1 if it is better.

    The share is the arm's value divided by the baseline's, or the reverse if lower values are
    better, as the geometric mean over the seeds with which both finished. The intervals of all arms
    hold simultaneously; they leave out the uncertainty of tuning settings such as lr. Return None
    if no seed finished in both, or if a value is not above 0, because a share of it has no meaning.
    """
    metric = metric or evidence.rules.metric
    own, base = (_values(evidence, name, metric) for name in (arm, evidence.baseline))
    seeds = [seed for seed in own if seed in base]
    if not seeds or min(*(own[seed] for seed in seeds), *(base[seed] for seed in seeds)) <= 0:
        return None
    first, second = (base, own) if scale_of(metric)["lower_is_better"] else (own, base)
    ratio = paired(
        [first[seed] for seed in seeds],
        [second[seed] for seed in seeds],
        log=True,
        alpha=evidence.rules.level / max(1, len(evidence.plan.others)),
    )
    return stored(Effect, ratio)


def paired_runs(evidence: Evidence, arm: str) -> list[RunSummary]:
    """Return the runs of an arm that finished and can be paired."""
    refused = {pair.seed for pair in evidence.refused_pairs if pair.arm == arm}
    return [run for run in evidence.arms[arm].finished if run.seed not in refused]


def _values(evidence: Evidence, arm: str, metric: str) -> dict[int, float]:
    """Return a metric by seed, of the runs that finished and can be paired."""
    return {
        run.seed: value
        for run in paired_runs(evidence, arm)
        if (value := run.metrics.get(metric)) is not None
    }


# Times


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
    """Return the times of one arm: of its runs that can be paired, its rounds, its timed steps."""
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


# The overview table


def overview(
    evidence: Evidence, phase: str | None = None, ids: Mapping[str, str] | None = None
) -> list[OverviewRow]:
    """Return one row for every arm of a comparison.

    Args:
        phase: the name of the group of experiments; by default, the name of the comparison.
        ids: arm → id of its experiment; an arm that is not listed has its name as id.
    """
    plan, rows = evidence.plan, []
    for arm in plan.arms:
        times, verdict = arm_times(evidence, arm.name), evidence.verdicts.get(arm.name)
        rows.append(
            OverviewRow(
                phase=phase or plan.name,
                id=(ids or {}).get(arm.name, arm.name),
                data=data_name(plan.recipe),
                method=plan.recipe_of(arm, plan.seeds[0]).treatment_name,
                total_seconds=None if times.total is None else times.total.mean,
                step_seconds=times.per_step if times.step is None else times.step,
                gap="baseline" if verdict is None else f"{verdict.paired or NONE}: {verdict.word}",
                status=_status(evidence, arm.name),
            )
        )
    return rows


def _status(evidence: Evidence, arm: str) -> str:
    """Return `finished` or how many runs finished, and whether the runs were shortened."""
    runs = evidence.arms[arm].runs
    done = sum(run.finished for run in runs)
    status = "finished" if done == len(runs) else f"{done} of {len(runs)} runs finished"
    return f"{status}, quick" if evidence.plan.quick else status


def data_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe's data; XNLI's has its language, as in `xnli_en`."""
    data = recipe["data"]
    return f"{data['name']}_{data['language']}" if data["name"] == "xnli" else str(data["name"])


def model_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe's model with its size, such as `GPT-Medium-512`.

    Other sizes are layers × width, as in `Decoder-4x64`; layers that stages add count, too. A
    pretrained model has its own name, with a remark if its weights are random or its settings are
    changed.
    """
    model = recipe["model"]
    kind = str(model["kind"])
    if kind == "pretrained":
        remarks = [] if model.get("weights", True) else ["random weights"]
        remarks += ["changed settings"] if model.get("config") else []
        name = PurePath(str(model["name"])).name
        return f"{name} ({', '.join(remarks)})" if remarks else name
    stages = recipe.get("stages") or ()
    added = sum((stage.get("add") or {}).get("layers", 0) for stage in stages)
    layers, width = model["layers"] + added, model["width"]
    size = _SIZES.get((kind, layers, width), f"{layers}x{width}")
    return f"{_KINDS.get(kind, kind)}-{size}"
