"""One run as text: its settings, result, clocks, stages and environment, or all as JSON."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.environment import read_environment
from frostlab.records.events import effective, read_events
from frostlab.records.finding.annotations import Annotations, read_annotations
from frostlab.records.finding.index import (
    EVENTS,
    RESULT,
    Summary,
    dotted,
    is_run,
    read_run,
    result_of,
)
from frostlab.records.finding.query import moment_text
from frostlab.records.folder import RunRecord, finished_status
from frostlab.records.schema import (
    DataRecord,
    EvaluationEvent,
    Event,
    NoteEvent,
    Parameters,
    Result,
    ResumeEvent,
    Series,
    Stage,
)
from frostlab.text import NONE, columns, counted, hms, number, plain, short, wrapped

# The name at the beginning of a line, and the gap after it.
_NAME = re.compile(r" *\S+(?: \S+)*  +")


@dataclass(frozen=True)
class _Run:
    """Contents of a run's files; None marks an absent or damaged file."""

    summary: Summary
    result: Result | None
    # evaluations, notes and resumes, without events that a resumed run repeated
    events: list[Event]
    damaged_events: list[str]  # the reason for each unreadable line
    recipe: dict[str, Any] | None
    recipe_file_digest: str | None  # digest of the recipe in recipe.yaml as it is now
    differences: dict[str, Any] | None  # dotted key → setting that is not the default
    environment: dict[str, Any] | None
    data: DataRecord | None
    damaged_data: str | None  # why data.json cannot be read; None if it is absent or intact
    annotations: Annotations
    damaged_annotations: str | None  # why annotations.json cannot be read; None if absent or intact
    examples: dict[str, int]  # split → number of examples, where it is known


def show_json(folder: Path) -> dict[str, Any]:
    """Return the contents of a run's files as plain values; None or empty if one is missing."""
    run = _read(folder)
    evaluations = [asdict(event) for event in run.events if isinstance(event, EvaluationEvent)]
    return {
        **asdict(run.summary),
        "folder": str(folder),
        "tags": list(run.summary.tags),
        "recipe": run.recipe,
        "recipe_file_digest": run.recipe_file_digest,
        "differences": run.differences,
        "environment": run.environment,
        "data": run.data and asdict(run.data),
        "result": run.result and asdict(run.result),
        "evaluations": evaluations,
        "resumes": _resumes(run),
        "notes": [
            *(asdict(event) for event in run.events if isinstance(event, NoteEvent)),
            *(asdict(note) for note in run.annotations.notes),
        ],
        "examples": run.examples,
        "damaged_events": run.damaged_events,
        "damaged_annotations": run.damaged_annotations,
    }


def show(folder: Path, width: int | None = None) -> str:
    """Format a run as text, in sections such as configuration, results, clocks and notes.

    Lines that are longer than `width` are continued on the next line.
    """
    from frostlab.records.environment import one_line

    run = _read(folder)
    notes = [event for event in run.events if isinstance(event, NoteEvent)]
    sections = {
        f"run {run.summary.name}": _status(run),
        "configuration": _configuration(run),
        "data": _data(run.data) if run.data else [run.damaged_data] if run.damaged_data else [],
        "results": _results(run),
        "scores": _scores(run),
        "stages": stages_table(run.result.stages if run.result else []),
        "clocks": _clocks(run),
        "wall clock": _wall_clock(run),
        "parameters": _parameters(run.result.parameters if run.result else None),
        "machine": _machine(run.result) if run.result else [],
        "environment": [one_line(run.environment or {}) or NONE],
        "notes": [
            *(f"step {event.step}: {event.text}" for event in notes),
            *(f"{moment_text(note.at)[:10]}: {note.text}" for note in run.annotations.notes),
            *([run.damaged_annotations] if run.damaged_annotations else []),
        ],
    }
    return "\n\n".join(
        "\n".join([plain(title), *(part for line in lines for part in _wrapped(line, width))])
        for title, lines in sections.items()
        if lines
    )


def as_html(record: RunRecord) -> str:
    """Return a run's result as a part of a page, for notebooks."""
    from frostlab.html import fragment  # here, because only notebooks need it

    if finished_status(record.folder) is None:
        return fragment(str(record.folder), "not finished")
    result = record.result
    best, parameters = result.best, result.parameters
    rows = [(name, number(value)) for name, value in record.metrics.items()]
    if best.value is not None:
        where = f"at step {best.step:,} of {result.steps:,}"
        rows.append((f"best validation {best.metric}", f"{number(best.value)} {where}"))
    rows += [
        ("training and evaluation time", hms(result.clocks.total_seconds)),
        ("trainable parameters", f"{parameters.trainable:,} of {parameters.total:,}"),
    ]
    about = f"{result.name}, treatment {result.treatment}, seed {result.seed}: {result.status}"
    alarms = [line for line in (result.error, result.caution) if line]
    return fragment(str(record.folder), about, rows=rows, alarms=alarms)


def _wrapped(line: str, width: int | None) -> list[str]:
    """Indent a line, and continue it below its value if it is too long."""
    line = f"  {plain(line)}"
    name = _NAME.match(line)
    start = len(name[0]) if name and len(name[0]) < 30 else 4
    return wrapped(line, width, " " * (start - 2))


def stages_table(stages: list[Stage]) -> list[str]:
    """Return a header and a line for each stage; nothing if there is only one stage."""
    if len(stages) < 2:
        return []
    head = ["stage", "trainable", "of", "steps", "epochs", "best at", "best", "seconds", "ended"]
    rows = [
        [
            plain(stage.name),
            f"{stage.trainable:,}",
            f"{stage.total:,}",
            str(stage.steps),
            number(stage.epochs),
            f"epoch {number(stage.best.epoch)}",
            f"{plain(stage.best.metric)} {number(stage.best.value)}",
            number(stage.seconds),
            "early" if stage.stopped_early else "",
        ]
        for stage in stages
    ]
    return columns([head, *rows], right={1, 2, 3, 4, 7})


def _status(run: _Run) -> list[str]:
    summary, started = run.summary, None
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        started = datetime.fromtimestamp(summary.started or 0.0, UTC).isoformat(" ", "seconds")
    lines = [
        ("started", None if summary.started is None else started),
        ("status", summary.status),
        ("steps", summary.steps),
    ]
    if run.annotations.tags:
        lines.append(("tags", ", ".join(run.annotations.tags)))
    if summary.error:
        lines.append(("error", summary.error))
    if resumes := _resumes(run):
        lines.append(("resumes", resumes))
    if run.damaged_events:
        lines.append(("damaged events", f"{len(run.damaged_events)}: {run.damaged_events[0]}"))
    return _pairs(lines)


def _configuration(run: _Run) -> list[str]:
    summary, digest = run.summary, run.summary.recipe_digest
    if digest and run.recipe_file_digest and digest != run.recipe_file_digest:
        digest = f"{digest}, but recipe.yaml now has {run.recipe_file_digest}"
    lines = _pairs([
        ("digest", digest), ("data", summary.data), ("model", summary.model),
        ("treatment", summary.treatment), ("seed", summary.seed),
    ])  # fmt: skip
    if run.differences is None:
        return [*lines, f"differences from the defaults: {NONE}"]
    changed = [f"  {line}" for line in _pairs(run.differences.items()) or ["none"]]
    return [*lines, "differences from the defaults:", *changed]


_SHOWN_CLASSES = 12  # classes that the table of splits lists
_COUNTS = {  # attribute of SplitRecord → its name in the table
    "examples": "examples",
    "rows": "rows read",
    "empty": "empty texts",
    "duplicates": "repeated texts",
    "contradictions": "contradicting labels",
    "tokens": "tokens",
    "characters": "characters",
    "recordings": "recordings",
    "subjects": "subjects",
    "seconds": "seconds",
    "seed": "seed",
}
_LENGTHS = {
    "cut": "cut at data.length",
    "least": "shortest, in tokens",
    "median": "median length",
    "mean": "mean length",
    "most": "longest",
}


def _data(data: DataRecord) -> list[str]:
    """Return a table with a column for each split, then the sources and the dropped rows."""
    splits = data.splits
    rows: list[tuple[str, list[Any]]] = [
        (name, [getattr(split, key) for split in splits.values()]) for key, name in _COUNTS.items()
    ]
    rows[2:2] = [  # after the examples and the rows read
        ("moved to other splits", [sum(split.carved.values()) for split in splits.values()]),
        ("dropped", [sum(split.dropped.values()) for split in splits.values()]),
    ]
    rows += [
        (name, [split.lengths and getattr(split.lengths, key) for split in splits.values()])
        for key, name in _LENGTHS.items()
    ]
    rows = [
        (name, values)
        for name, values in rows
        if any(values) or (name == "seed" and any(value is not None for value in values))
    ]
    labels = data.labels or []
    rows += [
        (
            f"class {short(plain(str(label)), 24)}",
            [_at(split.classes, n) for split in splits.values()],
        )
        for n, label in enumerate(labels[:_SHOWN_CLASSES])
    ]
    table = [["", *splits], *([name, *map(_count, values)] for name, values in rows)]
    lines = columns(table, right=range(1, len(splits) + 1))
    if len(labels) > _SHOWN_CLASSES:
        lines.append(f"and {len(labels) - _SHOWN_CLASSES:,} more classes")
    return [*lines, *_remarks(data)]


def _remarks(data: DataRecord) -> Iterator[str]:
    """Yield each split's source, the split that it was taken from, and why rows were dropped."""
    sources: dict[str, list[str]] = {}
    for name, split in data.splits.items():
        sources.setdefault(split.source, []).append(name)
    for source, names in sources.items():
        yield f"{', '.join(names)}: {source}"
    for name, split in data.splits.items():
        if split.carved_from is not None:
            yield f"{name}: taken from {split.carved_from}, {split.note}"
        for reason, count in split.dropped.items():
            yield f"{name}: {count:,} dropped, {reason}"


def _at(counts: list[int] | None, index: int) -> int | None:
    return counts[index] if counts is not None and index < len(counts) else None


def _count(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _results(run: _Run) -> list[str]:
    summary, result = run.summary, run.result
    best = f"{summary.metric} {number(summary.value)}" if summary.metric else None
    step = result.best.step if result else _best_step(run.events)
    if best and step is not None:
        best += f" at step {step}{_n(run, 'tune')}"
    report = _metrics(summary.report or {})
    layers = (result.report or {}).get("layers") if result else None
    of_layers = layers.items() if isinstance(layers, dict) else ()
    return _pairs([
        ("best" if result else "best so far", best),
        ("report", f"{report}{_n(run, 'report')}" if report else None),
        *((f"layer {layer}", _metrics(metrics)) for layer, metrics in of_layers),
        *([("caution", summary.caution)] if summary.caution else []),
    ])  # fmt: skip


def _best_step(events: list[Event]) -> int | None:
    """Return the step of the best evaluation of an unfinished run."""
    best = [e for e in events if isinstance(e, EvaluationEvent) and e.best and not e.checkpoint]
    return best[-1].step if best else None


def _n(run: _Run, split: str) -> str:
    """Return the number of examples that a metric averages, as ` (n = 400)`; "" if not known.

    For a language model, the number of tokens is added; for EEG, the number of subjects.
    """
    if split not in run.examples:
        return ""
    count = run.examples[split]
    part = run.data.splits.get(split) if run.data is not None else None
    if run.data is not None and part is not None:
        if run.data.task == "language" and part.tokens is not None:
            examples = counted(count, "examples")
            return f" (n = {examples} with {counted(part.tokens, 'tokens')})"
        if run.data.task == "envelope" and part.subjects is not None:
            return f" (n = {counted(part.subjects, 'subjects')}, {counted(count, 'windows')})"
    return f" (n = {count:,})"


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


_SECONDS = {
    "total_seconds": "total",
    "train_seconds": "train",
    "validation_seconds": "validation",
    "evaluation_seconds": "per evaluation",
    "data_seconds": "data",
    "data_overlapped_seconds": "data during train",
    "checkpoint_seconds": "checkpoints",
    "setup_seconds": "set-up",
    "epoch_seconds": "per epoch",
}


def _scores(run: _Run) -> list[str]:
    """Return the tables of an EEG run's scores."""
    if run.result is None or not run.result.scores:
        return []
    from frostlab.envelopes.scores_json import scores_lines  # imports scipy

    return scores_lines(run.summary.folder, run.result.scores)


def _clocks(run: _Run) -> list[str]:
    result = run.result
    clocks = result and result.clocks
    lines = [(name, _duration(getattr(clocks, key, None))) for key, name in _SECONDS.items()]
    step = None
    if clocks and (times := clocks.step_ms):
        parts = (f"{name} {number(getattr(times, name))}" for name in ("median", "mean", "p95"))
        step = f"{', '.join(parts)} ms, cv {number(times.cv)}"
        step += f"; {len(clocks.warmup_ms)} warm-up steps not counted"
    kinds = [f"{event.how} ({event.reason})" for event in result.stepping] if result else []
    unit = "samples" if _is_eeg(run) else "tokens"
    rest = [
        ("packing_efficiency", clocks.packing_efficiency), ("padding_share", clocks.padding_share),
        (unit, clocks.tokens),
    ] if clocks else []  # fmt: skip
    return _pairs([
        *lines,
        ("step", step),
        *([("kind of step", ", then ".join(dict.fromkeys(kinds)))] if kinds else []),
        (f"{unit}/s", number(clocks and clocks.tokens_per_second)),
        ("examples/s", number(clocks and clocks.examples_per_second)),
        *rest,
    ])  # fmt: skip


def _wall_clock(run: _Run) -> list[str]:
    """Return how the run's last process spent its time; a resumed run had several processes."""
    if run.result is None:
        return []
    wall = run.result.clocks.wall
    seconds = {name.replace("_", " "): value for name, value in asdict(wall).items()}
    rows = [
        (name, f"{value:.2f}", f"{100 * value / wall.total:.0f} %")
        for name, value in seconds.items()
    ]
    return columns([("", "s", "share"), *rows], right=[1, 2])


def _is_eeg(run: _Run) -> bool:
    """Return whether the run's data are EEG, according to data.json or, without it, the recipe."""
    if run.data is not None:
        return run.data.task == "envelope"
    data = (run.recipe or {}).get("data")
    return isinstance(data, dict) and str(data.get("name")).startswith("eeg")


def _duration(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_duration, value[:4]))
        return f"{shown} … ({len(value)} in all)" if len(value) > 4 else shown or NONE
    return NONE if (text := hms(value)) == NONE else f"{text} ({value:.4g} s)"


def _parameters(counts: Parameters | None) -> list[str]:
    if counts is None:
        return _pairs((name, None) for name in ("total", "trainable", "frozen"))
    return _pairs(
        (name, f"{count:,}  {count / counts.total:.1%}" if count and counts.total else count)
        for name, count in asdict(counts).items()
    )


def _machine(result: Result) -> list[str]:
    """Return the measured load, memory and power of the machine during the run."""
    telemetry, gibibyte = result.telemetry, 2**30
    lines = [
        ("memory", _scaled(telemetry.host_peak_bytes, gibibyte, "GiB at the peak")),
        ("GPU memory", _scaled(result.device_memory_peak, gibibyte, "GiB at the peak")),
        ("load", _scaled(_mean(telemetry.load_1min), 1, "on average")),
        ("GPU utilisation", _scaled(_mean(telemetry.gpu_utilisation_percent), 1, "% on average")),
        ("GPU power", _scaled(_mean(telemetry.gpu_power_watts), 1, "W on average")),
    ]
    before = result.gpu_before and result.gpu_before.temperature_c
    after = result.gpu_after and result.gpu_after.temperature_c
    if before is not None:
        lines.append(("GPU temperature", f"{number(before)} °C before, {number(after)} after"))
    return _pairs((name, text) for name, text in lines if text)


def _mean(series: Series | None) -> float | None:
    return series.mean if series else None


def _scaled(value: float | None, unit: float, name: str) -> str | None:
    return None if value is None else f"{value / unit:.3g} {name}"


def _pairs(items: Iterable[tuple[str, Any]]) -> list[str]:
    return columns([(plain(name), plain(value)) for name, value in items])


def _resumes(run: _Run) -> int:
    return sum(isinstance(event, ResumeEvent) for event in run.events)


def _read(folder: Path) -> _Run:
    if not is_run(folder):
        raise BadInput(f"{folder} is not a run: it has neither {EVENTS} nor {RESULT}")
    result = None
    with contextlib.suppress(OSError, BadInput):  # the summary's `error` gives the reason
        result = result_of(folder)
    events, damaged = _events(folder)
    recipe = _recipe(folder)
    differences, digest = _differences(recipe)
    environment = None
    with contextlib.suppress(BadInput):
        environment = read_environment(folder)
    data, damaged_data = None, None
    try:
        if (folder / "data.json").exists():
            data = RunRecord(folder).data
    except (OSError, BadInput) as error:
        damaged_data = str(error)
    annotations, damaged_annotations = Annotations(), None
    try:
        annotations = read_annotations(folder)
    except BadInput as error:
        damaged_annotations = str(error)
    return _Run(
        read_run(folder), result, events, damaged, recipe, digest, differences, environment,
        data, damaged_data, annotations, damaged_annotations, _examples(folder, data),
    )  # fmt: skip


def _examples(folder: Path, data: DataRecord | None) -> dict[str, int]:
    """Return the number of examples by split, from the records of data and predictions."""
    examples = {} if data is None else {name: split.examples for name, split in data.splits.items()}
    with contextlib.suppress(BadInput):
        if (predictions := RunRecord(folder).predictions) is not None:
            examples[predictions.split] = len(predictions.labels)
    return examples


def _events(folder: Path) -> tuple[list[Event], list[str]]:
    """Return the events that are shown, and the reason for each line that cannot be read.

    Events of other kinds, such as steps, are checked but not kept, as there can be millions.
    """
    damaged: list[str] = []
    every: Iterator[Event] = read_events(folder / EVENTS, damaged=damaged)
    events = [e for e in every if isinstance(e, EvaluationEvent | NoteEvent | ResumeEvent)]
    return effective(events), [reason.removeprefix(f"{EVENTS} ") for reason in damaged]


def _recipe(folder: Path) -> dict[str, Any] | None:
    from frostlab.recipe.bounded_yaml import read_yaml

    with contextlib.suppress(OSError, BadInput):
        return read_yaml(folder / "recipe.yaml")
    return None


def _differences(recipe: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    """Return a recipe's non-default settings by dotted key, and its digest.

    For a recipe that this version refuses, return all its settings, and None as the digest.
    """
    if recipe is None:
        return None, None
    from frostlab.recipe.recipe import Recipe

    try:
        # validated as JSON, because strict models accept lists as tuples only there
        checked = Recipe.model_validate_json(json.dumps(recipe))
    except (TypeError, ValueError):
        return dict(dotted(recipe)), None
    return dict(dotted(checked.model_dump(mode="json", exclude_defaults=True))), checked.digest
