"""The charts of a comparison's report: each function turns rows into a chart's specification.

Colours and shapes follow the order of the plan's arms. The rows hold the intervals and bands; the
chart library computes none. `hidden_arms` is a Vega signal, which the page's script sets to the
arms that the reader has switched off.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, cast

from frostlab.charts import GREY, INNER_CHARTS, LABEL, PALETTE, RED, SHAPES, require_drawing
from frostlab.recipe.settings import metric_facts

Rows = Sequence[dict[str, Any]]
_Values = ParamSpec("_Values")
WIDTH = 640  # pixels of a plot
_PANEL = 280  # pixels of a plot next to another one
_REACH = 4.0  # how far an axis may extend beyond the points, in multiples of their range
# like `charts.label`: a long name loses its beginning, because its end says more
_SHORT = f"length(datum.label) > {LABEL} ? '…' + slice(datum.label, {1 - LABEL}) : datum.label"
_IS_SHOWN = "indexof(hidden_arms, datum.arm) < 0"
_NAMES = {"labelExpr": _SHORT, "labelLimit": 260}


_POSITIVE = ("training loss", "seconds", "ms a step")  # quantities that are not metrics


def cut_off(rows: Rows, quantity: str) -> str:
    """Cut bands and intervals at the bounds of a quantity; return a sentence if any was cut.

    An end beyond the bounds comes from the symmetry of the interval, and no run can have such a
    value. Only the drawing is cut: the texts of the rows keep the whole intervals.
    """
    least, most = (0.0, math.inf) if quantity in _POSITIVE else metric_facts(quantity).bounds
    is_cut = False
    for row in rows:
        if row["low"] is not None and row["high"] is not None:
            whole = row["low"], row["high"]
            row["low"], row["high"] = max(row["low"], least), min(row["high"], most)
            is_cut |= whole != (row["low"], row["high"])
    return " Bands and intervals are cut off at the smallest and largest possible value." * is_cut


def _altair() -> Any:
    return require_drawing("a report")[0]


def _chart(name: str) -> Any:
    """Return an empty chart of named data."""
    alt = _altair()
    return alt.Chart(alt.NamedData(name))


def _scale(arms: Sequence[str], members: Sequence[str]) -> Any:
    chosen = [members[number % len(members)] for number in range(len(arms))]
    return _altair().Scale(domain=list(arms), range=chosen)


def _legend(arms: Sequence[str], legend: bool) -> Any:
    """Return a legend above the plot; None, Altair's value for no legend, if `legend` is false."""
    if not legend:
        return None
    columns = 4 if max(map(len, arms)) < 18 else 2
    return _altair().Legend(title=None, orient="top", columns=columns, symbolSize=90,
                            symbolStrokeWidth=0, symbolOpacity=1, **_NAMES)  # fmt: skip


def arm_colour(arms: Sequence[str], legend: bool = False) -> Any:
    """Return the colour channel of the field `arm`."""
    alt = _altair()
    return alt.Color("arm:N", scale=_scale(arms, PALETTE), legend=_legend(arms, legend))


def arm_shape(arms: Sequence[str], legend: bool = False) -> Any:
    """Return the shape channel of the field `arm`."""
    alt = _altair()
    return alt.Shape("arm:N", scale=_scale(arms, SHAPES), legend=_legend(arms, legend))


def arm_rows(arms: Sequence[str]) -> Any:
    """Return the y channel of charts that have one row for each arm."""
    alt = _altair()
    return alt.Y("arm:N", sort=list(arms), title=None, scale=alt.Scale(domain=list(arms)),
                 axis=alt.Axis(grid=False, ticks=False, domain=False, labelPadding=8,
                               **_NAMES))  # fmt: skip


def toggled(chart: Any) -> dict[str, Any]:
    """Return a specification of a chart that leaves out the arms that the reader switches off."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    _filter_arms(spec)
    spec["params"] = [*spec.get("params", []), {"name": "hidden_arms", "value": []}]
    return spec


def _filter_arms(spec: dict[str, Any]) -> None:
    """Filter every part, because a part with its own data ignores a filter of the whole chart."""
    parts = [part for key in INNER_CHARTS for part in spec.get(key, [])]
    for part in parts:
        _filter_arms(part)
    if not parts:
        spec["transform"] = [*spec.get("transform", []), {"filter": _IS_SHOWN}]


def _finished(chart: Any, **rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart's specification, with named data, in which arms can be switched off.

    The data are added last, because Altair copies them at every call.
    """
    spec = toggled(chart)
    spec["datasets"] = {name: list(members) for name, members in rows.items()}
    return spec


def _drawing(make: Callable[_Values, Any]) -> Callable[_Values, dict[str, Any]]:
    """Let a function build a chart without Altair's checks of every part, which are slow."""

    @wraps(make)
    def made(*values: _Values.args, **options: _Values.kwargs) -> dict[str, Any]:
        with _altair().utils.schemapi.debug_mode(False):
            return cast("dict[str, Any]", make(*values, **options))

    return made


def zoom() -> Any:
    """Return the Altair selection with which a reader can move and zoom a plot."""
    return _altair().selection_interval(bind="scales", encodings=["x", "y"])


def window(points: Sequence[float], ends: Sequence[float | None], log: bool) -> tuple[float, float]:
    """Return the range of an axis that shows all points, and the ends of intervals that are near.

    The interval of a few seeds can be so wide that nothing else would be visible.
    """

    def to(value: float) -> float:
        return math.log(value) if log else value

    def back(value: float) -> float:
        return math.exp(value) if log else value

    inside = [to(value) for value in points if value > 0 or not log]
    low, high = min(inside), max(inside)
    reach = _REACH * ((high - low) or abs(high) or 1.0)
    finite = [to(end) for end in ends if end is not None and (end > 0 or not log)]
    for end in finite:
        low, high = (
            max(min(low, end), min(inside) - reach),
            min(max(high, end), max(inside) + reach),
        )
    room = 0.04 * ((high - low) or abs(high) or 1.0)
    return back(low - room), back(high + room)


def _window_of_means(rows: Rows, log: bool) -> tuple[float, float]:
    """Return the range of an axis that shows all means, and at least the shortest interval."""
    whole = [(row["low"], row["high"]) for row in rows
             if row["low"] is not None and row["high"] is not None]  # fmt: skip
    shortest = min(whole, key=lambda ends: ends[1] - ends[0], default=())
    means = [row["mean"] for row in rows if row["mean"] is not None]
    return window([*means, *shortest], [end for ends in whole for end in ends], log)


def clipped(rows: Rows, domain: tuple[float, float]) -> list[dict[str, Any]]:
    """Return the rows that have a value, with the part of their interval that fits on the axis.

    `from` and `to` are the ends of this part. `beyond_low` and `beyond_high` are the ends of the
    axis if the interval goes beyond them, else None. A row without an interval gets no such keys.
    """
    drawn = []
    for row in rows:
        if (row.get("effect") if "effect" in row else row.get("mean")) is None:
            continue
        low, high = row.get("low"), row.get("high")
        if low is None and high is None:
            drawn.append(row)
            continue
        begin = domain[0] if low is None else max(low, domain[0])
        end = domain[1] if high is None else min(high, domain[1])
        drawn.append(row | {
            "from": begin, "to": end,
            "beyond_low": domain[0] if low is None or low < domain[0] else None,
            "beyond_high": domain[1] if high is None or high > domain[1] else None,
        })  # fmt: skip
    return drawn


def _interval_layers(base: Any, x: Any, colour: Any, above: float = 0) -> list[Any]:
    """Draw the intervals of `clipped` rows, with an arrow where one reaches beyond the axis.

    `above` is the number of pixels by which the intervals are moved up.
    """
    ends = base.transform_filter("isValid(datum.from)")
    layers = [ends.mark_rule(strokeWidth=3, strokeCap="round", yOffset=-above).encode(
        x=x("from:Q"), x2="to:Q", color=colour)]  # fmt: skip
    for name, side in (("beyond_low", "left"), ("beyond_high", "right")):
        layers.append(
            base.transform_filter(f"isValid(datum.{name})")
            .mark_point(shape=f"triangle-{side}", size=90, filled=True, opacity=1, yOffset=-above)
            .encode(x=x(f"{name}:Q"), color=colour)
        )
    return layers


def _upright_intervals(base: Any, y: Callable[[str], Any]) -> list[Any]:
    """Draw the intervals of `clipped` rows upright, with an arrow where one leaves the axis."""
    layers = [base.transform_filter("isValid(datum.from)").mark_rule(strokeWidth=2)
              .encode(y=y("from:Q"), y2="to:Q")]  # fmt: skip
    for name, side in (("beyond_low", "down"), ("beyond_high", "up")):
        layers.append(
            base.transform_filter(f"isValid(datum.{name})")
            .mark_point(shape=f"triangle-{side}", size=70, filled=True, opacity=1)
            .encode(y=y(f"{name}:Q"))
        )
    return layers


@_drawing
def paired_differences(
    seeds: Rows, effects: Rows, arms: Sequence[str], title: str, ratio: bool
) -> Any:
    """Draw each seed's paired difference as a dot, with each arm's effect and its interval.

    A dashed line is no difference; a true effect inside the grey bar would be missed in more than
    2 of 10 such comparisons. `seeds` have arm, seed, value and text; `effects` have arm, effect,
    low, high, text and, if known, seen_low and seen_high, the ends of the grey bar.
    """
    alt = _altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in effects)]
    none = 1.0 if ratio else 0.0
    points = [none, *(row["value"] for row in seeds)]
    points += [row["effect"] for row in effects if row["effect"] is not None]
    ends = [row.get(key) for row in effects for key in ("low", "high", "seen_low", "seen_high")]
    domain = window(points, ends, ratio)
    scale = alt.Scale(domain=list(domain), nice=False, type="log" if ratio else "linear")
    axis = alt.Axis(format="~g", tickCount=8, labelOverlap=True)

    def x(field: str) -> Any:
        return alt.X(field, title=title, scale=scale, axis=axis)

    y, colour = arm_rows(drawn), arm_colour(arms)
    base = _chart("effects").encode(y=y)
    seen = base.transform_filter("isValid(datum.seen_low)").mark_bar(
        height=44, color=GREY, opacity=0.2, clip=True, cornerRadius=3
    ).encode(x=x("seen_low:Q"), x2="seen_high:Q", tooltip=[
        alt.Tooltip("arm:N"),
        alt.Tooltip("seen:N", title="found in 8 of 10 such comparisons"),
    ])  # fmt: skip
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("text:N", title="effect and interval")]
    intervals = _interval_layers(base.encode(tooltip=tooltip), x, colour, above=8)
    effect = base.mark_tick(thickness=4, size=18, yOffset=-8).encode(
        x=x("effect:Q"), color=colour, tooltip=tooltip
    )
    dots = _chart("seeds").mark_point(filled=True, size=64, opacity=0.8, yOffset=9).encode(
        x=x("value:Q"), y=y, color=colour, shape=arm_shape(arms),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("seed:N"),
                 alt.Tooltip("text:N", title="difference")],
    )  # fmt: skip
    zero = _mark_line(none, x)
    layers = alt.layer(seen, zero, *intervals, effect, dots)
    chart = layers.properties(width=WIDTH, height=alt.Step(58))
    return _finished(chart, effects=clipped(effects, domain), seeds=seeds)


def _mark_line(value: float, x: Any) -> Any:
    """Draw a dashed vertical line at a value, such as no difference."""
    alt = _altair()
    return alt.Chart(alt.Data(values=[{"zero": value}])).mark_rule(
        strokeDash=[5, 4], strokeWidth=1.5, stroke=GREY
    ).encode(x=x("zero:Q"))  # fmt: skip


@_drawing
def curves(
    points: Rows, arms: Sequence[str], x: str, y: str, log: bool = False, short: bool = False
) -> Any:
    """Draw the mean of each arm's runs as a line with a band.

    Points have arm, x, mean, low, high, runs, text, `all` (whether every run of the arm has a
    value; if not, the line is dashed), `turn` (whether it is the last point before the dashed
    part) and `dot` (whether it has a symbol). `short` shows numbers of the x axis as 1k, 1M, 1G.
    """
    alt = _altair()
    scale = alt.Scale(type="log" if log else "linear", zero=False, nice=not log, padding=6)
    numbers = alt.Axis(format="~s" if short else ",.6~g", tickCount=8, labelOverlap=True)
    values = alt.Axis(format=".4~g", tickCount=6, labelOverlap=True)
    colour, shape = arm_colour(arms, legend=True), arm_shape(arms, legend=True)
    base = _chart("points").encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(nice=False, zero=False, padding=8), axis=numbers),
        color=colour,
    )

    def at(field: str) -> Any:
        return alt.Y(field, title=y, scale=scale, axis=values)

    band = (
        base.transform_filter("isValid(datum.low)")
        .mark_area(opacity=0.15, line=False, clip=True)
        .encode(y=at("low:Q"), y2="high:Q")
    )
    whole = base.transform_filter("datum.all").mark_line(strokeWidth=2, clip=True)
    rest = base.transform_filter("!datum.all || datum.turn").mark_line(
        strokeWidth=1.5, strokeDash=[3, 3], clip=True
    )
    dots = base.transform_filter("datum.dot").mark_point(
        filled=True, size=48, opacity=1, clip=True
    ).encode(
        y=at("mean:Q"), shape=shape,
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("x:Q", title=x, format=",.6~g"),
                 alt.Tooltip("text:N", title=y), alt.Tooltip("runs:Q")],
    )  # fmt: skip
    layers = [band, whole.encode(y=at("mean:Q")), rest.encode(y=at("mean:Q")),
              dots.add_params(zoom())]  # fmt: skip
    return _finished(alt.layer(*layers).properties(width=WIDTH, height=300), points=points)


@_drawing
def time_ratios(rows: Rows, arms: Sequence[str], control: dict[str, Any] | None, title: str) -> Any:
    """Draw the ratio of each arm's time to the baseline's with its interval.

    Rows have arm, effect, low, high, text and, if known, ceiling (the smallest ratio that the
    saved FLOPs explain), ceiling_text and first (whether its label is drawn). `control` has
    low and high, the interval of a second copy of the baseline, and text; a difference inside this
    interval shows nothing.
    """
    alt = _altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    known = [row["effect"] for row in rows if row["effect"] is not None]
    ceilings = [row["ceiling"] for row in rows if row.get("ceiling") is not None]
    ends = [row.get(key) for row in rows for key in ("low", "high")]
    ends += [control["low"], control["high"]] if control else []
    domain = window([1.0, *known, *ceilings], ends, log=True)
    scale = alt.Scale(domain=list(domain), nice=False, type="log")
    axis = alt.Axis(format="~g", tickCount=8, labelOverlap=True)

    def x(field: str) -> Any:
        return alt.X(field, title=title, scale=scale, axis=axis)

    layers = []
    if control:
        band = {"arm": None, "from": max(control["low"], domain[0]),
                "to": min(control["high"], domain[1]), "text": control["text"]}  # fmt: skip
        layers.append(
            alt.Chart(alt.Data(values=[band])).mark_rect(color=GREY, opacity=0.2, clip=True).encode(
                x=x("from:Q"), x2="to:Q",
                tooltip=[alt.Tooltip("text:N", title="the baseline against itself")])
        )  # fmt: skip
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("text:N", title="ratio and interval")]
    base = _chart("rows").encode(y=arm_rows(drawn))
    colour = arm_colour(arms)
    layers.append(_mark_line(1.0, x))
    layers += _interval_layers(base.encode(tooltip=tooltip), x, colour)
    layers.append(
        base.mark_point(filled=True, size=110, opacity=1).encode(
            x=x("effect:Q"), color=colour, shape=arm_shape(arms), tooltip=tooltip
        )
    )
    ceiling = base.transform_filter("isValid(datum.ceiling)").encode(x=x("ceiling:Q"))
    layers.append(
        ceiling.mark_tick(thickness=3, size=32, color=RED).encode(
            tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("ceiling_text:N", title="FLOP ceiling")]
        )
    )
    first = ceiling.transform_filter("datum.first")
    layers.append(first.mark_text(dy=-24, color=RED, fontSize=11).encode(
        text=alt.value("FLOP ceiling")))  # fmt: skip
    chart = alt.layer(*layers).properties(width=WIDTH, height=alt.Step(56))
    return _finished(chart, rows=clipped(rows, domain))


@_drawing
def responses(
    points: Rows, arms: Sequence[str], x: str, y: str, log: tuple[bool, bool] = (True, False)
) -> Any:
    """Draw each arm's score by the value of a tuned setting, all on one scale.

    Points have arm, value, mean, low, high, chosen (the number of seeds for which the value was
    chosen), seeds and mark (this number as a short and a longer text) and text. `log` says whether
    the x and the y axis are logarithmic.
    """
    alt = _altair()
    values = sorted({row["value"] for row in points})
    domain = _window_of_means(points, log[1])
    scale = alt.Scale(domain=list(domain), nice=False, type="log" if log[1] else "linear")
    room = alt.Scale(type="log" if log[0] else "linear", padding=28, nice=False, zero=False)
    form = "~e" if log[0] and values[0] < 1e-3 else "~g"
    ticks = alt.Axis(values=values, format=form, grid=False, labelOverlap="greedy")
    at_x = alt.X("value:Q", title=x, scale=room, axis=ticks)

    def at(field: str) -> Any:
        return alt.Y(field, title=y, scale=scale, axis=alt.Axis(format=".4~g", tickCount=6))

    columns = 2 if len(arms) in (2, 4) else 3
    rows = clipped(points, domain)
    rows += [row for row in points if row["mean"] is None]
    plain = alt.Chart().encode(x=at_x)
    base = plain.encode(color=arm_colour(arms))
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("value:Q", title=x),
               alt.Tooltip("text:N", title=y),
               alt.Tooltip("mark:N", title="chosen for")]  # fmt: skip
    layer = alt.layer(
        base.transform_filter("isValid(datum.mean)").mark_line(strokeWidth=1.5, opacity=0.7)
        .encode(y=at("mean:Q")),
        *_upright_intervals(base, at),
        base.transform_filter("isValid(datum.mean) && datum.chosen == 0")
        .mark_point(size=60, fill="white", strokeWidth=2, opacity=1)
        .encode(y=at("mean:Q"), shape=arm_shape(arms), tooltip=tooltip),
        base.transform_filter("isValid(datum.mean) && datum.chosen > 0")
        .mark_point(size=140, filled=True, opacity=1)
        .encode(y=at("mean:Q"), shape=arm_shape(arms), tooltip=tooltip),
        plain.transform_filter("datum.chosen > 0").mark_text(dy=-8, fontSize=11)
        .encode(y=alt.value(0), text="seeds:N"),
        plain.transform_filter("!isValid(datum.mean)").mark_text(color=RED, text="×", fontSize=18)
        .encode(y=alt.value("height"), tooltip=tooltip),
        data=alt.NamedData("rows"),
    ).properties(width=_PANEL if columns == 2 else 0.66 * _PANEL, height=210)  # fmt: skip
    return _finished(_panels(layer, arms, columns), rows=rows)


def _panels(layer: Any, arms: Sequence[str], columns: int = 2) -> Any:
    """Return one panel for each arm."""
    alt = _altair()
    header = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelLimit=_PANEL,
                        labelExpr=_SHORT, labelPadding=14)  # fmt: skip
    return layer.facet(facet=alt.Facet("arm:N", sort=list(arms), header=header), columns=columns)


@_drawing
def bars(rows: Rows, arms: Sequence[str], title: str) -> Any:
    """Draw one bar for each arm, with the interval of its mean and the number next to it.

    Rows have arm, mean, low, high and text.
    """
    alt = _altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    points = [0.0, *(row["mean"] for row in rows)]
    ends = [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    low, high = window(points, ends, False)
    low = 0.0 if min(points + ends) >= 0 else low
    scale = alt.Scale(domain=[low, high], nice=False)

    def x(field: str) -> Any:
        return alt.X(field, title=title, scale=scale, axis=alt.Axis(format="~g", tickCount=8))

    base = _chart("rows").encode(y=arm_rows(drawn))
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("text:N", title=title)]
    bar = base.mark_bar(height=20, opacity=0.55).encode(
        x=x("mean:Q"), color=arm_colour(arms), tooltip=tooltip
    )
    intervals = _interval_layers(base.encode(tooltip=tooltip), x, arm_colour(arms))
    text = base.mark_text(align="left", dx=8, fontSize=11).encode(
        x=alt.value("width"), text="text:N"
    )
    chart = alt.layer(bar, *intervals, text).properties(width=WIDTH, height=alt.Step(34))
    return _finished(chart, rows=clipped(rows, (low, high)))


@_drawing
def sizes(rows: Rows, arms: Sequence[str], title: str, kinds: Sequence[str], stacked: bool) -> Any:
    """Draw one bar for each arm and kind of size or, if `stacked`, one bar for each arm.

    Rows have arm, kind, size and text.
    """
    alt = _altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    axis = alt.Axis(labelExpr="format(datum.value, '~s')", tickCount=8)
    x = alt.X("size:Q", title=title, axis=axis, stack=True if stacked else None)
    opacity = alt.Opacity("kind:N", sort=list(kinds), legend=_kind_legend(),
                          scale=alt.Scale(domain=list(kinds), range=_opacities(kinds)))  # fmt: skip
    chart = _chart("rows").mark_bar(**({"height": 20} if stacked else {})).encode(
        x=x, y=arm_rows(drawn), color=arm_colour(arms), opacity=opacity, order="place:Q",
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("kind:N"), alt.Tooltip("text:N", title="size")],
    )  # fmt: skip
    if not stacked:
        chart = chart.encode(yOffset=alt.YOffset("kind:N", sort=list(kinds)))
    step = alt.Step(34) if stacked else alt.Step(14, **{"for": "offset"})
    placed = (row | {"place": kinds.index(row["kind"])} for row in rows)
    return _finished(chart.properties(width=WIDTH, height=step), rows=placed)


def _kind_legend() -> Any:
    return _altair().Legend(title=None, orient="top", symbolType="square", symbolFillColor=GREY)


def _opacities(kinds: Sequence[str]) -> list[float]:
    return [0.9 - 0.6 * number / max(1, len(kinds) - 1) for number in range(len(kinds))]


@_drawing
def ratios(rows: Rows, arms: Sequence[str], title: str, quantities: Sequence[str]) -> Any:
    """Draw ratios to the baseline with their intervals, one panel for each quantity.

    Rows have quantity, arm, effect, low, high and text.
    """
    alt = _altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    points = [1.0, *(row["effect"] for row in rows if row["effect"] is not None)]
    domain = window(points, [row[key] for row in rows for key in ("low", "high")], log=True)
    scale = alt.Scale(domain=list(domain), nice=False, type="log")

    def x(field: str) -> Any:
        return alt.X(field, title=title, scale=scale,
                     axis=alt.Axis(format="~g", tickCount=8, labelOverlap=True))  # fmt: skip

    tooltip = [alt.Tooltip("quantity:N"), alt.Tooltip("arm:N"),
               alt.Tooltip("text:N", title="ratio and interval")]  # fmt: skip
    base = alt.Chart().encode(y=arm_rows(drawn), tooltip=tooltip)
    layer = alt.layer(
        base.mark_rule(strokeDash=[5, 4], strokeWidth=1.5, stroke=GREY).encode(
            x=x("one:Q"), y=alt.value(0), y2=alt.value("height")),
        *_interval_layers(base, x, arm_colour(arms)),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            x=x("effect:Q"), color=arm_colour(arms), shape=arm_shape(arms)),
        data=alt.NamedData("rows"),
    ).properties(width=WIDTH, height=alt.Step(26))  # fmt: skip
    header = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelAnchor="start")
    facet = alt.Facet("quantity:N", sort=list(quantities), header=header)
    drawn_rows = (row | {"one": 1.0} for row in clipped(rows, domain))
    return _finished(layer.facet(facet=facet, columns=1), rows=drawn_rows)


@_drawing
def heat_maps(cells: Rows, arms: Sequence[str], title: str) -> Any:
    """Draw a heat map of parts by steps for each arm, with one colour scale.

    Cells have arm, row, place (of the row), step, power (log10 of the value, or null), sign (shown
    instead of a colour) and text.
    """
    alt = _altair()
    powers = [cell["power"] for cell in cells if cell["power"] is not None] or [0.0]
    scale = alt.Scale(scheme="viridis", domain=[min(powers), max(powers)])
    legend = alt.Legend(title=title, labelExpr="format(pow(10, datum.value), '.2~g')", tickCount=4,
                        orient="top", gradientLength=240, titleLimit=400)  # fmt: skip
    base = alt.Chart().encode(
        x=alt.X("step:O", title="step", sort="ascending",
                axis=alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=8)),
        y=alt.Y("row:N", sort=alt.EncodingSortField("place", op="min", order="ascending"),
                title=None, axis=alt.Axis(labelLimit=150, ticks=False, domain=False)),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("row:N", title="part"), alt.Tooltip("step:Q"),
                 alt.Tooltip("text:N", title=title)],
    )  # fmt: skip
    layer = alt.layer(
        base.transform_filter("isValid(datum.power)").mark_rect().encode(
            color=alt.Color("power:Q", scale=scale, legend=legend)),
        base.transform_filter("!isValid(datum.power)").mark_rect(color=GREY, opacity=0.25),
        base.transform_filter("!isValid(datum.power)").mark_text(fontSize=9).encode(text="sign:N"),
        data=alt.NamedData("cells"),
    ).properties(width=_PANEL - 60, height=alt.Step(13))  # fmt: skip
    panels = _panels(layer, arms).resolve_scale(x="independent", y="independent")
    return _finished(panels, cells=cells)


@_drawing
def trade_off(rows: Rows, arms: Sequence[str], x: str, y: str) -> Any:
    """Draw each arm's mean with its interval by the share of its parameters that trains.

    Rows have arm, share_text, at (the share, moved so that equal shares do not overlap), mean,
    low, high and text.
    """
    alt = _altair()
    domain = _window_of_means(rows, False)
    scale = alt.Scale(domain=list(domain), nice=False)

    def at(field: str) -> Any:
        return alt.Y(field, title=y, scale=scale, axis=alt.Axis(format=".4~g", tickCount=6))

    shares = alt.X("at:Q", title=x, scale=alt.Scale(zero=False, nice=True, padding=30),
                   axis=alt.Axis(labelExpr="datum.value > 1 ? '' : format(datum.value, '.3~%')",
                                 tickCount=6))  # fmt: skip
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("share_text:N", title=x),
               alt.Tooltip("text:N", title=y)]  # fmt: skip
    base = _chart("rows").encode(x=shares, color=arm_colour(arms, legend=True), tooltip=tooltip)
    layers = alt.layer(
        *_upright_intervals(base, at),
        base.mark_point(filled=True, size=130, opacity=1)
        .encode(y=at("mean:Q"), shape=arm_shape(arms, legend=True)),
    )  # fmt: skip
    chart = layers.properties(width=WIDTH, height=280)
    return _finished(chart, rows=clipped(rows, domain))
