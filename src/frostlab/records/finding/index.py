"""Summaries of the runs in a folder: settings, status, results, notes and tags.

An index file caches the summaries to save time; without it, the result is the same. To be fast,
listing must not import torch, pydantic or yaml if the index has all runs.
"""

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostlab.errors import BadInput, nearest
from frostlab.records import SCHEMA
from frostlab.records.finding.annotations import ANNOTATIONS, read_annotations
from frostlab.storage import (
    is_locked,
    open_regular,
    parse_json,
    read_bytes,
    read_text,
    remove_temporary,
    whole_file,
)
from frostlab.typed import check_numbers, read

if TYPE_CHECKING:  # the functions below import the schema only if they must read a run's files
    from frostlab.records.schema import Event, Result, StartEvent

RESULT, EVENTS, LOCK, INDEX = "result.json", "events.jsonl", "run.lock", ".index.json"
RECIPE, GROUP = "recipe.yaml", "group.json"
_SIGNED = (RESULT, EVENTS, RECIPE, ANNOTATIONS)  # a run is read again if one of these changes
_VERSION = 3  # version of the index format
_HEAD = 65536  # bytes that are read from the beginning of events.jsonl, to find the start event
_RECIPE_BYTES = 1 << 20  # the most bytes of recipe.yaml
# A file is indexed only this many ns after its last change, because a second change soon after the
# first one may leave the modification time as it is.
_SETTLED = 200_000_000
_SEED = re.compile(r"^seed:.*\n?", re.MULTILINE)  # the line of recipe.yaml that differs most often


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
    ended: float | None = None  # seconds since 1970; for an unfinished run, of its last event
    steps: int | None = None
    metric: str | None = None  # the metric that selects the best weights
    value: float | None = None  # its best value; for an unfinished run, the best so far
    report: dict[str, float] | None = None  # the reported metrics
    caution: str | None = None  # a warning about the reported numbers
    total_seconds: float | None = None
    step_ms: float | None = None  # median time of a step
    runs_at_once: int | None = None  # most runs that could share the device; None until the end
    error: str | None = None  # why the run did not finish, or why it cannot be read
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # by users, oldest first; or why annotations.json cannot be read
    # the recipe by dotted key, without `seed` and `about`; runs may share the object. This field
    # must be the last one, because the index stores it separately from the others.
    settings: dict[str, Any] = field(default_factory=dict)


_STORED = tuple(entry.name for entry in fields(Summary))[2:]  # without name and folder
_Entries = dict[str, list[list[Any]]]  # run name → [signature of its files, stored fields]


def list_runs(root: Path) -> list[Summary]:
    """Summarise every run in `root`, oldest first; a damaged run is listed with the reason."""
    stored, entries, runs, settled = _load(root), _Entries(), [], time.time_ns() - _SETTLED
    for name, signature in _run_folders(root):
        entry = stored.get(name)
        run = _stored_summary(root / name, signature, entry)
        if run is None or entry is None:
            run = _read(root / name)
            entry = [signature, [getattr(run, key) for key in _STORED]]
        # a damaged run may become readable without a change of its files, so read it every time
        if run.status != "damaged" and max(signature[::2]) < settled:
            entries[name] = entry
        runs.append(_with_lock(run))
    if entries != stored:
        _save(root, entries)
    return sorted(runs, key=lambda run: (run.started is None, run.started or 0.0, run.name))


def read_run(folder: Path) -> Summary:
    """Summarise one run from its own files, without the index."""
    return _with_lock(_read(Path(os.path.abspath(folder))))  # `.` alone has no name


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, intact or damaged."""
    return any(os.path.exists(folder / file) for file in (RESULT, EVENTS, LOCK))


def find_run(root: Path, text: str) -> Path:
    """Return the folder of a run, by its path, its name in `root`, or an unambiguous prefix."""
    if text and is_run(Path(text)):
        return Path(text)
    names = sorted(name for name, _ in _run_folders(root))
    matches = [name for name in names if text and name.startswith(text)]
    if len(matches) == 1 or text in matches:
        return root / matches[0]  # sorted, so an exact name comes first
    if matches:
        raise BadInput(f"run {text!r} could be {_listed(matches)} in {root}")
    hint = nearest(text, names) or (f"; it has {_listed(names)}" if names else "; it has no runs")
    if text and Path(text).is_dir():
        kind = "the folder of a comparison, not" if is_comparison(Path(text)) else "not the folder"
        raise BadInput(f"{text!r} is {kind} of a run; name a run in {root}{hint}")
    raise BadInput(f"no run {text!r} in {root}{hint}")


def is_comparison(folder: Path) -> bool:
    """Return whether a folder holds a comparison."""
    return (folder / "plan.json").is_file()


def is_group(folder: Path) -> bool:
    """Return whether a folder holds a group of comparisons."""
    return (folder / GROUP).is_file()


def _listed(names: Sequence[str]) -> str:
    """Return up to five names, and how many more there are."""
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)


def result_of(folder: Path) -> "Result | None":
    """Return a run's result, or None if it is not written yet; raise BadInput if damaged."""
    try:
        text = read_bytes(folder / RESULT)
    except FileNotFoundError:
        return None
    from frostlab.records.schema import read_result

    return read_result(text, RESULT)


def _run_folders(root: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield each run's name, and as signature the time and size of the files in `_SIGNED`."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise BadInput(f"{root} is not a folder of runs: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith(".") or not (entry.is_symlink() or entry.is_dir()):
            continue
        signature = []
        for file in _SIGNED:
            try:
                status = os.stat(f"{entry.path}/{file}")
                signature += [status.st_mtime_ns, status.st_size]
            except OSError:
                signature += [0, 0]
        if any(signature[:4]) or os.path.exists(f"{entry.path}/{LOCK}"):
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
    start = _start(folder, strict=result is None)
    tags, notes = _annotations(folder)
    run = Summary(
        folder.name, folder, "interrupted", tags=tags, notes=notes, settings=_settings(folder)
    )
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
    return _unfinished(run) if result is None else _ended(run, result)


def _annotations(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tags and the notes; if the file cannot be read, the reason is the only note."""
    try:
        annotations = read_annotations(folder)
    except BadInput as error:
        return (), (str(error),)
    return annotations.tags, tuple(note.text for note in annotations.notes)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of recipe.yaml by dotted key; empty if the file cannot be read."""
    with contextlib.suppress(OSError, BadInput):
        return _parsed_settings(_SEED.sub("", read_text(folder / RECIPE, _RECIPE_BYTES)))
    return {}


@lru_cache(maxsize=1024)
def _parsed_settings(text: str) -> dict[str, Any]:
    """Parse a recipe without its seed; runs that differ in the seed alone are parsed once."""
    from frostlab.recipe.bounded_yaml import parse_mapping

    settings = dict(dotted(parse_mapping(text, RECIPE)))
    settings.pop("about", None)
    return settings


def dotted(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects with their dotted keys, such as `optim.lr`."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _ended(run: Summary, result: "Result") -> Summary:
    report = {n: v for n, v in (result.report or {}).items() if isinstance(v, int | float)}
    step = result.clocks.step_ms
    return replace(
        run,
        status=result.status,
        recipe_digest=result.recipe_digest,
        seed=result.seed,
        treatment=result.treatment,
        ended=_seconds(result.ended),
        steps=result.steps,
        metric=result.best.metric,
        value=result.best.value,
        report=report or None,
        caution=result.caution,
        total_seconds=result.clocks.total_seconds,
        step_ms=None if step is None else step.median,
        runs_at_once=result.runs_at_once,
        error=result.error,
    )


def _seconds(moment: str) -> float | None:
    """Return an ISO 8601 time as seconds since 1970."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(moment).timestamp()
    return None


def _unfinished(run: Summary) -> Summary:
    """Add the last step, and the best evaluation of the last stage that has one, to a summary.

    Events are read from the last to the first.
    """
    from frostlab.records.events import LatestEvents
    from frostlab.records.schema import EVENTS as KINDS
    from frostlab.records.schema import EvaluationEvent, StageEvent

    latest = LatestEvents(run.folder / EVENTS)
    event = latest.next(*(kind for kind in KINDS.values() if not kind.kind.startswith("flow")))
    if event is not None:
        run = replace(run, steps=event.step, ended=event.at)
    while event is not None:
        if isinstance(event, StageEvent) and event.best_before is not None:
            return replace(run, metric=event.best_before.metric, value=event.best_before.value)
        if isinstance(event, EvaluationEvent) and event.checkpoint is None:
            metric, value = next(iter(event.metrics.items()), (None, None))
            run = replace(run, metric=metric)
            if event.best and not isinstance(value, dict):
                return replace(run, value=value)
        event = latest.next(StageEvent, EvaluationEvent)
    return run


def _start(folder: Path, strict: bool) -> "StartEvent | None":
    """Return the start event; with `strict`, refuse a file that does not begin with one."""
    from frostlab.records.schema import StartEvent, read_event

    try:
        with open_regular(folder / EVENTS) as file:
            line, ended, _ = file.read(_HEAD).partition(b"\n")
    except FileNotFoundError:
        return None
    start: Event | None = None
    try:
        start = read_event(line, EVENTS) if ended else None
    except BadInput:
        if strict:
            raise
    if strict and ended and not isinstance(start, StartEvent):
        raise BadInput(f"{EVENTS} does not begin with a start event")
    return start if isinstance(start, StartEvent) else None


def _load(root: Path) -> _Entries:
    """Return the stored entries; empty if the file is absent, damaged or of another version."""
    try:
        head, _, body = read_bytes(root / INDEX).partition(b"\n")
        stored = parse_json(body, INDEX) if parse_json(head, INDEX) == _header(body) else {}
        match stored:
            case {"settings": list(settings), "runs": dict(entries)}:
                for values in settings:
                    check_numbers(values, INDEX)
            case _:
                return {}
    except (OSError, BadInput):
        return {}
    for entry in entries.values():
        match entry:  # in the file, settings are the number of a shared object
            case [_, list(values)] if len(values) == len(_STORED):
                with contextlib.suppress(TypeError, IndexError):
                    values[-1] = settings[values[-1]]
    return entries


def _stored_summary(folder: Path, signature: list[int], entry: object) -> Summary | None:
    """Return the summary in an entry; None if the entry is absent, outdated or damaged."""
    match entry:
        case [list(stored), list(values)] if stored == signature and len(values) == len(_STORED):
            *others, settings = values  # `_load` has checked the settings, once for all runs
            known = zip(_STORED, others, strict=False)
            facts = {key: value for key, value in known if value is not None and value != []}
            with contextlib.suppress(BadInput):
                run = read(Summary, {**facts, "name": folder.name, "folder": folder}, INDEX)
                if isinstance(settings, dict):
                    object.__setattr__(run, "settings", settings)  # `replace` would copy the run
                    return run
    return None


def _save(root: Path, entries: _Entries) -> None:
    """Replace the index atomically; if that fails, the old index stays."""
    numbers: dict[str, int] = {}  # settings as JSON → their number in the file
    seen: dict[int, int] = {}  # identity of settings → their number
    runs = {}
    for name, (signature, values) in entries.items():
        *facts, settings = values
        if id(settings) not in seen:
            seen[id(settings)] = numbers.setdefault(json.dumps(settings), len(numbers))
        runs[name] = [signature, [*facts, seen[id(settings)]]]
    shared = f"[{','.join(numbers)}]"
    body = f'{{"settings":{shared},"runs":{json.dumps(runs, separators=(",", ":"))}}}'.encode()
    with contextlib.suppress(OSError):
        # this may delete the file that another listing is writing; then its index is not saved
        remove_temporary(root, INDEX)
        with whole_file(root / INDEX) as temporary:
            temporary.write_bytes(json.dumps(_header(body)).encode() + b"\n" + body)


def _header(body: bytes) -> list[int | str]:
    return [_VERSION, SCHEMA, *_STORED, zlib.crc32(body)]
