"""Rows of text, wherever they are kept: a local file or a split of a hub set."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from frostlab.data.files import format_of, read_lines, read_pieces
from frostlab.errors import BadInput, nearest

Label = int | str
_WHOLE = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Columns:
    """Which columns to read; `joined`: the rows are the lines of one document."""

    texts: tuple[str, ...]
    label: str | None
    joined: bool = False


class Row(NamedTuple):
    """One example, or a piece of a document that ends here or goes on."""

    line: int
    texts: tuple[str, ...]
    label: Label | None
    ends: bool


@dataclass(frozen=True)
class Part:
    """One split in one place."""

    split: str
    place: str  # for messages and records
    files: tuple[Path, ...]  # where the bytes are
    hub: Any = None  # a split of the `datasets` library, or None for a file

    def rows(self, columns: Columns) -> Iterator[Row]:
        """Yield what the columns say, checked."""
        if self.hub is None and format_of(self.files[0]) == "txt":
            yield from self._running(columns)
            return
        lines = read_lines(self.files[0]) if self.hub is None else self._hub_lines()
        line = 0
        for line, values in lines:
            yield _row(self.place, line, values, columns)
        if columns.joined and line:
            yield Row(line, ("",), None, ends=True)

    def _running(self, columns: Columns) -> Iterator[Row]:
        if columns.label is not None or len(columns.texts) > 1:
            lacks = "no labels" if columns.label is not None else "one text, not pairs"
            raise BadInput(f"{self.place}: .txt has {lacks}; use jsonl, csv, tsv or parquet")
        for text, ends in read_pieces(self.files[0]):
            yield Row(0, (text,), None, ends)

    def _hub_lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0
        for batch in self.hub.iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield number, dict(zip(batch, values, strict=True))

    def stamp(self) -> list[list[str | int]]:
        """Tell one state of the files from another without reading them."""
        try:
            states = [(path.resolve(), path.stat()) for path in self.files]
        except OSError as error:
            raise BadInput(f"{self.place} cannot be read: {error.strerror}") from error
        return [[str(path), state.st_size, state.st_mtime_ns] for path, state in states]


def _row(place: str, line: int, values: Mapping[str, Any], columns: Columns) -> Row:
    texts = tuple(_text(place, line, values, name) for name in columns.texts)
    label = None if columns.label is None else _label(place, line, values, columns.label)
    return Row(line, texts, label, not columns.joined)


def _cell(place: str, line: int, values: Mapping[str, Any], name: str) -> Any:
    try:
        return values[name]
    except KeyError:
        names = [str(key) for key in values]
        hint = nearest(name, names) or f"; there are {', '.join(names)}"
        raise BadInput(f"{place}:{line}: no column {name}{hint}") from None


def _text(place: str, line: int, values: Mapping[str, Any], name: str) -> str:
    value = _cell(place, line, values, name)
    if not isinstance(value, str):
        raise BadInput(f"{place}:{line}: column {name} holds {value!r:.40}, not text")
    return value


def _label(place: str, line: int, values: Mapping[str, Any], name: str) -> Label:
    value = _cell(place, line, values, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE.fullmatch(value) else value
    if value == -1:
        raise BadInput(f"{place}:{line}: label -1 means unlabelled; choose a split with labels")
    if isinstance(value, int) or (isinstance(value, str) and value):
        return int(value) if isinstance(value, bool) else value
    raise BadInput(f"{place}:{line}: label {value!r:.40} is neither a whole number nor a word")
