"""Gathering of a comparison's evidence: read its runs, pair them by seed, and judge every arm.

An arm is a variant of the recipe, with one run per seed. A run of an arm is paired with the
baseline's run of the same seed, unless the two runs differ in more than the plan allows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from frostlab.comparison.evidence import (
    QUANTITIES,
    SCHEMA,
    Answer,
    ArmEvidence,
    ArmVerdict,
    ComparedOrder,
    Effect,
    Evidence,
    Parameters,
    PredictionTest,
    Quantity,
    RefusedPair,
    RoundTimes,
    RunSummary,
    SplitTests,
    StageSummary,
    StepTiming,
    SubjectTest,
    Summary,
    TunedSetting,
    stored,
)
from frostlab.comparison.oelm_json import have_equal_norms, oelm_arm, orthogonality_arms
from frostlab.comparison.pairing import PairingFacts, steps_compared, why_unpaired
from frostlab.comparison.plan import Contrast, Plan, Rules, confounds, rules_for
from frostlab.comparison.statistics import holm, mcnemar, paired, spread
from frostlab.comparison.verdict import judge, judge_family
from frostlab.flow.measurements import Flow, flows_of
from frostlab.recipe.settings import METRICS
from frostlab.records.folder import REPORTED, SCORES, RunRecord, read_scores
from frostlab.records.schema import Stage, read
from frostlab.storage import finite
from frostlab.text import typed

Records = Mapping[tuple[str, int], RunRecord]  # by arm and seed, or by arm and round
_FRONT = (0, 1)  # indices of the front layers


def gather(
    plan: Plan,
    folder: Path,
    records: Records,
    rounds: Records,
    *,
    look: int,
    jobs: int,
    tuning: Sequence[TunedSetting],
    timing: StepTiming | None,
) -> Evidence:
    """Return the evidence: runs, pairs, summaries, times, and verdicts for every metric.

    Args:
        folder: the comparison's folder, to which the paths of runs become relative.
        records: the runs that give the results, by arm and seed.
        rounds: the whole runs that were only timed, by arm and round.
        look: 1 if the results are judged for the first time, 2 after adding seeds, and so on.
        jobs: number of runs that shared the machine.
    """
    runs = Runs.read(plan, records, folder)
    metrics = METRICS[plan.recipe_of(plan.baseline, plan.seeds[0]).data.task]
    primary = plan.rules.metric
    rules = _rules_for(plan, primary, look)
    others = [metric for metric in metrics if metric != primary]
    return Evidence(
        schema=SCHEMA,
        plan=plan,
        baseline=plan.baseline.name,
        look=look,
        jobs=jobs,
        caution=next(run.caution for run in runs.summaries.values()),
        pairs=sum(
            runs.summaries[arm.name, seed].finished
            and runs.summaries[plan.baseline.name, seed].finished
            for arm in plan.others
            for seed in plan.seeds
        ),
        confounds={arm: tuple(map(str, keys)) for arm, keys in plan.confounds().items()},
        tuning=tuple(tuning),
        arms={arm.name: _arm(runs, arm.name, metrics) for arm in plan.arms},
        refused_pairs=runs.refused,
        partly_compared=tuple(_partly_compared(runs)),
        verdicts={
            metric: _verdicts(runs, _rules_for(plan, metric, look)) for metric in (primary, *others)
        },
        contrasts=contrasts(runs, rules),
        oelm=oelm_arm(plan),
        orthogonality=_orthogonality(runs, rules),
        equal_norms=have_equal_norms(plan, orthogonality_arms(plan)),
        mcnemar=_prediction_tests(runs),
        subjects=subject_tests(plan, records, runs.refused),
        flow=_gradient_flow(plan, records, runs),
        timing=timing,
        rounds=_round_times(
            plan, {key: summarize(record, folder) for key, record in rounds.items()}
        ),
    )


def _rules_for(plan: Plan, metric: str, look: int) -> Rules:
    """Return the plan's rules for its metric; others have no limits to hold."""
    if metric == plan.rules.metric:
        return plan.rules.model_copy(update={"look": look})
    return rules_for(metric, alpha=plan.rules.alpha, looks=plan.rules.looks, look=look)


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison by arm and seed, each read once."""

    plan: Plan
    records: Records
    summaries: dict[tuple[str, int], RunSummary]
    facts: dict[tuple[str, int], PairingFacts]  # finished runs only
    refused: tuple[RefusedPair, ...]  # finished runs that cannot be paired with the baseline's

    @classmethod
    def read(cls, plan: Plan, records: Records, folder: Path) -> "Runs":
        """Read every run, and find the runs that cannot be paired with the baseline's."""
        keys = [(arm.name, seed) for arm in plan.arms for seed in plan.seeds]
        summaries = {key: summarize(records[key], folder) for key in keys}
        facts = {key: PairingFacts.of(records[key]) for key in keys if summaries[key].finished}
        return cls(plan, records, summaries, facts, tuple(_refused_pairs(plan, facts)))

    def values(
        self, arms: Iterable[str], metric: str, left_out: Iterable[tuple[str, int]]
    ) -> tuple[dict[str, dict[int, float]], dict[str, list[int]]]:
        """Return two mappings by arm: a metric's value by seed, and the seeds without a value.

        `left_out` lists (arm, seed) of finished runs that appear in neither mapping.
        """
        left_out = set(left_out)
        values: dict[str, dict[int, float]] = {arm: {} for arm in arms}
        failed: dict[str, list[int]] = {arm: [] for arm in values}
        for arm in values:
            for seed in self.plan.seeds:
                run = self.summaries[arm, seed]
                value = run.metrics.get(metric)
                if not run.finished or value is None:
                    failed[arm].append(seed)
                elif (arm, seed) not in left_out:
                    values[arm][seed] = value
        return values, failed


def summarize(record: RunRecord, folder: Path) -> RunSummary:
    """Return the facts about a run that a comparison uses; its path is relative to `folder`."""
    result = record.result
    clocks, best, last = result.clocks, result.best, result.last
    parameters = result.parameters
    step_ms = clocks.step_ms
    return RunSummary(
        seed=result.seed,
        folder=str(record.folder.relative_to(folder)),
        status=result.status,
        error=result.error,
        attempts=1 + len(list(record.folder.glob("result-*.json"))),
        metrics=dict(record.metrics),
        best=best.value,
        final_loss=None if last is None else typed(last.get("loss"), int, float),
        steps=result.steps,
        stages=tuple(_stage(stage) for stage in result.stages),
        parameters=Parameters(parameters.total, parameters.trainable),
        total_seconds=clocks.total_seconds,
        train_seconds=clocks.train_seconds,
        validation_seconds=clocks.validation_seconds,
        epoch_seconds=tuple(clocks.epoch_seconds),
        step_ms=None if step_ms is None else step_ms.mean,
        clipped_steps=result.clipped_steps,
        weights_digest=result.weights_digest,
        recipe_digest=result.recipe_digest,
        caution=result.caution,
    )


def _stage(stage: Stage) -> StageSummary:
    best = stage.best
    return StageSummary(
        name=stage.name,
        metric=best.metric,
        best=best.value,
        epoch=best.epoch,
        seconds=stage.seconds,
        trainable=stage.trainable,
        total=stage.total,
    )


def _refused_pairs(
    plan: Plan, facts: Mapping[tuple[str, int], PairingFacts]
) -> Iterable[RefusedPair]:
    """Yield the finished runs that cannot be paired with the baseline's run, with the reason.

    A pair is also refused if its data differ from the first seed's data, which happens if the
    data's files changed between two calls.
    """
    baseline = {seed: facts[arm, seed] for arm, seed in facts if arm == plan.baseline.name}
    first = next(iter(baseline), None)
    for arm in plan.others:
        for seed, base in baseline.items():
            treated = facts.get((arm.name, seed))
            if treated is None or first is None:
                continue
            reason = why_unpaired(base, treated, plan.vary)
            if base.data != baseline[first].data:
                reason = f"the data differ from the data of seed {first}"
            if reason is not None:
                yield RefusedPair(arm.name, seed, reason)


def _partly_compared(runs: Runs) -> Iterable[ComparedOrder]:
    """Yield the pairs of runs whose examples could not be compared for every step of both."""
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
    """Summarize the finished runs of one arm."""
    own_runs = tuple(runs.summaries[name, seed] for seed in runs.plan.seeds)
    finished = [run for run in own_runs if run.finished]
    values = {
        metric: [value for run in finished if (value := run.metrics[metric]) is not None]
        for metric in metrics
    }
    arm = next(arm for arm in runs.plan.arms if arm.name == name)
    return ArmEvidence(
        does=runs.plan.recipe_of(arm, runs.plan.seeds[0]).surgery.description,
        runs=own_runs,
        metrics={metric: _summary(numbers) for metric, numbers in values.items() if numbers},
        parameters=next((run.parameters for run in finished), None),
        seconds=_summary([run.total_seconds for run in finished]) if finished else None,
    )


def _summary(values: Sequence[float]) -> Summary:
    return stored(Summary, spread(values))


def _verdicts(runs: Runs, rules: Rules) -> dict[str, ArmVerdict]:
    """Judge every arm against the baseline on one metric."""
    plan = runs.plan
    left_out = [(pair.arm, pair.seed) for pair in runs.refused]
    values, failed = runs.values([arm.name for arm in plan.arms], rules.metric, left_out)
    confounding = {arm: list(map(str, found)) for arm, found in plan.confounds().items()}
    verdicts = judge(values, plan.baseline.name, rules, confounds=confounding, failed=failed)
    return {arm: stored(ArmVerdict, verdict) for arm, verdict in verdicts.items()}


def contrasts(runs: Runs, rules: Rules) -> tuple[Answer, ...]:
    """Answer the plan's questions, with one Holm correction for values and one for gains."""
    verdicts: dict[str, ArmVerdict] = {}
    for of in ("value", "gain"):
        asked = [contrast for contrast in runs.plan.contrasts if contrast.of == of]
        if asked:
            verdicts |= _judge_contrasts(runs, asked, rules)
    return tuple(
        Answer(contrast.question, contrast.of, verdicts[contrast.question])
        for contrast in runs.plan.contrasts
    )


def _judge_contrasts(runs: Runs, asked: Sequence[Contrast], rules: Rules) -> dict[str, ArmVerdict]:
    """Return the verdict on each question; all of them are about values, or all about gains."""
    plan = runs.plan
    arms = {arm.name: arm for arm in plan.arms}
    names = {name for contrast in asked for name in (contrast.arm, contrast.against)}
    values: dict[str, dict[int, float]] = {name: {} for name in names}
    failed: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        for seed in plan.seeds:
            value = _contrast_value(runs.summaries[name, seed], rules, asked[0].of)
            if value is None:
                failed[name].append(seed)
            else:
                values[name][seed] = value
    unproven = {contrast.question: _unpaired_seed(runs, contrast) for contrast in asked}
    verdicts = judge_family(
        values,
        {contrast.question: (contrast.arm, contrast.against) for contrast in asked},
        rules.model_copy(update={"noninferior": None}),
        "questions",
        confounds={
            contrast.question: [
                str(confound)
                for confound in plan.confounds_between(arms[contrast.against], arms[contrast.arm])
            ]
            for contrast in asked
        },
        failed=failed,
        unproven={question: reason for question, reason in unproven.items() if reason},
    )
    return {question: stored(ArmVerdict, verdict) for question, verdict in verdicts.items()}


def _contrast_value(run: RunSummary, rules: Rules, of: str) -> float | None:
    """Return a run's metric or, for a gain, the change of the best value from first to last stage.

    On the log scale, the change is a ratio. Return None if the run did not finish or lacks a value.
    """
    if not run.finished:
        return None
    if of == "value":
        return run.metrics.get(rules.metric)
    first, last = run.stages[0].best, run.stages[-1].best
    if first is None or last is None:
        return None
    return last / first if rules.log else last - first


def _unpaired_seed(runs: Runs, contrast: Contrast) -> str | None:
    """Return why the two arms of a contrast cannot be paired, for the first such seed, or None."""
    for seed in runs.plan.seeds:
        arm = runs.facts.get((contrast.arm, seed))
        against = runs.facts.get((contrast.against, seed))
        if arm is not None and against is not None:
            reason = why_unpaired(against, arm, runs.plan.vary)
            if reason is not None:
                return f"seed {seed}: {reason}"
    return None


def _orthogonality(runs: Runs, rules: Rules) -> ArmVerdict | None:
    """Judge the arm with orthogonal query and key against the arm with random ones.

    Both arms freeze these weights. Return None unless the plan has both arms.
    """
    plan = runs.plan
    arms = {arm.name: arm for arm in plan.arms}
    names = orthogonality_arms(plan)
    if names is None:
        return None
    arm, random = names
    left_out = [(pair.arm, pair.seed) for pair in runs.refused]
    for seed in plan.seeds:
        facts, random_facts = (runs.facts.get((name, seed)) for name in (arm, random))
        if facts is not None and random_facts is not None and why_unpaired(random_facts, facts):
            left_out.append((arm, seed))
    values, failed = runs.values(names, rules.metric, left_out)
    tuned = [tune.key for tune in plan.tune]
    differing = confounds(plan.recipe_of(arms[random], 0), plan.recipe_of(arms[arm], 0))
    confounding = [str(confound) for confound in differing if confound.key not in tuned]
    verdicts = judge(values, random, rules, confounds={arm: confounding}, failed=failed)
    return stored(ArmVerdict, verdicts[arm])


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
            of_arm, of_base = correct[arm.name, seed], correct[plan.baseline.name, seed]
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


def _round_times(plan: Plan, rounds: Mapping[tuple[str, int], RunSummary]) -> dict[str, RoundTimes]:
    """Return the total times of the timed whole runs by arm, paired by round with the baseline."""
    if not rounds:
        return {}
    seconds = {
        arm.name: [rounds[arm.name, number].total_seconds for number in range(plan.rounds)]
        for arm in plan.arms
    }
    baseline = plan.baseline.name
    return {
        arm: RoundTimes(
            seconds=tuple(own),
            paired=None
            if arm == baseline
            else stored(Effect, paired(own, seconds[baseline], log=True)),
            finished=all(rounds[arm, number].finished for number in range(plan.rounds)),
        )
        for arm, own in seconds.items()
    }


def subject_tests(
    plan: Plan, records: Records, refused: Iterable[RefusedPair]
) -> dict[str, SplitTests]:
    """Test EEG decoders on every split: arm against baseline by subject, and against ridge by seed.

    Each subject counts once, with its mean Fisher z over the seeds that both arms have. Runs of
    other tasks have no file of scores and are skipped.
    """
    left_out = {(pair.arm, pair.seed) for pair in refused}
    scores = {
        (arm.name, seed): read_scores(records[arm.name, seed].folder)
        for arm in plan.arms
        for seed in plan.seeds
        if (records[arm.name, seed].folder / SCORES).exists() and (arm.name, seed) not in left_out
    }
    tests = {}
    for split in REPORTED:
        of_split = {key: splits[split] for key, splits in scores.items() if split in splits}
        if of_split:
            tests[split] = _split_tests(plan, of_split)
    return tests


def _split_tests(plan: Plan, scores: Mapping[tuple[str, int], Mapping[str, Any]]) -> SplitTests:
    """Run the tests of one split, given the scores of `model` and `ridge` by arm and seed."""
    by_arm = {
        arm.name: {seed: decoders for (name, seed), decoders in scores.items() if name == arm.name}
        for arm in plan.arms
    }
    ridge = {
        arm: stored(Effect, paired(*(
            [decoders[decoder].summary.mean for decoders in by_seed.values()]
            for decoder in ("model", "ridge")
        )))
        for arm, by_seed in by_arm.items()
    }  # fmt: skip
    tests = {}
    for arm in plan.others:
        treated, base = by_arm[arm.name], by_arm[plan.baseline.name]
        both = [seed for seed in treated if seed in base]
        tests[arm.name] = _subject_test(
            [_subject_z(treated[seed]["model"]) for seed in both],
            [_subject_z(base[seed]["model"]) for seed in both],
        )
    adjusted = holm(
        {arm: math.nan if (p := test["p"]) is None else p for arm, test in tests.items()}
    )
    return SplitTests(
        subjects={
            arm: read(SubjectTest, finite(test | {"p_adjusted": adjusted[arm]}), "subjects")
            for arm, test in tests.items()
        },
        ridge=ridge,
    )


def _subject_z(scores: Any) -> dict[str, float]:
    """Return Fisher's z by subject; unlike r, it is close to normal, so it can be averaged."""
    from frostlab.envelopes.correlation import fisher_z

    return {score.subject: float(fisher_z(score.r)) for score in scores.subjects}


def _subject_test(
    arm: Sequence[dict[str, float]], base: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Compare an arm with the baseline by subject: t test on z, signed-rank test on r.

    Each item of `arm` and `base` holds the z by subject of one seed.
    """
    from scipy import stats

    subjects = sorted(arm[0]) if arm else []
    a, b = (
        np.array([np.mean([z[subject] for z in by_seed]) for subject in subjects])
        for by_seed in (arm, base)
    )
    test = paired(a, b)
    gaps = np.tanh(a) - np.tanh(b)
    has_ranks = len(subjects) > 1 and gaps.any()
    return {
        "n": len(subjects),
        "seeds": len(arm),
        "better": int((a > b).sum()),
        "r": float(np.tanh(a.mean()) - np.tanh(b.mean())) if subjects else None,
        "z": asdict(test),
        "p": None if math.isnan(test.p) else test.p,
        "p_signed": float(stats.wilcoxon(gaps).pvalue) if has_ranks else None,
    }


def _gradient_flow(plan: Plan, records: Records, runs: Runs) -> dict[str, dict[str, Quantity]]:
    """Return the gradient-flow quantities by arm; empty if the recipe does not measure them."""
    if plan.recipe_of(plan.baseline, plan.seeds[0]).watch is None:
        return {}
    measured = {
        arm.name: {
            seed: _measure_flow(records[arm.name, seed].folder)
            for seed in plan.seeds
            if runs.summaries[arm.name, seed].finished
        }
        for arm in plan.arms
    }
    baseline = measured[plan.baseline.name]
    return {
        arm: {name: _quantity(own, baseline, name) for name in QUANTITIES}
        for arm, own in measured.items()
    }


def _measure_flow(folder: Path) -> dict[str, float]:
    """Return the gradient-flow quantities of a run's last stage, if they are positive and finite.

    They are the gradient size of the front layers relative to the head's, the change of the front
    weights' range, and the update/weight ratio of the front layers.
    """
    flow = list(flows_of(folder).values())[-1]
    ends = flow.depth_ratios()
    values = (ends.front_ratio, ends.weight_change, _front_update(flow))
    return {
        name: value
        for name, value in zip(QUANTITIES, values, strict=True)
        if math.isfinite(value) and value > 0
    }


def _front_update(flow: Flow) -> float:
    """Return the update/weight ratio of the front: the median over its parts, then over reports."""
    front = [i for i, part in enumerate(flow.parts) if part.layer in _FRONT]
    medians = []
    for report in flow.reports:
        ratios = [ratio for ratio in map(report.ratio, front) if not math.isnan(ratio)]
        medians += [median(ratios)] if ratios else []
    return median(medians) if medians else math.nan


def _quantity(
    own: Mapping[int, dict[str, float]], baseline: Mapping[int, dict[str, float]], name: str
) -> Quantity:
    """Summarize one quantity over an arm's seeds, and compare it with the baseline by seed."""
    values = {seed: flow[name] for seed, flow in own.items() if name in flow}
    both = [seed for seed in values if name in baseline.get(seed, {})]
    ratio = paired([values[s] for s in both], [baseline[s][name] for s in both], log=True)
    return Quantity(
        summary=_summary(list(values.values())) if values else None,
        against=None if own is baseline else stored(Effect, ratio),
    )
