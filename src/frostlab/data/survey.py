"""What a split holds, read once: a digest, and per document a key, a size and a label."""

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostlab.data.cache import FORMAT, build_once, digest_of
from frostlab.data.rows import Columns, Label, Part
from frostlab.errors import BadInput


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
