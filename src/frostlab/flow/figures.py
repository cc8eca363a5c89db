"""Heat maps and line charts of a flow: the reports of a run, one for each measured step.

A heat map is first computed as a `Grid` of cells, which can also be shown as text. Drawing it, or
a line chart, uses altair and needs `frostlab[report]`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from frostlab.charts import GREY, RED, label, png, require_drawing, svg, themed
from frostlab.flow.diagnosis import RATIO_WORDS, front_ratios
from frostlab.flow.measurements import Report

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


# kinds of cells; FROZEN: the part was not trainable, or not in the model yet, at that step
NUMBER, ZERO, UNREACHED, FROZEN, BROKEN = "number", "zero", "unreached", "frozen", "broken"
SIGNS = {ZERO: "0", UNREACHED: "-", FROZEN: "·", BROKEN: "!"}
MEANINGS = {
    ZERO: "zero",
    UNREACHED: "no gradient arrived",
    FROZEN: "frozen",
    BROKEN: "NaN or infinity",
}
TITLES = {"gradient": "gradient norm", "ratio": "update / weight"}
DECADES = 8  # a colour scale spans at most this many powers of ten; smaller numbers are clamped

_ROWS = 130  # if there are more parts, rows are layers
_COLUMNS = 48  # if there are more reports, a column is the median of several
MOST_ROWS = 200  # further rows are not drawn
_PURPOSE = "drawing a flow"
_LARGEST = 1e300  # the largest upper end of a colour scale; above it, 10 ** log10(x) can overflow
_WIDTH = 280  # width of a plot, in pixels


@dataclass(frozen=True)
class Cell:
    """One cell of a grid: its kind, and its value if the kind is NUMBER or ZERO."""

    kind: str
    value: float = math.nan


@dataclass(frozen=True)
class Row:
    """A row of a grid: one part or all parts of a layer, as indices into the flow's parts."""

    name: str
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Cells of one quantity: a row is a part or a layer, a column one or more reports."""

    quantity: str
    rows: tuple[Row, ...]
    steps: tuple[int, ...]  # the last step of each column
    cells: tuple[tuple[Cell, ...], ...]
    reports_a_column: int  # largest number of reports in one column
    low: float  # lower end of the colour scale
    high: float  # upper end of the colour scale

    def kinds(self) -> list[str]:
        """Return the kinds of cells in this grid other than NUMBER, in the order of `SIGNS`."""
        present = {cell.kind for row in self.cells for cell in row}
        return [kind for kind in SIGNS if kind in present]

    def power(self, value: float) -> float:
        """Return log10 of a number, clamped to the colour scale."""
        return math.log10(min(max(value, self.low), self.high))


def rows_of(flow: "Flow", most: int) -> tuple[Row, ...]:
    """Return one row per part or, for more than `most` parts, one row per layer.

    Among rows of layers, each part with an alarming verdict also has a row of its own, unless the
    verdicts on all parts of its layer are alarming.
    """
    if len(flow.parts) <= most:
        return tuple(Row(part.name, (i,)) for i, part in enumerate(flow.parts))
    verdicts = flow.verdicts() if flow.reports else {}
    layers: dict[str, list[int]] = {}
    alarming: dict[str, list[int]] = {}
    for i, part in enumerate(flow.parts):
        layer = _layer_of(part.name)
        layers.setdefault(layer, []).append(i)
        if part.name in verdicts and verdicts[part.name].alarming:
            alarming.setdefault(layer, []).append(i)
    rows = []
    for layer, parts in layers.items():
        rows.append(Row(layer, tuple(parts)))
        alarms = alarming.get(layer, [])
        if len(alarms) < len(parts):
            rows += [Row(flow.parts[i].name, (i,)) for i in alarms]
    return tuple(rows)


def grid_of(flow: "Flow", quantity: str, rows: Sequence[Row], columns: int) -> Grid:
    """Return the grid of `gradient` or `ratio`; a column of several reports shows the median."""
    spans = _spans(len(flow.reports), columns)
    reports = [flow.reports[a:b] for a, b in spans]
    cells = tuple(
        tuple(_joined([_cell(r, quantity, row.parts) for r in column]) for column in reports)
        for row in rows
    )
    numbers = [c.value for row in cells for c in row if c.kind == NUMBER and c.value < math.inf]
    high = min(max(numbers, default=1.0), _LARGEST)
    low = max(min(numbers, default=1.0), high * 10.0**-DECADES)
    steps = tuple(column[-1].step for column in reports)
    most = max((b - a for a, b in spans), default=0)
    return Grid(quantity, tuple(rows), steps, cells, most, low, high)


def _layer_of(part: str) -> str:
    """Return a part's name up to its first index, such as `layers[3]`, or the whole name."""
    match = re.match(r".*?(\[\d+\]|(?<![^.])\d+(?![^.]))", part)
    return match[0] if match else part


def _spans(count: int, columns: int) -> list[tuple[int, int]]:
    """Divide `count` reports into at most `columns` spans; only the last may be shorter."""
    size = max(1, math.ceil(count / columns))
    return [(a, min(a + size, count)) for a in range(0, count, size)]


def _cell(report: Report, quantity: str, parts: Sequence[int]) -> Cell:
    if any(i in report.broken for i in parts):
        return Cell(BROKEN)
    trainable = [i for i in parts if not math.isnan(report.of("weight", i))]
    if not trainable:
        return Cell(FROZEN)
    if quantity == "gradient":
        norms = [x for i in trainable if not math.isnan(x := report.of("gradient", i))]
        if not norms:
            return Cell(UNREACHED)
        return _number(math.hypot(*norms))
    weight = math.hypot(*(report.of("weight", i) for i in trainable))
    update = math.hypot(*(report.of("update", i) for i in trainable))
    return _number(update / weight if weight else math.inf if update else 0.0)


def _number(value: float) -> Cell:
    return Cell(NUMBER, value) if value else Cell(ZERO, 0.0)


def _joined(cells: Sequence[Cell]) -> Cell:
    """Merge the cells of several reports into one cell.

    The result is BROKEN if any of the cells is. Otherwise, it is the median of their numbers or, if
    they have no numbers, the last cell.
    """
    if len(cells) == 1 or any(cell.kind == BROKEN for cell in cells):
        return next((cell for cell in cells if cell.kind == BROKEN), cells[0])
    values = [cell.value for cell in cells if cell.kind in (NUMBER, ZERO)]
    return _number(median(values)) if values else cells[-1]


def heat_png(flow: "Flow", scale: float = 1.5) -> bytes:
    """Draw the heat maps of gradient and ratio side by side on white, and return the PNG file."""
    alt, _ = require_drawing(_PURPOSE)
    grids = _grids(flow)
    both = alt.hconcat(*map(_titled, grids), spacing=24).resolve_scale(color="independent")
    both = both.properties(padding={"left": 5, "top": 5, "bottom": 5, "right": 20})
    spec = themed(both, False, {grid.quantity: _cells(grid) for grid in grids})
    return png(spec, scale)


def heat_svgs(flow: "Flow") -> dict[str, Markup]:
    """Draw one heat map per quantity; each cell shows its value as a tooltip."""
    return {
        g.quantity: svg(themed(_titled(g), True, {g.quantity: _cells(g)}), g.quantity)
        for g in _grids(flow)
    }


def heat_charts(flow: "Flow", width: int) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    """Return, for each quantity, a heat map without a title, and the data that it contains."""
    charts = {}
    for grid in _grids(flow):
        rows = _cells(grid)
        charts[grid.quantity] = (
            _heat(grid, width).properties(datasets={grid.quantity: rows}),
            rows,
        )
    return charts


def norm_svg(flow: "Flow") -> Markup:
    """Draw the norm of the whole gradient by step, after and, if measured, before clipping."""
    return svg(
        themed(norm_chart(flow).properties(title="norm of the whole gradient"), True), "norm"
    )


def norm_chart(flow: "Flow") -> Any:
    """Return the chart of the norm of the whole gradient, without a title."""
    titles = (("gradient", "after clipping"), ("before_clip", "before clipping"))
    series = {title: _points(flow.norms(quantity)) for quantity, title in titles}
    if not series["before clipping"]:
        series = {"gradient": series["after clipping"]}
    return _lines(series)


def front_svg(flow: "Flow") -> Markup | None:
    """Draw the gradient size of the first two layers (front) relative to the head's (output).

    Return None if no ratio is finite and positive.
    """
    chart = front_chart(flow)
    titled = chart and chart.properties(title="front / output gradient")
    return titled and svg(themed(titled, True), "front")


def front_chart(flow: "Flow") -> Any:
    """Return the chart that `front_svg` draws, without a title; None if there is no ratio."""
    alt, _ = require_drawing(_PURPOSE)
    points = _points(front_ratios(flow.reports))
    if not points:
        return None
    limits = [{"limit": limit, "word": f"{word} < {limit:g}"} for limit, word in RATIO_WORDS]
    base = alt.Chart(alt.Data(values=limits)).encode(y="limit:Q")
    rule = base.mark_rule(strokeDash=[4, 3], stroke=GREY)
    text = base.mark_text(align="left", dx=4, x=_WIDTH, color=GREY).encode(text="word:N")
    chart = _lines({"front/output": points}) + rule + text
    return chart.properties(padding={"left": 12, "top": 5, "bottom": 8, "right": 40})


def too_many_rows(flow: "Flow") -> bool:
    """Return whether a heat map leaves out rows."""
    return len(rows_of(flow, _ROWS)) > MOST_ROWS


def _grids(flow: "Flow") -> list[Grid]:
    rows = rows_of(flow, _ROWS)[:MOST_ROWS]
    return [grid_of(flow, quantity, rows, _COLUMNS) for quantity in TITLES]


def _cells(grid: Grid) -> list[dict[str, Any]]:
    names = [label(row.name) for row in grid.rows]
    return [
        {"row": name, "step": step, "kind": cell.kind, "sign": SIGNS.get(cell.kind, ""),
         "power": grid.power(cell.value) if cell.kind == NUMBER else None,
         "tooltip": f"{name}, step {step}: {MEANINGS.get(cell.kind, f'{cell.value:.3g}')}"}
        for name, line in zip(names, grid.cells, strict=True)
        for step, cell in zip(grid.steps, line, strict=True)
    ]  # fmt: skip


def _heat(grid: Grid, width: int = _WIDTH) -> Any:
    """Return a heat map without a title; its data, named like the quantity, are added later."""
    alt, _ = require_drawing(_PURPOSE)
    names = [label(row.name) for row in grid.rows]
    # room for row names, 6.5 px per character: the fonts of browsers are wider than those with
    # which vl_convert lays out the drawing
    extent = min(6.5 * max(map(len, names)), 200)
    height = 12 if len(grid.rows) > 30 else 16
    base = alt.Chart(alt.NamedData(grid.quantity)).encode(
        x=alt.X(
            "step:O",
            sort=list(grid.steps),
            title="step",
            axis=alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=5),
        ),
        y=alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=190, minExtent=extent)),
        description="tooltip:N",
        tooltip="tooltip:N",
    )
    scale = alt.Scale(scheme="viridis", domain=[grid.power(0.0), grid.power(grid.high)])
    legend = alt.Legend(
        title=None, labelExpr="format(pow(10, datum.value), '.2~g')", tickCount=4,
        orient="bottom", gradientLength=width,
    )  # fmt: skip
    coloured = (
        base.mark_rect()
        .transform_filter("datum.kind == 'number'")
        .encode(color=alt.Color("power:Q", scale=scale, legend=legend))
    )
    # Broken cells are red, other cells without a number grey; a sign shows the kind.
    uncoloured = (
        base.mark_rect(fillOpacity=0.3)
        .transform_filter("datum.kind != 'number'")
        .encode(
            fill=alt.when("datum.kind == 'broken'").then(alt.value(RED)).otherwise(alt.value(GREY))
        )
    )
    signs = (
        base.mark_text(fontSize=9)
        .transform_filter("datum.kind != 'number'")
        .encode(text="sign:N", description=alt.value(""))
    )
    return (coloured + uncoloured + signs).properties(width=width, height=alt.Step(height))


def _titled(grid: Grid) -> Any:
    return _heat(grid).properties(title=TITLES[grid.quantity])


def _lines(series: dict[str, list[dict[str, float]]]) -> Any:
    alt, _ = require_drawing(_PURPOSE)
    points = [
        {**point, "line": name, "tooltip": f"step {point['step']:g}: {point['value']:.3g}"}
        for name, line in series.items()
        for point in line
    ]
    chart = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(type="log", padding=6)),
    )
    if len(series) > 1:
        chart = chart.encode(color=alt.Color("line:N", title=None))
    dots = chart.mark_circle(size=22, opacity=1).encode(
        description="tooltip:N", tooltip="tooltip:N"
    )
    return (chart.mark_line() + dots).properties(width=_WIDTH, height=170)


def _points(series: dict[int, float]) -> list[dict[str, float]]:
    """Return the finite positive points, which a logarithmic axis can show."""
    return [{"step": s, "value": v} for s, v in series.items() if math.isfinite(v) and v > 0]
