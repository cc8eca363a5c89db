"""Splits of text by role: train, tune (to select checkpoints) and report (for the final scores).

Labelled rows are held out by a hash of their text, running text by its order, so the splits are the
same for every seed. A `Survey` holds the hash, size and label of each row. A text that occurs in
several splits stays in only one of them: a row of train is dropped if its text is in tune or
report, a row of tune if its text is in report. Nothing is dropped with `splits: published` (which
has no tune: report selects checkpoints), nor from running text that is split by characters.
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from frostlab.data.arrays import map_npy
from frostlab.data.files import word_end
from frostlab.data.sources import Columns, Split, SplitPlan
from frostlab.data.split_record import FileRecord, Label
from frostlab.data.tokens import load_facts, save_facts
from frostlab.errors import BadInput
from frostlab.storage import FORMAT, build_once, digest_of, file_digest
from frostlab.text import counted, plain

Mask = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
FEWEST_DOCUMENTS = 20  # with fewer documents, running text is split by characters
_FACTS = "survey.json"
# array of a survey → its dtype
_COLUMN_TYPES = {"keys": "uint64", "sizes": "int64", "codes": "int64", "empty": "uint8"}
_VERSION = 1  # version of a survey's files; raise it when they change
# Purpose (holding out rows for a role, or choosing `data.limit` rows) → number that makes its
# pseudo-random order of rows differ from the others'.
_SALT = {"report": 1, "tune": 2, "limit": 3}


# Surveys


@dataclass(frozen=True)
class Survey:
    """The hash, size and label of each row of a split."""

    digest: str
    keys: Keys  # hash of each row's texts
    sizes: Numbers  # number of characters of each row
    codes: Numbers  # index into `labels` of each row's label; empty without labels
    empty: npt.NDArray[np.uint8]  # 1 for each row with a text that is empty or white space
    labels: tuple[tuple[Label, int], ...]  # each different label, and the line of its first row
    files: tuple[FileRecord, ...]  # empty if the rows are generated or from the hub

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class _SurveyFacts:
    """Cached metadata of a survey."""

    digest: str
    labels: tuple[tuple[Label, int], ...]
    files: tuple[FileRecord, ...]


def survey(split: Split, columns: Columns, cache: Path) -> Survey:
    """Survey a split; reuse a cached survey if the files have the same sizes and times."""
    key = [split.stamp(), split.name, columns.texts, columns.label, columns.joined, FORMAT]
    key += [_VERSION, split.is_file]
    folder = build_once(
        cache / "surveys" / digest_of(key)[:32],
        lambda folder: _write_survey(split, columns, folder),
    )
    facts = load_facts(_SurveyFacts, folder, _FACTS)
    arrays = {
        name: np.array(map_npy(folder / f"{name}.npy", kind))
        for name, kind in _COLUMN_TYPES.items()
    }
    return Survey(facts.digest, **arrays, labels=facts.labels, files=facts.files)


def _write_survey(split: Split, columns: Columns, folder: Path) -> None:
    keys, sizes, codes, empty = array("Q"), array("q"), array("q"), array("B")
    label_codes: dict[Label, int] = {}
    first_lines: list[tuple[Label, int]] = []
    all_rows = hashlib.sha256()
    document, size, blank = hashlib.blake2b(digest_size=16), 0, True
    for row in split.rows(columns):
        for number, text in enumerate(row.texts):
            if number:
                document.update(b"\xff")  # never in UTF-8, so ("ab", "c") and ("a", "bc") differ
            document.update(_encode(split, row.line, text))
            size += len(text)
        blank = blank and any(not text or text.isspace() for text in row.texts)
        if not row.ends:
            continue
        key = document.digest()
        all_rows.update(key)
        if row.label is not None:
            if row.label not in label_codes:
                label_codes[row.label] = len(first_lines)
                first_lines.append((row.label, row.line))
            codes.append(label_codes[row.label])
            all_rows.update(f"{row.label!r};".encode())
        keys.append(int.from_bytes(key[:8], "little"))
        sizes.append(size)
        empty.append(blank)
        document, size, blank = hashlib.blake2b(digest_size=16), 0, True
    if not sum(sizes):
        raise BadInput(f"{split.place}: split {split.name} holds no text")
    np.save(folder / "keys.npy", np.array(keys, dtype=np.uint64))
    np.save(folder / "sizes.npy", np.array(sizes, dtype=np.int64))
    np.save(folder / "codes.npy", np.array(codes, dtype=np.int64))
    np.save(folder / "empty.npy", np.array(empty, dtype=np.uint8))
    files = split.files if split.is_file else ()
    facts = _SurveyFacts(all_rows.hexdigest(), tuple(first_lines), tuple(map(_file, files)))
    save_facts(folder, facts, _FACTS)


def _file(path: Path) -> FileRecord:
    path = path.resolve()
    return FileRecord(str(path), path.stat().st_size, file_digest(path))


def _encode(split: Split, line: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise BadInput(
            f"{split.place}:{line}: {surrogate} is half of a surrogate pair, not a character"
        ) from error


# Classes


def classes_of(split: Split, train: Survey, count: int | None) -> tuple[Label, ...]:
    """Return the labels in class order: 0 to `count` - 1, or the sorted training labels."""
    if count is not None:
        return tuple(range(count))
    labels = [label for label, _ in train.labels]
    if not all(isinstance(label, int) for label in labels):
        labels = [str(label) for label in labels]
    if len(labels) < 2:
        label = plain(str(labels[0])[:40])
        raise BadInput(f"{split.place}: every label is {label}; two classes are needed")
    return tuple(sorted(labels, key=lambda label: (label if isinstance(label, int) else 0, label)))


def class_numbers(split: Split, rows: Survey, classes: tuple[Label, ...]) -> Numbers:
    """Return the class number of each row; refuse a label that is not a class."""
    order = {label: number for number, label in enumerate(classes)}
    numbers = []
    for label, line in rows.labels:
        key = label if label in order else str(label)
        if key not in order:
            listed = ", ".join(f"{name!s:.40}" for name in classes[:8]) + " …" * (len(classes) > 8)
            raise BadInput(
                f"{split.place}:{line}: label {label!s:.40} is not one of the classes {listed}"
            )
        numbers.append(order[key])
    return np.array(numbers, dtype=np.int64)[rows.codes]


def single_labels(rows: Survey) -> list[tuple[Label, int]]:
    """Return the labels that occur in one row only, each with the line of its row."""
    counts = np.bincount(rows.codes, minlength=len(rows.labels))
    return [rows.labels[code] for code in np.flatnonzero(counts == 1)]


# Roles


@dataclass(frozen=True)
class Portion:
    """The part of a split that has one role: some rows or documents, or a range of characters."""

    split: Split
    survey: Survey
    taken: Mask  # which rows or documents are in the portion
    characters: tuple[int, int] | None = None  # a range of the text; if given, replaces `taken`
    note: str = ""  # how rows were held out or dropped, for the record
    carved_from: str | None = None  # the role that this portion is a share of
    carved: Mapping[str, int] = field(default_factory=dict)  # role → rows that it got from here
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason → rows that are not used

    @property
    def size(self) -> int:
        """Number of characters."""
        if self.characters is not None:
            return self.characters[1] - self.characters[0]
        return int(self.survey.sizes[self.taken].sum())

    def pieces(self, columns: Columns) -> Iterator[tuple[str, bool]]:
        """Yield pieces of the running text, each with a flag that marks the end of a document."""
        document = end = 0  # index of the document; number of characters read
        for row in self.split.rows(columns):
            text, begin = row.texts[0], end
            end += len(text)
            if self.characters is not None:
                low, high = (_cut(text, edge - begin) for edge in self.characters)
                # Yield an empty piece only if it ends a document.
                if high > low or (row.ends and self.characters[0] < end <= self.characters[1]):
                    yield text[low:high], row.ends and high == len(text)
            elif self.taken[document]:
                yield text, row.ends
            document += row.ends


def _cut(text: str, edge: int) -> int:
    """Return the edge of a portion as a position in a text, moved to the end of a word."""
    if edge <= 0 or edge >= len(text):
        return min(max(edge, 0), len(text))
    return word_end(text, edge)


def divide(
    plan: SplitPlan, surveys: dict[str, Survey], numbers: Numbers | None
) -> dict[str, Portion]:
    """Return each role's portion; `numbers` has the class of each row of train, if any."""
    portions = {
        role: Portion(split, surveys[role], np.ones(len(surveys[role]), dtype=np.bool_))
        for role, split in (("train", plan.train), ("tune", plan.tune), ("report", plan.report))
        if isinstance(split, Split)
    }
    shares = {
        role: share
        for role, share in (("report", plan.report), ("tune", plan.tune))
        if isinstance(share, float)
    }
    if sum(shares.values()) >= 1:
        given = " and ".join(f"data.{role} {share:g}" for role, share in shares.items())
        raise BadInput(f"{given} leave nothing of {plan.train.place} to train on")
    if numbers is None and shares and len(surveys["train"]) < FEWEST_DOCUMENTS:
        _hold_out_characters(portions, shares)
    else:
        _hold_out_rows(portions, shares, numbers)
        if plan.tune is not None:
            _drop_shared_texts(portions)
    for role, portion in portions.items():
        if portion.size == 0:
            reason = (
                f"{len(portion.survey)} rows of {portion.split.place} are too few to hold out "
                "from, or their texts are in another split"
            )
            raise BadInput(f"nothing is left for {role}: {reason}")
    return {role: portions[role] for role in ("train", "tune", "report") if role in portions}


def _hold_out_characters(portions: dict[str, Portion], shares: dict[str, float]) -> None:
    """Hold out the end of the text for report, and the text before it for tune."""
    train = portions["train"]
    stop = total = int(train.survey.sizes.sum())
    for role, share in shares.items():
        start = stop - max(1, round(share * total))
        note = (
            f"the last {share:.0%} of the text"
            if stop == total
            else f"the {share:.0%} of the text before report"
        )
        portions[role] = replace(train, characters=(start, stop), note=note, carved_from="train")
        stop = start
    portions["train"] = replace(train, characters=(0, stop), note=f"without {' and '.join(shares)}")


def _hold_out_rows(
    portions: dict[str, Portion], shares: dict[str, float], numbers: Numbers | None
) -> None:
    """Hold out a share of each class, or the last documents of a language-modelling set."""
    train = portions["train"]
    left = train.taken.copy()
    carved: dict[str, int] = {}
    for role, share in shares.items():
        scaled = share * len(left) / max(1, left.sum())  # relative to the rows that are left
        if numbers is None:
            taken, how = _last_documents(left, scaled), f"the last {share:.0%} of the documents"
        else:
            taken = stratified_share(train.survey.keys, numbers, left, scaled, role)
            how = f"{share:.0%} of each class"
        left &= ~taken
        carved[role] = int(taken.sum())
        note = f"{how}, {carved[role]:,} in all"
        portions[role] = replace(train, taken=taken, note=note, carved_from="train")
    note = f"without {' and '.join(shares)}" if shares else ""
    portions["train"] = replace(train, taken=left, note=note, carved=carved)


def _last_documents(left: Mask, share: float) -> Mask:
    documents = np.flatnonzero(left)
    taken = np.zeros_like(left)
    taken[documents[-max(1, round(share * len(documents))) :]] = True
    return taken


def stratified_share(keys: Keys, numbers: Numbers, left: Mask, share: float, purpose: str) -> Mask:
    """Take a share of each class among the rows in `left`; equal texts stay together.

    At least one text of each class is not taken.
    """
    rows = np.flatnonzero(left)
    texts, first, text_of_row, counts = np.unique(
        keys[rows], return_index=True, return_inverse=True, return_counts=True
    )
    class_of_text = numbers[rows][first]
    order = np.lexsort((scramble(texts, purpose), class_of_text))
    taken_texts = np.zeros(len(texts), dtype=np.bool_)
    for group in np.split(order, np.flatnonzero(np.diff(class_of_text[order])) + 1):
        running = np.cumsum(counts[group])
        wanted = round(share * int(running[-1]))
        size = max(1, int(np.searchsorted(running, wanted, side="right")))
        taken_texts[group[: min(size, len(group) - 1)]] = True
    taken = np.zeros_like(left)
    taken[rows] = taken_texts[text_of_row]
    return taken


def scramble(keys: Keys, purpose: str) -> Keys:
    """Hash keys with splitmix64, which gives a fixed pseudo-random order for each purpose."""
    z = keys + np.uint64((_SALT[purpose] * 0x9E3779B97F4A7C15) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _drop_shared_texts(portions: dict[str, Portion]) -> None:
    """Drop rows of tune whose text is in report, and rows of train whose text is in either."""
    held_out: list[Keys] = []
    roles: list[str] = []
    for role in ("report", "tune", "train"):
        portion = portions[role]
        if held_out:
            shared = portion.taken & np.isin(
                portion.survey.keys, np.concatenate(held_out), kind="sort"
            )
            if shared.any():
                reason = f"text is also in {' or '.join(roles)}"
                note = f"without {counted(int(shared.sum()), 'rows')} whose {reason}"
                note = f"{portion.note}, {note}" if portion.note else note
                portion = replace(
                    portion,
                    taken=portion.taken & ~shared,
                    note=note,
                    dropped={reason: int(shared.sum())},
                )
                portions[role] = portion
        held_out.append(portion.survey.keys[portion.taken])
        roles.append(role)


class RowCounts(NamedTuple):
    """Numbers of suspicious rows of a split; each is described in `SplitRecord`."""

    empty: int | None = None
    duplicates: int | None = None
    contradictions: int | None = None


def count_rows(survey: Survey, rows: Numbers, numbers: Numbers | None) -> RowCounts:
    """Count the empty, repeated and contradicting texts of some rows.

    `numbers` has the class of each row of the survey; None if the rows have no classes.
    """
    keys = survey.keys[rows]
    texts, text_of_row = np.unique(keys, return_inverse=True)
    contradictions = None
    if numbers is not None:
        lowest = np.full(len(texts), len(numbers), dtype=np.int64)
        highest = np.full(len(texts), -1, dtype=np.int64)
        np.minimum.at(lowest, text_of_row, numbers[rows])
        np.maximum.at(highest, text_of_row, numbers[rows])
        contradictions = int((lowest != highest)[text_of_row].sum())
    return RowCounts(int(survey.empty[rows].sum()), len(keys) - len(texts), contradictions)


def limit_rows(portion: Portion, numbers: Numbers, limit: int | None) -> Numbers:
    """Choose at most `limit` rows, with classes in proportion; return them in file order."""
    rows = np.flatnonzero(portion.taken)
    if limit is None or limit >= len(rows):
        return rows
    classes, scrambled = numbers[rows], scramble(portion.survey.keys[rows], "limit")
    order = np.lexsort((rows, scrambled, classes))
    counts = np.bincount(classes)
    begin = np.concatenate(([0], np.cumsum(counts)))[classes[order]]
    # Each row's rank within its class, from 0 to 1; the lowest ranks of all classes are chosen.
    quantile = (np.arange(len(order)) - begin + 0.5) / counts[classes[order]]
    chosen = order[np.lexsort((scrambled[order], quantile))[:limit]]
    return np.sort(rows[chosen])
