"""Which rows train, tune and report: fixed by the texts, the same for every seed and arm."""

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostlab.data.files import word_end
from frostlab.data.sources import Columns, Label, Part, Plan
from frostlab.errors import BadInput
from frostlab.storage import FORMAT, build_once, digest_of


@dataclass(frozen=True)
class Survey:
    """A split without its text; equal texts have equal keys."""

    digest: str
    keys: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]  # characters
    codes: npt.NDArray[np.int64]  # places in `labels`; empty without labels
    labels: tuple[tuple[Label, int], ...]  # each label with the line it is first met on

    def __len__(self) -> int:
        return len(self.keys)


def survey(part: Part, columns: Columns, cache: Path) -> Survey:
    """Look a split over, or remember it while its files have the same size and time."""
    asked = [part.stamp(), part.split, columns.texts, columns.label, columns.joined, FORMAT]
    folder = build_once(
        cache / "surveys" / digest_of(asked)[:32], lambda place: _look(part, columns, place)
    )
    facts = json.loads((folder / "survey.json").read_text())
    loaded = {name: np.load(folder / f"{name}.npy") for name in ("keys", "sizes", "codes")}
    labels = tuple((value, line) for value, line in facts["labels"])
    return Survey(facts["digest"], **loaded, labels=labels)


def _look(part: Part, columns: Columns, folder: Path) -> None:
    keys, sizes, codes = array("Q"), array("q"), array("q")
    places: dict[Label, int] = {}
    lines: list[tuple[Label, int]] = []
    whole = hashlib.sha256()
    one, size = hashlib.blake2b(digest_size=16), 0
    for row in part.rows(columns):
        for number, text in enumerate(row.texts):
            if number:
                one.update(b"\xff")  # never part of UTF-8: ("ab", "c") is not ("a", "bc")
            one.update(_bytes(part, row.line, text))
            size += len(text)
        if not row.ends:
            continue
        mark = one.digest()
        whole.update(mark)
        if row.label is not None:
            if row.label not in places:
                places[row.label] = len(lines)
                lines.append((row.label, row.line))
            codes.append(places[row.label])
            whole.update(f"{row.label!r};".encode())
        keys.append(int.from_bytes(mark[:8], "little"))
        sizes.append(size)
        one, size = hashlib.blake2b(digest_size=16), 0
    if not sum(sizes):
        raise BadInput(f"{part.place}: split {part.split} holds no text")
    np.save(folder / "keys.npy", np.array(keys, dtype=np.uint64))
    np.save(folder / "sizes.npy", np.array(sizes, dtype=np.int64))
    np.save(folder / "codes.npy", np.array(codes, dtype=np.int64))
    facts = {"digest": whole.hexdigest(), "labels": lines}
    (folder / "survey.json").write_text(json.dumps(facts))


def _bytes(part: Part, line: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise BadInput(f"{part.place}:{line}: {found} is half a character, not text") from error


def classes_of(part: Part, train: Survey, known: int | None) -> tuple[Label, ...]:
    """Return the labels in the order of their class: a known set's, or the training split's."""
    if known is not None:
        return tuple(range(known))
    values = [value for value, _ in train.labels]
    if not all(isinstance(value, int) for value in values):
        values = [str(value) for value in values]
    if len(values) < 2:
        raise BadInput(f"{part.place}: every label is {values[0]}; there is nothing to tell apart")
    return tuple(sorted(values, key=lambda value: (value if isinstance(value, int) else 0, value)))


def class_numbers(part: Part, found: Survey, classes: tuple[Label, ...]) -> npt.NDArray[np.int64]:
    """Return each row's class, or name the first row whose label is none of them."""
    order = {value: number for number, value in enumerate(classes)}
    numbers = []
    for value, line in found.labels:
        known = value if value in order else str(value)
        if known not in order:
            listed = ", ".join(str(name) for name in classes[:8])
            raise BadInput(f"{part.place}:{line}: label {value} is not a class: {listed}")
        numbers.append(order[known])
    return np.array(numbers, dtype=np.int64)[found.codes]


Mask = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]
SEVERAL = 20  # documents; with fewer, running text is carved by characters
_SALT = {"report": 1, "tune": 2, "limit": 3}


@dataclass(frozen=True)
class Portion:
    """The rows or documents of a split that play one role, or a stretch of its characters."""

    part: Part
    survey: Survey
    taken: Mask
    stretch: tuple[int, int] | None = None
    note: str = ""  # what was carved or dropped, for the record

    @property
    def size(self) -> int:
        """Characters."""
        if self.stretch is not None:
            return self.stretch[1] - self.stretch[0]
        return int(self.survey.sizes[self.taken].sum())

    def pieces(self, columns: Columns) -> Iterator[tuple[str, bool]]:
        """Yield this portion's running text, and whether a document ends there."""
        document = at = 0
        for row in self.part.rows(columns):
            text, begin = row.texts[0], at
            at += len(text)
            if self.stretch is not None:
                low, high = (_cut(text, edge - begin) for edge in self.stretch)
                if high > low or (row.ends and self.stretch[0] < at <= self.stretch[1]):
                    yield text[low:high], row.ends and high == len(text)
            elif self.taken[document]:
                yield text, row.ends
            document += row.ends


def _cut(text: str, edge: int) -> int:
    """Move an edge inside a piece to the end of the word it falls in."""
    if edge <= 0 or edge >= len(text):
        return min(max(edge, 0), len(text))
    return word_end(text, edge)


def mixed(keys: Keys, purpose: str) -> Keys:
    """Scramble keys, each purpose its own way (splitmix64), to order rows without a generator."""
    z = keys + np.uint64((_SALT[purpose] * 0x9E3779B97F4A7C15) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def divide(
    plan: Plan, surveys: dict[str, Survey], numbers: npt.NDArray[np.int64] | None
) -> dict[str, Portion]:
    """Give every role its rows; `numbers` are the training rows' classes, None for language."""
    portions = {
        role: Portion(part, surveys[role], np.ones(len(surveys[role]), dtype=np.bool_))
        for role, part in (("train", plan.train), ("tune", plan.tune), ("report", plan.report))
        if isinstance(part, Part)
    }
    shares = {
        role: share
        for role, share in (("report", plan.report), ("tune", plan.tune))
        if isinstance(share, float)
    }
    if sum(shares.values()) >= 1:
        raise BadInput(f"data.tune {plan.tune} leaves nothing of {plan.train.place} to train on")
    if numbers is None and shares and len(surveys["train"]) < SEVERAL:
        _carve_characters(portions, shares)
    else:
        _carve_rows(portions, shares, numbers)
        if plan.tune is not None:
            _drop_shared(portions)
    for role, portion in portions.items():
        if portion.size == 0:
            few = f"{len(portion.survey)} rows of {portion.part.place} are too few to carve from"
            raise BadInput(f"nothing is left for {role}: {few}")
    return {role: portions[role] for role in ("train", "tune", "report") if role in portions}


def _carve_characters(portions: dict[str, Portion], shares: dict[str, float]) -> None:
    whole = portions["train"]
    stop = int(whole.survey.sizes.sum())
    total = stop
    for role, share in shares.items():
        start = stop - max(1, round(share * total))
        note = (
            f"the last {share:.0%} of the text"
            if stop == total
            else f"the {share:.0%} of the text before report"
        )
        portions[role] = replace(whole, stretch=(start, stop), note=note)
        stop = start
    portions["train"] = replace(whole, stretch=(0, stop), note=f"less {' and '.join(shares)}")


def _carve_rows(
    portions: dict[str, Portion],
    shares: dict[str, float],
    numbers: npt.NDArray[np.int64] | None,
) -> None:
    whole = portions["train"]
    left = whole.taken.copy()
    for role, share in shares.items():
        scaled = share * len(left) / max(1, left.sum())  # a share of all, not of what is left
        if numbers is None:
            taken, how = _last(left, scaled), f"the last {share:.0%} of the documents"
        else:
            taken = carve(whole.survey.keys, numbers, left, scaled, role)
            how = f"{share:.0%} carved by label"
        left &= ~taken
        portions[role] = replace(whole, taken=taken, note=f"{how}, {taken.sum():,}")
    note = f"less {' and '.join(shares)}" if shares else ""
    portions["train"] = replace(whole, taken=left, note=note)


def _last(left: Mask, share: float) -> Mask:
    documents = np.flatnonzero(left)
    taken = np.zeros_like(left)
    taken[documents[-max(1, round(share * len(documents))) :]] = True
    return taken


def carve(
    keys: Keys, numbers: npt.NDArray[np.int64], left: Mask, share: float, purpose: str
) -> Mask:
    """Take a share of each class; rows of equal text go together, a class is never emptied."""
    rows = np.flatnonzero(left)
    texts, first, which, counts = np.unique(
        keys[rows], return_index=True, return_inverse=True, return_counts=True
    )
    number = numbers[rows][first]
    order = np.lexsort((mixed(texts, purpose), number))
    taken = np.zeros(len(texts), dtype=np.bool_)
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        running = np.cumsum(counts[group])
        wanted = round(share * int(running[-1]))
        size = max(1, int(np.searchsorted(running, wanted, side="right")))
        taken[group[: min(size, len(group) - 1)]] = True
    found = np.zeros_like(left)
    found[rows] = taken[which]
    return found


def _drop_shared(portions: dict[str, Portion]) -> None:
    """Take out of tune what is in report, and out of train what is in either."""
    seen: list[Keys] = []
    names: list[str] = []
    for role in ("report", "tune", "train"):
        portion = portions[role]
        if seen:
            shared = portion.taken & np.isin(portion.survey.keys, np.concatenate(seen))
            if shared.any():
                note = f"less {shared.sum():,} whose text is also in {' or '.join(names)}"
                note = f"{portion.note}, {note}" if portion.note else note
                portion = replace(portion, taken=portion.taken & ~shared, note=note)
                portions[role] = portion
        seen.append(portion.survey.keys[portion.taken])
        names.append(role)


def limited(
    portion: Portion, numbers: npt.NDArray[np.int64], limit: int | None
) -> npt.NDArray[np.int64]:
    """Return at most `limit` row numbers, every class in proportion, in the order of the file."""
    rows = np.flatnonzero(portion.taken)
    if limit is None or limit >= len(rows):
        return rows
    number, scrambled = numbers[rows], mixed(portion.survey.keys[rows], "limit")
    order = np.lexsort((rows, scrambled, number))
    counts = np.bincount(number)
    begin = np.concatenate(([0], np.cumsum(counts)))[number[order]]
    quantile = (np.arange(len(order)) - begin + 0.5) / counts[number[order]]
    chosen = order[np.lexsort((scrambled[order], quantile))[:limit]]
    return np.sort(rows[chosen])
