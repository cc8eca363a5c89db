"""Parts of charts of arms: colours, shapes, legends, axes, intervals, and switching arms off.

Colours and shapes follow the order of the plan's arms. `hidden_arms` is a Vega signal, which the
page's script sets to the arms that the reader has switched off.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, cast

from frostlab.charts import INNER_CHARTS, LABEL, PALETTE, SHAPES, require_drawing
from frostlab.recipe.settings import metric_facts

Rows = Sequence[dict[str, Any]]
_Values = ParamSpec("_Values")
WIDTH = 640  # pixels of a plot
_REACH = 4.0  # how far an axis may extend beyond the points, in multiples of their range
# like `charts.label`: a long name loses its beginning, because its end says more
_SHORT = f"length(datum.label) > {LABEL} ? '…' + slice(datum.label, {1 - LABEL}) : datum.label"
_IS_SHOWN = "indexof(hidden_arms, datum.arm) < 0"
NAMES = {"labelExpr": _SHORT, "labelLimit": 260}  # how axes and legends show the names of arms


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


def altair() -> Any:
    return require_drawing("a report")[0]


def empty_chart(name: str) -> Any:
    """Return an empty chart of named data."""
    alt = altair()
    return alt.Chart(alt.NamedData(name))


def _scale(arms: Sequence[str], members: Sequence[str]) -> Any:
    chosen = [members[number % len(members)] for number in range(len(arms))]
    return altair().Scale(domain=list(arms), range=chosen)


def _legend(arms: Sequence[str], legend: bool) -> Any:
    """Return a legend above the plot; None, Altair's value for no legend, if `legend` is false."""
    if not legend:
        return None
    columns = 4 if max(map(len, arms)) < 18 else 2
    return altair().Legend(title=None, orient="top", columns=columns, symbolSize=90,
                            symbolStrokeWidth=0, symbolOpacity=1, **NAMES)  # fmt: skip


def arm_colour(arms: Sequence[str], legend: bool = False) -> Any:
    """Return the colour channel of the field `arm`."""
    alt = altair()
    return alt.Color("arm:N", scale=_scale(arms, PALETTE), legend=_legend(arms, legend))


def arm_shape(arms: Sequence[str], legend: bool = False) -> Any:
    """Return the shape channel of the field `arm`."""
    alt = altair()
    return alt.Shape("arm:N", scale=_scale(arms, SHAPES), legend=_legend(arms, legend))


def arm_rows(arms: Sequence[str]) -> Any:
    """Return the y channel of charts that have one row for each arm."""
    alt = altair()
    return alt.Y("arm:N", sort=list(arms), title=None, scale=alt.Scale(domain=list(arms)),
                 axis=alt.Axis(grid=False, ticks=False, domain=False, labelPadding=8,
                               **NAMES))  # fmt: skip


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


def finished(chart: Any, **rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart's specification, with named data, in which arms can be switched off.

    The data are added last, because Altair copies them at every call.
    """
    spec = toggled(chart)
    spec["datasets"] = {name: list(members) for name, members in rows.items()}
    return spec


def drawing(make: Callable[_Values, Any]) -> Callable[_Values, dict[str, Any]]:
    """Let a function build a chart without Altair's checks of every part, which are slow."""

    @wraps(make)
    def made(*values: _Values.args, **options: _Values.kwargs) -> dict[str, Any]:
        with altair().utils.schemapi.debug_mode(False):
            return cast("dict[str, Any]", make(*values, **options))

    return made


def zoom() -> Any:
    """Return the Altair selection with which a reader can move and zoom a plot."""
    return altair().selection_interval(bind="scales", encodings=["x", "y"])


def window(points: Sequence[float], ends: Sequence[float | None], log: bool) -> tuple[float, float]:
    """Return the range of an axis that shows all points, and intervals as far as `_REACH` allows.

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


def window_of_means(rows: Rows, log: bool) -> tuple[float, float]:
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


def interval_layers(base: Any, x: Any, colour: Any, above: float = 0) -> list[Any]:
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


def upright_intervals(base: Any, y: Callable[[str], Any]) -> list[Any]:
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
