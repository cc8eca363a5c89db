"""The content of a report, from which its page, its Markdown and its tables are written.

Every number in the tables and texts of a report that comes from a record is a `Cell`, which says
where it comes from: a JSON file (or a recipe's YAML) in the reported folder, a pointer into it
(RFC 6901, such as `/verdicts/oelm/paired`) and the name of the format in which it is shown. So
anyone can look it up, and a test can check every number of a page.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from frostlab.comparison.evidence import Effect, Summary, interval_text
from frostlab.comparison.plan import Rules
from frostlab.errors import BadInput
from frostlab.pages.languages.phrases import LANGUAGES, reason_in, translated
from frostlab.pages.languages.words import TRANSLATIONS, translated_word
from frostlab.recipe.settings import all_metrics, metric_facts
from frostlab.storage import read_json
from frostlab.text import NONE, hms, number, plain, printable

_MEBIBYTE = 2**20
_LARGE_SHARE = 10.0  # from here on, a share is shown as a multiple such as 12 ×, not in percent
_SMALLEST = 0.0001  # a smaller probability is shown as "< 0.0001"
_WORDS = frozenset({  # names of the formats that show texts; all others show numbers
    "text", "lines", "json", "list", "file name", "short digest",
    *(f"{name} in {language}" for language in LANGUAGES
      for name in ("looks", "remark", "remarks", "reason", "word", "verdict", "verdict counts")),
})  # fmt: skip


def _or_none(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a format that shows None as a dash."""
    return lambda value: NONE if value is None else show(value)


_CHANGES: dict[str, Callable[[float], str]] = {  # form of a metric → format of a change of it
    "percent": lambda change: f"{100 * change:+.2f} points",
    "number": lambda change: f"{change:+.4g}",
    "r": lambda change: f"{change:+.3f}",
}
_TIMES = ("train_seconds", "validation_seconds", "checkpoint_seconds")


def _change(metric: str, stages: list[dict[str, Any]]) -> str:
    """Show how much a metric of the best evaluation improved from the first stage to the last."""
    first, last = (stages[place]["metrics"].get(metric) for place in (0, -1))
    if first is None or last is None:
        return NONE
    facts = metric_facts(metric)
    return _CHANGES[facts.form](first - last if facts.lower_is_better else last - first)


def _share(part: str, clocks: dict[str, Any]) -> str:
    """Show a part of the total time in percent."""
    return f"{clocks[part] / clocks['total_seconds']:.1%}" if clocks["total_seconds"] else NONE


def _interval(effect: dict[str, Any]) -> str:
    return interval_text(effect["low"], effect["high"], effect["log"])


def _with_interval(values: dict[str, Any], key: str, form: str | Callable[[Any], str]) -> str:
    """Show a value with its interval, if at least one end of the interval is known."""
    show = form.format if isinstance(form, str) else form
    if values[key] is None:
        return NONE
    low, high = values["low"], values["high"]
    if low is None and high is None:
        return show(values[key])
    lower = "−∞" if low is None else show(low)
    upper = "∞" if high is None else show(high)
    return f"{show(values[key])} [{lower}, {upper}]"


def _share_text(share: float) -> str:
    """Show a share in percent or, if it is very large, as a multiple."""
    return f"{share:.1%}" if abs(share) < _LARGE_SHARE else f"{share:.3g} ×"


def _rules(evidence: dict[str, Any]) -> Rules:
    """Return a comparison's rules from its evidence.json, as `Evidence.rules` does."""
    spent = sum(look["spent"] for look in evidence["earlier_looks"])
    return Rules(**evidence["plan"]["rules"] | {"look": evidence["look"], "spent": spent})


def _margin(rules: Rules) -> str:
    return NONE if rules.margin is None else rules.margin_text()


def _adjusted_p(verdict: dict[str, Any]) -> str:
    """Show p times the number of statements, at most 1."""
    p = (verdict["paired"] or {}).get("p")
    return NONE if p is None else _probability(min(1.0, verdict["family"] * p))


def _probability(value: float) -> str:
    return number(value) if value >= _SMALLEST else f"< {_SMALLEST}"


def _bytes(value: float) -> str:
    """Show a number of bytes in the unit that suits it."""
    unit, size = ("KiB", 2**10) if value < _MEBIBYTE else ("MiB", _MEBIBYTE)
    return f"{value / size:,.0f} {unit}"


def _clipped(runs: list[dict[str, Any]]) -> str:
    """Show the share of steps whose gradient was clipped, a mean over the finished runs."""
    shares = [run["clipped_steps"] / run["steps"] for run in runs
              if run["status"] == "finished" and run["clipped_steps"] is not None
              and run["steps"]]  # fmt: skip
    return f"{fmean(shares):.1%}" if shares else NONE


def _word(word: str, language: str) -> str:
    return plain(translated_word(word, language))


def _verdict(verdict: dict[str, Any], language: str) -> str:
    """Show a verdict's word and, if there is one, its effect."""
    word, effect = _word(verdict["word"], language), verdict["paired"]
    return word + ("" if effect is None else f": {Effect(**effect)}")


def _verdict_counts(counts: dict[str, int], language: str) -> str:
    return ", ".join(f"{n} {_word(word, language)}" for word, n in counts.items())


def _reason(language: str, sentence: str) -> str:
    return plain(reason_in(sentence, language))


def _in_language(language: str) -> dict[str, Callable[[Any], str]]:
    """Return the formats that show a record's English texts in a language."""
    return {
        f"remark in {language}": lambda value: plain(translated(value, language)),
        f"remarks in {language}": lambda value: (
            ", ".join(plain(translated(entry, language)) for entry in value) or NONE
        ),
        f"looks in {language}": lambda value: translated(_rules(value).history() or NONE, language),
        f"word in {language}": lambda value: _word(value, language),
        f"verdict in {language}": lambda value: _verdict(value, language),
        f"verdict counts in {language}": lambda value: _verdict_counts(value, language),
    }


def _finished_runs(arms: dict[str, Any]) -> str:
    """Show how many runs of all arms finished."""
    finished = [run["status"] == "finished" for arm in arms.values() for run in arm["runs"]]
    return f"{sum(finished):,} of {len(finished):,}"


FORMATS: dict[str, Callable[[Any], str]] = {  # by name; each turns a value of a record into text
    name: _or_none(show)
    for name, show in dict[str, Callable[[Any], str]]({
        "text": lambda value: plain(str(value)),
        "lines": lambda value: printable(str(value)),
        "json": lambda value: plain(value),
        "number": number,
        "probability": _probability,
        "short number": lambda value: f"{value:.3g}",
        "exact": lambda value: f"{value:.6g}",
        "factor": lambda value: f"{value:.4g} ×",
        "count": lambda value: f"{value:,}",
        "percent": lambda value: f"{value:.2%}",
        "percent of a ratio": lambda value: f"{100 * value:.3g} %",
        "short percent": lambda value: f"{value:.1%}",
        "whole percent": lambda value: f"{value:.0f} %",  # of a value that is in percent
        "seconds": lambda value: f"{number(value)} s",
        "hms": hms,
        "ms": lambda value: f"{number(value)} ms",
        "seconds as ms": lambda value: f"{number(1000 * value)} ms",
        "bytes": _bytes,
        "MiB": lambda value: f"{value / _MEBIBYTE:,.0f} MiB",
        "day": lambda value: datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d"),
        "year": lambda value: str(value)[:4],  # of a date in ISO 8601
        "short digest": lambda value: plain(str(value)[:16]),
        "file name": lambda value: plain(os.path.basename(value) if os.path.isabs(value)
                                         else value),
        "list": lambda value: ", ".join(plain(str(entry)) for entry in value) or NONE,
        "length": lambda value: f"{len(value):,}",
        # of objects and lists, not of single values
        "ends": lambda value: interval_text(value[0], value[1], False),  # of a difference
        "ends of a ratio": lambda value: interval_text(value[0], value[1], True),
        "finished runs": lambda value: (
            f"{sum(run['status'] == 'finished' for run in value)} of {len(value)}"
        ),
        "clipped steps": _clipped,
        "effect": lambda value: str(Effect(**value)),
        "interval": _interval,
        "summary": lambda value: str(Summary(**value)),
        "summary in s": lambda value: f"{Summary(**value)} s",
        "seconds of rounds": lambda value: f"{', '.join(map(number, value))} s",
        "subjects better": lambda value: f"{value['better']} of {value['n']}",
        "trainable share": lambda value: f"{value['trainable'] / value['total']:.1%}",
        "adjusted p": _adjusted_p,
        "reached": lambda value: f"{value['reached']} of {value['runs']}",
        "share": lambda value: _with_interval(value, "share", _share_text),
        "gap": lambda value: _with_interval(value, "gap", "{}"),
        "saved": lambda value: _with_interval(value, "saved", "{}"),
        "tuned value": lambda value: _with_interval(value, "mean", "{:.4g}"),
        "margin": lambda value: _margin(_rules(value)),  # of evidence.json as a whole
        "level": lambda value: f"{_rules(value).level:.2%}",
        "confidence": lambda value: f"{100 * (1 - _rules(value).level):.4g} %",
        "time level": lambda value: f"{_rules(value).time_level:.2%}",
        "time confidence": lambda value: f"{100 * (1 - _rules(value).time_level):.4g} %",
        "step ratio": lambda value: _with_interval(value, "ratio", "{:.4f}"),
        **{name: show for language in LANGUAGES for name, show in _in_language(language).items()},
        **{f"reason in {language}": partial(_reason, language) for language in TRANSLATIONS},
        "finished of all arms": _finished_runs,
        # in the report of a run
        "setting": plain,
        "rate": lambda value: f"{value:,.0f} a second",
        "GiB": lambda value: f"{value / 2**30:.3g} GiB",
        "watts": lambda value: f"{value:.0f} W",
        "celsius": lambda value: f"{value:.0f} °C",
        "MHz": lambda value: f"{value:,.0f} MHz",
        "kJ": lambda value: f"{value / 1000:,.4g} kJ",
        "r": lambda value: f"{value:.3f}",
        "p": lambda value: f"{value:.2g}",
        "mean r": lambda value: (
            f"{value['mean']:.3f}" if value["low"] is None
            else f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
        ),
        "chance": lambda value: f"{value['low']:.3f} to {value['high']:.3f}",
        "right share": lambda value: (
            f"{value['right'] / value['decisions']:.1%}" if value["decisions"] else NONE
        ),
        "data wait": lambda value: (
            f"{number(value['data_seconds'] - value['data_overlapped_seconds'])} s"
        ),
        **{f"share of {part}": partial(_share, part) for part in _TIMES},
        **{f"change of {metric}": partial(_change, metric) for metric in all_metrics()},
    }).items()
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A text of a report, with the place in a record that it comes from, if it has one."""

    text: str
    file: str | None = None  # relative to the reported folder; None if it is not from a record
    pointer: str = ""  # JSON pointer of the value in the file
    format: str = "text"  # name of the format in `FORMATS`
    alarm: bool = False  # whether it is shown in red
    link: str | None = None  # path from the reported folder to the report that the text names

    @property
    def is_number(self) -> bool:
        """Whether it shows a number."""
        return self.file is not None and self.format not in _WORDS


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or an item of a list: texts and cells one after another."""

    pieces: tuple[str | Cell, ...]
    alarm: bool = False  # whether it is shown in red
    item: bool = False  # whether it is an item of a list
    lead: str | Cell = ""  # its first words, in bold


@dataclass(frozen=True)
class Table:
    """A table, which is also written as a CSV and a LaTeX file."""

    name: str  # of the files, without their ending
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it holds only numbers; such a column is aligned right."""
        columns = ([cell for cell in column if is_filled(cell)]
                   for column in zip(*self.rows, strict=True))  # fmt: skip
        return [
            bool(filled) and all(isinstance(cell, Cell) and cell.is_number for cell in filled)
            for filled in columns
        ]


@dataclass(frozen=True)
class Figure:
    """A chart, which is also written as SVG, PNG and PDF, and its data as CSV."""

    name: str  # of the files, without their ending
    title: str
    chart: Any  # an Altair chart, or its specification, without a theme
    caption: str  # what it shows, in words
    rows: Sequence[dict[str, Any]]  # the data that it draws
    files: tuple[str, ...] = ()  # records that the data come from


@dataclass(frozen=True)
class Listing:
    """Text whose lines are kept as they are, such as an entry of BibTeX."""

    pieces: tuple[str | Cell, ...]


Block = Paragraph | Table | Figure | Listing


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
    first: tuple[Block, ...]  # the first screen: what was found, and how reliable it is
    sections: tuple[Section, ...]
    arms: tuple[str, ...] = ()  # arms that a reader can switch on and off in the figures
    language: str = "en"
    problems: tuple[str, ...] = field(default=())  # parts of the report that could not be made
    record: tuple[Section, ...] = ()  # content of report.md; if empty, it has the whole document
    # records, such as means.json, with numbers of the report that no earlier record holds; they are
    # written with the report
    records: dict[str, Any] = field(default_factory=dict)  # by file name
    caution: str | None = None  # a warning that every file with numbers repeats

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


def read_record(path: Path) -> Any:
    """Return the content of a JSON file, or of a YAML file such as a run's recipe."""
    if path.suffix != ".yaml":
        return read_json(path)
    from frostlab.recipe.bounded_yaml import read_yaml

    return read_yaml(path)


class Records:
    """The JSON and YAML files of a folder, each read once, as sources of cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}

    def add(self, file: str, value: Any) -> None:
        """Add the content of a record that will be written with the report."""
        self._files[file] = value

    def value(self, file: str, *keys: str | int) -> Any:
        """Return a value of a file; None if the file or a key is missing, or the value is null."""
        if file not in self._files:
            try:
                self._files[file] = read_record(self.folder / file)
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
        """Return the cell of a value; if there is no value, a cell that shows a dash."""
        value = self.value(file, *keys)
        if value is None:
            return Cell(NONE)
        return Cell(FORMATS[format](value), file, pointer(*keys), format, alarm)


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


def is_filled(cell: str | Cell) -> bool:
    """Return whether a cell of a table shows anything."""
    return (cell.text if isinstance(cell, Cell) else cell) not in ("", NONE)


def words(*pieces: str | Cell, alarm: bool = False) -> Paragraph:
    """Return a paragraph of these pieces."""
    return Paragraph(pieces, alarm)


def item(*pieces: str | Cell, alarm: bool = False, lead: str | Cell = "") -> Paragraph:
    """Return an item of a list of these pieces, after the words `lead` in bold."""
    return Paragraph(pieces, alarm, item=True, lead=lead)
