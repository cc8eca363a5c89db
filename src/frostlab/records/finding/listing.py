"""Tables of runs and of groups of runs, as wide as the terminal."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frostlab.records.finding.index import Summary
from frostlab.records.finding.query import Group, differing, value_of
from frostlab.text import NONE, columns, hms, number, plain, short, typed, wrapped

_MARKS = "*†‡§"
_WIDEST = 28  # the most characters of a cell, except in columns that are never left out
_NAME = 20  # the fewest characters to which a name is shortened


@dataclass(frozen=True)
class Column:
    """A column of the table of runs."""

    name: str
    text: Callable[[Summary], Any]  # returns a run's value; None: unknown
    right: bool = False  # whether it is right-aligned
    marked: bool = False  # whether a run with a caution gets a footnote mark here
    rank: int = 0  # columns with a larger rank are left out first; 0: never left out


def _best(run: Summary) -> str | None:
    return f"{run.metric}={number(run.value)}" if run.metric else None


def _reported(run: Summary) -> str | None:
    value = (run.report or {}).get(run.metric or "")
    return None if value is None else number(value)


_FIRST = (
    Column("name", lambda run: run.name),
    Column("status", lambda run: run.status, rank=4),
    Column("treatment", lambda run: run.treatment, rank=3),
    Column("seed", lambda run: run.seed, right=True, rank=3),
    Column("steps", lambda run: run.steps, right=True, rank=6),
    Column("best", _best, marked=True),
    Column("report", _reported, marked=True, rank=1),
)
_TAGS = Column("tag", lambda run: ",".join(run.tags) or None, rank=2)
_NOTES = Column("note", lambda run: run.notes[-1] if run.notes else None, rank=5)
_LAST = (
    Column("step ms", lambda run: number(run.step_ms), right=True, rank=8),
    Column("total", lambda run: hms(run.total_seconds), right=True, rank=7),
)


def runs_table(
    summaries: Iterable[Summary], keys: Sequence[str] | None = None, width: int | None = None
) -> str:
    """Format runs as a table with footnotes.

    Args:
        summaries: the runs.
        keys: settings and metrics to show; by default, the settings that are not the same in all
            runs.
        width: the most characters of a line. Columns that do not fit are left out, and a line
            below the table names them. By default, everything is shown.
    """
    runs = list(summaries)
    if not runs:
        return "no runs"
    cautions = list(dict.fromkeys(run.caution for run in runs if run.caution))
    marks = {text: _MARKS[i] if i < 4 else f"[{i + 1}]" for i, text in enumerate(cautions)}
    shown = _columns(runs, keys)
    cells = {column.name: [column.name, *(_cell(column, run, marks) for run in runs)]
             for column in shown}  # fmt: skip
    if width is not None:
        asked = set(keys or ())
        for column in shown:
            if column.rank and column.name not in asked:
                head, *texts = cells[column.name]
                cells[column.name] = [short(cell, _WIDEST) for cell in (head, *_within(texts))]
    kept = shown if width is None else _fitting(shown, cells, width)
    lines = _lines(kept, cells, width)
    left_out = [column.name for column in shown if column not in kept]
    for text, mark in marks.items():
        lines += wrapped(f"{mark} {plain(text)}", width)
    failed = [plain(f"{run.name}: {run.error}") for run in runs if run.error]
    lines += [line if width is None else short(line, width) for line in failed[:10]]
    lines += [f"and {len(failed) - 10} more with an error"] * (len(failed) > 10)
    if left_out:
        lines += _left_out(left_out, width or 0)
    return "\n".join(lines)


def _within(texts: Sequence[str]) -> list[str]:
    """If all known values are absolute paths, make them relative to the folder that they share."""
    paths = {text for text in texts if os.path.isabs(text)}
    if len(paths) < 2 or paths != set(texts) - {NONE}:
        return list(texts)
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(text, shared) if text in paths else text for text in texts]


def _left_out(names: Sequence[str], width: int) -> list[str]:
    """Return a sentence that names the columns that are left out, at most twelve, as lines."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return wrapped(f"--wide also shows {', '.join(names[:12])}{more}", width)


def _columns(runs: Sequence[Summary], keys: Sequence[str] | None) -> list[Column]:
    """Return the columns of a table, in order."""
    settings = differing(runs) if keys is None else list(keys)
    given = [
        Column(key, _value(key), _is_numeric(runs, key), rank=_rank(place) if keys is None else 0)
        for place, key in enumerate(settings)
    ]
    annotated = [_TAGS] * any(run.tags for run in runs) + [_NOTES] * any(run.notes for run in runs)
    own = [c for c in (*_FIRST, *annotated, *_LAST) if c.name not in {g.name for g in given}]
    if len({run.status for run in runs}) > 1:  # the best value of an unfinished run is preliminary
        own = [replace(c, rank=2) if c.name == "status" else c for c in own]
    place = own.index(next(c for c in own if c.name == "best"))
    return [*own[:place], *given, *own[place:]]


def _rank(place: int) -> int:
    """Return the rank of a setting that differs: the first two are more important."""
    return 2 if place < 2 else 5


def _value(key: str) -> Callable[[Summary], Any]:
    def text(run: Summary) -> Any:
        value = value_of(run, key)
        return number(value) if isinstance(value, float) else value

    return text


def _is_numeric(runs: Sequence[Summary], key: str) -> bool:
    values = [value for run in runs if (value := value_of(run, key)) is not None]
    return all(typed(value, int, float) is not None for value in values)


def _cell(column: Column, run: Summary, marks: dict[str, str]) -> str:
    value = column.text(run)
    mark = marks.get(run.caution or "", "") if column.marked and value is not None else ""
    return plain(value) + mark


def _fitting(shown: list[Column], cells: dict[str, list[str]], width: int) -> list[Column]:
    """Return the columns that fit into a width: the smallest rank first, then from the left.

    A column that is too wide for the space that is left does not keep out narrower ones.
    """
    widths = {name: max(map(len, texts)) + 2 for name, texts in cells.items()}
    left = width + 2 - sum(widths[column.name] for column in shown if not column.rank)
    kept = {column.name for column in shown if not column.rank}
    for column in sorted(shown, key=lambda column: column.rank):
        if column.name not in kept and widths[column.name] <= left:
            kept.add(column.name)
            left -= widths[column.name]
    return [column for column in shown if column.name in kept]


def _lines(kept: list[Column], cells: dict[str, list[str]], width: int | None) -> list[str]:
    """Align the cells; if they are still too wide, names are cut in the middle."""
    texts = [list(cells[column.name]) for column in kept]
    right = {place for place, column in enumerate(kept) if column.right}
    if width is not None:
        others = sum(2 + max(map(len, column)) for column in texts[1:])
        most = max(_NAME, width - others)
        texts[0] = [_middle_cut(name, most) for name in texts[0]]
    return columns(list(zip(*texts, strict=True)), right, width)


def _middle_cut(name: str, width: int) -> str:
    """Shorten a name in the middle, because its end may hold the seed."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"


def groups_table(groups: Sequence[Group], width: int | None = None) -> str:
    """Format groups: their keys, and n, mean and 95 % interval of each quantity.

    Keys that do not fit into `width` are left out, and a line below the table names them.
    """
    if not groups:
        return "no runs"
    keys = {key: _key_column(groups, key, width) for key in groups[0].keys}
    measured: list[list[str]] = []
    for name in groups[0].means:
        measured += _mean_columns(groups, name)
    left_out: list[str] = []
    space = 0
    if width is not None:
        space = width - sum(2 + max(map(len, column)) for column in measured) + 2
        for key in list(keys):
            space -= 2 + max(map(len, keys[key]))
            if space < 0 and len(keys) > 1:
                space += 2 + max(map(len, keys.pop(key)))
                left_out.append(key)
    numeric = [
        all(typed(group.keys[key], int, float) is not None for group in groups) for key in keys
    ]
    right = {place for place, is_number in enumerate(numeric) if is_number}
    for first in range(len(keys), len(keys) + len(measured), 3):
        right |= {first, first + 1}
    lines = columns(list(zip(*keys.values(), *measured, strict=True)), right, width)
    if width is not None and max(map(len, lines)) > width:
        lines = [short(line, width) for line in lines]
        lines.append("--wide shows the whole lines")
    elif space < 0:
        lines.append("--wide shows whole cells")
    if left_out:
        lines += _left_out(left_out, width or 0)
    cautions = dict.fromkeys(run.caution for group in groups for run in group.runs if run.caution)
    return "\n".join([*lines, *map(plain, cautions)])


def _key_column(groups: Sequence[Group], key: str, width: int | None) -> list[str]:
    """Return a key and its value in each group; long values are cut if there is a width."""
    values = [group.keys[key] for group in groups]
    texts = [number(value) if isinstance(value, float) else plain(value) for value in values]
    if width is None:
        return [key, *texts]
    return [key, *(short(text, _WIDEST) for text in _within(texts))]


def _mean_columns(groups: Sequence[Group], name: str) -> list[list[str]]:
    """Return three columns with their heads: n, mean and interval of a quantity."""
    counts, means, intervals = ["n"], [name], ["95 % interval"]
    for group in groups:
        mean, runs = group.means[name], len(group.runs)
        counts.append(f"{mean.n} of {runs}" if mean.n < runs else str(mean.n))
        means.append(number(mean.mean))
        bounds = f"[{number(mean.low)}, {number(mean.high)}]"
        intervals.append(NONE if mean.low is None else bounds)
    return [counts, means, intervals]
