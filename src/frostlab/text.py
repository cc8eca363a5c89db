"""Formatting of numbers, durations and tables as text, and escaping of untrusted text."""

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from textwrap import wrap
from typing import Any

NONE = "–"  # text for a missing value
_NARROWEST = 8  # the fewest characters to which a column is shortened
_SHORTEST_NAME = 12  # names are cut to fewer characters only if no further column can be left out
_LEAST_SHARED = 4  # a beginning that all names share is left out if it is at least this long
_MARKDOWN = re.compile(  # characters with a meaning in Markdown
    r"[\\`*|$~]"
    r"|<(?=[A-Za-z/!?]|$)"  # a tag
    r"|&(?=[#\w])"  # a character reference, such as &amp;
    r"|\](?=[(\[:])"  # a link
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; inside a word, `_` is only a character
    r"|^[>\[=]|^[#+-](?=[#\s-]|$)|(?<!#)#(?=#*$)"  # the start of a quote or list; a heading
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # the start of a numbered list


def hms(seconds: Any) -> str:
    """Format seconds as h:mm:ss, rounded; `NONE` for a value that is not a finite number."""
    if typed(seconds, int, float) is None or not math.isfinite(seconds):
        return NONE
    rounded = round(abs(seconds))
    return f"{'-' * (seconds < 0)}{rounded // 3600}:{rounded // 60 % 60:02}:{rounded % 60:02}"


def plain(value: Any) -> str:
    r"""Format a value on one line (None as `NONE`); escape characters that cannot be printed.

    An escaped character looks like `\x1b`.
    """
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Escape the control characters of a text, except its line breaks."""
    return "\n".join(map(plain, text.split("\n")))


def number(value: Any) -> str:
    """Format a number with four significant digits; `NONE` for any other type."""
    return NONE if typed(value, int, float) is None else f"{value:.4g}"


def size_text(size: int | None) -> str:
    """Format a number of bytes, such as 1.2 MB; `NONE` if it is unknown."""
    if size is None:
        return NONE
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def counted(count: int, plural: str) -> str:
    """Return a number with its noun, whose plural ends in s: "1 subject", "1,200 subjects"."""
    return f"{count:,} {plural.removesuffix('s') if count == 1 else plural}"


def enumerated(names: Sequence[str]) -> str:
    """Return names as a list in a sentence: "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


Rows = Sequence[Sequence[str]]  # of a table


def columns(rows: Rows, right: Collection[int] = (), width: int | None = None) -> list[str]:
    """Format rows as lines of aligned columns; `right` holds the indices of those to align right.

    Cells are shown with `plain`, because names come from users' files. If the lines are longer than
    `width`, the cells of the widest columns that are not aligned right are shortened.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    if width is not None:
        widths = _narrowed(_widths(rows), right, width)
        rows = [[short(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in aligned(rows, right)]


def aligned(rows: Rows, right: Collection[int] = ()) -> list[list[str]]:
    """Return rows with their cells filled up to the widths of the columns."""
    widths = _widths(rows)
    return [
        [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _narrowed(widths: list[int], right: Collection[int], most: int) -> list[int]:
    """Return widths of columns that fit into `most` characters together, if that is possible."""
    widths = list(widths)
    too_wide = sum(widths) + 2 * (len(widths) - 1) - most
    left = [index for index in range(len(widths)) if index not in right]
    while too_wide > 0 and left:
        widest = max(left, key=lambda index: widths[index])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        too_wide -= 1
    return widths


def fitted(tables: Sequence[Rows], width: int | None, keep: int) -> tuple[Rows, list[str]]:
    """Choose from tables of the same named rows, and shorten the names, to fit a width.

    The first row is the head, and the first cell of each other row is its name. If the first table
    is too wide, the beginning that all names share is left out of them. If one of the first `keep`
    tables then fits, it is chosen. If none does, names are cut in the middle to fit the last of
    these. If they would become equal or very short, they are cut to fit one of the later tables.

    Args:
        tables: the same rows, in each table with fewer columns than in the one before.
        width: the most characters of a line; None: any number.
        keep: the number of tables that are tried before names are shortened.

    Returns:
        the rows of the chosen table, and lines that say what was left out.
    """
    names = [plain(row[0]) for row in tables[0][1:]]
    rooms = [_room(table, width) for table in tables]
    longest = max([len(tables[0][0][0]), *map(len, names)])
    if longest <= rooms[0]:
        return _renamed(tables[0], names), []
    start = shared_start(names)
    notes = [f"all names begin with {start}"] if start else []
    if start:
        names = [f"…{name.removeprefix(start)}" for name in names]
        longest = max([len(tables[0][0][0]), *map(len, names)])
    for table, room in zip(tables[:keep], rooms[:keep], strict=True):
        if longest <= room:
            return _renamed(table, names), notes
    for table, room in zip(tables[keep - 1 :], rooms[keep - 1 :], strict=True):
        shortened = short_names(names, int(max(_NARROWEST, min(room, longest))))
        differ = len(set(shortened)) == len(set(names))
        if table is tables[-1] or (differ and room >= min(longest, _SHORTEST_NAME)):
            break
    return _renamed(table, shortened), notes


def _room(table: Rows, width: int | None) -> float:
    """Return how many characters the other columns of a table leave to its names."""
    if width is None:
        return math.inf
    return width - sum(2 + column for column in _widths(table)[1:])


def _renamed(table: Rows, names: Sequence[str]) -> Rows:
    head, *rows = table
    return [head, *([name, *row[1:]] for name, row in zip(names, rows, strict=True))]


def shared_start(names: Sequence[str]) -> str:
    """Return what all names begin with, up to the last `-`, `@` or `_` in it; empty if short."""
    if len(names) < 2:
        return ""
    least, most = min(names), max(names)
    same = next((i for i, letter in enumerate(least) if letter != most[i : i + 1]), len(least))
    end = 1 + max(least.rfind(mark, 0, min(same, len(least) - 1)) for mark in "-@_")
    return least[:end] if end >= _LEAST_SHARED else ""


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Cut names in the middle to a width; as many of them as possible stay different."""
    best, wanted = list[str](), len(set(names))
    if all(len(name) <= width for name in names):
        return list(names)
    # The end, where seeds and treatments are, is as long as the beginning, if that is possible.
    for end in sorted(range(width), key=lambda end: abs(2 * end - width)):
        cut = [
            name if len(name) <= width else f"{name[: width - end - 1]}…{name[len(name) - end :]}"
            for name in names
        ]
        if not best or len(set(cut)) > len(set(best)):
            best = cut
        if len(set(best)) == wanted:
            break
    return best


def short(text: str, width: int) -> str:
    """Cut a text to a width; a cut text ends in `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def wrapped(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Break a line at spaces into lines of at most `width` characters; later ones are indented.

    A word that is longer than a line, such as a path, stays whole. With None, nothing is broken.
    """
    if width is None or len(text) <= width:
        return [text]
    start = text[: len(text) - len(text.lstrip())]
    return wrap(
        text, width, subsequent_indent=start + indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


class Markdown(str):
    """Text that is Markdown already, so that `escaped` leaves it as it is."""


def escaped(text: str) -> Markdown:
    """Escape a text for Markdown, so that it makes no tag, link, emphasis or new line."""
    if isinstance(text, Markdown):
        return text
    text = _MARKDOWN.sub(r"\\\g<0>", plain(text).strip())
    return Markdown(_NUMBERED.sub(r"\1\\\2", text))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; its cells are escaped."""
    lines = [[escaped(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, [Markdown("---")] * len(head))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def typed(value: Any, *kinds: type) -> Any:
    """Return the value if it has one of these types and is not a bool, else None."""
    return value if isinstance(value, kinds) and not isinstance(value, bool) else None


def joined(texts: Iterable[str | None]) -> str | None:
    """Join with semicolons the texts that are not empty; return None if there are none."""
    return "; ".join(text for text in texts if text) or None
