"""The notes and tags that users give to a run or a comparison, in a file of its folder.

The manifest, which has the checksums of a finished run's files, does not list this file, because
it may change later.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frostlab.errors import BadInput, nearest
from frostlab.storage import Lock, read_bytes, write_whole
from frostlab.typed import parse, read

ANNOTATIONS = "annotations.json"
_TAG = re.compile(r"[\w.+-]{1,40}")
_LONGEST = 2000  # the most characters of a note
_BYTES = 1 << 20  # the most bytes of the file


@dataclass(frozen=True)
class Note:
    """A remark by a user."""

    at: float  # s since 1970
    text: str  # the remark


@dataclass(frozen=True)
class Annotations:
    """annotations.json: the notes and tags of a run or a comparison."""

    notes: tuple[Note, ...] = ()  # oldest first
    tags: tuple[str, ...] = ()  # in alphabetical order


def read_annotations(folder: Path) -> Annotations:
    """Return the notes and tags of a folder; empty if it has none."""
    path = folder / ANNOTATIONS
    try:
        values = parse(read_bytes(path, _BYTES))
    except FileNotFoundError:
        return Annotations()
    if values is None:
        raise BadInput(f"{path} is not a JSON object; delete it to begin a new one")
    return read(Annotations, values, path)


def add_note(folder: Path, text: str) -> Annotations:
    """Add a note to a run or a comparison."""
    text = " ".join(text.split())
    if not text or len(text) > _LONGEST:
        raise BadInput(f"a note should have 1 to {_LONGEST} characters, but has {len(text)}")
    note = Note(round(time.time(), 3), text)
    return _change(folder, lambda now: replace(now, notes=(*now.notes, note)))


def add_tag(folder: Path, tag: str) -> Annotations:
    """Add a tag to a run or a comparison; nothing changes if it has the tag already."""
    if not _TAG.fullmatch(tag):
        raise BadInput(
            f"the tag {tag!r:.60} should be one word of at most 40 letters, digits and . + - _, "
            "e.g. keep"
        )
    return _change(folder, lambda now: replace(now, tags=tuple(sorted({*now.tags, tag}))))


def remove_tag(folder: Path, tag: str) -> Annotations:
    """Remove a tag; refuse one that the run or comparison does not have."""

    def without(now: Annotations) -> Annotations:
        if tag not in now.tags:
            listed = f"it has {', '.join(now.tags)}" if now.tags else "it has no tags"
            raise BadInput(
                f"{folder} has no tag {tag!r:.60}{nearest(tag, now.tags) or f'; {listed}'}"
            )
        return replace(now, tags=tuple(other for other in now.tags if other != tag))

    return _change(folder, without)


def _change(folder: Path, change: Callable[[Annotations], Annotations]) -> Annotations:
    """Change the file; other processes that change it wait meanwhile."""
    try:
        with Lock(folder):
            annotations = change(read_annotations(folder))
            write_whole(folder / ANNOTATIONS, json.dumps(asdict(annotations), indent=1) + "\n")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror})") from None
    return annotations
