"""The charts of a comparison's report: each function turns rows into a chart's specification.

The rows hold the intervals and bands; the chart library computes none.
"""

from collections.abc import Sequence
from typing import Any

from frostlab.charts import GREY, RED
from frostlab.pages.chart_parts import (
    NAMES,
    WIDTH,
    Rows,
    altair,
    arm_colour,
    arm_rows,
    arm_shape,
    clipped,
    drawing,
    empty_chart,
    finished,
    interval_layers,
    upright_intervals,
    window,
    window_of_means,
    zoom,
)

_PANEL = 280  # pixels of a plot next to another one


@drawing
def paired_differences(
    seeds: Rows, effects: Rows, arms: Sequence[str], title: str, ratio: bool
) -> Any:
    """Draw each seed's paired difference as a dot, with each arm's effect and its interval.

    The dashed line marks no difference. A true effect inside the grey bar would be missed in more
    than 2 of 10 such comparisons. `seeds` have arm, seed, value and text; `effects` have arm,
    effect, low, high, text and, if known, seen_low and seen_high (the ends of the grey bar) and
    seen (the effect at its ends, as text).
    """
    alt = altair()
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
    base = empty_chart("effects").encode(y=y)
    seen = base.transform_filter("isValid(datum.seen_low)").mark_bar(
        height=44, color=GREY, opacity=0.2, clip=True, cornerRadius=3
    ).encode(x=x("seen_low:Q"), x2="seen_high:Q", tooltip=[
        alt.Tooltip("arm:N"),
        alt.Tooltip("seen:N", title="found in 8 of 10 such comparisons"),
    ])  # fmt: skip
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("text:N", title="effect and interval")]
    intervals = interval_layers(base.encode(tooltip=tooltip), x, colour, above=8)
    effect = base.mark_tick(thickness=4, size=18, yOffset=-8).encode(
        x=x("effect:Q"), color=colour, tooltip=tooltip
    )
    dots = empty_chart("seeds").mark_point(filled=True, size=64, opacity=0.8, yOffset=9).encode(
        x=x("value:Q"), y=y, color=colour, shape=arm_shape(arms),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("seed:N"),
                 alt.Tooltip("text:N", title="difference")],
    )  # fmt: skip
    layers = alt.layer(seen, _mark_line(none, x), *intervals, effect, dots)
    chart = layers.properties(width=WIDTH, height=alt.Step(58))
    return finished(chart, effects=clipped(effects, domain), seeds=seeds)


def _mark_line(value: float, x: Any) -> Any:
    """Draw a dashed vertical line at a value, such as no difference."""
    alt = altair()
    return alt.Chart(alt.Data(values=[{"at": value}])).mark_rule(
        strokeDash=[5, 4], strokeWidth=1.5, stroke=GREY
    ).encode(x=x("at:Q"))  # fmt: skip


@drawing
def curves(
    points: Rows, arms: Sequence[str], x: str, y: str, log: bool = False, short: bool = False
) -> Any:
    """Draw the mean of each arm's runs as a line with a band.

    Points have arm, x, mean, low, high, runs (how many have a value at this x), text, `all`
    (whether all do; if not, the line is dashed), `turn` (whether it is the last point before the
    dashed part) and `dot` (whether it has a symbol). `log` makes the y axis logarithmic; `short`
    shows numbers of the x axis as 1k, 1M, 1G.
    """
    alt = altair()
    scale = alt.Scale(type="log" if log else "linear", zero=False, nice=not log, padding=6)
    numbers = alt.Axis(format="~s" if short else ",.6~g", tickCount=8, labelOverlap=True)
    values = alt.Axis(format=".4~g", tickCount=6, labelOverlap=True)
    colour, shape = arm_colour(arms, legend=True), arm_shape(arms, legend=True)
    base = empty_chart("points").encode(
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
    return finished(alt.layer(*layers).properties(width=WIDTH, height=300), points=points)


@drawing
def time_ratios(rows: Rows, arms: Sequence[str], control: dict[str, Any] | None, title: str) -> Any:
    """Draw the ratio of each arm's time to the baseline's with its interval.

    Rows have arm, effect, low, high, text and, if known, ceiling (the smallest ratio that the
    saved FLOPs explain), ceiling_text and first (whether its mark is labelled “FLOP ceiling”).
    `control` has text, low and high, the interval of the ratio of a copy of the baseline to the
    baseline; an effect inside this interval shows nothing.
    """
    alt = altair()
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
    base = empty_chart("rows").encode(y=arm_rows(drawn))
    colour = arm_colour(arms)
    layers.append(_mark_line(1.0, x))
    layers += interval_layers(base.encode(tooltip=tooltip), x, colour)
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
    return finished(chart, rows=clipped(rows, domain))


@drawing
def responses(
    points: Rows, arms: Sequence[str], x: str, y: str, log: tuple[bool, bool] = (True, False)
) -> Any:
    """Draw each arm's score by the value of a tuned setting, all on one scale.

    Points have arm, value, mean, low, high, chosen (the number of seeds for which the value was
    chosen), seeds and mark (the same as text: “2/6” and “2 of 6 seeds”) and text. `log` says
    whether the x and the y axis are logarithmic.
    """
    alt = altair()
    values = sorted({row["value"] for row in points})
    domain = window_of_means(points, log[1])
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
        *upright_intervals(base, at),
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
    return finished(_panels(layer, arms, columns), rows=rows)


def _panels(layer: Any, arms: Sequence[str], columns: int = 2) -> Any:
    """Return one panel for each arm."""
    alt = altair()
    header = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelLimit=_PANEL,
                        labelExpr=NAMES["labelExpr"], labelPadding=14)  # fmt: skip
    return layer.facet(facet=alt.Facet("arm:N", sort=list(arms), header=header), columns=columns)


@drawing
def bars(rows: Rows, arms: Sequence[str], title: str) -> Any:
    """Draw one bar for each arm, with the interval of its mean and the number next to it.

    Rows have arm, mean, low, high and text.
    """
    alt = altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    points = [0.0, *(row["mean"] for row in rows)]
    ends = [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    low, high = window(points, ends, False)
    low = 0.0 if min(points + ends) >= 0 else low
    scale = alt.Scale(domain=[low, high], nice=False)

    def x(field: str) -> Any:
        return alt.X(field, title=title, scale=scale, axis=alt.Axis(format="~g", tickCount=8))

    base = empty_chart("rows").encode(y=arm_rows(drawn))
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("text:N", title=title)]
    bar = base.mark_bar(height=20, opacity=0.55).encode(
        x=x("mean:Q"), color=arm_colour(arms), tooltip=tooltip
    )
    intervals = interval_layers(base.encode(tooltip=tooltip), x, arm_colour(arms))
    text = base.mark_text(align="left", dx=8, fontSize=11).encode(
        x=alt.value("width"), text="text:N"
    )
    chart = alt.layer(bar, *intervals, text).properties(width=WIDTH, height=alt.Step(34))
    return finished(chart, rows=clipped(rows, (low, high)))


@drawing
def sizes(rows: Rows, arms: Sequence[str], title: str, kinds: Sequence[str], stacked: bool) -> Any:
    """Draw sizes of each arm, such as trainable and frozen parameters, as bars.

    Each of the `kinds` has a bar of its own or, if `stacked`, a part of the arm's one bar. Rows
    have arm, kind, size and text.
    """
    alt = altair()
    drawn = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    axis = alt.Axis(labelExpr="format(datum.value, '~s')", tickCount=8)
    x = alt.X("size:Q", title=title, axis=axis, stack=True if stacked else None)
    opacity = alt.Opacity("kind:N", sort=list(kinds), legend=_kind_legend(),
                          scale=alt.Scale(domain=list(kinds), range=_opacities(kinds)))  # fmt: skip
    chart = empty_chart("rows").mark_bar(**({"height": 20} if stacked else {})).encode(
        x=x, y=arm_rows(drawn), color=arm_colour(arms), opacity=opacity, order="place:Q",
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("kind:N"), alt.Tooltip("text:N", title="size")],
    )  # fmt: skip
    if not stacked:
        chart = chart.encode(yOffset=alt.YOffset("kind:N", sort=list(kinds)))
    step = alt.Step(34) if stacked else alt.Step(14, **{"for": "offset"})
    placed = (row | {"place": kinds.index(row["kind"])} for row in rows)
    return finished(chart.properties(width=WIDTH, height=step), rows=placed)


def _kind_legend() -> Any:
    return altair().Legend(title=None, orient="top", symbolType="square", symbolFillColor=GREY)


def _opacities(kinds: Sequence[str]) -> list[float]:
    return [0.9 - 0.6 * number / max(1, len(kinds) - 1) for number in range(len(kinds))]


@drawing
def ratios(rows: Rows, arms: Sequence[str], title: str, quantities: Sequence[str]) -> Any:
    """Draw ratios to the baseline with their intervals, one panel for each quantity.

    Rows have quantity, arm, effect, low, high and text.
    """
    alt = altair()
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
        *interval_layers(base, x, arm_colour(arms)),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            x=x("effect:Q"), color=arm_colour(arms), shape=arm_shape(arms)),
        data=alt.NamedData("rows"),
    ).properties(width=WIDTH, height=alt.Step(26))  # fmt: skip
    header = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelAnchor="start")
    facet = alt.Facet("quantity:N", sort=list(quantities), header=header)
    drawn_rows = (row | {"one": 1.0} for row in clipped(rows, domain))
    return finished(layer.facet(facet=facet, columns=1), rows=drawn_rows)


@drawing
def heat_maps(cells: Rows, arms: Sequence[str], title: str) -> Any:
    """Draw a heat map of parts by steps for each arm, with one colour scale.

    Cells have arm, row, place (of the row), step, power (log10 of the value; None if there is no
    positive number), sign (shown in a grey cell, if power is None) and text.
    """
    alt = altair()
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
    return finished(panels, cells=cells)


@drawing
def trade_off(rows: Rows, arms: Sequence[str], x: str, y: str) -> Any:
    """Draw each arm's mean with its interval by the share of its parameters that trains.

    Rows have arm, share_text, at (the share, moved so that equal shares do not overlap), mean,
    low, high and text.
    """
    alt = altair()
    domain = window_of_means(rows, False)
    scale = alt.Scale(domain=list(domain), nice=False)

    def at(field: str) -> Any:
        return alt.Y(field, title=y, scale=scale, axis=alt.Axis(format=".4~g", tickCount=6))

    shares = alt.X("at:Q", title=x, scale=alt.Scale(zero=False, nice=True, padding=30),
                   axis=alt.Axis(labelExpr="datum.value > 1 ? '' : format(datum.value, '.3~%')",
                                 tickCount=6))  # fmt: skip
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("share_text:N", title=x),
               alt.Tooltip("text:N", title=y)]  # fmt: skip
    base = empty_chart("rows").encode(
        x=shares, color=arm_colour(arms, legend=True), tooltip=tooltip
    )
    layers = alt.layer(
        *upright_intervals(base, at),
        base.mark_point(filled=True, size=130, opacity=1)
        .encode(y=at("mean:Q"), shape=arm_shape(arms, legend=True)),
    )  # fmt: skip
    chart = layers.properties(width=WIDTH, height=280)
    return finished(chart, rows=clipped(rows, domain))
