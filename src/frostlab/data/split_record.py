"""Descriptions of data: the source of each split, its counts, and notes about suspicious rows.

The dataclasses hold plain values only, because a run writes them to data.json.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from frostlab.text import escaped, markdown

Label = int | str
_SHOWN = 8  # the most classes or files that the table names for a split


@dataclass(frozen=True)
class FileRecord:
    """A file that a split was read from."""

    path: str  # absolute path
    bytes: int  # size
    sha256: str  # checksum of the file


@dataclass(frozen=True)
class LengthRecord:
    """Lengths of a split's examples, in tokens."""

    least: int  # length of the shortest example
    median: float  # median length
    mean: float  # mean length
    most: int  # length of the longest example
    cut: int | None = None  # examples cut at data.length; null for running text, or if generated


@dataclass(frozen=True)
class SplitRecord:
    """One split: its source, its examples, and the rows that did not become examples.

    For labelled text, `examples` is `rows` without the rows that other splits got (`carved`) and
    without the rows that were not used (`dropped`).
    """

    # an absolute path; a name on the hub with its revision; or the name of data that are generated,
    # or registered with `fl.register_data`
    source: str
    examples: int  # number of examples: rows, stretches of running text, or windows of EEG
    digest: str  # digest of the prepared examples
    files: list[FileRecord] = field(default_factory=list)  # empty if generated or from the hub
    rows: int | None = None  # rows or documents read for this split; null if generated, and for EEG
    rows_digest: str | None = None  # digest of the source's rows; the same in all file formats
    carved_from: str | None = None  # the split that this one is a share of
    carved: dict[str, int] = field(default_factory=dict)  # split → rows that it got from this one
    dropped: dict[str, int] = field(default_factory=dict)  # reason → rows that were not used
    note: str = ""  # how the split was carved and rows were dropped; EEG: its origin
    classes: list[int] | None = None  # examples of each class, in the order of labels
    lengths: LengthRecord | None = None  # lengths of the examples; null for EEG
    tokens: int | None = None  # tokens of the examples or of the running text; null for EEG
    characters: int | None = None  # characters of the rows; null if generated, and for EEG
    empty: int | None = None  # rows with an empty or blank text; they are kept
    duplicates: int | None = None  # rows whose text is also in an earlier row; they are kept
    contradictions: int | None = None  # rows whose text has another label in another row; kept
    recordings: int | None = None  # EEG: number of recordings
    subjects: int | None = None  # EEG: number of subjects
    seconds: float | None = None  # EEG: length of all recordings
    seed: int | None = None  # generated data: the seed that it was drawn from


def splits_markdown(
    splits: Mapping[str, SplitRecord],
    labels: Sequence[Label] | None,
    notes: Iterable[str],
) -> str:
    """Return a table of the splits in Markdown, with the notes below it.

    Files are named without their folder, because pages and cards are shared.
    """
    head = ["split", "examples", "classes", "source", "digest", "note"]
    rows = [
        [
            name,
            f"{split.examples:,}",
            _classes(split, labels),
            _source(split),
            split.digest[:16],
            "; ".join(_remarks(split)),
        ]
        for name, split in splits.items()
    ]
    kept = [k for k, _ in enumerate(head) if any(row[k] for row in rows)]
    table = markdown([head[k] for k in kept], [[row[k] for k in kept] for row in rows])
    return "\n\n".join([table, *map(escaped, notes)])


def _classes(split: SplitRecord, labels: Sequence[Label] | None) -> str:
    if labels is None or split.classes is None:
        return ""
    counts = [f"{label}: {count:,}" for label, count in zip(labels, split.classes, strict=False)]
    return _listed(counts)


def _source(split: SplitRecord) -> str:
    if split.files:
        return _listed(f"{os.path.basename(f.path)} (sha256 {f.sha256[:16]})" for f in split.files)
    return os.path.basename(split.source) if os.path.isabs(split.source) else split.source


def _remarks(split: SplitRecord) -> Iterator[str]:
    if split.note:
        yield split.note
    if split.recordings is not None and split.seconds is not None:
        yield f"{split.recordings:,} recordings, {split.subjects} subjects, {split.seconds:,.0f} s"
    for count, what in (
        (split.empty, "empty or blank texts"),
        (split.duplicates, "repeated texts"),
        (split.contradictions, "rows whose text has several labels"),
    ):
        if count:
            yield f"{count:,} {what}"


def _listed(items: Iterable[str]) -> str:
    listed = list(items)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
