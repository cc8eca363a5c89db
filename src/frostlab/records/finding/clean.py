"""Removal of old runs that are not tagged, running, damaged, or used by a comparison."""

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.records.finding.annotations import read_annotations
from frostlab.records.finding.index import LOCK, Summary, list_runs
from frostlab.storage import Lock, read_json

TAGGED = "tagged"  # keeps runs with any tag
_UNITS = {"h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]{1,6})([hdw])")
_COMPARISON = ("plan.json", "evidence.json")  # files of a comparison that may name runs


@dataclass(frozen=True)
class Removal:
    """A run to remove."""

    folder: Path
    age: float  # s since it ended, or since its last event
    size: int  # bytes


@dataclass(frozen=True)
class Kept:
    """A run that is old enough, or of unknown age, but is kept."""

    folder: Path
    reason: str


def duration(text: str) -> float:
    """Return a duration such as 30d, 12h or 2w in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"--older {text!r:.40} is not a duration; e.g. 12h, 30d or 2w")
    return int(match[1]) * float(_UNITS[match[2]])


def old_runs(
    root: Path, older: float, keep: str, comparisons: Sequence[Path]
) -> tuple[list[Removal], list[Kept]]:
    """Return the runs to remove, and the old runs that are kept, each with the reason.

    Args:
        root: the folder of runs.
        older: the age in seconds above which a run is old; its age counts from its end or, if it
            is unfinished, from its last event.
        keep: `tagged` keeps runs with any tag; otherwise, a list of tags, separated by commas,
            keeps runs with one of them.
        comparisons: folders in which to look for comparisons that refer to runs.
    """
    runs, now = list_runs(root), time.time()
    tags = _tags(runs, keep)
    referring = referred_runs([root, *comparisons])
    owner = _comparison_around(root)
    removed, kept = [], []
    for run in runs:
        if run.ended is not None and now - run.ended <= older:
            continue
        reason = _why_kept(run, tags)
        if reason is None and owner is not None:
            reason = f"it is part of the comparison {owner}"
        if reason is None and (comparison := referring.get(run.folder.resolve())) is not None:
            reason = f"the comparison {comparison} refers to it"
        if reason is not None:
            kept.append(Kept(run.folder, reason))
        elif run.ended is not None:
            removed.append(Removal(run.folder, now - run.ended, _size(run.folder)))
    return removed, kept


def _tags(runs: Sequence[Summary], keep: str) -> frozenset[str] | None:
    """Return the tags that keep a run; None: any tag."""
    wanted = [tag.strip() for tag in keep.split(",") if tag.strip()]
    if wanted == [TAGGED]:
        return None
    known = {tag for run in runs for tag in run.tags}
    for tag in wanted:
        if tag not in known:
            hint = nearest(tag, [*known, TAGGED]) or f"; use --keep {TAGGED} for all tagged runs"
            raise BadInput(f"--keep {tag!r:.60}: no run has this tag{hint}")
    if not wanted:
        raise BadInput(f"--keep is empty; use --keep {TAGGED}, or tags, e.g. --keep paper")
    return frozenset(wanted)


def _why_kept(run: Summary, tags: frozenset[str] | None) -> str | None:
    if run.status == "running":
        return "it is running"
    if run.status == "damaged" or run.ended is None:
        return "its age is unknown, because no readable record says when it ended"
    if run.folder.is_symlink():
        return "it is a link"
    try:
        own = read_annotations(run.folder).tags  # the listing ignores a damaged file
    except BadInput as error:
        return f"its tags cannot be read: {error}"
    keeping = own if tags is None else [tag for tag in own if tag in tags]
    return f"it is tagged {', '.join(keeping)}" if keeping else None


def referred_runs(places: Sequence[Path]) -> dict[Path, Path]:
    """Return the runs that comparisons in these folders refer to: run → a comparison."""
    referred: dict[Path, Path] = {}
    for place in places:
        for folder in [place, *sorted(place.iterdir())] if place.is_dir() else []:
            for file in _COMPARISON:
                for text in _texts_in(folder / file):
                    if (run := _run_at(folder, text)) is not None:
                        referred.setdefault(run, folder)
    return referred


def _texts_in(path: Path) -> set[str]:
    """Return the texts in a JSON file of a comparison; empty if the file does not exist."""
    if not path.is_file():
        return set()
    try:
        return set(_texts(read_json(path)))
    except BadInput as error:
        raise BadInput(f"{error}; it may name runs, so nothing is removed") from None


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value that may be paths."""
    if isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)


def _run_at(comparison: Path, text: str) -> Path | None:
    """Return the run that a text in a comparison's file names; None if it names none."""
    if "/" not in text and "\\" not in text:
        return None
    for path in (comparison / text, Path(text)):
        try:
            if (path / "events.jsonl").is_file():
                return path.resolve()
        except OSError:  # a name that is too long
            return None
    return None


def _comparison_around(root: Path) -> Path | None:
    """Return the comparison whose folder holds this folder of runs; None if there is none."""
    parent = Path(os.path.abspath(root)).parent
    return parent if (parent / _COMPARISON[0]).is_file() else None


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def remove_run(folder: Path) -> None:
    """Remove a run's folder, unless a process has begun to use it.

    The folder is renamed first, so that an interrupted removal leaves no incomplete run.
    """
    lock = Lock(folder / LOCK)
    try:
        if not lock.acquire(seconds=0):
            raise BadInput(f"{folder} is kept: it is running")
        try:
            hidden = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            os.replace(folder, hidden)
            shutil.rmtree(hidden)
        finally:
            lock.release()
    except OSError as error:
        raise BadInput(f"{folder} cannot be removed ({error.strerror})") from None
