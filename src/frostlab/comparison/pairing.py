"""Pairing of runs: two runs with the same seed form a pair if only the treatment differs.

The seed, the data, the examples of every step that both runs took, the initial weights that neither
treatment changes, and the machine's settings must be equal.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from frostlab.records.folder import RunRecord
from frostlab.records.schema import ResumeEvent, StartEvent, StepEvent

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
