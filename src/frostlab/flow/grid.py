"""A flow as a grid of cells, rows by steps: what the heat maps of terminal and page draw."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from frostlab.flow.facts import Report

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow

NUMBER, ZERO, NONE, FROZEN, BROKEN = "number", "zero", "none", "frozen", "broken"
SIGNS = {ZERO: "0", NONE: "-", FROZEN: "·", BROKEN: "!"}
MEANINGS = {
    ZERO: "zero",
    NONE: "no gradient arrived",
    FROZEN: "frozen",
    BROKEN: "NaN or infinity",
}
TITLES = {"gradient": "gradient norm", "ratio": "update / weight"}
DECADES = 8  # of a scale; what is smaller is drawn as its smallest


@dataclass(frozen=True)
class Cell:
    """What one row did around one step: a kind, and its number if it is one."""

    kind: str
    value: float = math.nan


@dataclass(frozen=True)
class Row:
    """A part, or the parts of a layer together: their places in the flow."""

    name: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Cells of one quantity, a row a part or layer, a column a report or some of them."""

    quantity: str
    rows: tuple[Row, ...]
    steps: tuple[int, ...]  # the last one of each column
    cells: tuple[tuple[Cell, ...], ...]
    together: int  # the most reports that one column holds
    low: float  # the ends of the scale
    high: float

    def kinds(self) -> list[str]:
        """The kinds of cell that are no number, where there are any."""
        seen = {cell.kind for row in self.cells for cell in row}
        return [kind for kind in SIGNS if kind in seen]

    def power(self, value: float) -> float:
        """Where a number lies on the scale, as a logarithm."""
        return math.log10(min(max(value, self.low), self.high))


def rows_of(flow: "Flow", most: int) -> tuple[Row, ...]:
    """Every part; where those are too many, every layer, and beside it what is wrong in it."""
    if len(flow.parts) <= most:
        return tuple(Row(part.name, (i,)) for i, part in enumerate(flow.parts))
    verdicts = flow.verdicts() if flow.reports else {}
    rows: dict[str, list[int]] = {}
    wrong: dict[str, list[int]] = {}
    for i, part in enumerate(flow.parts):
        layer = _layer(part.name)
        rows.setdefault(layer, []).append(i)
        if part.name in verdicts and verdicts[part.name].alarming:
            wrong.setdefault(layer, []).append(i)
    made = []
    for name, places in rows.items():
        made.append(Row(name, tuple(places)))
        alarming = wrong.get(name, [])
        if len(alarming) < len(places):
            made += [Row(flow.parts[i].name, (i,)) for i in alarming]
    return tuple(made)


def grid_of(flow: "Flow", quantity: str, rows: Sequence[Row], columns: int) -> Grid:
    """Cells of `gradient` or `ratio`; a column of several reports shows their median."""
    spans = _spans(len(flow.reports), columns)
    taken = [flow.reports[a:b] for a, b in spans]
    cells = tuple(
        tuple(_joined([_cell(r, quantity, row.places) for r in some]) for some in taken)
        for row in rows
    )
    numbers = [c.value for row in cells for c in row if c.kind == NUMBER and c.value < math.inf]
    high = max(numbers, default=1.0)
    low = max(min(numbers, default=1.0), high * 10.0**-DECADES)
    steps = tuple(some[-1].step for some in taken)
    together = max((b - a for a, b in spans), default=0)
    return Grid(quantity, tuple(rows), steps, cells, together, low, high)


def _layer(part: str) -> str:
    """The layer a part is in: its name up to the first number, or all of it without one."""
    found = re.match(r".*?(\[\d+\]|(?<![^.])\d+(?![^.]))", part)
    return found[0] if found else part


def _spans(count: int, columns: int) -> list[tuple[int, int]]:
    """Cut reports into at most so many columns, all but the last one alike."""
    size = max(1, math.ceil(count / columns))
    return [(a, min(a + size, count)) for a in range(0, count, size)]


def _cell(report: Report, quantity: str, places: Sequence[int]) -> Cell:
    if any(i in report.broken for i in places):
        return Cell(BROKEN)
    own = [i for i in places if not math.isnan(report.of("weight", i))]
    if not own:
        return Cell(FROZEN)
    if quantity == "gradient":
        known = [x for i in own if not math.isnan(x := report.of("gradient", i))]
        if not known:
            return Cell(NONE)
        return _number(math.hypot(*known))
    weight = math.hypot(*(report.of("weight", i) for i in own))
    update = math.hypot(*(report.of("update", i) for i in own))
    return _number(update / weight if weight else math.inf if update else 0.0)


def _number(value: float) -> Cell:
    return Cell(NUMBER, value) if value else Cell(ZERO, 0.0)


def _joined(cells: Sequence[Cell]) -> Cell:
    """One cell for several reports: what is broken is never lost, the rest is a median."""
    if len(cells) == 1 or any(cell.kind == BROKEN for cell in cells):
        return next((cell for cell in cells if cell.kind == BROKEN), cells[0])
    known = [cell.value for cell in cells if cell.kind in (NUMBER, ZERO)]
    return _number(median(known)) if known else cells[-1]
