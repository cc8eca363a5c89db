"""Summaries of the runs in a folder, and the table that lists them.

An index file caches the summaries to save time; without it, the result is the same. To be fast,
listing must not import torch, pydantic or yaml.
"""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostlab.errors import BadInput, nearest
from frostlab.records import SCHEMA
from frostlab.storage import (
    is_locked,
    open_regular,
    parse_json,
    read_bytes,
    remove_temporary,
    whole_file,
)
from frostlab.text import columns, hms, number, plain, short
from frostlab.typed import read

if TYPE_CHECKING:  # the functions below import the schema only if they must read a run's files
    from frostlab.records.schema import Event, Result, StartEvent

RESULT, EVENTS, LOCK, INDEX = "result.json", "events.jsonl", "run.lock", ".index.json"
_VERSION = 2  # version of the index format
_HEAD = 65536  # number of bytes read from the beginning of a run's events
_TAIL = 2**20  # number of bytes read from their end, to find the last evaluation
# A file is indexed only this many ns after its last change, because a second change soon after the
# first one may leave the modification time as it is.
_SETTLED = 200_000_000
_FLOW = b'{"kind": "flow'  # the beginning of a line with gradient flow


@dataclass(frozen=True)
class Summary:
    """The facts about a run that a listing shows; None marks unknown values."""

    name: str
    folder: Path
    status: str  # one of `schema.ENDINGS`, or running, interrupted, damaged
    recipe_digest: str | None = None
    seed: int | None = None
    treatment: str | None = None
    data: str | None = None
    model: str | None = None
    started: float | None = None  # seconds since 1970
    steps: int | None = None
    metric: str | None = None
    value: float | None = None  # the best value of an ended run, the latest value of others
    report: dict[str, float] | None = None  # the reported metrics
    caution: str | None = None  # a warning about the reported numbers
    total_seconds: float | None = None
    step_ms: float | None = None  # median time of a step
    error: str | None = None  # why the run failed, or why it cannot be read


_STORED = tuple(field.name for field in fields(Summary))[2:]  # without name and folder
_Entries = dict[str, list[list[Any]]]  # run name → [signature of its files, stored fields]


def list_runs(root: Path) -> list[Summary]:
    """Summarise every run in `root`, oldest first; a damaged run is listed with the reason."""
    stored, entries, runs, settled = _load(root), _Entries(), [], time.time_ns() - _SETTLED
    for name, signature in _run_folders(root):
        entry = stored.get(name)
        run = _stored_summary(root / name, signature, entry)
        if run is None or entry is None:
            run = _read(root / name)
            entry = [signature, [getattr(run, field) for field in _STORED]]
        # a damaged run may become readable without a change of its files, so read it every time
        if run.status != "damaged" and max(signature[0], signature[2]) < settled:
            entries[name] = entry
        runs.append(_with_lock(run))
    if entries != stored:
        _save(root, entries)
    return sorted(runs, key=lambda run: (run.started is None, run.started or 0.0, run.name))


def read_run(folder: Path) -> Summary:
    """Summarise one run from its files alone."""
    return _with_lock(_read(Path(os.path.abspath(folder))))  # `.` alone has no name


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, intact or damaged."""
    return any(os.path.exists(folder / file) for file in (RESULT, EVENTS, LOCK))


def find_run(root: Path, text: str) -> Path:
    """Return the folder of the run that `text` names: a path, a name in `root`, or its prefix."""
    if text and is_run(Path(text)):
        return Path(text)
    names = sorted(name for name, _ in _run_folders(root))
    matches = [name for name in names if text and name.startswith(text)]
    if len(matches) == 1 or text in matches:
        return root / matches[0]  # sorted, so an exact name comes first
    if matches:
        shown = ", ".join(matches[:5]) + f" and {len(matches) - 5} more" * (len(matches) > 5)
        raise BadInput(f"run {text!r} could be {shown} in {root}")
    hint = nearest(text, names) or (f"; there is `{names[-1]}`" if names else "; it has no runs")
    raise BadInput(f"no run {text!r} in {root}{hint}")


def result_of(folder: Path) -> "Result | None":
    """Return a run's result, or None if it is not written yet; raise BadInput if damaged."""
    try:
        text = read_bytes(folder / RESULT)
    except FileNotFoundError:
        return None
    from frostlab.records.schema import read_result

    return read_result(text, RESULT)


def _run_folders(root: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield each run's name, and as signature the time and size of its result and its events."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise BadInput(f"{root} is not a folder of runs: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith(".") or not (entry.is_symlink() or entry.is_dir()):
            continue
        signature = [0, 0, 0, 0]
        for place, file in ((0, RESULT), (2, EVENTS)):
            with contextlib.suppress(OSError):
                status = os.stat(f"{entry.path}/{file}")
                signature[place : place + 2] = status.st_mtime_ns, status.st_size
        if any(signature) or os.path.exists(f"{entry.path}/{LOCK}"):
            yield entry.name, signature


def _with_lock(run: Summary) -> Summary:
    """Set the status to "running" if a process holds the lock of an unfinished run."""
    idle = run.status in ("finished", "damaged") or not is_locked(run.folder / LOCK)
    return run if idle else replace(run, status="running", error=None)


def _read(folder: Path) -> Summary:
    """Summarise a run without checking its lock."""
    try:
        return _summary(folder)
    except OSError as error:
        reason = f"{Path(error.filename or folder).name}: {error.strerror}"
    except BadInput as error:
        reason = str(error)
    return Summary(folder.name, folder, "damaged", error=reason)


def _summary(folder: Path) -> Summary:
    result = result_of(folder)
    start, latest = _ends(folder, strict=result is None)
    run = Summary(folder.name, folder, "interrupted")
    if start is not None:
        run = replace(
            run,
            recipe_digest=start.recipe_digest,
            seed=start.seed,
            treatment=start.treatment,
            data=start.data,
            model=start.model,
            caution=start.caution,
            started=start.at,
        )
    return _unfinished(run, latest) if result is None else _ended(run, result)


def _ended(run: Summary, result: "Result") -> Summary:
    report = {n: v for n, v in (result.report or {}).items() if isinstance(v, int | float)}
    step = result.clocks.step_ms
    return replace(
        run,
        status=result.status,
        recipe_digest=result.recipe_digest,
        seed=result.seed,
        treatment=result.treatment,
        steps=result.steps,
        metric=result.best.metric,
        value=result.best.value,
        report=report or None,
        caution=result.caution,
        total_seconds=result.clocks.total_seconds,
        step_ms=None if step is None else step.median,
        error=result.error,
    )


def _unfinished(run: Summary, latest: "Iterator[Event]") -> Summary:
    """Add the last step and evaluation to a summary; `latest` yields events in reverse order."""
    from frostlab.records.schema import EvaluationEvent

    for event in latest:
        if run.steps is None:
            run = replace(run, steps=event.step)
        if isinstance(event, EvaluationEvent):
            metric, value = next(iter(event.metrics.items()), (None, None))
            return replace(run, metric=metric, value=None if isinstance(value, dict) else value)
    return run


def _ends(folder: Path, strict: bool) -> "tuple[StartEvent | None, Iterator[Event]]":
    """Return the start event, and an iterator over the events that were read, in reverse order.

    With `strict`, the end of a long file is read too, and a file that does not begin with a start
    event is refused. A truncated last line is ignored.
    """
    from frostlab.records.schema import StartEvent, read_event

    try:
        with open_regular(folder / EVENTS) as file:
            head = tail = file.read(_HEAD)
            if strict and len(head) == _HEAD:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                tail = file.read(_TAIL)
    except FileNotFoundError:
        return None, iter(())
    line, ended, _ = head.partition(b"\n")
    start: Event | None = None
    try:
        start = read_event(line, EVENTS) if ended else None
    except BadInput:
        if strict:
            raise
    if strict and ended and not isinstance(start, StartEvent):
        raise BadInput(f"{EVENTS} does not begin with a start event")
    return start if isinstance(start, StartEvent) else None, _backwards(tail)


def _backwards(text: bytes) -> "Iterator[Event]":
    """Yield the events of complete lines in reverse order, except flow events."""
    from frostlab.records.schema import read_event

    for line in reversed(text.split(b"\n")[:-1]):
        if not line.startswith(_FLOW):
            with contextlib.suppress(BadInput):
                if (event := read_event(line, EVENTS)) is not None:
                    yield event


def _load(root: Path) -> _Entries:
    """Return the stored entries; empty if the file is absent, damaged or of another version."""
    try:
        head, _, body = read_bytes(root / INDEX).partition(b"\n")
        entries = parse_json(body, INDEX) if parse_json(head, INDEX) == _header(body) else {}
    except (OSError, BadInput):
        return {}
    return entries if isinstance(entries, dict) else {}


def _stored_summary(folder: Path, signature: list[int], entry: object) -> Summary | None:
    """Return the summary in an entry; None if the entry is absent, outdated or damaged."""
    match entry:
        case [list(stored), list(values)] if stored == signature and len(values) == len(_STORED):
            facts = {**dict(zip(_STORED, values, strict=True)), "name": folder.name}
            with contextlib.suppress(BadInput):
                return read(Summary, {**facts, "folder": folder}, INDEX)
    return None


def _save(root: Path, entries: _Entries) -> None:
    """Replace the index atomically; if that fails, the old index stays."""
    body = json.dumps(entries, separators=(",", ":")).encode()
    with contextlib.suppress(OSError):
        # this may delete the file that another listing is writing; then its index is not saved
        remove_temporary(root, INDEX)
        with whole_file(root / INDEX) as temporary:
            temporary.write_bytes(json.dumps(_header(body)).encode() + b"\n" + body)


def _header(body: bytes) -> list[int | str]:
    return [_VERSION, SCHEMA, *_STORED, zlib.crc32(body)]


@dataclass(frozen=True)
class Column:
    """A column of the table of runs."""

    name: str
    text: Callable[[Summary], Any]  # returns a run's value; None: unknown
    right: bool = False  # whether it is right-aligned
    marked: bool = False  # whether a footnote mark for the run's caution is added


def _best(run: Summary) -> str | None:
    return f"{run.metric}={number(run.value)}" if run.metric else None


def _reported(run: Summary) -> str | None:
    value = (run.report or {}).get(run.metric or "")
    return None if value is None else number(value)


WIDTH = 100  # of the table, in characters
COLUMNS = (
    Column("name", lambda run: run.name),
    Column("status", lambda run: run.status),
    Column("treatment", lambda run: run.treatment),
    Column("seed", lambda run: run.seed, right=True),
    Column("steps", lambda run: run.steps, right=True),
    Column("best", _best, marked=True),
    Column("report", _reported, marked=True),
    Column("step ms", lambda run: number(run.step_ms), right=True),
    Column("total", lambda run: hms(run.total_seconds), right=True),
)
_RIGHT = {place for place, column in enumerate(COLUMNS) if column.right}
# the column to shorten if the table is too wide
_CUT = next(place for place, column in enumerate(COLUMNS) if column.name == "treatment")
_MARKS = "*†‡§"


def runs_table(summaries: Iterable[Summary]) -> str:
    """Format runs as a table with footnotes, at most 100 characters wide if the names permit."""
    runs = list(summaries)
    if not runs:
        return "no runs"
    cautions = list(dict.fromkeys(run.caution for run in runs if run.caution))
    marks = {text: _MARKS[i] if i < 4 else f"[{i + 1}]" for i, text in enumerate(cautions)}
    rows = [[_cell(column, run, marks) for column in COLUMNS] for run in runs]
    lines = _within_width([[column.name for column in COLUMNS], *rows])
    lines += [f"{mark} {plain(text)}" for text, mark in marks.items()]
    failed = [run for run in runs if run.error]
    lines += [short(plain(f"{run.name}: {run.error}"), WIDTH) for run in failed[:10]]
    lines += [f"and {len(failed) - 10} more with an error"] * (len(failed) > 10)
    return "\n".join(lines)


def _cell(column: Column, run: Summary, marks: dict[str, str]) -> str:
    value = column.text(run)
    mark = marks.get(run.caution or "", "") if column.marked and value is not None else ""
    return plain(value) + mark


def _within_width(rows: list[list[str]]) -> list[str]:
    """Align rows; if too wide, shorten treatments, but not names, which users need in full."""
    lines = columns(rows, _RIGHT)
    too_wide = max(map(len, lines)) - WIDTH
    if too_wide <= 0:
        return lines
    widest = max(len(row[_CUT]) for row in rows)
    width = max(min(widest, 10), widest - too_wide)
    cut = [[*row[:_CUT], short(row[_CUT], width), *row[_CUT + 1 :]] for row in rows]
    return columns(cut, _RIGHT)
