"""Values as words on one line."""

import json
import math
from typing import Any

from frostlab.records.index import typed

NONE = "–"


def hms(seconds: Any) -> str:
    """Write seconds as h:mm:ss, rounded."""
    if typed(seconds, int, float) is None or not math.isfinite(seconds):
        return NONE
    whole = round(abs(seconds))
    return f"{'-' * (seconds < 0)}{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def plain(value: Any) -> str:
    """Write a value on one line of printable characters."""
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def number(value: Any) -> str:
    """Write a number to four digits."""
    return NONE if typed(value, int, float) is None else f"{value:.4g}"


def short(text: str, width: int) -> str:
    """Cut a text to a width."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
