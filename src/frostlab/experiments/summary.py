"""The summary of a group of comparisons: each arm's results next to those that sources reported.

The sources are the published studies that the group repeats. An arm is a variant of a recipe; each
is compared with the baseline arm. `summarize` reads evidence.json, the results of a comparison, in
each comparison's folder. Comparisons without this file are listed as not run, or as not finished if
they have a folder. summary.json has the keys of `GroupSummary`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from frostlab.comparison.evidence import ArmEvidence, Effect, Evidence, read_evidence
from frostlab.comparison.judging.statistics import paired
from frostlab.comparison.judging.verdict import JUDGED, NO_VALUE, Word
from frostlab.comparison.oelm_json import QUESTIONS, answers
from frostlab.comparison.plan import LEAST_SEEDS, confounds
from frostlab.errors import BadInput
from frostlab.experiments.further import FurtherResult
from frostlab.experiments.plans import (
    SAME_EXPERIMENT,
    arm_name,
    comparison_names,
    group_plans,
)
from frostlab.recipe.groups import Group, Interaction
from frostlab.storage import read_json
from frostlab.typed import check_schema, read

SCHEMA = 1  # version of summary.json
SUMMARY = "summary.json"
Status = Literal["finished", "not finished", "not run"]
TRANSFER = len(QUESTIONS) - 1  # index of the question that needs comparisons of BERT and of GPT
MODELS = ("BERT", "GPT")
# settings that --quick changes
_SHORTENED = ("train.steps", "train.epochs", "evaluate.every", "watch.every_n_steps")


@dataclass(frozen=True)
class TimeGap:
    """The time of an arm's step relative to the baseline's."""

    ratio: float | None  # None if it is not finite
    low: float | None  # lower end of the ratio's interval; None: unbounded
    high: float | None  # upper end, likewise
    verdict: Word | None  # None: no verdict
    proven: bool  # whether the timing can be trusted


@dataclass(frozen=True)
class ArmSummary:
    """The results of one arm."""

    arm: str  # its name
    does: str  # what its treatment does to the model
    runs: int  # finished runs
    mean: float | None  # of the metric, over the finished runs that can be paired
    std: float | None  # standard deviation over the same runs; None for a single run
    gap: Effect | None  # effect against the baseline, paired by seed; None: baseline, or no pairs
    verdict: Word | None  # None for the baseline
    sentence: str | None  # the verdict in a sentence
    retained: float | None  # share of the baseline's metric (retained_share); above 1: better
    confounds: tuple[str, ...]  # settings besides the treatment that differ from the baseline
    time: TimeGap | None  # None for the baseline, or if steps were not timed
    experiment: str | None  # id of the sources' experiment to which the arm corresponds
    reported: dict[str, float]  # metric → value that the sources reported (times in s)


@dataclass(frozen=True)
class Answered:
    """A question and its answer, for the whole group or by comparison."""

    question: str  # in words
    answer: str  # in a sentence; empty if each comparison has its own
    by_comparison: dict[str, str] = field(default_factory=dict)  # name → its answer


@dataclass(frozen=True)
class ComparisonSummary:
    """One comparison of the group."""

    name: str  # also the name of its folder
    status: Status  # finished: it has results
    about: str = ""  # what is compared, as in the plan
    metric: str | None = None  # the metric that decides
    seeds: int = 0  # number of seeds
    model: str | None = None  # BERT, GPT or another kind
    data: str | None = None  # `data.name` of the recipe
    caution: str | None = None  # a warning to show with every number
    reduced: tuple[str, ...] = ()  # how the runs were made smaller: scale, fewer steps, stand-ins
    changed: tuple[str, ...] = ()  # settings of the baseline that differ from the group's plan
    baseline: str | None = None  # name of the arm that the others are compared with
    # how the baseline's weights were changed or frozen; None if they were not
    baseline_treated: str | None = None
    oelm: str | None = None  # the arm with orthogonal frozen query and key weights
    arms: tuple[ArmSummary, ...] = ()  # in the plan's order
    # the plan's questions; without any, the OELM study's questions, if there is an OELM arm
    questions: tuple[Answered, ...] = ()

    @property
    def oelm_arm(self) -> ArmSummary | None:
        """The results of the arm with orthogonal frozen query and key weights."""
        return next((arm for arm in self.arms if arm.arm == self.oelm), None)


@dataclass(frozen=True)
class GroupSummary:
    """A group of comparisons and its results so far."""

    schema: int  # `SCHEMA` when it was written
    group: str  # its name
    about: str  # its description
    as_published: bool  # whether the settings are those of the sources
    comparisons: tuple[ComparisonSummary, ...]  # in the group's order
    questions: tuple[Answered, ...]  # of the OELM study; empty if no comparison asks them
    interactions: tuple[Answered, ...]  # on how an arm's effect differs between comparisons
    further: tuple[FurtherResult, ...]  # the runs' best weights on further data

    def to_dict(self) -> dict[str, Any]:
        """Return the values of summary.json."""
        return asdict(self)


def read_summary(folder: Path) -> GroupSummary:
    """Read the summary in a group's folder."""
    path = folder / SUMMARY
    try:
        values = read_json(path)
    except FileNotFoundError:
        raise BadInput(f"{folder} has no {SUMMARY} yet") from None
    return read(GroupSummary, check_schema(values, SCHEMA, path), path)


def summarize(
    group: Group, as_published: bool, folder: Path, further: Sequence[FurtherResult] = ()
) -> GroupSummary:
    """Summarize the comparisons in a group's folder.

    To answer whether a result carries over from BERT to GPT, groups in the folders next to this one
    are read, too: groups as published for a group as published, and fair groups for a fair one.
    """
    names = comparison_names(group, as_published)
    evidence = {name: read_evidence(folder / name / "evidence.json") for name in names}
    comparisons = tuple(
        _comparison(group, as_published, name, measured)
        if measured is not None
        else ComparisonSummary(name, "not finished" if (folder / name).exists() else "not run")
        for name, measured in evidence.items()
    )
    finished = {name: measured for name, measured in evidence.items() if measured is not None}
    return GroupSummary(
        schema=SCHEMA,
        group=group.name,
        about=group.about,
        as_published=as_published,
        comparisons=comparisons,
        questions=_questions(comparisons, _siblings(folder, as_published)),
        interactions=tuple(_interactions(group, names, finished)),
        further=tuple(further),
    )


def _comparison(
    group: Group, as_published: bool, name: str, evidence: Evidence
) -> ComparisonSummary:
    plan = evidence.plan
    baseline = evidence.arms[evidence.baseline]
    treated = plan.recipe_of(plan.baseline, plan.seeds[0]).surgery
    experiments = _experiments(group, as_published, name, evidence)
    asked = [(answer.question, answer.verdict.sentence) for answer in evidence.contrasts]
    if not asked and evidence.oelm is not None:
        asked = answers(evidence)
    return ComparisonSummary(
        name=name,
        status="finished",
        about=plan.about,
        metric=plan.rules.metric,
        seeds=len(plan.seeds),
        model=model_name(plan.recipe["model"]),
        data=str(plan.recipe["data"]["name"]),
        caution=evidence.caution,
        reduced=reduced_by(evidence),
        changed=_changed(group, as_published, name, evidence),
        baseline=evidence.baseline,
        baseline_treated=baseline.does if treated.init or treated.freeze else None,
        oelm=evidence.oelm,
        arms=tuple(
            _arm(evidence, arm.name, baseline, experiments.get(arm.name), group)
            for arm in plan.arms
        ),
        questions=tuple(Answered(question, answer) for question, answer in asked),
    )


def model_name(settings: Mapping[str, Any]) -> str:
    """Return BERT or GPT if the model's name or kind contains it, else the name or kind itself."""
    name = str(settings.get("name") or settings["kind"])
    return next((model for model in MODELS if model.lower() in name.lower()), name)


def reduced_by(evidence: Evidence) -> tuple[str, ...]:
    """Return in which ways the runs are smaller than the recipe: scale, stand-ins, `--quick`."""
    plan = evidence.plan
    caution = plan.recipe_of(plan.baseline, plan.seeds[0]).caution
    reasons = [] if caution is None else [caution]
    return (*reasons, *(["quick: shortened runs"] if plan.quick else []))


def _changed(group: Group, as_published: bool, name: str, evidence: Evidence) -> tuple[str, ...]:
    """Return settings of the baseline that differ from the group's plan, as `key old → new`."""
    plan = evidence.plan
    own = group_plans(group, as_published=as_published, only=[name])[name]
    recipes = (either.recipe_of(either.baseline, plan.seeds[0]) for either in (own, plan))
    ignored = (*SAME_EXPERIMENT, *(_SHORTENED if plan.quick else ()))
    return tuple(str(entry) for entry in confounds(*recipes) if entry.key not in ignored)


def _arm(
    evidence: Evidence, name: str, baseline: ArmEvidence, experiment: str | None, group: Group
) -> ArmSummary:
    arm, verdict = evidence.arms[name], evidence.verdicts.get(name)
    spread = arm.metrics.get(evidence.rules.metric)
    timing = evidence.timing
    timed = None if timing is None or verdict is None else timing.arms[name]
    return ArmSummary(
        arm=name,
        does=arm.does,
        runs=len(arm.finished),
        mean=None if spread is None else spread.mean,
        std=None if spread is None else spread.std,
        gap=None if verdict is None else verdict.paired,
        verdict=None if verdict is None else verdict.word,
        sentence=None if verdict is None else verdict.sentence,
        retained=None if verdict is None else retained_share(evidence, name, arm, baseline),
        confounds=evidence.confounds.get(name, ()),
        time=None
        if timed is None or timing is None
        else TimeGap(timed.ratio, timed.low, timed.high, timed.word, timing.proven),
        experiment=experiment,
        reported={} if experiment is None else dict(group.experiments[experiment].reported),
    )


def retained_share(
    evidence: Evidence, name: str, arm: ArmEvidence, baseline: ArmEvidence
) -> float | None:
    """Return the arm's mean divided by the baseline's, inverted if lower values are better.

    For a metric on the log scale, the paired ratio takes the place of the ratio of means. None if a
    value is missing, zero or negative.
    """
    rules = evidence.rules
    if rules.log:
        gap = evidence.verdicts[name].paired
        ratio = None if gap is None else gap.effect
        return 1 / ratio if ratio and rules.lower_is_better else ratio
    own, base = (either.metrics.get(rules.metric) for either in (arm, baseline))
    if own is None or base is None or not own.mean or not base.mean:
        return None
    if own.mean < 0 or base.mean < 0:  # a share of a negative correlation means nothing
        return None
    return base.mean / own.mean if rules.lower_is_better else own.mean / base.mean


def _experiments(group: Group, as_published: bool, name: str, evidence: Evidence) -> dict[str, str]:
    """Return the sources' experiment that corresponds to each arm, where one does.

    As published, the arms are the experiments. In a fair comparison, the baseline corresponds to
    the baseline of the published comparison with the same name. Any other arm corresponds to the
    experiment of that comparison with the same treatment, if there is exactly one. An arm with the
    published baseline's treatment corresponds to none.
    """
    if name not in group.published:
        return {}
    first, *others = ids = group.arms(name)
    if as_published:
        return {arm_name(experiment): experiment for experiment in ids}
    plan, matches = evidence.plan, {evidence.baseline: first}
    base = group.recipe(first).surgery
    surgeries = {experiment: group.recipe(experiment).surgery for experiment in others}
    for arm in plan.others:
        own = plan.recipe_of(arm, plan.seeds[0]).surgery
        same = [other for other, surgery in surgeries.items() if surgery == own != base]
        if len(same) == 1:
            matches[arm.name] = same[0]
    return matches


# Questions over the whole group


def _siblings(folder: Path, as_published: bool) -> dict[str, GroupSummary]:
    """Return the summaries of the groups in the folders next to a group's folder.

    Groups as published are returned for a group as published, and fair ones for a fair one.
    """
    summaries = {}
    for path in sorted(folder.resolve().parent.glob(f"*/{SUMMARY}")):
        if path.parent == folder.resolve():
            continue
        try:
            summary = read_summary(path.parent)
        except BadInput:  # a file of another version or of another program
            continue
        if summary.as_published == as_published:
            summaries[path.parent.name] = summary
    return summaries


def _questions(
    comparisons: Sequence[ComparisonSummary], siblings: Mapping[str, GroupSummary]
) -> tuple[Answered, ...]:
    """Answer the five questions of the OELM study from the comparisons that finished."""
    if not any(_asks_about_oelm(comparison) for comparison in comparisons):
        return ()
    answered = [
        Answered(question, "", {entry.name: _answer(entry, index) for entry in comparisons})
        for index, question in enumerate(QUESTIONS)
    ]
    transfer = Answered(QUESTIONS[TRANSFER], _transfer(comparisons, siblings))
    return (*answered[:TRANSFER], transfer)


def _asks_about_oelm(comparison: ComparisonSummary) -> bool:
    return comparison.oelm is not None and tuple(
        entry.question for entry in comparison.questions
    ) == tuple(QUESTIONS)


def _answer(comparison: ComparisonSummary, index: int) -> str:
    """Return a comparison's answer to the question at `index`; at 0, OELM's gap and verdict."""
    if comparison.status != "finished":
        return comparison.status
    arm = comparison.oelm_arm
    if arm is None or not _asks_about_oelm(comparison):
        return "not asked"
    if index:
        return comparison.questions[index].answer
    by = f" by {', '.join(arm.confounds)}" if arm.confounds else ""
    return f"{arm.arm} {effect_text(arm.gap)} on {comparison.metric}: {arm.verdict}{by}"


def _transfer(
    comparisons: Sequence[ComparisonSummary], siblings: Mapping[str, GroupSummary]
) -> str:
    """Compare the effects of OELM on BERT and on GPT, over this group and those next to it."""
    everything = [(comparison.name, comparison) for comparison in comparisons]
    everything += [
        (f"{name}/{comparison.name}", comparison)
        for name, summary in siblings.items()
        for comparison in summary.comparisons
    ]
    words: dict[str, set[str]] = {}
    parts = []
    for model in MODELS:
        effects = []
        for name, comparison in everything:
            arm = comparison.oelm_arm
            if comparison.model == model and arm is not None and arm.gap is not None:
                notes = ", ".join([str(arm.verdict), *comparison.reduced])
                effects.append(f"{name} {effect_text(arm.gap)} ({notes})")
                words.setdefault(model, set()).add(str(arm.verdict))
        parts.append(f"{model}: {', '.join(effects) if effects else 'no effect measured'}.")
    missing = [model for model in MODELS if model not in words]
    if missing:
        return f"Not known: {' '.join(parts)}"
    if not set().union(*words.values()) <= set(JUDGED):
        *first, last = (f'"{word}"' if " " in word else word for word in JUDGED)
        needed = f"Every verdict has to be {', '.join(first)} or {last}."
        return f"Not shown: {' '.join(parts)} {needed}"
    if words["BERT"] == words["GPT"] and len(words["BERT"]) == 1:
        return f"Yes, these verdicts agree: {' '.join(parts)}"
    return f"Not in every comparison: {' '.join(parts)}"


def effect_text(effect: Effect | None) -> str:
    """Format a paired effect with its interval: "+0.012 [+0.004, +0.02]" or "0.93 × […]"."""
    if effect is None or effect.effect is None:
        return "–"
    sign, unit = ("", " ×") if effect.log else ("+", "")
    if effect.low is None and effect.high is None:
        return f"{effect.effect:{sign}.4g}{unit}"
    low = "−∞" if effect.low is None else f"{effect.low:{sign}.3g}"
    high = "∞" if effect.high is None else f"{effect.high:{sign}.3g}"
    return f"{effect.effect:{sign}.4g}{unit} [{low}, {high}]"


# Interactions


def _interactions(
    group: Group, names: Sequence[str], finished: Mapping[str, Evidence]
) -> list[Answered]:
    """Answer the group's questions about how an arm's effect differs between two comparisons."""
    asked = [
        interaction
        for interaction in group.interactions
        if {interaction.comparison, interaction.against} <= set(names)
    ]
    return [
        Answered(interaction.question, _interaction(interaction, finished, len(asked)))
        for interaction in asked
    ]


def _interaction(
    interaction: Interaction, finished: Mapping[str, Evidence], statements: int
) -> str:
    names = (interaction.comparison, interaction.against)
    missing = [name for name in names if name not in finished]
    if missing:
        return f"not finished: {', '.join(missing)}."
    own, other = (finished[name] for name in names)
    without = [name for name in names if interaction.arm not in finished[name].verdicts]
    if without:
        return f"not known: no verdict on {interaction.arm} in {' and '.join(without)}."
    parts = "; ".join(_effect_in(name, finished[name], interaction.arm) for name in names)
    if own.rules.metric != other.rules.metric:
        metrics = f"{own.rules.metric} and {other.rules.metric}"
        return f"the effects cannot be compared, because the metrics are {metrics}; {parts}."
    for name in names:
        if (word := finished[name].verdicts[interaction.arm].word) in NO_VALUE:
            return f'not shown: the verdict in {name} is "{word}".'
    effects = [_effects_by_seed(evidence, interaction.arm) for evidence in (own, other)]
    seeds = sorted(effects[0].keys() & effects[1].keys())
    if len(seeds) < LEAST_SEEDS:
        return (
            f"too few seeds: both comparisons have {len(seeds)} in common; at least {LEAST_SEEDS} "
            "are needed."
        )
    level = own.rules.level / statements
    difference = paired(*([by_seed[seed] for seed in seeds] for by_seed in effects), alpha=level)
    on_scale = math.exp if own.rules.log else float
    mean, low, high = map(on_scale, (difference.effect, difference.low, difference.high))
    effect = Effect(len(seeds), own.rules.log, level, mean, low, high, difference.p, None)
    shown = "is not shown to differ" if difference.low <= 0 <= difference.high else "differs"
    text = f"the effect of {interaction.arm} {shown} between {names[0]} and {names[1]}"
    confounded = [name for name in names if finished[name].confounds.get(interaction.arm)]
    note = f" Confounded: {', '.join(confounded)}." if confounded else ""
    return (
        f"{text}: {effect_text(effect)} ({100 * (1 - level):.4g} %), over {len(seeds)} seeds; "
        f"{parts}.{note}"
    )


def _effect_in(name: str, evidence: Evidence, arm: str) -> str:
    verdict = evidence.verdicts[arm]
    return f"{name} {effect_text(verdict.paired)} ({verdict.word})"


def _effects_by_seed(evidence: Evidence, arm: str) -> dict[int, float]:
    """Return an arm's difference from the baseline by seed, of logarithms if `rules.log`.

    Seeds whose runs did not both finish, or cannot be paired, are left out.
    """
    refused = {pair.seed for pair in evidence.refused_pairs if pair.arm == arm}
    values = {
        name: {
            run.seed: value
            for run in evidence.arms[name].finished
            if (value := run.metrics.get(evidence.rules.metric)) is not None
        }
        for name in (arm, evidence.baseline)
    }
    on_scale = math.log if evidence.rules.log else float
    return {
        seed: on_scale(value) - on_scale(values[evidence.baseline][seed])
        for seed, value in values[arm].items()
        if seed in values[evidence.baseline] and seed not in refused
    }
