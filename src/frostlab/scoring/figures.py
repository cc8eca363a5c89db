"""The figures of an EEG evaluation, drawn by Altair."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from frostlab.errors import BadInput
from frostlab.scoring.drawing import Rows

_WIDTH = 640


def altair() -> Any:
    """The library that draws, or one line that says what is missing."""
    try:
        import altair as alt
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise BadInput(f"figures need {error.name}; pip install 'frostlab[report]'") from None
    return alt


def draw_subjects(rows: Rows, best: float | None = None) -> Any:
    """r of each subject under each decoder; grey is what chance gives."""
    alt = altair()
    first = rows[0]["decoder"]
    own = [row for row in rows if row["decoder"] == first]
    order = [row["subject"] for row in sorted(own, key=lambda row: row["r"])]
    x = alt.X("subject:N", sort=order, title="subject, by r of the first decoder")
    decoders = list(dict.fromkeys(row["decoder"] for row in rows))
    chance = (
        alt.Chart(alt.Data(values=own))
        .mark_bar(color="#bbbbbb", opacity=0.7, size=min(30, 0.7 * _WIDTH / len(own)))
        .encode(
            x=x,
            y=alt.Y("chance_low:Q", title="Pearson r (grey: 90 % of r by chance)"),
            y2="chance_high:Q",
        )
    )
    dots = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=55)
        .encode(
            x=x,
            y="r:Q",
            color=alt.Color("decoder:N", sort=decoders, title=None),
            shape=alt.Shape("decoder:N", sort=decoders, legend=None),
        )
    )
    layers = [chance, dots]
    if best is not None:
        line = alt.Chart(alt.Data(values=[{"r": best}])).mark_rule(strokeDash=[6, 4])
        layers.append(line.encode(y="r:Q"))
    said = "" if best is None else f"; dashed: best achievable, {best:.3f}"
    return alt.layer(*layers).properties(
        width=_WIDTH, height=260, title=f"Correlation with the envelope, by subject{said}"
    )


def draw_excerpt(rows: Rows, title: str) -> Any:
    """Signals over time."""
    alt = altair()
    signals = list(dict.fromkeys(row["signal"] for row in rows))
    times = [row["second"] for row in rows]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("second:Q", title="seconds", scale=alt.Scale(domain=[min(times), max(times)])),
            y=alt.Y("value:Q", title="standard deviations"),
            color=alt.Color("signal:N", sort=signals, title=None),
        )
        .properties(width=_WIDTH, height=180, title=title)
    )


def draw_kernels(rows: Rows) -> Any:
    """Courses over time of the strongest filters, one small panel each."""
    alt = altair()
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(x=alt.X("ms:Q", title="ms"), y=alt.Y("weight:Q", title=None))
        .properties(width=140, height=90)
        .facet(facet=alt.Facet("filter:N", sort=filters, title="filter"), columns=4)
        .properties(title="Learned temporal kernels, the strongest first")
    )


def draw_channels(rows: Rows, most: int = 20) -> Any:
    """The channels that count most, as bars: where there is no scalp map."""
    alt = altair()
    return (
        alt.Chart(alt.Data(values=rows[:most]))
        .mark_bar()
        .encode(x="importance:Q", y=alt.Y("channel:N", sort=None, title=None))
        .properties(width=_WIDTH, title="Channel importance, the largest first")
    )


def draw_scalp(rows: Rows, cells: Rows, places: Sequence[tuple[float, float]]) -> Any:
    """Channel importance on the head seen from above, the nose up."""
    alt = altair()
    square = alt.Scale(domain=[-1.3, 1.3])
    x = alt.X("x:Q", scale=square, axis=None)
    y = alt.Y("y:Q", scale=square, axis=None)
    field = (
        alt.Chart(alt.Data(values=cells))
        .mark_rect()
        .encode(
            x=x,
            x2="x2:Q",
            y=y,
            y2="y2:Q",
            color=alt.Color("importance:Q", scale=alt.Scale(scheme="viridis"), title="importance"),
        )
    )
    turn = np.linspace(0, 2 * np.pi, 91)
    head = [{"x": float(np.cos(t)), "y": float(np.sin(t)), "at": i} for i, t in enumerate(turn)]
    nose = [{"x": a, "y": b, "at": i} for i, (a, b) in enumerate(((-0.1, 1), (0, 1.12), (0.1, 1)))]
    outline = [
        alt.Chart(alt.Data(values=line))
        .mark_line(color="black", strokeWidth=1.5)
        .encode(x=x, y=y, order="at:Q")
        for line in (head, nose)
    ]
    dots = [
        {"x": a, "y": b, "channel": row["channel"], "strong": place < 10}
        for place, (row, (a, b)) in enumerate(zip(rows, places, strict=True))
    ]
    channels = alt.Chart(alt.Data(values=dots)).encode(x=x, y=y)
    marks = channels.mark_point(filled=True, size=10, color="black", opacity=1)
    named = channels.transform_filter("datum.strong").mark_text(dy=-7, fontSize=9)
    return alt.layer(field, *outline, marks, named.encode(text="channel:N")).properties(
        width=380, height=380, title="Channel importance; the ten largest are named"
    )
