"""The charts of a comparison's report, one function each; all of them take rows and return a chart.

Colours and shapes follow the order of the plan's arms. Intervals and bands are computed here or
before, never by the chart library. `hidden_arms` is the signal that the page's script sets.
"""

from collections.abc import Sequence
from typing import Any

from frostlab.charts import GREY, PALETTE, SHAPES, label, require_drawing

Rows = Sequence[dict[str, Any]]
WIDTH = 640  # pixels of a plot


def _altair() -> Any:
    return require_drawing("a report")[0]


def arm_colour(arms: Sequence[str]) -> Any:
    """Return the colour channel of the field `arm`, without a legend: the page has one."""
    alt = _altair()
    colours = [PALETTE[number % len(PALETTE)] for number in range(len(arms))]
    return alt.Color("arm:N", scale=alt.Scale(domain=list(arms), range=colours), legend=None)


def arm_shape(arms: Sequence[str]) -> Any:
    """Return the shape channel of the field `arm`, without a legend."""
    alt = _altair()
    shapes = [SHAPES[number % len(SHAPES)] for number in range(len(arms))]
    return alt.Shape("arm:N", scale=alt.Scale(domain=list(arms), range=shapes), legend=None)


def toggled(chart: Any) -> Any:
    """Return a chart that leaves out the rows of the arms that the reader switched off."""
    alt = _altair()
    hidden = alt.param(name="hidden_arms", value=[])
    return _filtered(chart.copy()).add_params(hidden)


def _filtered(chart: Any) -> Any:
    """Filter every part of a chart, because a part with data of its own ignores the whole's."""
    alt = _altair()
    parts = {
        alt.LayerChart: "layer", alt.HConcatChart: "hconcat", alt.VConcatChart: "vconcat",
        alt.ConcatChart: "concat",
    }.get(type(chart))  # fmt: skip
    if parts is None:
        return chart.transform_filter("indexof(hidden_arms, datum.arm) < 0")
    chart[parts] = [_filtered(part.copy()) for part in chart[parts]]
    return chart


def paired_differences(
    seeds: Rows, effects: Rows, arms: Sequence[str], title: str, ratio: bool
) -> Any:
    """Draw each seed's paired difference as a dot, the interval, zero, and what could be seen.

    `seeds` have arm, seed and value; `effects` have arm, effect, low, high and, if known, the
    smallest effect that would be found, seen_low and seen_high.
    """
    alt = _altair()
    names = [label(arm) for arm in arms]
    drawn = [name for name in names if any(row["arm"] == name for row in effects)]
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True, padding=12))
    y = alt.Y("arm:N", sort=drawn, title=None, axis=alt.Axis(labelLimit=220, grid=False))
    base = alt.Chart(alt.Data(values=list(effects))).encode(y=y)
    seen = base.mark_bar(height=26, color=GREY, opacity=0.22).encode(
        x=alt.X("seen_low:Q", title=title),
        x2="seen_high:Q",
        tooltip=[alt.Tooltip("seen:N", title="a true effect inside the grey bar can be missed")],
    )
    interval = base.mark_rule(strokeWidth=3).encode(
        x=alt.X("low:Q", title=title), x2="high:Q", color=arm_colour(names)
    )
    effect = base.mark_tick(thickness=4, size=22).encode(
        x=alt.X("effect:Q", title=title),
        color=arm_colour(names),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("text:N", title="effect")],
    )
    dots = alt.Chart(alt.Data(values=list(seeds))).mark_point(
        filled=True, size=60, opacity=0.75, yOffset=13
    ).encode(
        x=x, y=y, color=arm_colour(names), shape=arm_shape(names),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("seed:N"),
                 alt.Tooltip("text:N", title="difference")],
    )  # fmt: skip
    zero = alt.Chart(alt.Data(values=[{"zero": 1.0 if ratio else 0.0}])).mark_rule(
        strokeDash=[5, 4], strokeWidth=1.5, stroke=GREY
    ).encode(x=alt.X("zero:Q", title=title))  # fmt: skip
    layers = alt.layer(seen, zero, interval, effect, dots)
    return toggled(layers).properties(width=WIDTH, height=alt.Step(52))


def curves(points: Rows, arms: Sequence[str], x: str, y: str, log: bool = False) -> Any:
    """Draw the mean of each arm's runs as a line with a band.

    Points have arm, x, mean, low, high, runs and text.
    """
    alt = _altair()
    names = [label(arm) for arm in arms]
    scale = alt.Scale(type="log" if log else "linear", zero=False, nice=not log, padding=8)
    base = alt.Chart(alt.Data(values=list(points))).encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(nice=False)), color=arm_colour(names)
    )
    band = base.mark_area(opacity=0.18, line=False).encode(
        y=alt.Y("low:Q", title=y, scale=scale), y2="high:Q"
    )
    line = base.mark_line(strokeWidth=2).encode(y=alt.Y("mean:Q", title=y, scale=scale))
    dots = base.mark_point(filled=True, size=45).encode(
        y=alt.Y("mean:Q", title=y, scale=scale), shape=arm_shape(names),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("x:Q", title=x, format=",.6~g"),
                 alt.Tooltip("text:N", title=y), alt.Tooltip("runs:Q")],
    )  # fmt: skip
    zoom = alt.selection_interval(bind="scales", encodings=["x", "y"])
    return toggled(alt.layer(band, line, dots.add_params(zoom))).properties(width=WIDTH, height=300)
