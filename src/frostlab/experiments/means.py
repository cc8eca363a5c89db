"""Means of the effects of several comparisons: over all of them, by model and by task.

A mean covers comparisons with the same arm, metric and shortcomings, so that confounded effects and
those of reduced runs (scaled, shortened or with stand-ins) are not mixed with the others. Every
comparison has the same weight, whatever its number of seeds. The comparisons count as independent,
and the mean is about these comparisons: its interval says nothing about other data sets. A mean
over a single comparison is that comparison's effect, with the interval of its verdict. `Means` is
the schema of means.json, which a report of several comparisons writes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy import special

from frostlab.comparison.evidence import Effect, Evidence
from frostlab.experiments.summary import MODELS, model_name, reduced_by, retained_share
from frostlab.storage import finite

SCHEMA = 1  # version of means.json
MEANS = "means.json"
ALPHA = 0.05  # the interval of a mean over several comparisons has confidence 1 − ALPHA
By = Literal["all", "model", "task"]


@dataclass(frozen=True)
class Mean:
    """The mean effect of one arm over several comparisons."""

    arm: str  # its name
    metric: str  # the metric that decides in these comparisons
    by: By  # how comparisons are grouped
    value: str  # such as BERT or classification; empty for all comparisons
    shortcomings: tuple[str, ...]  # confounded, reduced; the same for all these comparisons
    comparisons: tuple[str, ...]  # their folders, by path from the folder that is reported
    verdicts: dict[str, int]  # verdict → number of comparisons
    # for a single comparison, its own effect; else the mean, whose `n` is the number of comparisons
    effect: Effect
    retained: float | None  # geometric mean of the comparisons' `retained_share`; above 1: better


@dataclass(frozen=True)
class Contrast:
    """One arm's mean effects on BERT and on GPT, compared.

    They are subtracted or, if the effects are ratios, divided.
    """

    arm: str  # its name
    metric: str  # the metric that decides in these comparisons
    models: tuple[str, str]  # the two kinds of models
    shortcomings: tuple[str, ...]  # as in `Mean`
    effect: Effect  # of the first model, minus or divided by that of the second


@dataclass(frozen=True)
class Means:
    """The content of means.json."""

    schema: int  # `SCHEMA` when it was written
    means: tuple[Mean, ...]  # one per arm, metric, grouping, value and shortcomings
    contrasts: tuple[Contrast, ...]  # for arms with comparisons of both models

    def to_dict(self) -> dict[str, Any]:
        """Return the values of means.json."""
        values: dict[str, Any] = finite(asdict(self))
        return values


@dataclass(frozen=True)
class _Entry:
    """The effect of one arm in one comparison."""

    comparison: str
    arm: str
    metric: str
    model: str
    task: str
    shortcomings: tuple[str, ...]
    word: str  # the verdict, such as worse
    effect: Effect
    retained: float | None


def means_of(comparisons: Mapping[str, Evidence]) -> Means:
    """Return the means over comparisons, given as folder → evidence."""
    entries = [
        entry for name, evidence in comparisons.items() for entry in _entries(name, evidence)
    ]
    means = [
        *_means(entries, "all", lambda entry: "", least=2),
        *_means(entries, "model", lambda entry: entry.model),
        *_means(entries, "task", lambda entry: entry.task),
    ]
    return Means(SCHEMA, tuple(means), tuple(_contrasts(entries)))


def task_of(evidence: Evidence) -> str:
    """Return the task of a comparison in words: classification, generation or EEG decoding."""
    plan = evidence.plan
    task = str(plan.recipe_of(plan.baseline, plan.seeds[0]).data.task)
    return {"language": "generation", "envelope": "EEG decoding"}.get(task, task)


def _entries(name: str, evidence: Evidence) -> list[_Entry]:
    entries = []
    baseline = evidence.arms[evidence.baseline]
    for arm, verdict in evidence.verdicts.items():
        if verdict.paired is None or verdict.paired.effect is None:
            continue
        shortcomings = [
            *(["confounded"] if evidence.confounds.get(arm) else []),
            *(["reduced"] if reduced_by(evidence) else []),
        ]
        entries.append(_Entry(
            name, arm, evidence.rules.metric, model_name(evidence.plan.recipe["model"]),
            task_of(evidence), tuple(shortcomings), verdict.word, verdict.paired,
            retained_share(evidence, arm, evidence.arms[arm], baseline),
        ))  # fmt: skip
    return entries


def _grouped(entries: Iterable[_Entry], key: Any) -> dict[Any, list[_Entry]]:
    groups: dict[Any, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _means(entries: Sequence[_Entry], by: By, value_of: Any, least: int = 1) -> list[Mean]:
    def key(entry: _Entry) -> tuple[Any, ...]:
        return entry.arm, entry.metric, entry.effect.log, value_of(entry), entry.shortcomings

    return [
        Mean(
            arm, metric, by, value, shortcomings,
            tuple(entry.comparison for entry in members),
            dict(Counter(entry.word for entry in members)),
            _mean_effect([entry.effect for entry in members]),
            _mean_share([entry.retained for entry in members]),
        )
        for (arm, metric, _, value, shortcomings), members in _grouped(entries, key).items()
        if len(members) >= least
    ]  # fmt: skip


def _contrasts(entries: Sequence[_Entry]) -> list[Contrast]:
    def key(entry: _Entry) -> tuple[Any, ...]:
        return entry.arm, entry.metric, entry.effect.log, entry.shortcomings

    contrasts = []
    for (arm, metric, _, shortcomings), members in _grouped(entries, key).items():
        first, second = ([entry for entry in members if entry.model == model] for model in MODELS)
        if first and second:
            weighted = [(entry.effect, 1 / len(first)) for entry in first]
            weighted += [(entry.effect, -1 / len(second)) for entry in second]
            contrasts.append(Contrast(arm, metric, MODELS, shortcomings, _combined(weighted)))
    return contrasts


def _mean_share(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share]
    if not known or len(known) < len(shares):
        return None
    return math.exp(sum(map(math.log, known)) / len(known))


def _mean_effect(effects: Sequence[Effect]) -> Effect:
    if len(effects) == 1:
        return effects[0]
    return _combined([(effect, 1 / len(effects)) for effect in effects])


def _combined(weighted: Sequence[tuple[Effect, float]]) -> Effect:
    """Return a weighted sum of independent effects with Welch's t interval.

    Ratios are combined as logarithms. There is no interval if an effect has fewer than two pairs or
    no spread.
    """
    log = weighted[0][0].log
    to, back = (math.log, math.exp) if log else (float, float)
    try:
        total = sum(weight * to(effect.effect or 0.0) for effect, weight in weighted)
        value: float | None = back(total)
    except (ValueError, OverflowError):  # a ratio of 0 has no logarithm
        return Effect(len(weighted), log, ALPHA, None, None, None, None, None)
    empty = Effect(len(weighted), log, ALPHA, value, None, None, None, None)
    variances = [
        (weight**2 * effect.std**2 / effect.n, effect.n - 1)
        for effect, weight in weighted
        if effect.std and effect.n > 1
    ]
    if len(variances) < len(weighted):
        return empty
    variance = sum(part for part, _ in variances)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in variances)
    half = float(special.stdtrit(freedom, 1 - ALPHA / 2)) * math.sqrt(variance)
    p = 2 * float(special.stdtr(freedom, -abs(total) / math.sqrt(variance)))
    try:
        low, high = back(total - half), back(total + half)
    except OverflowError:
        return empty
    return Effect(len(weighted), log, ALPHA, value, low, high, p, None)
