"""The runs of a comparison, read once, and paired: a pair differs only as the plan declares.

Both runs of a pair must have the same seed, the same data in the same order, the same kind of
device, precision, number of processes and threads, and the same libraries and frostlab code. The
order is compared up to the last step at which both runs recorded a digest of it. Unless the plan
varies the model, the pretrained weights must be equal, too, and so must the initial weights that
neither treatment changes.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from frostlab.comparison.evidence import (
    Evidence,
    Made,
    Parameters,
    RefusedPair,
    RunSummary,
    StageSummary,
    VariedFact,
)
from frostlab.comparison.judging.verdict import Scores
from frostlab.comparison.plan import AFTER_THE_FACT, Plan
from frostlab.comparison.tuning import Trial, Trials
from frostlab.errors import BadInput
from frostlab.records.environment import comparable_facts, machine_line
from frostlab.records.folder import RunRecord
from frostlab.records.manifest import check_unchanged
from frostlab.records.schema import (
    DataRecord,
    EvaluationEvent,
    ResumeEvent,
    Stage,
    StartEvent,
    StepEvent,
)
from frostlab.text import typed
from frostlab.training.evaluate import COMPUTED, Totals

UNFINISHED = "unfinished"  # status of a run that has no result yet
_MACHINE = ("device", "precision", "processes", "threads")


@dataclass(frozen=True)
class PairingFacts:
    """The facts about a run that decide which runs it can be paired with."""

    seed: int
    data: str  # digest of the prepared data
    source: str | None  # digest of the files of pretrained weights; None if weights are drawn
    weights: dict[str, str]  # part of the treated model → digest of its values before training
    touched: frozenset[str]  # names of the parts (weights) whose values the treatment replaced
    steps: int
    orders: dict[int, str]  # step → digest of the examples of all steps up to it, in order
    # name of a fact about machine or software → its distinct values over all starts and resumes
    environment: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, record: RunRecord) -> "PairingFacts":
        """Read the facts of a run from its record."""
        digests = record.digests
        starts = [*record.events(StartEvent), *record.events(ResumeEvent)]
        return cls(
            seed=record.result.seed,
            data=digests.data,
            source=digests.source,
            weights=digests.weights,
            touched=frozenset(digests.touched),
            steps=record.result.steps,
            orders={event.step: event.order for event in record.events(StepEvent)},
            environment=_distinct(
                [{key: str(getattr(start, key)) for key in _MACHINE} for start in starts]
            )
            | environment_facts(record),
        )


def environment_facts(record: RunRecord) -> dict[str, tuple[str, ...]]:
    """Return the environment's facts that must be equal in a pair: name → values in this run.

    A fact has several values if it changed between the run's start and a resume.
    """
    return _distinct([comparable_facts(values) for values in record.environments])


def _distinct(facts: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for by_name in facts for name in by_name)
    return {name: tuple(sorted({by_name.get(name, "none") for by_name in facts})) for name in names}


def why_unpaired(first: PairingFacts, second: PairingFacts, vary: Iterable[str] = ()) -> str | None:
    """Return the first difference that prevents pairing two runs, or None if they form a pair.

    `vary` lists the settings that the plan compares. If one of them is a setting of the model, the
    pretrained weights and the initial weights may differ.
    """
    same_model = not any(key.partition(".")[0] == "model" for key in vary)
    return next(_differences(first, second, same_model), None)


def steps_compared(first: PairingFacts, second: PairingFacts) -> tuple[int, int]:
    """Return how many steps both runs took, and in how many of them the examples were compared.

    The second number is smaller if the shorter run ended where the other recorded no digest.
    """
    compared = max(first.orders.keys() & second.orders.keys(), default=0)
    return min(first.steps, second.steps), compared


def _differences(first: PairingFacts, second: PairingFacts, same_model: bool) -> Iterator[str]:
    if first.seed != second.seed:
        yield f"the seeds differ ({first.seed} and {second.seed})"
    if first.data != second.data:
        yield f"the data differ ({first.data} and {second.data})"
    if same_model:
        if first.source != second.source:
            yield f"the pretrained weights differ ({first.source} and {second.source})"
        yield from _weight_differences(first, second)
    for step in sorted(first.orders.keys() & second.orders.keys()):
        a, b = first.orders[step], second.orders[step]
        if a != b:
            yield f"the order of examples differs in the first {step} steps ({a} and {b})"
    for key in first.environment | second.environment:
        a, b = (", ".join(facts.environment.get(key, ["none"])) for facts in (first, second))
        if a != b:
            yield f"{key} differs ({a} and {b})"


def _weight_differences(first: PairingFacts, second: PairingFacts) -> Iterator[str]:
    touched = first.touched | second.touched
    for name, digest in first.weights.items():
        if name not in touched and second.weights.get(name, digest) != digest:
            yield f"the initial weights of {name} differ, though neither treatment changes them"
    for name in sorted(first.weights.keys() ^ second.weights.keys()):
        if name not in touched:
            yield f"only one of the two runs has the weights {name}"


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison by arm and seed, each read once."""

    plan: Plan
    trials: Trials
    # if settings are tuned: the run with the values that were chosen for the seed
    records: dict[tuple[str, int], RunRecord]
    summaries: dict[tuple[str, int], RunSummary]
    # arm → for each combination of tuned values, the runs by seed; empty without tuning
    tried: dict[str, tuple[dict[int, RunSummary], ...]]
    facts: dict[tuple[str, int], PairingFacts]  # finished runs only
    refused: tuple[RefusedPair, ...]  # finished runs that cannot be paired with the baseline's
    changed: dict[tuple[str, int], str]  # run → how data or pretrained weights changed (`_Sources`)
    unproven: dict[str, str]  # arm → why no verdict can follow from its tuning
    varied: tuple[VariedFact, ...]  # facts about the environment that are not equal in all runs

    @classmethod
    def read(cls, plan: Plan, trials: Trials, folder: Path) -> "Runs":
        """Read every run, and determine which cannot be paired with the baseline's."""
        records = trials.results()
        summaries = {key: summarize(record, folder) for key, record in records.items()}
        facts = {
            key: PairingFacts.of(records[key])
            for key, summary in summaries.items()
            if summary.finished
        }
        tried = {
            arm.name: tuple(
                {
                    seed: summarize(trials.records[arm.name, trial, seed], folder)
                    for seed in plan.seeds
                }
                for trial in trials.trials
            )
            for arm in plan.arms
            if len(trials.trials) > 1
        }
        sources = _Sources.first(plan, facts)
        changed = {
            key: reason
            for key, own in facts.items()
            if (reason := sources.why_changed(key[0], own.data, own.source)) is not None
        }
        tuning = {  # every finished trial; empty without tuning
            key: record
            for key, record in trials.records.items()
            if plan.tune and record.status == "finished"
        }
        environments = [(seed, own.environment) for (_, seed), own in facts.items()]
        environments += [(key[2], environment_facts(record)) for key, record in tuning.items()]
        return cls(
            plan=plan,
            trials=trials,
            records=records,
            summaries=summaries,
            tried=tried,
            facts=facts,
            refused=tuple(_refused_pairs(plan, facts, changed)),
            changed=changed,
            unproven=trials.unproven | _changed_trials(sources, tuning),
            varied=_varied_facts(environments),
        )

    def seeds_of(self, arm: str) -> list[int]:
        """Return the seeds of an arm's runs; with `compare --runs`, some may be missing."""
        return [seed for seed in self.plan.seeds if (arm, seed) in self.summaries]

    def finished(self, arm: str, seed: int) -> bool:
        """Return whether an arm has a run with this seed that finished."""
        return (arm, seed) in self.summaries and self.summaries[arm, seed].finished

    @property
    def caution(self) -> str | None:
        """The warnings to show with every number: on the choice of runs, their scale and data."""
        chosen = f"{AFTER_THE_FACT}, when their results could be seen" if self.plan.runs else None
        about_data = next(run.caution for run in self.summaries.values())
        return "; ".join(filter(None, [chosen, about_data])) or None

    @property
    def data(self) -> DataRecord | None:
        """The data of the first run, which all compared runs share; None if it is unreadable."""
        with suppress(BadInput):
            return next(iter(self.records.values())).data
        return None

    def why_unpaired(self, arm: str, against: str) -> str | None:
        """Return the first seed whose runs of two arms cannot be paired, and why; else None."""
        for seed in self.plan.seeds:
            own, other = self.facts.get((arm, seed)), self.facts.get((against, seed))
            if own is not None and other is not None:
                changed = (self.changed.get((name, seed)) for name in (arm, against))
                reasons = (why_unpaired(other, own, self.plan.vary), *changed)
                if (reason := next(filter(None, reasons), None)) is not None:
                    return f"seed {seed}: {reason}"
        return None

    def why_unlike_baseline(self, records: Mapping[int, RunRecord]) -> str | None:
        """Return why one of these runs, by seed, cannot be paired with the baseline's, or None."""
        for seed, record in records.items():
            base = self.facts.get((self.plan.baseline.name, seed))
            if base is not None and record.status == "finished":
                reason = why_unpaired(base, PairingFacts.of(record))
                if reason is not None:
                    return f"seed {seed}: {reason}"
        return None

    def scores(
        self, arm: str, value: Callable[[RunSummary], float | None], left_out: Iterable[int] = ()
    ) -> Scores:
        """Return an arm's scores; `value` reads a run's value, or None if it has none.

        `left_out` lists seeds to ignore, because their runs cannot be paired.
        """
        values, missing = {}, {}
        for seed in self.seeds_of(arm):
            run = self.summaries[arm, seed]
            number = value(run) if run.finished else None
            if seed in left_out:
                continue
            if number is None:
                missing[seed] = _why_missing(run)
            else:
                values[seed] = number
        tried = [
            {
                seed: number
                for seed, run in by_seed.items()
                if run.finished and (number := value(run)) is not None
            }
            for by_seed in self.tried.get(arm, ())
        ]
        # Drop the combinations of tuned values with a missing run, unless every combination has
        # one. A missing run counts as the worst, so its combination cannot be the best.
        whole = [by_seed for by_seed in tried if len(by_seed) == len(self.plan.seeds)]
        tried = whole or tried
        return Scores(values, missing, tuple(tried))


def _why_missing(run: RunSummary) -> str:
    if run.finished:
        return "ended without a finite value"
    return run.status if run.status in ("diverged", "failed") else "did not finish"


def status_of(record: RunRecord) -> str:
    """Return how a run ended, or "unfinished" if it has no result yet."""
    return record.status if (record.folder / "result.json").exists() else UNFINISHED


def first_run(plan: Plan, trials: Trials) -> RunRecord:
    """Return the baseline's run with the first of its seeds."""
    runs = trials.results()
    return next(runs[key] for seed in plan.seeds if (key := (plan.baseline.name, seed)) in runs)


def how_made(plan: Plan, trials: Trials) -> Made:
    """Return how a comparison was made, from the records of its runs."""
    records = trials.records.values()
    results = [record.result for record in records if status_of(record) != UNFINISHED]
    first = first_run(plan, trials)
    values, digests = first.environment, first.digests
    versions, code = (
        value if isinstance(value := values.get(key), dict) else {} for key in ("versions", "code")
    )
    commit, digest = (code.get(key) for key in ("commit", "digest"))
    return Made(
        plan=plan.digest,
        data=digests.data,
        source=digests.source,
        revision=digests.revision,
        began=min(result.started for result in results),
        ended=max(result.ended for result in results),
        machine=machine_line(values),
        versions={name: str(version) for name, version in versions.items() if version},
        commit=None if commit is None else str(commit),
        code=None if digest is None else str(digest),
        command=str(values.get("command")),
    )


def unlike(first: Evidence, again: Evidence) -> list[str]:
    """Say whether a comparison that was made again has the metrics of the first.

    Return one line about the metrics and, if some differ, one line for each difference in the data,
    the pretrained weights, the machine, the code and the library versions.
    """
    differing, total = list[str](), 0
    for arm, evidence in first.arms.items():
        other_runs = again.arms[arm].runs if arm in again.arms else ()
        metrics = {run.seed: run.metrics for run in other_runs}
        for run in evidence.runs:
            for metric, value in run.metrics.items():
                total += 1
                other = metrics.get(run.seed, {}).get(metric)
                if value != other:
                    differing.append(f"{arm} seed {run.seed}: {metric} {value} and now {other}")
    if not differing:
        return [f"all {total} metrics are equal to those of the first comparison, in every digit"]
    lines = [f"{len(differing)} of {total} metrics differ, such as {differing[0]}"]
    made, now = first.made, again.made
    facts = {
        "data": (made.data, now.data),
        "pretrained weights": (made.source, now.source),
        "machine": (made.machine, now.machine),
        "frostlab's code": (made.code, now.code),
        **{
            name: (made.versions.get(name), now.versions.get(name))
            for name in made.versions | now.versions
        },
    }
    return lines + [f"{name}: {a} and now {b}" for name, (a, b) in facts.items() if a != b]


def check_records(records: Iterable[RunRecord]) -> None:
    """Refuse a run if a file was changed, or if its metrics do not follow from its other files.

    Only runs that finished or diverged are checked, because others can still be resumed.
    """
    for record in records:
        if (status := status_of(record)) in ("finished", "diverged"):
            check_unchanged(record.folder)
        if status == "finished":
            _check_report(record)
            _check_metrics(record)


def _check_report(record: RunRecord) -> None:
    """Refuse a result.json whose reported metrics are not those of events.jsonl."""
    evaluations = record.events(EvaluationEvent)  # only the last, on `report`, names one
    report = next((event for event in evaluations if event.checkpoint is not None), None)
    if report is None or report.metrics != record.result.report:
        raise BadInput(
            f"{record.folder / 'result.json'}: its reported metrics are not those in events.jsonl; "
            f"delete {record.folder} to train it again"
        )


def _check_metrics(record: RunRecord) -> None:
    """Refuse a result whose accuracy or macro F1 does not follow from the run's predictions."""
    predictions = record.predictions
    if predictions is None or not predictions.labels:
        return
    classes = sorted({*predictions.labels, *predictions.classes})
    place = {number: index for index, number in enumerate(classes)}
    confusion = [[0] * len(classes) for _ in classes]
    for label, predicted in zip(predictions.labels, predictions.classes, strict=True):
        confusion[place[label]][place[predicted]] += 1
    correct = sum(confusion[i][i] for i in range(len(classes)))
    totals = Totals(math.nan, len(predictions.labels), correct, confusion)
    for name in ("accuracy", "macro_f1"):
        value, expected = record.metrics.get(name), COMPUTED["classification"][name](totals)
        if value is None or not math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12):
            raise BadInput(
                f"{record.folder / 'result.json'}: report.{name} is {value}, but predictions.json "
                f"gives {expected:.6g}; delete {record.folder} to train it again"
            )


def summarize(record: RunRecord, folder: Path) -> RunSummary:
    """Return what a comparison uses of a run; the run's path is relative to `folder`."""
    if status_of(record) == UNFINISHED:
        return _unfinished(record, folder)
    result = record.result
    clocks, best, last = result.clocks, result.best, result.last
    parameters = result.parameters
    step_ms, utilisation = clocks.step_ms, result.telemetry.gpu_utilisation_percent
    return RunSummary(
        seed=result.seed,
        folder=os.path.relpath(record.folder, folder),
        status=result.status,
        error=result.error,
        attempts=_attempts(record),
        metrics=dict(record.metrics),
        best=best.value,
        final_loss=None if last is None else typed(last.get("loss"), int, float),
        steps=result.steps,
        epochs=sum(stage.epochs for stage in result.stages),
        stages=tuple(_stage(stage) for stage in result.stages),
        parameters=Parameters(parameters.total, parameters.trainable),
        total_seconds=clocks.total_seconds,
        train_seconds=clocks.train_seconds,
        validation_seconds=clocks.validation_seconds,
        evaluation_seconds=tuple(clocks.evaluation_seconds),
        epoch_seconds=tuple(clocks.epoch_seconds),
        step_ms=None if step_ms is None else step_ms.mean,
        gpu_utilisation=None if utilisation is None else utilisation.mean,
        clipped_steps=result.clipped_steps,
        weights_digest=result.weights_digest,
        recipe_digest=result.recipe_digest,
        caution=result.caution,
    )


def _unfinished(record: RunRecord, folder: Path) -> RunSummary:
    """Return the facts about a run that has no result yet."""
    events = record.events()
    return RunSummary(
        seed=record.start.seed,
        folder=os.path.relpath(record.folder, folder),
        status=UNFINISHED,
        error=None,
        attempts=_attempts(record),
        metrics={},
        best=None,
        final_loss=None,
        steps=events[-1].step,
        epochs=0.0,
        stages=(),
        parameters=None,
        total_seconds=0.0,
        train_seconds=0.0,
        validation_seconds=0.0,
        evaluation_seconds=(),
        epoch_seconds=(),
        step_ms=None,
        gpu_utilisation=None,
        clipped_steps=None,
        weights_digest=None,
        recipe_digest=record.start.recipe_digest,
        caution=record.start.caution,
    )


def _attempts(record: RunRecord) -> int:
    """Count the attempts at a run; each new one renames the last one's result to result-N.json."""
    return 1 + len(list(record.folder.glob("result-*.json")))


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


@dataclass(frozen=True)
class _Sources:
    """The digests that a run must have; a different one shows that files changed between two runs.

    The data of all runs must be those of the first finished run, and the pretrained weights of an
    arm's runs must be those of the arm's first finished run.
    """

    data: tuple[str, str] | None  # name of the run, digest of its data; None if no run finished
    weights: dict[str, tuple[int, str | None]]  # arm → seed of the run, digest of its weights

    @classmethod
    def first(cls, plan: Plan, facts: Mapping[tuple[str, int], PairingFacts]) -> "_Sources":
        """Take the digests of the first finished runs; the baseline's runs come first."""
        ordered = sorted(facts, key=lambda key: key[0] != plan.baseline.name)
        weights: dict[str, tuple[int, str | None]] = {}
        for arm, seed in ordered:
            weights.setdefault(arm, (seed, facts[arm, seed].source))
        data = next(((f"{arm}, seed {seed}", facts[arm, seed].data) for arm, seed in ordered), None)
        return cls(data, weights)

    def why_changed(self, arm: str, data: str, source: str | None) -> str | None:
        """Return which of a run's digests is not the one that it must have, or None."""
        if self.data is not None and data != self.data[1]:
            return f"the data differ from those of the first finished run ({self.data[0]})"
        if arm in self.weights and source != self.weights[arm][1]:
            return f"the pretrained weights differ from those of {arm}, seed {self.weights[arm][0]}"
        return None


def _changed_trials(
    sources: _Sources, records: Mapping[tuple[str, Trial, int], RunRecord]
) -> dict[str, str]:
    """Return the arms that were tuned with other data or pretrained weights, with the reason."""
    reasons: dict[str, str] = {}
    for (arm, _, _), record in records.items():
        digests = record.digests
        if (reason := sources.why_changed(arm, digests.data, digests.source)) is not None:
            tuned = f"{arm} was tuned with a run that does not fit, {record.folder.name}"
            reasons.setdefault(arm, f"{tuned}: {reason}")
    return reasons


def _varied_facts(
    environments: Iterable[tuple[int, Mapping[str, tuple[str, ...]]]],
) -> tuple[VariedFact, ...]:
    """Return the facts that are not the same in all runs, given each run's seed and facts."""
    seeds: dict[str, dict[str, set[int]]] = {}  # fact → value → seeds
    for seed, facts in environments:
        for name, values in facts.items():
            seeds.setdefault(name, {}).setdefault(", ".join(values), set()).add(seed)
    return tuple(
        VariedFact(name, {value: tuple(sorted(own)) for value, own in by_value.items()})
        for name, by_value in seeds.items()
        if len(by_value) > 1
    )


def _refused_pairs(
    plan: Plan,
    facts: Mapping[tuple[str, int], PairingFacts],
    changed: Mapping[tuple[str, int], str],
) -> Iterable[RefusedPair]:
    """Yield the finished runs that cannot be paired with the baseline's run, with the reason."""
    for arm in plan.others:
        for seed in plan.seeds:
            base, treated = facts.get((plan.baseline.name, seed)), facts.get((arm.name, seed))
            if base is None or treated is None:
                continue
            reason = changed.get((plan.baseline.name, seed))
            reason = reason or why_unpaired(base, treated, plan.vary)
            reason = reason or changed.get((arm.name, seed))
            if reason is not None:
                yield RefusedPair(arm.name, seed, reason)
