"""Means of the arms' metrics, and the share of the baseline's performance that an arm retains.

An arm is a variant of the compared recipe; the baseline is the arm that others are compared with.
A run can be paired unless it differs from the baseline's run of the same seed in more than the plan
declares (`Evidence.refused_pairs`).
"""

from collections.abc import Iterable
from statistics import fmean, geometric_mean

from frostlab.comparison.evidence import Effect, Evidence, RunSummary, stored
from frostlab.comparison.plan import scale_of
from frostlab.comparison.statistics import paired


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
    hold simultaneously; they do not include the uncertainty of tuned values. Return None if no seed
    finished in both, or if a value is not above 0, because a share of it has no meaning.
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
