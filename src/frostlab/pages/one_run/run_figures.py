"""The charts of one run's report: functions that take rows and return a chart without a theme."""

import math
from collections.abc import Sequence
from typing import Any

from frostlab.charts import GREY, PALETTE, require_drawing

Rows = Sequence[dict[str, Any]]
_WIDTH = 640  # pixels of a plot
_SPAN = 10  # if max / min of a quantity is at least this, its axis is logarithmic


def _altair() -> Any:
    return require_drawing("a report")[0]


def is_wide(values: Sequence[float]) -> bool:
    """Return whether the values are positive and the largest is at least 10 times the smallest."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _SPAN


def _scale(values: Sequence[float]) -> Any:
    alt = _altair()
    if is_wide(values):
        return alt.Scale(type="log", nice=False, padding=18)
    return alt.Scale(zero=False, padding=18)


def _steps(last: int) -> Any:
    alt = _altair()
    return alt.X(
        "step:Q", title="optimizer step",
        scale=alt.Scale(domain=[0, 1.02 * max(last, 1)], nice=False),
        axis=alt.Axis(format=",d", tickMinStep=1, tickCount=10),
    )  # fmt: skip


def _boundaries(stages: Rows, last: int, named: bool) -> list[Any]:
    """Return chart layers that mark the steps at which the stages after the first begin."""
    alt = _altair()
    if not stages:
        return []
    base = alt.Chart(alt.Data(values=list(stages))).encode(x=_steps(last))
    layers = [base.mark_rule(strokeDash=[4, 3], stroke=GREY).encode(tooltip="stage:N")]
    if named:
        layers.append(
            base.mark_text(align="left", baseline="top", dx=4, y=4, color=GREY, fontSize=11)
            .encode(text="stage:N")
        )  # fmt: skip
    return layers


def training(
    losses: Rows, evaluations: Rows, stages: Rows, metric: str, percent: bool = False
) -> Any:
    """Draw the metric of every evaluation, with a ring around the best, above the training loss.

    `losses` have step, loss and text; `evaluations` have step, value, text and best (a bool).
    `stages` are the stages after the first: they have step, at which the stage begins, and its name
    as `stage`. With `percent`, the metric is a share that is shown in percent.
    """
    alt = _altair()
    last = max((row["step"] for row in [*losses, *evaluations]), default=1)
    panels = []
    if evaluations:
        y = alt.Y("value:Q", title=metric, scale=_scale([row["value"] for row in evaluations]),
                  axis=alt.Axis(tickCount=6, format=".3~%" if percent else ".4~g"))  # fmt: skip
        base = alt.Chart(alt.Data(values=list(evaluations))).encode(x=_steps(last), y=y)
        tip = [alt.Tooltip("step:Q", format=",d"), alt.Tooltip("text:N", title=metric)]
        line = base.mark_line(color=PALETTE[0], strokeWidth=2)
        dots = base.mark_point(filled=True, size=45, opacity=1, color=PALETTE[0]).encode(
            tooltip=tip
        )
        best = base.transform_filter("datum.best").mark_point(
            size=170, strokeWidth=2, color=PALETTE[1], opacity=1
        ).encode(tooltip=tip)  # fmt: skip
        near_end = any(row["best"] and row["step"] > 0.95 * last for row in evaluations)
        name = base.transform_filter("datum.best").mark_text(
            dy=-16, dx=8 if near_end else 0, align="right" if near_end else "center",
            color=PALETTE[1], fontWeight="bold",
        ).encode(text="text:N")  # fmt: skip
        layers = [*_boundaries(stages, last, named=True), line, dots, best, name]
        panels.append(_zoomed(alt.layer(*layers)).properties(width=_WIDTH, height=210))
    if losses:
        y = alt.Y("loss:Q", title="training loss", scale=_scale([row["loss"] for row in losses]),
                  axis=alt.Axis(tickCount=5))  # fmt: skip
        base = alt.Chart(alt.Data(values=list(losses))).encode(x=_steps(last), y=y)
        line = base.mark_line(color=PALETTE[2], strokeWidth=1.5)
        tip = [alt.Tooltip("step:Q", format=",d"), alt.Tooltip("text:N", title="loss")]
        dots = _small_dots(base, losses, PALETTE[2]).encode(tooltip=tip)
        layers = [*_boundaries(stages, last, named=not evaluations), line, dots]
        panels.append(_zoomed(alt.layer(*layers), "zoom_loss").properties(width=_WIDTH, height=170))
    return alt.vconcat(*panels, spacing=18) if len(panels) > 1 else panels[0]


def _zoomed(chart: Any, name: str = "zoom") -> Any:
    """Return a chart in which one can zoom and move; each panel of a figure needs its own name."""
    return chart.add_params(_altair().selection_interval(name=name, bind="scales"))


def _small_dots(base: Any, points: Rows, colour: str) -> Any:
    """Return the points of a curve, for their tooltips; many points are made invisible."""
    opacity = 1 if len(points) <= 60 else 0
    return base.mark_point(filled=True, size=22, opacity=opacity, color=colour)


def by_step(points: Rows, stages: Rows, title: str, zero: bool) -> Any:
    """Draw one quantity of the training steps; points have step, value and text.

    With `zero`, the axis begins at 0.
    """
    alt = _altair()
    last = max(row["step"] for row in points)
    values = [row["value"] for row in points]
    scale = alt.Scale(domain=[0, 1.08 * max(*values, 1e-12)]) if zero else _scale(values)
    axis = alt.Axis(format=".1e" if zero else ".4~g", tickCount=6)
    y = alt.Y("value:Q", title=title, scale=scale, axis=axis)
    base = alt.Chart(alt.Data(values=list(points))).encode(x=_steps(last), y=y)
    dots = _small_dots(base, points, PALETTE[0]).encode(
        tooltip=[alt.Tooltip("step:Q", format=",d"), alt.Tooltip("text:N", title=title)]
    )
    layers = [
        *_boundaries(stages, last, named=True),
        base.mark_line(strokeWidth=1.5, color=PALETTE[0]),
        dots,
    ]
    return _zoomed(alt.layer(*layers)).properties(width=_WIDTH, height=170)


def times(parts: Rows) -> Any:
    """Draw a bar for each part of the time, in this order; parts have part, seconds and text."""
    alt = _altair()
    order = [row["part"] for row in parts]
    base = alt.Chart(alt.Data(values=list(parts))).encode(
        y=alt.Y("part:N", sort=order, title=None, axis=alt.Axis(labelLimit=240, grid=False)),
        x=alt.X("seconds:Q", title="seconds"),
    )
    bars = base.mark_bar(color=PALETTE[0], height=18).encode(
        tooltip=[alt.Tooltip("part:N"), alt.Tooltip("text:N", title="time")]
    )
    names = base.mark_text(align="left", dx=5).encode(text="text:N")
    return alt.layer(bars, names).properties(width=_WIDTH - 160, height=alt.Step(30))


def stages_in_time(spans: Rows, evaluations: Rows, metric: str) -> Any:
    """Draw all stages on one axis of time: a band for each, and the metric of its evaluations.

    `spans` have stage, start, end and text; `evaluations` have stage, seconds, value and text.
    """
    alt = _altair()
    names = [row["stage"] for row in spans]
    colours = [PALETTE[number % len(PALETTE)] for number in range(len(names))]
    colour = alt.Color(
        "stage:N", scale=alt.Scale(domain=names, range=colours), sort=names, title=None,
        legend=alt.Legend(orient="top", labelLimit=300, symbolOpacity=1),
    )  # fmt: skip
    end = max(row["end"] for row in spans)
    x = alt.X("start:Q", title="seconds since training began",
              scale=alt.Scale(domain=[0, end], nice=False))  # fmt: skip
    bands = alt.Chart(alt.Data(values=list(spans))).mark_rect(opacity=0.12).encode(
        x=x, x2="end:Q", color=colour, tooltip=[alt.Tooltip("stage:N"), alt.Tooltip("text:N",
        title="time")],
    )  # fmt: skip
    if not evaluations:
        return bands.properties(width=_WIDTH, height=60)
    y = alt.Y("value:Q", title=metric, scale=_scale([row["value"] for row in evaluations]),
              axis=alt.Axis(tickCount=6))  # fmt: skip
    base = alt.Chart(alt.Data(values=list(evaluations))).encode(
        x=alt.X("seconds:Q", title="seconds since training began"), y=y, color=colour
    )
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(
        tooltip=[alt.Tooltip("stage:N"), alt.Tooltip("seconds:Q", format=".4~g"),
                 alt.Tooltip("text:N", title=metric)],
    )  # fmt: skip
    chart = alt.layer(bands, base.mark_line(strokeWidth=2), dots)
    return _zoomed(chart).properties(width=_WIDTH, height=240)


def by_layer(points: Rows, title: str) -> Any:
    """Draw the head's metric if it reads the output of a layer: one point per stage and layer.

    A point has stage, layer, value and text.
    """
    alt = _altair()
    stages = list(dict.fromkeys(row["stage"] for row in points))
    base = alt.Chart(alt.Data(values=list(points))).encode(
        x=alt.X("layer:O", title="layer whose output the head reads", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=title, scale=_scale([row["value"] for row in points])),
        color=alt.Color("stage:N", sort=stages, title=None,
                        legend=alt.Legend(orient="top", labelLimit=300)),
    )  # fmt: skip
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        shape=alt.Shape("stage:N", sort=stages, legend=None),
        tooltip=[alt.Tooltip("stage:N"), alt.Tooltip("layer:O"),
                 alt.Tooltip("text:N", title=title)],
    )  # fmt: skip
    return alt.layer(base.mark_line(strokeWidth=2), dots).properties(width=_WIDTH, height=240)


def class_counts(rows: Rows) -> Any:
    """Draw how many examples of each class the splits have; rows have class, split and count."""
    alt = _altair()
    classes = list(dict.fromkeys(row["class"] for row in rows))
    splits = list(dict.fromkeys(row["split"] for row in rows))
    return (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_bar()
        .encode(
            y=alt.Y("class:N", sort=classes, title=None, axis=alt.Axis(labelLimit=200)),
            x=alt.X("count:Q", title="examples"),
            color=alt.Color("split:N", sort=splits, title=None, legend=alt.Legend(orient="top")),
            yOffset=alt.YOffset("split:N", sort=splits),
            tooltip=[alt.Tooltip("class:N"), alt.Tooltip("split:N"),
                     alt.Tooltip("count:Q", format=",d", title="examples")],
        )
        .properties(width=_WIDTH - 160, height=alt.Step(11, **{"for": "offset"})
                    if len(classes) > 1 else 60)
    )  # fmt: skip


def confusion(rows: Rows) -> Any:
    """Draw which classes were predicted for the examples of each class, as shares of the class.

    Rows have label, predicted, share and text.
    """
    alt = _altair()
    classes = list(dict.fromkeys(row["label"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("predicted:N", sort=classes, title="predicted class",
                axis=alt.Axis(labelAngle=-40, labelLimit=120)),
        y=alt.Y("label:N", sort=classes, title="class", axis=alt.Axis(labelLimit=160)),
        tooltip=[alt.Tooltip("label:N", title="class"), alt.Tooltip("predicted:N"),
                 alt.Tooltip("text:N", title="share of the class")],
    )  # fmt: skip
    cells = base.mark_rect().encode(
        color=alt.Color("share:Q", title="share of the class",
                        scale=alt.Scale(scheme="viridis", domain=[0, 1]),
                        legend=alt.Legend(format="%"))
    )  # fmt: skip
    size = min(480, max(120, 46 * len(classes)))
    if len(classes) <= 12:
        ink = alt.when("datum.share > 0.6").then(alt.value("#222222")).otherwise(alt.value("white"))
        names = base.mark_text(fontSize=11).encode(text="text:N", color=ink)
        return alt.layer(cells, names).properties(width=size, height=size)
    return cells.properties(width=size, height=size)


def thinned(values: Sequence[tuple[int, float | None]], most: int = 400) -> list[dict[str, Any]]:
    """Return at most `most` points of a series as rows: neighbouring finite values are averaged.

    The step of a point is the last step of the values in its average.
    """
    finite = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
    size = max(1, math.ceil(len(finite) / most))
    rows = []
    for first in range(0, len(finite), size):
        block = finite[first : first + size]
        mean = sum(value for _, value in block) / len(block)
        rows.append({"step": block[-1][0], "value": mean, "text": f"{mean:.4g}"})
    return rows
