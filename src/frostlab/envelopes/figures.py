"""Figures of envelope scores, and the page that shows the figures.

Functions `…_rows` return the data of a figure as plain rows, functions `draw_…` draw the rows with
Altair, and `eeg_page` writes a folder with the page and a PNG of each figure. r is the correlation
of a decoded envelope with the envelope of the heard speech.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from frostlab.charts import GREY, label, png, require_drawing, svg, themed
from frostlab.envelopes.challenge import SEEN, UNSEEN, segments_table, subjects_table
from frostlab.envelopes.correlation import Floats, unit_norm
from frostlab.envelopes.scores import EnvelopeScores, scores_table
from frostlab.errors import BadInput, require
from frostlab.html import render
from frostlab.storage import whole_file, write_whole

Rows = list[dict[str, Any]]
_WIDTH = 640  # pixels
_NAMED = 40  # the most subjects whose names stand at an axis
_BARS = 20  # the most channels that are drawn as bars
_RIM = 1.15  # radius of the coloured map, in head radii
_LIMIT = 1.3  # head radii; channels farther out, on face or neck, do not colour the map
_PAGE = """
{% if caution %}<p>{{ caution }}</p>{% endif %}

{% for split in splits %}
<h2>{{ split.title }}</h2>
<pre>{% for line in split.table %}{{ line }}
{% endfor %}</pre>
{{ figure(*split.figure) }}
{% endfor %}
{% if segments %}
<h2>Segments</h2>
<pre>{% for line in segments %}{{ line }}
{% endfor %}</pre>
{% endif %}
{% for drawing in figures %}
{{ figure(*drawing) }}
{% endfor %}
{% if note %}<p>{{ note }}</p>{% endif %}

"""


def eeg_page(
    folder: Path,
    scores: Mapping[str, Mapping[str, EnvelopeScores]],
    *,
    best: Mapping[str, float] | None = None,
    excerpts: Mapping[str, Rows] | None = None,
    kernels: Rows | None = None,
    importance: tuple[Sequence[str], ArrayLike] | None = None,
    caution: str | None = None,
    titles: Mapping[str, str] | None = None,
) -> Path:
    """Write `index.html` and a PNG of each figure into the folder, and return the page's path.

    Args:
        scores: split → decoder → scores.
        best: split → an upper bound on any decoder's r, which is known for simulated data.
        excerpts: title → rows of `excerpt_rows`.
        kernels: rows of `kernel_rows`.
        importance: channel names, and one value for each.
        caution: a warning to show above the scores.
        titles: split → title (default: the split's name).
    """
    if not scores:
        raise BadInput("an EEG page needs the scores of at least one split")
    charts: dict[str, Any] = {}  # file name without its ending → chart
    splits: list[dict[str, Any]] = []
    note = None
    for number, (split, decoders) in enumerate(scores.items(), 1):
        best_r = (best or {}).get(split)
        name = _file_name(split, number, charts)
        whose = f", for {next(iter(decoders))}" if len(decoders) > 1 else ""
        dashed = "" if best_r is None else f"; dashed: upper bound, {best_r:.3f}"
        charts[name] = draw_subjects(subject_rows(decoders), best_r).properties(
            title="Correlation r of decoded and true envelope, by subject; grey: 5 % to 95 % "
            f"quantile of r by chance{whose}{dashed}"
        )
        table = scores_table(decoders, best_r).splitlines()
        splits.append({"title": (titles or {}).get(split, split), "table": table, "name": name})
    for number, (title, rows) in enumerate((excerpts or {}).items(), 1):
        charts[f"excerpt-{number}"] = draw_excerpt(rows).properties(title=title)
    if kernels:
        charts["kernels"] = draw_kernels(kernels).properties(
            title="Learned temporal kernels, the strongest first"
        )
    if importance is not None:
        chart, title, note = draw_importance(*importance)
        charts["channels"] = chart.properties(title=title)
    # name → SVG and alternative text
    drawings = {
        name: (svg(themed(chart, in_page=True), name), label(str(chart.title), 200))
        for name, chart in charts.items()
    }
    for section in splits:
        section["figure"] = drawings.pop(section["name"])
    segments: list[str] = []
    if not {SEEN, UNSEEN}.isdisjoint(scores):
        segments = [
            *segments_table(scores).splitlines(),
            "",
            *subjects_table(scores, most=None).splitlines(),
        ]
    text = render(
        _PAGE, title="EEG to speech envelope", caution=caution, splits=splits, segments=segments,
        figures=drawings.values(), note=note,
    )  # fmt: skip
    pictures = {name: png(themed(chart, in_page=False), 2) for name, chart in charts.items()}
    return _write(folder, text, pictures)


def _file_name(split: str, number: int, taken: Collection[str]) -> str:
    """Return the file name of a split's figure, without the ending: `r-` and the split's name.

    Special characters become `-`. If the name is taken or too long, the split's number replaces it.
    """
    name = "r-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in split)
    return f"r-{number}" if name in taken or len(name.encode()) > 100 else name


def _write(folder: Path, text: str, pictures: Mapping[str, bytes]) -> Path:
    page = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            with whole_file(folder / f"{name}.png") as temporary:
                temporary.write_bytes(picture)
        write_whole(page, text)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}") from None
    return page


def draw_importance(
    names: Sequence[str], values: ArrayLike, quantity: str = "importance"
) -> tuple[Any, str, str | None]:
    """Draw a scalp map of `values`, one for each channel; return it with its title and None.

    If a map is impossible, for example without MNE, draw bars, and return the reason instead of
    None. `quantity` names the values in the figure.
    """
    rows = channel_rows(values, names)
    try:
        places = scalp_positions([row["channel"] for row in rows])
        positions = [places[row["channel"]] for row in rows]
        cells = scalp_rows([row["importance"] for row in rows], positions)
    except BadInput as error:
        title = "Channel importance, the largest first"
        return draw_channels(rows, quantity), title, f"Channels as bars: {error}."
    title = "Channel importance; the ten largest are named"
    return draw_scalp(rows, cells, positions, quantity), title, None


def subject_rows(decoders: Mapping[str, EnvelopeScores]) -> Rows:
    """Return r, p and the chance range of r for each subject and decoder."""
    return [
        {"decoder": name, "subject": score.subject, "r": score.r, "p": score.null.p,
         "chance_low": score.null.low, "chance_high": score.null.high}
        for name, scores in decoders.items()
        for score in scores.subjects
    ]  # fmt: skip


def draw_subjects(rows: Rows, best: float | None = None) -> Any:
    """Draw r for each subject and decoder, with the first decoder's chance range in grey.

    A dashed line marks `best`, an upper bound on any decoder's r.
    """
    alt = _altair()
    decoders = list(dict.fromkeys(row["decoder"] for row in rows))
    first_rows = [row for row in rows if row["decoder"] == decoders[0]]
    order = [row["subject"] for row in sorted(first_rows, key=lambda row: row["r"])]
    named = len(order) <= _NAMED
    x = alt.X(
        "subject:N", sort=order, axis=alt.Axis(labels=named, ticks=named, labelAngle=-50),
        title=f"{len(order)} subjects, by r of {decoders[0]}",
    )  # fmt: skip
    chance = (
        alt.Chart(alt.Data(values=first_rows))
        .mark_bar(color=GREY, opacity=0.4, size=min(30, 0.7 * _WIDTH / len(first_rows)))
        .encode(
            x=x,
            y=alt.Y("chance_low:Q", title="Pearson r"),
            y2="chance_high:Q",
        )
    )
    legend = alt.Legend(orient="top")
    dots = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=55)
        .encode(
            x=x,
            y="r:Q",
            color=alt.Color("decoder:N", sort=decoders, title=None, legend=legend),
            shape=alt.Shape("decoder:N", sort=decoders, legend=None),
            tooltip=[
                "subject:N",
                "decoder:N",
                alt.Tooltip("r:Q", format=".3f"),
                alt.Tooltip("p:Q", format=".2g"),
            ],
        )
    )
    layers = [chance, dots]
    if best is not None:
        line = alt.Chart(alt.Data(values=[{"r": best}])).mark_rule(strokeDash=[6, 4], color=GREY)
        layers.append(line.encode(y="r:Q"))
    return alt.layer(*layers).properties(width=_WIDTH, height=260)


def excerpt_rows(
    signals: Mapping[str, ArrayLike],
    rate: float,
    *,
    start: float = 0.0,
    seconds: float = 10.0,
    points: int = 400,
) -> Rows:
    """Return an excerpt of signals, such as envelope and prediction, with mean 0 and variance 1.

    If an excerpt has more than `points` samples, neighbouring samples are averaged.
    """
    rows: Rows = []
    for name, values in signals.items():
        signal = np.asarray(values, np.float64)
        first = round(start * rate)
        excerpt = signal[first : first + round(seconds * rate)]
        if first < 0 or len(excerpt) < 2:
            raise BadInput(
                f"no excerpt from {start:g} s in {name}, which ends at {len(signal) / rate:g} s"
            )
        block = -(-len(excerpt) // points)
        excerpt = excerpt[: len(excerpt) // block * block].reshape(-1, block).mean(1)
        scaled = unit_norm(excerpt) * np.sqrt(len(excerpt))
        times = (first + (np.arange(len(excerpt)) + 0.5) * block - 0.5) / rate
        rows += [
            {"signal": name, "second": float(t), "value": float(value)}
            for t, value in zip(times, scaled, strict=True)
        ]
    return rows


def draw_excerpt(rows: Rows) -> Any:
    """Draw signals over time."""
    alt = _altair()
    signals = list(dict.fromkeys(row["signal"] for row in rows))
    times = [row["second"] for row in rows]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("second:Q", title="seconds", scale=alt.Scale(domain=[min(times), max(times)])),
            y=alt.Y("value:Q", title="standard deviations"),
            color=alt.Color("signal:N", sort=signals, title=None, legend=alt.Legend(orient="top")),
        )
        .properties(width=_WIDTH, height=180)
    )


def kernel_rows(weights: ArrayLike, rate: float, *, first: int = 0, most: int = 8) -> Rows:
    """Return the time courses of the strongest filters, from weights (filters, channels, taps).

    A time course is a filter's leading temporal singular vector, times the singular value; no other
    time course explains more of the filter. The sign is chosen so that the value of largest
    magnitude is positive. `first` is the lag of the first tap in samples, and `most` the maximum
    number of filters.
    """
    kernels = np.asarray(weights, np.float64)
    if kernels.ndim != 3:
        raise BadInput(f"kernels must be (filters, channels, taps), not {kernels.shape}")
    strongest = np.argsort(-np.linalg.norm(kernels, axis=(1, 2)), kind="stable")[:most]
    rows: Rows = []
    for index in strongest:
        _, sizes, courses = np.linalg.svd(kernels[index], full_matrices=False)
        course = sizes[0] * courses[0]
        course = course * (np.sign(course[np.abs(course).argmax()]) or 1.0)
        rows += [
            {"filter": int(index), "ms": 1000 * (first + tap) / rate, "weight": float(value)}
            for tap, value in enumerate(course)
        ]
    return rows


def draw_kernels(rows: Rows) -> Any:
    """Draw the rows of `kernel_rows`, one small panel for each filter."""
    alt = _altair()
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(x=alt.X("ms:Q", title="ms"), y=alt.Y("weight:Q", title=None))
        .properties(width=140, height=90)
        .facet(facet=alt.Facet("filter:N", sort=filters, title="filter"), columns=4)
    )


def channel_rows(importance: ArrayLike, channels: Sequence[str]) -> Rows:
    """Return the importance of each channel, the largest first."""
    values = np.asarray(importance, np.float64)
    if values.shape != (len(channels),):
        raise BadInput(f"{len(channels)} channels need as many values, not {values.shape}")
    if not np.isfinite(values).all():
        raise BadInput("channel importance has values that are not finite")
    order = np.argsort(-values, kind="stable")
    return [{"channel": channels[i], "importance": float(values[i])} for i in order]


def draw_channels(rows: Rows, quantity: str) -> Any:
    """Draw the most important channels as bars, the substitute for a scalp map."""
    alt = _altair()
    return (
        alt.Chart(alt.Data(values=rows[:_BARS]))
        .mark_bar()
        .encode(
            x=alt.X("importance:Q", title=quantity), y=alt.Y("channel:N", sort=None, title=None)
        )
        .properties(width=_WIDTH)
    )


def scalp_positions(channels: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return x (to the right) and y (to the nose) of each channel; the head has radius 1.

    Positions come from the first of three MNE montages that has all channel names. The angle
    from the top of the head becomes the distance from the centre; 90°, at the height of the ears,
    becomes 1.
    """
    mne = require("mne", "eeg", "a scalp map")
    built_in = mne.channels.get_builtin_montages()
    dense = "colin27_1005" if "colin27_1005" in built_in else "standard_1005"  # name in older MNE
    montages = ("biosemi64", "biosemi128", dense)
    missing: list[str] = []
    for name in montages:
        places = mne.channels.make_standard_montage(name).get_positions()["ch_pos"]
        by_name = {channel.lower(): place for channel, place in places.items()}
        unknown = [channel for channel in channels if channel.lower() not in by_name]
        if not unknown:
            centre = np.array([0.0, *_sphere_centre(np.array(list(places.values())))])
            return {channel: _project(by_name[channel.lower()] - centre) for channel in channels}
        missing = unknown if not missing or len(unknown) < len(missing) else missing
    raise BadInput(
        f"none of the montages {', '.join(montages)} has all channels (the closest lacks "
        f"{missing[0]}), so there is no map"
    )


def _sphere_centre(places: Floats) -> tuple[float, float]:
    """Return y and z of the centre of the sphere that fits the electrodes best.

    Every point p on a sphere with centre c satisfies |p|² = 2 p·c + constant, which is linear in c.
    """
    square = (places**2).sum(1)
    rows = np.column_stack([2 * places, np.ones(len(places))])
    solved = np.linalg.lstsq(rows, square, rcond=None)[0]
    return float(solved[1]), float(solved[2])


def _project(place: Floats) -> tuple[float, float]:
    """Project a position on the sphere onto the map (azimuthal equidistant projection)."""
    x, y, z = place
    radius = float(np.hypot(x, y))
    angle = float(np.arctan2(radius, z)) / (np.pi / 2)
    return (angle * float(x) / radius, angle * float(y) / radius) if radius > 1e-9 else (0.0, 0.0)


def scalp_rows(
    importance: ArrayLike, places: Sequence[tuple[float, float]], cells: int = 64
) -> Rows:
    """Interpolate the channels' values on a grid of squares; return the squares of the map."""
    from scipy.interpolate import RBFInterpolator  # slow to import

    values, positions = np.asarray(importance, np.float64), np.array(places, np.float64)
    near = np.hypot(*positions.T) <= _LIMIT
    try:
        smooth = RBFInterpolator(positions[near], values[near], kernel="thin_plate_spline")
    except (ValueError, np.linalg.LinAlgError):  # fewer than three channels, or all on one line
        raise BadInput(f"{near.sum()} channels on the head do not span a map") from None
    side = 2 * _RIM / cells
    centres = -_RIM + side * (np.arange(cells) + 0.5)
    grid = np.stack(np.meshgrid(centres, centres), -1).reshape(-1, 2)
    grid = grid[np.hypot(*grid.T) <= _RIM]
    smoothed = np.clip(smooth(grid), values.min(), values.max())
    half = side / 2
    return [
        {"x": x - half, "x2": x + half, "y": y - half, "y2": y + half, "importance": value}
        for (x, y), value in zip(grid.tolist(), smoothed.tolist(), strict=True)
    ]


def draw_scalp(
    rows: Rows, cells: Rows, places: Sequence[tuple[float, float]], quantity: str
) -> Any:
    """Draw channel importance on the head, seen from above with the nose up.

    `rows` are the result of `channel_rows`, in the order of `places`; `cells` are the result of
    `scalp_rows`; `quantity` is the title of the colours.
    """
    alt = _altair()
    square = alt.Scale(domain=[-1.3, 1.3])
    x = alt.X("x:Q", scale=square, axis=None)
    y = alt.Y("y:Q", scale=square, axis=None)
    field = (
        alt.Chart(alt.Data(values=cells))
        .mark_rect(x2Offset=0.6, y2Offset=-0.6)  # overlapping squares leave no seams
        .encode(
            x=x,
            x2="x2:Q",
            y=y,
            y2="y2:Q",
            color=alt.Color("importance:Q", scale=alt.Scale(scheme="viridis"), title=quantity),
        )
    )
    angles = np.linspace(0, 2 * np.pi, 91)
    head = [{"x": float(np.cos(t)), "y": float(np.sin(t)), "at": i} for i, t in enumerate(angles)]
    nose = [{"x": a, "y": b, "at": i} for i, (a, b) in enumerate(((-0.1, 1), (0, 1.12), (0.1, 1)))]
    outline = [
        alt.Chart(alt.Data(values=line))
        .mark_line(color="black", strokeWidth=1.5)
        .encode(x=x, y=y, order="at:Q")
        for line in (head, nose)
    ]
    dots = [
        {"x": a, "y": b, "channel": row["channel"], "strong": rank < 10}
        for rank, (row, (a, b)) in enumerate(zip(rows, places, strict=True))
    ]
    channels = alt.Chart(alt.Data(values=dots)).encode(x=x, y=y)
    points = channels.mark_point(filled=True, size=10, color="black", opacity=1)
    named = channels.transform_filter("datum.strong").mark_text(dy=-7, fontSize=9)
    return alt.layer(field, *outline, points, named.encode(text="channel:N")).properties(
        width=380, height=380
    )


def _altair() -> Any:
    """Return Altair; raise an error if Altair or vl-convert, which writes images, is missing."""
    return require_drawing("drawing figures")[0]
