"""The runs of a folder, through an index that only saves time: without it the answer is equal."""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.storage import is_locked
from frostlab.text import typed

RESULT, EVENTS, LOCK, INDEX = "result.json", "events.jsonl", "run.lock", ".index.json"
ENDINGS = ("finished", "stopped", "failed", "diverged")
_SCHEMA, _PIECE = 1, 65536  # of the index; bytes read from the beginning of a run's events
_TAIL = 2**20  # bytes read from their end: watched runs write much between two evaluations
_SETTLED = 200_000_000  # ns; a file changed more recently may change again within one clock tick


@dataclass(frozen=True)
class Summary:
    """A run on one line; what is not known is None."""

    name: str
    folder: Path
    status: str  # one of ENDINGS, or running, interrupted, damaged
    recipe_digest: str | None = None
    seed: int | None = None
    treatment: str | None = None
    data: str | None = None
    model: str | None = None
    started: float | None = None  # unix seconds
    steps: int | None = None
    metric: str | None = None
    value: float | None = None  # the best once the run ended, the latest until then
    report: dict[str, float] | None = None
    caution: str | None = None
    total_seconds: float | None = None
    step_ms: float | None = None
    error: str | None = None


_FLOW = b'{"kind": "flow'
_STORED = tuple(field.name for field in fields(Summary))[2:]
_Entries = dict[str, list[list[Any]]]  # name: [signature, stored fields]


def list_runs(root: Path) -> list[Summary]:
    """Summarise every run in `root`, oldest first; a damaged one is listed with the reason."""
    known, kept, found, settled = _load(root), _Entries(), [], time.time_ns() - _SETTLED
    for name, signature in _run_folders(root):
        entry = known.get(name)
        if entry is not None and entry[0] == signature:
            run, lasting = Summary(name, root / name, *entry[1]), True
        else:
            run, lasting = _read(root / name)
            entry = [signature, [getattr(run, field) for field in _STORED]]
        if lasting and max(signature[0], signature[2]) < settled:
            kept[name] = entry
        found.append(_with_lock(run))
    if kept != known:
        _save(root, kept)
    return sorted(found, key=lambda run: (run.started is None, run.started or 0.0, run.name))


def is_run(folder: Path) -> bool:
    """Say whether a folder holds a run, whole or damaged."""
    return any(os.path.exists(folder / file) for file in (RESULT, EVENTS, LOCK))


def find_run(root: Path, text: str) -> Path:
    """Return the run that `text` names: a run folder's path, its name in `root`, or a prefix."""
    if text and is_run(Path(text)):
        return Path(text)
    names = sorted(name for name, _ in _run_folders(root))
    begin = [name for name in names if text and name.startswith(text)]
    if len(begin) == 1 or text in begin:
        return root / begin[0]  # sorted: the name itself stands first
    if begin:
        shown = ", ".join(begin[:5]) + f" and {len(begin) - 5} more" * (len(begin) > 5)
        raise BadInput(f"run {text!r} could be {shown} in {root}")
    hint = nearest(text, names) or (f"; there is `{names[-1]}`" if names else "; it has no runs")
    raise BadInput(f"no run {text!r} in {root}{hint}")


def _run_folders(root: Path) -> Iterator[tuple[str, list[int]]]:
    """Each run's name, and the time and size of the files that say what it came to."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise BadInput(f"{root} is no folder of runs: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith(".") or not (entry.is_symlink() or entry.is_dir()):
            continue
        signature = [0, 0, 0, 0]
        for place, file in ((0, RESULT), (2, EVENTS)):
            with contextlib.suppress(OSError):
                found = os.stat(f"{entry.path}/{file}")
                signature[place : place + 2] = found.st_mtime_ns, found.st_size
        if any(signature) or os.path.exists(f"{entry.path}/{LOCK}"):
            yield entry.name, signature


def read_run(folder: Path) -> Summary:
    """Summarise one run from its files alone."""
    return _with_lock(_read(Path(os.path.abspath(folder)))[0])  # `.` has no name


def _with_lock(run: Summary) -> Summary:
    lasting = run.status in ("finished", "damaged") or not is_locked(run.folder / LOCK)
    return run if lasting else replace(run, status="running", error=None)


def _read(folder: Path) -> tuple[Summary, bool]:
    """Summarise a run as if nobody ran it, and say whether its files were there to be read."""
    try:
        return _summary(folder), True
    except OSError as error:  # another time it may be readable, with the same time and size
        reason = f"{Path(error.filename or folder).name}: {error.strerror}"
        return Summary(folder.name, folder, "damaged", error=reason), False
    except ValueError as error:
        return Summary(folder.name, folder, "damaged", error=str(error)), True


def _summary(folder: Path) -> Summary:
    result = read_result(folder)
    start, latest = _ends(folder, strict=result is None)
    said = start | (result or {})
    known = replace(
        Summary(folder.name, folder, "interrupted"),
        recipe_digest=typed(said.get("recipe_digest"), str),
        seed=typed(said.get("seed"), int),
        treatment=label(said.get("treatment")),
        data=label(start.get("data")),
        model=label(start.get("model")),
        caution=typed(said.get("caution"), str),
        started=typed(start.get("at", said.get("started")), int, float),
    )
    if result is None:
        steps = metric = value = None
        while (steps is None or metric is None) and (event := next(latest, None)) is not None:
            steps = typed(event.get("step"), int) if steps is None else steps
            if event.get("kind") == "evaluation" and metric is None:
                metric, value = next(iter(part(event, "metrics").items()), (None, None))
        return replace(known, steps=steps, metric=metric, value=typed(value, int, float))
    best, clocks, report = part(result, "best"), part(result, "clocks"), part(result, "report")
    return replace(
        known,
        status=result["status"],
        steps=typed(result.get("steps"), int),
        metric=typed(best.get("metric"), str),
        value=typed(best.get("value"), int, float),
        report={n: v for n, v in report.items() if typed(v, int, float) is not None} or None,
        total_seconds=typed(clocks.get("total_seconds"), int, float),
        step_ms=typed(part(clocks, "step_ms").get("median"), int, float),
        error=typed(result.get("error"), str),
    )


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return what result.json says, or None before there is one; ValueError if it is damaged."""
    try:
        text = (folder / RESULT).read_bytes()
    except FileNotFoundError:
        return None
    result = parse(text)
    if result is None:
        raise ValueError(f"{RESULT} is not a JSON object")
    if result.get("status") not in ENDINGS:
        raise ValueError(f"{RESULT} has the status {result.get('status')!r}")
    return result


def _ends(folder: Path, strict: bool) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return the start event, and the last ones from the latest back; a torn end is normal."""
    try:
        with open(folder / EVENTS, "rb") as file:
            head = last = file.read(_PIECE)
            if strict and len(head) == _PIECE:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                last = file.read()
    except FileNotFoundError:
        return {}, iter(())
    line, ended, _ = head.partition(b"\n")
    start = parse(line) or {}
    if strict and ended and start.get("kind") != "start":
        raise ValueError(f"{EVENTS} does not begin with a start event")
    lines = (line for line in reversed(last.split(b"\n")[:-1]) if not line.startswith(_FLOW))
    events = map(parse, lines)
    return start, (event for event in events if event is not None)


def parse(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is, or None if it is not one."""
    with contextlib.suppress(ValueError, RecursionError):
        return typed(json.loads(text), dict)
    return None


def part(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, empty where there is none."""
    return typed(record.get(key), dict) or {}


def label(value: Any) -> str | None:
    """Name a treatment, data set or model that is a word, or an object of settings."""
    if isinstance(value, dict):
        value = value.get("name") or value.get("path") or value.get("kind") or json.dumps(value)
    return typed(value, str)


def _load(root: Path) -> _Entries:
    """Return the stored entries; none if the file is absent, damaged or of another version."""
    try:
        head, _, body = (root / INDEX).read_bytes().partition(b"\n")
        return json.loads(body) if json.loads(head) == _header(body) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _save(root: Path, entries: _Entries) -> None:
    """Replace the index in one move; where that cannot be, the next listing reads the folders."""
    body = json.dumps(entries, separators=(",", ":")).encode()
    draft = root / f"{INDEX}.{os.getpid()}.tmp"
    try:
        draft.write_bytes(json.dumps(_header(body)).encode() + b"\n" + body)
        os.replace(draft, root / INDEX)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def _header(body: bytes) -> list[int | str]:
    return [_SCHEMA, *_STORED, zlib.crc32(body)]
