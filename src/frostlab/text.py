"""Formatting of numbers, durations and tables as text, and escaping of untrusted text."""

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

NONE = "–"  # text for a missing value
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
    """Format seconds as h:mm:ss, rounded."""
    if typed(seconds, int, float) is None or not math.isfinite(seconds):
        return NONE
    rounded = round(abs(seconds))
    return f"{'-' * (seconds < 0)}{rounded // 3600}:{rounded // 60 % 60:02}:{rounded % 60:02}"


def plain(value: Any) -> str:
    r"""Format a value on one line of printable characters; others are escaped, as in `\x1b`."""
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
    """Format a number with four significant digits."""
    return NONE if typed(value, int, float) is None else f"{value:.4g}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines of aligned columns; `right` holds the columns to align right, from 0.

    Cells are shown with `plain`, because names come from users' files.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def short(text: str, width: int) -> str:
    """Cut a text to a width; a cut text ends in `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


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
