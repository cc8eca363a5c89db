"""Descriptions of data: the source of each split, its counts, and notes about suspicious rows.

The classes hold plain values only, because a run writes them to data.json.
"""

from dataclasses import dataclass, field

Label = int | str


@dataclass(frozen=True)
class FileRecord:
    """A file that a split was read from."""

    path: str  # absolute path
    bytes: int  # size
    sha256: str  # checksum of the file


@dataclass(frozen=True)
class LengthRecord:
    """Lengths of a split's examples, in tokens (EEG: samples)."""

    least: int  # length of the shortest example
    median: float  # median length
    mean: float  # mean length
    most: int  # length of the longest example
    cut: int | None = None  # number of examples cut at data.length; null for running text and EEG


@dataclass(frozen=True)
class SplitRecord:
    """One split: its source, the rows that became examples, and those that did not.

    For labelled text, `rows` less all of `carved` and `dropped` is `examples`.
    """

    source: str  # absolute path, hub name and revision, or how the data were generated
    examples: int  # number of examples: rows, or pieces of running text, or windows of EEG
    digest: str  # digest of the prepared examples
    files: list[FileRecord] = field(default_factory=list)  # empty if generated or from the hub
    rows: int | None = None  # rows or documents read for this split; null if generated, and for EEG
    rows_digest: str | None = None  # digest of the source's rows; equal for all file formats
    carved_from: str | None = None  # the split that this one is a share of
    carved: dict[str, int] = field(default_factory=dict)  # split → rows that it got from this one
    dropped: dict[str, int] = field(default_factory=dict)  # reason → rows that were not used
    note: str = ""  # how the split was carved and what was dropped, in words
    classes: list[int] | None = None  # examples of each class, in the order of labels
    lengths: LengthRecord | None = None  # lengths of the examples
    tokens: int | None = None  # tokens of all examples; null for EEG
    characters: int | None = None  # characters of the rows; null if generated, and for EEG
    empty: int | None = None  # rows with an empty text; they are kept
    duplicates: int | None = None  # rows whose text stands in an earlier row too; they are kept
    contradictions: int | None = None  # rows whose text has another label in another row; kept
    recordings: int | None = None  # EEG: number of recordings
    subjects: int | None = None  # EEG: number of subjects
    seconds: float | None = None  # EEG: length of all recordings
    seed: int | None = None  # generated data: the seed of this split
