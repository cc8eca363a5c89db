"""A flow as a grid of cells, rows by steps: what the heat maps of terminal and page draw."""

import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from frostlab.errors import FrostlabError
from frostlab.flow.diagnosis import RATIO_WORDS, front_ratios
from frostlab.flow.measurements import Report

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


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


try:
    import altair as alt
    import vl_convert
except ImportError:
    raise FrostlabError(
        "pictures of a flow need altair and vl-convert-python: pip install 'frostlab[report]'"
    ) from None

_ROWS, _COLUMNS = 130, 48  # of a heat map; more are joined
_WIDTH = 280  # of a plot
_GREY, _RED = "#8c8c8c", "#d62728"
_STEPS = alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=5)
_INK = {"svg": "currentColor", "png": "#222222"}


def heat_png(flow: "Flow", scale: float = 1.5) -> bytes:
    """Both heat maps side by side, on white."""
    grids = _grids(flow)
    both = alt.hconcat(*map(_heat, grids), spacing=24).resolve_scale(color="independent")
    both = both.properties(padding={"left": 5, "top": 5, "bottom": 5, "right": 20})
    spec = _spec(both, "png", {grid.quantity: _cells(grid) for grid in grids})
    return _packed(vl_convert.vegalite_to_png(spec, scale=scale))


def heat_svgs(flow: "Flow") -> dict[str, str]:
    """A heat map a quantity, each cell with its numbers as a tooltip."""
    return {
        g.quantity: _svg(_spec(_heat(g), "svg", {g.quantity: _cells(g)}), g.quantity)
        for g in _grids(flow)
    }


def norm_svg(flow: "Flow") -> str:
    """The norm of the whole gradient by step, and before clipping where it is known."""
    named = (("gradient", "after clipping"), ("before_clip", "before clipping"))
    known = {word: _points(flow.norms(quantity)) for quantity, word in named}
    if not known["before clipping"]:
        known = {"gradient": known["after clipping"]}
    return _svg(_spec(_lines(known, "norm of the whole gradient"), "svg"), "norm")


def front_svg(flow: "Flow") -> str | None:
    """Front/output gradient ratio by step between the limits of its words; None without one."""
    points = _points(front_ratios(flow.reports))
    if not points:
        return None
    limits = [{"limit": limit, "word": f"{word} < {limit:g}"} for limit, word in RATIO_WORDS]
    base = alt.Chart(alt.Data(values=limits)).encode(y="limit:Q")
    rule = base.mark_rule(strokeDash=[4, 3], stroke=_GREY)
    text = base.mark_text(align="left", dx=4, x=_WIDTH, color=_GREY).encode(text="word:N")
    chart = _lines({"front/output": points}, "front / output gradient") + rule + text
    return _svg(
        _spec(chart.properties(padding={"left": 12, "top": 5, "bottom": 8, "right": 40}), "svg"),
        "front",
    )


def _grids(flow: "Flow") -> list[Grid]:
    rows = rows_of(flow, _ROWS)
    return [grid_of(flow, quantity, rows, _COLUMNS) for quantity in TITLES]


def _cells(grid: Grid) -> list[dict[str, Any]]:
    return [
        {"row": row.name, "step": step, "kind": cell.kind, "sign": SIGNS.get(cell.kind, ""),
         "power": grid.power(cell.value) if cell.kind == NUMBER else None,
         "told": f"{row.name}, step {step}: {MEANINGS.get(cell.kind, f'{cell.value:.3g}')}"}
        for row, line in zip(grid.rows, grid.cells, strict=True)
        for step, cell in zip(grid.steps, line, strict=True)
    ]  # fmt: skip


def _heat(grid: Grid) -> alt.LayerChart:
    """A heat map of cells that `_spec` is given under the quantity's name."""
    names = [row.name for row in grid.rows]
    extent = min(6.5 * max(map(len, names)), 200)  # browsers' fonts are wider than the measured one
    high = 12 if len(grid.rows) > 30 else 16
    base = alt.Chart(alt.NamedData(grid.quantity)).encode(
        x=alt.X(
            "step:O",
            sort=list(grid.steps),
            title="step",
            axis=_STEPS,
        ),
        y=alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=190, minExtent=extent)),
        description="told:N",
    )
    scale = alt.Scale(scheme="viridis", domain=[grid.power(0.0), grid.power(grid.high)])
    legend = alt.Legend(
        title=None, labelExpr="format(pow(10, datum.value), '.0e')", tickCount=4,
        orient="bottom", gradientLength=_WIDTH,
    )  # fmt: skip
    coloured = (
        base.mark_rect()
        .transform_filter("datum.kind == 'number'")
        .encode(color=alt.Color("power:Q", scale=scale, legend=legend))
    )
    # Cells without a number are grey, broken ones red; the sign on each says which it is.
    plain = (
        base.mark_rect(fillOpacity=0.3)
        .transform_filter("datum.kind != 'number'")
        .encode(
            fill=alt.when("datum.kind == 'broken'")
            .then(alt.value(_RED))
            .otherwise(alt.value(_GREY))
        )
    )
    signs = (
        base.mark_text(fontSize=9)
        .transform_filter("datum.kind != 'number'")
        .encode(text="sign:N", description=alt.value(""))
    )
    return (coloured + plain + signs).properties(
        title=TITLES[grid.quantity], width=_WIDTH, height=alt.Step(high)
    )


def _lines(series: dict[str, list[dict[str, float]]], title: str) -> alt.Chart:
    points = [
        {**point, "line": name, "told": f"step {point['step']:g}: {point['value']:.3g}"}
        for name, some in series.items()
        for point in some
    ]
    chart = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(type="log", padding=6)),
    )
    if len(series) > 1:
        chart = chart.encode(color=alt.Color("line:N", title=None))
    dots = chart.mark_circle(size=22, opacity=1).encode(description="told:N")
    return (chart.mark_line() + dots).properties(title=title, width=_WIDTH, height=170)


def _points(series: dict[int, float]) -> list[dict[str, float]]:
    """What a logarithmic axis can show."""
    return [{"step": s, "value": v} for s, v in series.items() if math.isfinite(v) and v > 0]


def _spec(chart: Any, kind: str, data: dict[str, Any] | None = None) -> str:
    """The specification, in ink that suits it: the page's own colour, or dark on white.

    Data are put in last, for altair copies and checks what it holds at every call.
    """
    ink = _INK[kind]
    axis = {"labelColor": ink, "titleColor": ink, "domainColor": _GREY, "tickColor": _GREY}
    styled = (
        chart.configure(background="transparent" if kind == "svg" else "white")
        .configure_axis(**axis, gridColor=_GREY, gridOpacity=0.25)
        .configure_legend(labelColor=ink, titleColor=ink)
        .configure_title(color=ink, fontSize=13)
        .configure_text(color=ink)
        .configure_view(stroke=None)
    )
    spec = styled.to_dict(validate=False)
    spec["datasets"] = {**spec.get("datasets", {}), **(data or {})}
    return json.dumps(spec)


def _packed(png: bytes) -> bytes:
    """The same picture, compressed as well as zlib can: some eight times smaller."""
    at, data, made = 8, b"", png[:8]
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        elif kind == b"IEND":
            body = b"IDAT" + zlib.compress(zlib.decompress(data), 9)
            made += struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        if kind != b"IDAT":
            made += png[at : at + 12 + size]
        at += 12 + size
    return made


def _svg(spec: str, name: str) -> str:
    """SVG for a page: labels become tooltips, names do not clash, no sizes that a phone cannot."""
    svg = vl_convert.vegalite_to_svg(spec)
    size = re.search(r' width="([\d.]+)"', svg)
    svg = re.sub(
        r"<svg [^>]*?( viewBox=\"[^\"]*\")>", r'<svg aria-hidden="true"\1 STYLE>', svg, count=1
    )
    svg = svg.replace("STYLE", f'style="width:{size[1] if size else _WIDTH}px"')
    svg = re.sub(r'<path aria-label="([^"]+)"([^>]*?)/>', r"<path\2><title>\1</title></path>", svg)
    svg = re.sub(r' (?:role|aria-label|aria-roledescription|class)="[^"]*"', "", svg)
    return re.sub(r"(id=\"|url\(#)(gradient|clip)", rf"\1{name}-\2", svg)
