"""A flow as text: a line a part, then what is wrong, then the ends."""

import math
from typing import TYPE_CHECKING

from frostlab.flow.front import WANTED
from frostlab.flow.rules import FROZEN, LEARNING

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow

_HEADER = ("part", "gradient", "before clip", "weight", "update", "update/weight", "verdict")
_NONE = "–"


def as_text(flow: "Flow") -> str:
    """Draw the last report; frozen parts have no numbers."""
    if not flow.reports:
        return f"{flow.model}: no step has been measured yet"
    last, verdicts = flow.reports[-1], flow.verdicts()
    rows: list[tuple[str, ...]] = [_HEADER]
    for i, part in enumerate(flow.parts):
        quantities = ("gradient", "before_clip", "weight", "update")
        numbers = [last.of(quantity, i) for quantity in quantities]
        cells = [_number(x) for x in (*numbers, last.ratio(i))]
        rows.append((part.name, *cells, verdicts[part.name].word))
    if all(row[2] == _NONE for row in rows[1:]):
        rows = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{flow.model}, step {last.step}, {len(flow.reports)} reports", ""]
    for row in rows:
        first, *middle, word = row
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, word]))
    told: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.word not in (LEARNING, FROZEN):
            told.setdefault((verdict.word, verdict.hint), []).append(name)
    for (word, hint), names in told.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += ["", f"{names[0]}{more}: {word}: {verdicts[names[0]].why}", f"  try: {hint}"]
    return "\n".join([*lines, *_ends_lines(flow)])


def _ends_lines(flow: "Flow") -> list[str]:
    ends = flow.ends()
    if math.isnan(ends.front_ratio):
        return []
    text = f"front/output gradient {ends.front_ratio:.3g} ({ends.word}"
    text += f", wanted > {WANTED['front_ratio']:g})"
    text += f", back/output {ends.back_ratio:.3g}"
    if not math.isnan(ends.weight_change):
        text += f", front weight change {ends.weight_change:.4f}"
        text += f" (wanted > {WANTED['weight_change']:g})"
    return ["", text]


def _number(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.3g}"
