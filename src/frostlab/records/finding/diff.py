"""The differences between two runs: settings, data, code, environment, metrics and losses."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.environment import comparable_facts, machine_line, read_environment
from frostlab.records.finding.index import Summary, read_run
from frostlab.records.folder import RunRecord
from frostlab.records.schema import StepEvent
from frostlab.text import columns, number, plain, typed, wrapped

_CONDITIONS = ("device", "precision", "processes", "threads")  # keys of the start event
Values = dict[str, tuple[Any, Any]]  # name → the value in the first and in the second run


@dataclass(frozen=True)
class Losses:
    """The training losses of two runs, compared step by step."""

    steps: int  # steps that both runs recorded
    first: int | None  # the first step at which the losses differ; None: they are equal
    values: tuple[float | None, float | None] | None  # the losses of that step
    # the first recorded step by which the examples, or their order, differed; None: at no step
    order: int | None


@dataclass(frozen=True)
class Difference:
    """The differences between two runs; values that are equal are left out, except metrics."""

    names: tuple[str, str]
    settings: Values
    inputs: Values  # digests of the data and of the initial weights
    environment: Values  # code, libraries, machine and device
    metrics: Values  # equal and different ones
    losses: Losses
    cautions: tuple[str | None, str | None]  # warnings about the numbers of each run

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def text(self, width: int | None = None) -> str:
        """Return the differences as text, a section for each kind."""
        sections = [
            ("settings", self.settings, "all are equal"),
            ("data and initial weights", self.inputs, "all digests are equal"),
            ("code and environment", self.environment, "all recorded facts are equal"),
            ("metrics", self.metrics, "neither run has any"),
        ]
        rows = [["", *self.names]]
        for title, values, nothing in sections:
            rows.append([title if values else f"{title}: {nothing}", "", ""])
            rows += [[f"  {name}", *map(_shown, pair)] for name, pair in values.items()]
        titles = {row[0] for row in rows if row[1:] == ["", ""]}
        aligned = iter(columns([row for row in rows if row[0] not in titles], width=width))
        lines = [row[0] if row[0] in titles else next(aligned) for row in rows]
        cautions = [
            part
            for name, caution in zip(self.names, self.cautions, strict=True)
            if caution is not None
            for part in wrapped(plain(f"caution: {name}: {caution}"), width)
        ]
        return "\n".join([*lines, *cautions, *self._loss_lines()])

    def _loss_lines(self) -> list[str]:
        losses = self.losses
        if not losses.steps:
            return ["losses: no step was recorded by both runs"]
        if losses.first is None:
            return [f"losses: equal in all {losses.steps} steps that both runs took"]
        left, right = (number(value) for value in losses.values or (None, None))
        if left == right:
            left, right = map(plain, losses.values or ())
        lines = [f"losses: first differ at step {losses.first} ({left} and {right})"]
        if losses.order is not None:
            lines.append(f"examples: different, or in a different order, by step {losses.order}")
        return lines


def difference(first: Path, second: Path) -> Difference:
    """Compare two runs; a value that a run has not recorded is None."""
    folders = (first, second)
    summaries = (read_run(first), read_run(second))
    for run in summaries:
        if run.status == "damaged":
            raise BadInput(f"{run.folder} is damaged: {run.error}")
    records = (RunRecord(first), RunRecord(second))
    names = (summaries[0].name, summaries[1].name)
    return Difference(
        names=names if names[0] != names[1] else (str(first), str(second)),
        settings=_unequal(_settings(run) for run in summaries),
        inputs=_inputs(records),
        environment=_unequal(map(_environment, folders, records)),
        metrics=_pairs(_metrics(run) for run in summaries),
        losses=_losses(records),
        cautions=(summaries[0].caution, summaries[1].caution),
    )


def _pairs(sides: Iterable[Mapping[str, Any]]) -> Values:
    left, right = sides
    return {name: (left.get(name), right.get(name)) for name in {**left, **right}}


def _unequal(sides: Iterable[Mapping[str, Any]]) -> Values:
    return {name: pair for name, pair in _pairs(sides).items() if pair[0] != pair[1]}


def _settings(run: Summary) -> dict[str, Any]:
    return {"treatment": run.treatment, **run.settings, "seed": run.seed}


def _inputs(records: tuple[RunRecord, RunRecord]) -> Values:
    """Return the digests that differ; for initial weights, their number and the first pair."""
    sides: list[dict[str, Any]] = []
    weights: list[dict[str, str]] = []
    for record in records:
        side: dict[str, Any] = {}
        parts: dict[str, str] = {}
        with suppress(BadInput):  # digests.json is missing or damaged
            digests, parts = record.digests, record.digests.weights
            side = {"data": digests.data, "pretrained weights": digests.source}
            side["revision"] = digests.revision
        sides.append(side)
        weights.append(parts)
    values = _unequal(sides)
    unequal, names = _unequal(weights), {**weights[0], **weights[1]}
    if unequal:
        part = next(iter(unequal))
        values[f"{len(unequal)} of {len(names)} initial weights"] = unequal[part]
    return values


def _environment(folder: Path, record: RunRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with suppress(BadInput):
        start = record.start
        facts |= {name: getattr(start, name) for name in _CONDITIONS}
    with suppress(BadInput):
        values = read_environment(folder)
        code = values.get("code")
        facts["commit"] = code.get("commit") if isinstance(code, dict) else None
        facts |= comparable_facts(values) | {"machine": machine_line(values)}
    return facts


def _metrics(run: Summary) -> dict[str, Any]:
    best = {f"best {run.metric}": run.value} if run.metric else {}
    return {
        "status": run.status,
        "steps": run.steps,
        **best,
        **{f"report {name}": value for name, value in (run.report or {}).items()},
        "total seconds": run.total_seconds,
        "step ms": run.step_ms,
    }


def _losses(records: tuple[RunRecord, RunRecord]) -> Losses:
    """Find the first step with different losses, and the first by which the examples differ."""
    left, right = (_steps(record) for record in records)
    steps = sorted(left[0].keys() & right[0].keys())
    first = next((step for step in steps if left[0][step] != right[0][step]), None)
    digests = sorted(left[1].keys() & right[1].keys())
    order = next((step for step in digests if left[1][step] != right[1][step]), None)
    values = None if first is None else (left[0][first], right[0][first])
    return Losses(len(steps), first, values, order)


def _steps(record: RunRecord) -> tuple[dict[int, float | None], dict[int, str]]:
    """Return the loss of each step, and by step the digest of all examples up to it."""
    losses: dict[int, float | None] = {}
    orders: dict[int, str] = {}
    for event in record.events(StepEvent):
        losses |= enumerate(event.loss, event.first)
        orders[event.step] = event.order
    return losses, orders


def _shown(value: Any) -> str:
    return number(value) if typed(value, float) is not None else plain(value)
