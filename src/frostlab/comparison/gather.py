"""Gathering of a comparison's evidence: read its runs, pair them by seed, and judge every arm.

An arm is a variant of the recipe, with one run per seed or, if settings are tuned, per seed and
combination of their values. A run of an arm is paired with the baseline's run of the same seed,
unless the two runs differ in more than the plan allows.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from frostlab.comparison.evidence import (
    SCHEMA,
    Answer,
    ArmEvidence,
    ArmVerdict,
    Assay,
    ComparedOrder,
    EarlierLook,
    Effect,
    Evidence,
    Made,
    PredictionTest,
    Repeat,
    RunSummary,
    StepTiming,
    Summary,
    stored,
)
from frostlab.comparison.judging.looks import Looks
from frostlab.comparison.judging.pairing import Runs, status_of, steps_compared, summarize
from frostlab.comparison.judging.statistics import Paired, mcnemar, over_examples, paired
from frostlab.comparison.judging.verdict import Scores, Statement, judge
from frostlab.comparison.measures.arms import round_times
from frostlab.comparison.measures.convergence import convergence
from frostlab.comparison.measures.eeg import segment_scores, subject_tests
from frostlab.comparison.measures.gradients import gradient_flow
from frostlab.comparison.oelm_json import have_equal_norms, oelm_arm, orthogonality_arms
from frostlab.comparison.plan import Plan, Rules, scale_of
from frostlab.comparison.tuning import Trials
from frostlab.recipe.settings import METRICS
from frostlab.records.folder import RunRecord

Records = Mapping[tuple[str, int], RunRecord]  # (arm, seed) or (arm, round) → run


@dataclass(frozen=True)
class AssayRuns:
    """Runs of the baseline with fewer steps: a planted harm, which must be judged worse."""

    records: dict[int, RunRecord]  # seed → run
    steps: int  # of each run
    of: int  # steps of a whole run


@dataclass(frozen=True)
class Trained:
    """All runs that a comparison has trained."""

    trials: Trials  # the runs of every arm, seed and combination of tuned values
    rounds: Records  # extra whole runs, trained only to time them, by arm and round
    repeat: RunRecord | None  # a second run of the baseline with the first seed
    assay: AssayRuns | None  # runs of the baseline with a planted harm

    @property
    def records(self) -> list[RunRecord]:
        """The record of every run."""
        records = [*self.trials.records.values(), *self.rounds.values()]
        records += [] if self.repeat is None else [self.repeat]
        return records + ([] if self.assay is None else list(self.assay.records.values()))


def gather(
    plan: Plan,
    folder: Path,
    trained: Trained,
    *,
    looks: Looks,
    jobs: int,
    timing: StepTiming | None,
    made: Made,
) -> Evidence:
    """Return the evidence: runs, pairs, summaries, times, and one verdict for every statement.

    Args:
        folder: the comparison's folder, to which the paths of runs become relative.
        looks: the current look (analysis of the results), and the looks before it.
        jobs: largest number of parallel runs.
    """
    trials, repeat, assay = trained.trials, trained.repeat, trained.assay
    runs = Runs.read(plan, trials, folder)
    metrics = tuple(METRICS[plan.recipe_of(plan.baseline, plan.seeds[0]).data.task])
    rules = plan.rules.model_copy(update={"look": looks.number, "spent": looks.spent})
    verdicts = Judged(runs, rules)
    refused = {(pair.arm, pair.seed) for pair in runs.refused}
    return Evidence(
        schema=SCHEMA,
        plan=plan,
        made=made,
        baseline=plan.baseline.name,
        look=looks.number,
        earlier_looks=tuple(
            EarlierLook(look.at, look.folder, look.metric, len(look.seeds), look.spent)
            for look in looks.earlier
        ),
        jobs=jobs,
        caution=runs.caution,
        data=runs.data,
        pairs=sum(
            runs.finished(arm.name, seed)
            and runs.finished(plan.baseline.name, seed)
            and (arm.name, seed) not in refused
            for arm in plan.others
            for seed in plan.seeds
        ),
        confounds={arm: tuple(map(str, keys)) for arm, keys in plan.confounds().items()},
        tuning=trials.settings,
        arms={arm.name: _arm(runs, arm.name, metrics) for arm in plan.arms},
        refused_pairs=runs.refused,
        partly_compared=tuple(_partly_compared(runs)),
        varied_facts=runs.varied,
        verdicts={arm.name: verdicts.of(arm.name, plan.baseline.name) for arm in plan.others},
        secondary={
            metric: _effects(runs, metric, rules) for metric in metrics if metric != rules.metric
        },
        contrasts=tuple(
            Answer(asked.question, asked.of, verdicts.of(asked.arm, asked.against, asked.of))
            for asked in plan.contrasts
        ),
        oelm=oelm_arm(plan),
        orthogonality=verdicts.orthogonality(),
        equal_norms=have_equal_norms(plan, orthogonality_arms(plan)),
        assay=None if assay is None else _assay(runs, assay, verdicts),
        repeat=None if repeat is None else _repeat(runs, repeat, folder),
        mcnemar=_prediction_tests(runs),
        subjects=subject_tests(plan, runs.records, runs.refused),
        segments=segment_scores(plan, runs.records, runs.refused),
        flow=gradient_flow(runs),
        convergence=convergence(runs, rules),
        timing=timing,
        rounds=round_times(
            plan, {key: summarize(record, folder) for key, record in trained.rounds.items()}
        ),
    )


def results_of(plan: Plan, trials: Trials) -> dict[str, float | str | None]:
    """Return recipe digest → the run's metric, or its status if the run did not finish."""
    return {
        record.start.recipe_digest: record.metrics.get(plan.rules.metric)
        if status_of(record) == "finished"
        else status_of(record)
        for record in trials.records.values()
    }


def _partly_compared(runs: Runs) -> Iterable[ComparedOrder]:
    """Yield the pairs of runs whose order of examples could be compared for some steps only."""
    plan = runs.plan
    pairs = {arm.name: plan.baseline.name for arm in plan.others}.items()
    asked = ((contrast.arm, contrast.against) for contrast in plan.contrasts)
    for arm, against in dict.fromkeys((*pairs, *asked, *filter(None, [orthogonality_arms(plan)]))):
        for seed in plan.seeds:
            facts, other = runs.facts.get((arm, seed)), runs.facts.get((against, seed))
            if facts is not None and other is not None:
                steps, compared = steps_compared(facts, other)
                if compared < steps:
                    yield ComparedOrder(arm, against, seed, steps, compared)


def _arm(runs: Runs, name: str, metrics: Sequence[str]) -> ArmEvidence:
    """List the runs of one arm, and summarize those that finished and can be paired."""
    own_runs = tuple(runs.summaries[name, seed] for seed in runs.seeds_of(name))
    refused = {pair.seed for pair in runs.refused if pair.arm == name}
    finished = [run for run in own_runs if run.finished and run.seed not in refused]
    values = {
        metric: [value for run in finished if (value := run.metrics.get(metric)) is not None]
        for metric in metrics
    }
    arm = next(arm for arm in runs.plan.arms if arm.name == name)
    return ArmEvidence(
        does=runs.plan.recipe_of(arm, runs.plan.seeds[0]).surgery.description,
        runs=own_runs,
        metrics={metric: Summary.of(numbers) for metric, numbers in values.items() if numbers},
        parameters=next((run.parameters for run in finished), None),
        seconds=Summary.of([run.total_seconds for run in finished]) if finished else None,
    )


class Judged:
    """The verdicts on all statements of a comparison, whose intervals hold simultaneously.

    The statements are: every arm against the baseline, the plan's contrasts, and the question
    whether orthogonality is needed. A statement is about values (a run's metric) or about gains
    (how much a run improves from its first stage to its last). If two arms are compared twice in
    the same way, this counts as one statement.
    """

    def __init__(self, runs: Runs, rules: Rules) -> None:
        self.runs, self.rules, plan = runs, rules, runs.plan
        names = orthogonality_arms(plan)
        asked = [(arm.name, plan.baseline.name, "value") for arm in plan.others]
        asked += [(contrast.arm, contrast.against, contrast.of) for contrast in plan.contrasts]
        asked += [] if names is None else [(*names, "value")]
        self.orthogonality_asked = names
        self.asked = list(dict.fromkeys(asked))
        self.size = len({(frozenset(key[:2]), key[2]) for key in self.asked})
        self.verdicts = self._judge("value") | self._judge("gain")

    def of(self, arm: str, against: str, of: str = "value") -> ArmVerdict:
        """Return the verdict on an arm against another, about values or about gains."""
        return self.verdicts[arm, against, of]

    def orthogonality(self) -> ArmVerdict | None:
        """Return the verdict on orthogonal against random frozen weights, if both are arms."""
        return None if self.orthogonality_asked is None else self.of(*self.orthogonality_asked)

    def _judge(self, of: str) -> dict[tuple[str, str, str], ArmVerdict]:
        asked = {" against ".join(key[:2]): key for key in self.asked if key[2] == of}
        names = {name for arm, against, _ in asked.values() for name in (arm, against)}
        left_out: dict[str, list[int]] = {}
        for pair in self.runs.refused if of == "value" else ():
            left_out.setdefault(pair.arm, []).append(pair.seed)
        rules = self.rules if of == "value" else self.rules.model_copy(update={"margin": None})
        verdicts = judge(
            {
                name: self.runs.scores(
                    name, lambda run: _value(run, rules, of), left_out.get(name, ())
                )
                for name in names
            },
            {name: self._statement(arm, against, of) for name, (arm, against, _) in asked.items()},
            rules,
            self.size,
        )
        arms = {arm.name: arm for arm in self.runs.plan.arms}
        return {
            asked[name]: stored(ArmVerdict, verdict).qualified(
                self.runs.plan.shortcomings(arms[verdict.baseline], arms[verdict.arm])
            )
            for name, verdict in verdicts.items()
        }

    def _statement(self, arm: str, against: str, of: str) -> Statement:
        plan = self.runs.plan
        arms = {own.name: own for own in plan.arms}
        differing = plan.confounds_between(arms[against], arms[arm])
        unproven = self.runs.unproven.get(arm) or self.runs.unproven.get(against)
        # In a statement about values against the baseline, `_judge` leaves out the runs that cannot
        # be paired with the baseline's. Any other statement becomes unproven if the two arms' runs
        # of some seed cannot be paired.
        is_baseline = against == plan.baseline.name
        if unproven is None and (of == "gain" or not is_baseline):
            unproven = self.runs.why_unpaired(arm, against)
        of_value = of == "value"
        return Statement(
            arm=arm,
            baseline=against,
            confounds=tuple(map(str, differing)),
            together=plan.together(arms[against], arms[arm]),
            unproven=unproven,
            identical=_identical(self.runs, arm, against),
            about="these test examples" if of_value else "the split that selects the checkpoint",
            at_chance=of_value and all(_at_chance(self.runs, name) for name in (arm, against)),
            population=_population(self.runs, arm, against, self.rules.level / self.size)
            if of_value
            else None,
            retry=plan.retry,
        )


def _value(run: RunSummary, rules: Rules, of: str) -> float | None:
    """Return a run's metric or, for a gain, the change of the best value from first to last stage.

    On the log scale, the change is a ratio. Return None if the run lacks a value.
    """
    if of == "value":
        return run.metrics.get(rules.metric)
    first, last = run.stages[0].best, run.stages[-1].best
    if first is None or last is None:
        return None
    return last / first if rules.log else last - first


def _identical(runs: Runs, arm: str, against: str) -> bool:
    """Return whether, with every shared seed, the runs finished with the same best weights."""
    shared = [seed for seed in runs.seeds_of(arm) if seed in runs.seeds_of(against)]
    pairs = [(runs.summaries[arm, seed], runs.summaries[against, seed]) for seed in shared]
    return bool(pairs) and all(
        own.finished
        and own.weights_digest is not None
        and own.weights_digest == other.weights_digest
        for own, other in pairs
    )


def _at_chance(runs: Runs, arm: str) -> bool:
    """Return whether an arm's accuracy may be that of always predicting the most common class.

    The answer is True if the mean accuracy over seeds differs from that class's frequency by two of
    the frequency's standard errors at most. For a correlation, it is True if the interval over
    seeds includes 0. Other metrics have no known chance level, so for them it is False.
    """
    own_runs = [runs.summaries[arm, seed] for seed in runs.seeds_of(arm)]
    metric = runs.plan.rules.metric
    values = [value for run in own_runs
              if run.finished and (value := run.metrics.get(metric)) is not None]  # fmt: skip
    if metric == "pearson" and len(values) > 1:
        effect = paired(values, [0.0] * len(values))
        return effect.low <= 0 <= effect.high
    predictions = next(
        (stored_predictions for seed in runs.seeds_of(arm)
         if (stored_predictions := runs.records[arm, seed].predictions) is not None), None
    )  # fmt: skip
    if metric != "accuracy" or predictions is None or not values:
        return False
    chance = max(Counter(predictions.labels).values()) / len(predictions.labels)
    error = math.sqrt(chance * (1 - chance) / len(predictions.labels))
    return abs(fmean(values) - chance) <= 2 * error


def _population(runs: Runs, arm: str, against: str, alpha: float) -> Paired | None:
    """Estimate the difference in accuracy for other test examples; None if it is unknown."""
    if runs.plan.rules.metric != "accuracy":
        return None
    left_out = {pair.seed for pair in runs.refused if pair.arm in (arm, against)}
    rows = [
        tuple(_correct_predictions(runs.records[name, seed]) for name in (arm, against))
        for seed in runs.seeds_of(arm)
        if seed not in left_out and seed in runs.seeds_of(against)
    ]
    both = [(own, other) for own, other in rows if own is not None and other is not None]
    if len(both) < 2 or len(both[0][0]) < 2:
        return None
    return over_examples([own for own, _ in both], [other for _, other in both], alpha)


def _effects(runs: Runs, metric: str, rules: Rules) -> dict[str, Effect | None]:
    """Return the effect of every arm on a secondary metric; the intervals hold all at once."""
    plan = runs.plan
    own_rules = rules.model_copy(update={"metric": metric, **scale_of(metric), "margin": None})
    left_out: dict[str, list[int]] = {}
    for pair in runs.refused:
        left_out.setdefault(pair.arm, []).append(pair.seed)
    verdicts = judge(
        {
            arm.name: runs.scores(
                arm.name, lambda run: run.metrics.get(metric), left_out.get(arm.name, ())
            )
            for arm in plan.arms
        },
        {arm.name: Statement(arm.name, plan.baseline.name) for arm in plan.others},
        own_rules,
    )
    return {
        arm: None if verdict.paired is None else stored(Effect, verdict.paired)
        for arm, verdict in verdicts.items()
    }


def _assay(runs: Runs, assay: AssayRuns, verdicts: Judged) -> Assay:
    """Judge the baseline's shortened runs against its whole runs, by the same rules as an arm."""
    metric, baseline = verdicts.rules.metric, runs.plan.baseline.name
    values, missing = {}, {}
    for seed, record in assay.records.items():
        number = record.metrics.get(metric) if record.status == "finished" else None
        if number is None:
            missing[seed] = str(record.status)
        else:
            values[seed] = number
    base = runs.scores(baseline, lambda run: run.metrics.get(metric))
    harmed = "baseline with a planted harm"
    verdict = judge(
        {harmed: Scores(values, missing), baseline: replace(base, tried=())},
        {harmed: Statement(harmed, baseline, unproven=runs.why_unlike_baseline(assay.records))},
        verdicts.rules,
        verdicts.size,
    )[harmed]
    return Assay(assay.steps, assay.of, stored(ArmVerdict, verdict))


def _repeat(runs: Runs, again: RunRecord, folder: Path) -> Repeat:
    """Compare a second run of the baseline with the first run of the same seed."""
    seed = again.result.seed
    first = runs.summaries[runs.plan.baseline.name, seed]
    second = summarize(again, folder)
    return Repeat(
        seed=seed,
        folder=second.folder,
        status=second.status,
        metrics={
            metric: (value, second.metrics.get(metric)) for metric, value in first.metrics.items()
        },
        same_weights=first.weights_digest is not None
        and first.weights_digest == second.weights_digest,
    )


def _prediction_tests(runs: Runs) -> dict[str, tuple[PredictionTest, ...]]:
    """Run McNemar's test on the predictions of each pair of runs, by arm.

    The test compares two trained models, not two treatments, so no verdict uses it.
    """
    plan = runs.plan
    left_out = {(pair.arm, pair.seed) for pair in runs.refused}
    correct = {key: _correct_predictions(record) for key, record in runs.records.items()}
    tests: dict[str, list[PredictionTest]] = {}
    for arm in plan.others:
        for seed in plan.seeds:
            of_arm, of_base = (correct.get((name, seed)) for name in (arm.name, plan.baseline.name))
            if of_arm is not None and of_base is not None and (arm.name, seed) not in left_out:
                test = PredictionTest(seed=seed, **vars(mcnemar(of_arm, of_base)))
                tests.setdefault(arm.name, []).append(test)
    return {arm: tuple(arm_tests) for arm, arm_tests in tests.items()}


def _correct_predictions(record: RunRecord) -> list[bool] | None:
    """Return whether each example was predicted correctly; None if the run has no predictions."""
    if (predictions := record.predictions) is None:
        return None
    pairs = zip(predictions.labels, predictions.classes, strict=True)
    return [label == prediction for label, prediction in pairs]
