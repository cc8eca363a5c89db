"""The runs of a comparison, read once, and paired: a pair differs only in the treatment.

The seed, the data, the examples of every step that both runs took, the initial weights that neither
treatment changes, and the machine's settings must be equal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from frostlab.comparison.evidence import Parameters, RefusedPair, RunSummary, StageSummary
from frostlab.comparison.plan import Plan
from frostlab.comparison.tuning import Trials
from frostlab.comparison.verdict import Scores
from frostlab.records.folder import RunRecord
from frostlab.records.schema import ResumeEvent, Stage, StartEvent, StepEvent
from frostlab.text import typed

_MACHINE = ("device", "precision", "processes", "threads")


@dataclass(frozen=True)
class PairingFacts:
    """The facts about a run that decide which runs it can be paired with."""

    seed: int
    data: str  # digest of the prepared data
    weights: dict[str, str]  # digest of each part of the treated model before training
    touched: frozenset[str]  # names of the parts whose values the treatment replaced
    steps: int
    orders: dict[int, str]  # by step: a digest of the examples of every step up to it, in order
    machine: dict[str, tuple[str, ...]]  # by key: the distinct values over all starts and resumes

    @classmethod
    def of(cls, record: RunRecord) -> "PairingFacts":
        """Read the facts of a run from its record."""
        digests = record.digests
        starts = [*record.events(StartEvent), *record.events(ResumeEvent)]
        return cls(
            seed=record.result.seed,
            data=digests.data,
            weights=digests.weights,
            touched=frozenset(digests.touched),
            steps=record.result.steps,
            orders={event.step: event.order for event in record.events(StepEvent)},
            machine={
                key: tuple(sorted({str(getattr(start, key)) for start in starts}))
                for key in _MACHINE
            },
        )


def why_unpaired(first: PairingFacts, second: PairingFacts, vary: Iterable[str] = ()) -> str | None:
    """Return the first difference that prevents pairing two runs, or None if they form a pair.

    `vary` lists the settings that the plan compares. If one of them is a setting of the model, the
    initial weights may differ.
    """
    same_model = not any(key.partition(".")[0] == "model" for key in vary)
    return next(_differences(first, second, same_model), None)


def steps_compared(first: PairingFacts, second: PairingFacts) -> tuple[int, int]:
    """Return how many steps both runs took, and how many of them have examples that were compared.

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
        yield from _weight_differences(first, second)
    for step in sorted(first.orders.keys() & second.orders.keys()):
        a, b = first.orders[step], second.orders[step]
        if a != b:
            yield f"the order of examples differs by step {step} ({a} and {b})"
    for key in _MACHINE:
        a, b = (" then ".join(facts.machine[key]) for facts in (first, second))
        if a != b:
            yield f"{key} differs ({a} and {b})"


def _weight_differences(first: PairingFacts, second: PairingFacts) -> Iterator[str]:
    touched = first.touched | second.touched
    for name, digest in first.weights.items():
        if name not in touched and second.weights.get(name) != digest:
            yield f"the initial weights of {name} differ, though neither treatment changes them"
    for name in second.weights:
        if name not in first.weights and name not in touched:
            yield f"only one of the two runs has the weights {name}"


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison by arm and seed, each read once."""

    plan: Plan
    trials: Trials
    records: dict[tuple[str, int], RunRecord]  # of the trials that were chosen
    summaries: dict[tuple[str, int], RunSummary]
    tried: dict[str, tuple[dict[int, RunSummary], ...]]  # by arm: every trial, by seed
    facts: dict[tuple[str, int], PairingFacts]  # finished runs only
    refused: tuple[RefusedPair, ...]  # finished runs that cannot be paired with the baseline's

    @classmethod
    def read(cls, plan: Plan, trials: Trials, folder: Path) -> "Runs":
        """Read every run, and find the runs that cannot be paired with the baseline's."""
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
        refused = tuple(_refused_pairs(plan, facts))
        return cls(plan, trials, records, summaries, tried, facts, refused)

    def scores(
        self, arm: str, value: Callable[[RunSummary], float | None], left_out: Iterable[int] = ()
    ) -> Scores:
        """Return an arm's values; `value` reads one from a run, or None if it has none.

        `left_out` lists the seeds of runs that cannot be paired.
        """
        values, missing = {}, {}
        for seed in self.plan.seeds:
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
        # A setting with a run that is missing cannot be the best, as that run counts as the worst.
        whole = [by_seed for by_seed in tried if len(by_seed) == len(self.plan.seeds)]
        tried = whole or tried
        return Scores(values, missing, tuple(tried))


def _why_missing(run: RunSummary) -> str:
    if run.finished:
        return "ended without a finite value"
    return run.status if run.status in ("diverged", "failed") else "did not finish"


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
