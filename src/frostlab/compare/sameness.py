"""Two runs are a pair if only the treatment tells them apart; digests say so."""

from collections.abc import Iterable, Iterator
from typing import Any

from frostlab.records.record import RunRecord

_SHAPE = ("device", "precision", "processes", "threads")


def why_unpaired(one: RunRecord, other: RunRecord, vary: Iterable[str] = ()) -> str | None:
    """The first thing that keeps two runs from being a pair, or None.

    Where arms vary in their model, they begin with other weights.
    """
    models_vary = any(key.partition(".")[0] == "model" for key in vary)
    return next(_differences(one, other, weights=not models_vary), None)


def _differences(one: RunRecord, other: RunRecord, weights: bool) -> Iterator[str]:
    if one.result["seed"] != other.result["seed"]:
        yield f"the seeds differ ({one.result['seed']} and {other.result['seed']})"
    mine, theirs = one.digests, other.digests
    if mine["data"] != theirs["data"]:
        yield f"the data differ ({mine['data']} and {theirs['data']})"
    if weights:
        yield from _other_weights(mine, theirs)
    for epoch, (a, b) in enumerate(zip(_orders(one), _orders(other), strict=False)):
        if a != b:
            yield f"the order of examples differs in epoch {epoch + 1} ({a} and {b})"
    for key in _SHAPE:
        a, b = (sorted({str(began[key]) for began in _begun(each)}) for each in (one, other))
        if a != b:
            yield f"{key} differs ({' then '.join(a)} and {' then '.join(b)})"


def _other_weights(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    touched = {*mine["touched"], *theirs["touched"]}
    for key, value in mine["weights"].items():
        if key not in touched and theirs["weights"].get(key) != value:
            yield f"the initial weights of {key} differ, which neither treatment touches"
    strange = [key for key in theirs["weights"] if key not in {*mine["weights"], *touched}]
    if strange:
        yield f"only one has the weights {strange[0]}"


def _orders(record: RunRecord) -> list[Any]:
    return [event["order"] for event in record.events() if event["kind"] == "epoch"]


def _begun(record: RunRecord) -> list[dict[str, Any]]:
    return [event for event in record.events() if event["kind"] in ("start", "resume")]
