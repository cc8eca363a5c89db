"""Evaluation of a comparison's runs on further data, such as languages other than the trained one.

A group's file lists such data sets under the key `further`. After a comparison, the best weights of
each run are evaluated on each of these data sets. There, every arm (variant of a recipe) is
compared with the baseline, paired by seed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frostlab.comparison.evidence import (
    Effect,
    Evidence,
    RunSummary,
    Summary,
    read_evidence,
    stored,
)
from frostlab.comparison.judging.statistics import paired, spread
from frostlab.errors import BadInput
from frostlab.records.folder import RunRecord
from frostlab.storage import finite, read_json, write_whole
from frostlab.typed import read

FURTHER = "further.json"


@dataclass(frozen=True)
class FurtherScore:
    """The metrics of one run's best weights on one set of further data."""

    comparison: str  # its name
    arm: str  # name of the run's arm
    seed: int  # seed of the run
    data: str  # the group's name for the data
    settings: dict[str, Any]  # of the evaluation, such as data.language
    weights: str | None  # digest of the weights that were evaluated
    source: str  # where the examples come from
    metrics: dict[str, float | None]  # metric → value; null: not finite
    n: int  # number of examples, tokens or subjects
    caution: str | None  # a warning to show with the metrics


@dataclass(frozen=True)
class FurtherArm:
    """One arm on one set of further data."""

    summary: Summary | None  # of the metric over the seeds; None without a score
    gap: Effect | None  # effect against the baseline, paired by seed; None: baseline, or no pairs


@dataclass(frozen=True)
class FurtherResult:
    """The arms of one comparison on one set of further data."""

    comparison: str  # its name
    data: str  # the group's name for the data
    source: str  # where the examples come from
    metric: str  # the metric of the summaries
    n: int  # number of examples, tokens or subjects
    caution: str | None  # a warning to show with the numbers
    arms: dict[str, FurtherArm]  # arm → its result


@dataclass(frozen=True)
class _Scores:
    """The content of further.json."""

    scores: list[FurtherScore]  # one per run and data


def read_scores_of(folder: Path) -> list[FurtherScore]:
    """Read further.json of a group's folder; return an empty list if it does not exist."""
    try:
        return read(_Scores, read_json(folder / FURTHER), folder / FURTHER).scores
    except FileNotFoundError:
        return []


def pending_runs(
    folder: Path,
    name: str,
    evidence: Evidence,
    further: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, RunSummary, list[str]]]:
    """Return (arm, run, names of the further data without a score) for each run that lacks scores.

    Only finished runs are returned. A score is stored with the run's weights and the settings of
    the evaluation; if either has changed since, the score counts as lacking. If the comparison
    tunes a setting, only the run with the chosen value counts for each arm and seed.
    """
    scores = {_key(score): score for score in read_scores_of(folder)}
    pending = []
    for arm, entry in evidence.arms.items():
        for run in entry.finished:
            missing = []
            for data, settings in further.items():
                known = scores.get((name, arm, run.seed, data))
                same = (dict(settings), run.weights_digest)
                if known is None or (known.settings, known.weights) != same:
                    missing.append(data)
            if missing:
                pending.append((arm, run, missing))
    return pending


def evaluate_further(
    folder: Path,
    name: str,
    further: Mapping[str, Mapping[str, Any]],
    data_dir: Path | None,
    say: Callable[[str], None],
) -> None:
    """Evaluate the runs of a finished comparison on further data, and store their scores."""
    from frostlab.use.evaluation import evaluate_run
    from frostlab.use.scoring import Evaluator

    evidence = read_evidence(folder / name / "evidence.json")
    assert evidence is not None, "the comparison is finished"
    scores = {_key(score): score for score in read_scores_of(folder)}
    pending = pending_runs(folder, name, evidence, further)
    for index, (arm, run, missing) in enumerate(pending, 1):
        evaluator = Evaluator(RunRecord(folder / name / run.folder))
        for data in missing:
            result = evaluate_run(evaluator, settings=further[data], data_dir=data_dir)
            score = FurtherScore(
                comparison=name,
                arm=arm,
                seed=run.seed,
                data=data,
                settings=dict(further[data]),
                weights=run.weights_digest,
                source=result.source,
                metrics=dict(result.metrics),
                n=result.n[evidence.rules.metric],
                caution=result.caution,
            )
            scores[_key(score)] = score
        values = finite({"scores": [asdict(score) for score in scores.values()]})
        write_whole(folder / FURTHER, json.dumps(values, indent=1) + "\n")
        say(f"further data: run {index} of {len(pending)}  {arm} seed {run.seed}")


def _key(score: FurtherScore) -> tuple[str, str, int, str]:
    return score.comparison, score.arm, score.seed, score.data


def further_results(
    scores: Sequence[FurtherScore], name: str, evidence: Evidence
) -> list[FurtherResult]:
    """Compare the arms of a comparison on each of the further data, paired by seed.

    The intervals of all further data and arms of the comparison hold simultaneously. Scores of runs
    that the comparison no longer has are left out.
    """
    rules = evidence.rules
    current = {
        (arm, run.seed): run.weights_digest
        for arm, entry in evidence.arms.items()
        for run in entry.finished
    }
    own = [
        score
        for score in scores
        if score.comparison == name and current.get((score.arm, score.seed), "") == score.weights
    ]
    names = list(dict.fromkeys(score.data for score in own))
    level = rules.alpha / max(1, len(names) * len(evidence.verdicts))
    refused = {(pair.arm, pair.seed) for pair in evidence.refused_pairs}
    results = []
    for data in names:
        here = [score for score in own if score.data == data]
        values = {
            arm: {
                score.seed: value
                for score in here
                if score.arm == arm and (value := score.metrics.get(rules.metric)) is not None
            }
            for arm in evidence.arms
        }
        base = values[evidence.baseline]
        arms = {}
        for arm, by_seed in values.items():
            seeds = [seed for seed in by_seed if seed in base and (arm, seed) not in refused]
            gap = None
            if arm != evidence.baseline and seeds:
                pairs = ([either[seed] for seed in seeds] for either in (by_seed, base))
                gap = stored(Effect, paired(*pairs, alpha=level, log=rules.log))
            numbers = list(by_seed.values())
            arms[arm] = FurtherArm(stored(Summary, spread(numbers)) if numbers else None, gap)
        cautions = dict.fromkeys(score.caution for score in here if score.caution)
        first = here[0]
        results.append(
            FurtherResult(
                name, data, first.source, rules.metric, first.n, "; ".join(cautions) or None, arms
            )
        )
    return results


def check_further(further: Mapping[str, Mapping[str, Any]], label: str) -> None:
    """Refuse further data with settings that an evaluation cannot change.

    This is called before anything is trained. `label` is the group's name, for the error.
    """
    from frostlab.use.evaluation import check_settings

    for name, settings in further.items():
        try:
            check_settings(settings)
        except BadInput as error:
            raise BadInput(f"{label}: further.{name}: {error}") from None
