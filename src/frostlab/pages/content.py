"""The content of a report, from which its page, its Markdown and its tables are written.

Every number of a report is a `Cell`, which says where it comes from: a JSON file in the reported
folder, a pointer into it (RFC 6901, such as `/verdicts/oelm/paired`) and the name of the format in
which it is shown. So anyone can look it up, and a test can check every number of a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from frostlab.comparison.evidence import Effect, Summary, interval_text
from frostlab.errors import BadInput
from frostlab.storage import read_json
from frostlab.text import NONE, hms, number, plain

_MEBIBYTE = 2**20


def _or_none(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a format that shows None as a dash."""
    return lambda value: NONE if value is None else show(value)


def _interval(effect: dict[str, Any]) -> str:
    return interval_text(effect["low"], effect["high"], effect["log"])


FORMATS: dict[str, Callable[[Any], str]] = {  # by name; each turns a value of a record into text
    name: _or_none(show)
    for name, show in {
        "text": lambda value: plain(str(value)),
        "number": number,
        "count": lambda value: f"{value:,}",
        "percent": lambda value: f"{value:.2%}",
        "whole percent": lambda value: f"{value:.0f} %",  # of a value that is in percent
        "seconds": lambda value: f"{number(value)} s",
        "hms": hms,
        "ms": lambda value: f"{number(value)} ms",
        "seconds as ms": lambda value: f"{number(1000 * value)} ms",
        "MiB": lambda value: f"{value / _MEBIBYTE:,.0f} MiB",
        "day": lambda value: datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d"),
        "list": lambda value: ", ".join(plain(str(entry)) for entry in value) or NONE,
        "length": lambda value: f"{len(value):,}",
        # of whole objects
        "effect": lambda value: str(Effect(**value)),
        "interval": _interval,
        "summary": lambda value: str(Summary(**value)),
        "trainable share": lambda value: f"{value['trainable'] / value['total']:.1%}",
        "step ratio": lambda value: (
            NONE if value["ratio"] is None
            else f"{value['ratio']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"
        ),
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A text of a report and, for every number, where it comes from."""

    text: str
    file: str | None = None  # relative to the reported folder; None for words
    pointer: str = ""  # into the file
    format: str = "text"  # name of the format in `FORMATS`
    alarm: bool = False  # whether it is shown in red


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or an item of a list: texts and cells one after another."""

    pieces: tuple[str | Cell, ...]
    alarm: bool = False  # whether it is shown in red
    item: bool = False  # whether it is an item of a list


@dataclass(frozen=True)
class Table:
    """A table, which is also written as a CSV and a LaTeX file."""

    name: str  # of the files, without their ending
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart, which is also written as SVG, PNG and PDF, and its data as CSV."""

    name: str  # of the files, without their ending
    title: str
    chart: Any  # an Altair chart, or its specification, without a theme
    caption: str  # what it shows, in words
    rows: Sequence[dict[str, Any]]  # the data that it draws
    files: tuple[str, ...] = ()  # records that the data come from


Block = Paragraph | Table | Figure


@dataclass(frozen=True)
class Section:
    """A part of a report with a title."""

    name: str  # of its anchor in the page
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    about: str  # the question, or what was trained
    first: tuple[Block, ...]  # the first screen: what was found, and how far to trust it
    sections: tuple[Section, ...]
    arms: tuple[str, ...] = ()  # that can be switched on and off in the figures
    language: str = "en"
    problems: tuple[str, ...] = field(default=())  # parts of the report that could not be made

    def blocks(self) -> list[Block]:
        """Return all blocks in order."""
        return [*self.first, *(block for section in self.sections for block in section.blocks)]

    @property
    def figures(self) -> list[Figure]:
        """All figures in order."""
        return [block for block in self.blocks() if isinstance(block, Figure)]

    @property
    def tables(self) -> list[Table]:
        """All tables in order."""
        return [block for block in self.blocks() if isinstance(block, Table)]


class Records:
    """The JSON files of a folder, each read once, as sources of cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}

    def value(self, file: str, *keys: str | int) -> Any:
        """Return a value of a file; None if a key on the way to it is missing or null."""
        if file not in self._files:
            try:
                self._files[file] = read_json(self.folder / file)
            except FileNotFoundError:
                self._files[file] = None
        value = self._files[file]
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def cell(
        self, file: str, *keys: str | int, format: str = "number", alarm: bool = False
    ) -> Cell:
        """Return the cell of a value; a dash without a source if there is no value."""
        value = self.value(file, *keys)
        if value is None:
            return Cell(NONE)
        return Cell(FORMATS[format](value), file, pointer(*keys), format, alarm)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that were read so far and exist."""
        return tuple(sorted(name for name, value in self._files.items() if value is not None))


def pointer(*keys: str | int) -> str:
    """Return the JSON pointer (RFC 6901) of these keys."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def resolve(value: Any, path: str) -> Any:
    """Return the value that a JSON pointer names."""
    for part in path.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise BadInput(f"there is no {path}") from None
    return value


def words(*pieces: str | Cell, alarm: bool = False) -> Paragraph:
    """Return a paragraph of these pieces."""
    return Paragraph(pieces, alarm)


def item(*pieces: str | Cell, alarm: bool = False) -> Paragraph:
    """Return an item of a list of these pieces."""
    return Paragraph(pieces, alarm, item=True)
