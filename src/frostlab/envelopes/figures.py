"""What the figures show, as plain rows that any chart can draw."""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from frostlab.envelopes.correlation import Floats, centred
from frostlab.envelopes.scores import EnvelopeScores, scores_table
from frostlab.errors import BadInput

Rows = list[dict[str, Any]]


def subject_rows(decoders: Mapping[str, EnvelopeScores]) -> Rows:
    """r of each subject under each decoder, with what chance gives there."""
    return [
        {"decoder": name, "subject": each.subject, "r": each.r, "p": each.null.p,
         "chance_low": each.null.low, "chance_high": each.null.high}
        for name, scores in decoders.items()
        for each in scores.subjects
    ]  # fmt: skip


def excerpt_rows(
    signals: Mapping[str, ArrayLike],
    rate: float,
    *,
    start: float = 0.0,
    seconds: float = 10.0,
    points: int = 400,
) -> Rows:
    """A stretch of signals, e.g. envelope and prediction, each with mean 0 and spread 1 in it.

    Longer ones than `points` are thinned by the mean over neighbours, which leaves no aliases.
    """
    rows: Rows = []
    for name, values in signals.items():
        signal = np.asarray(values, np.float64)
        first = round(start * rate)
        shown = signal[first : first + round(seconds * rate)]
        if first < 0 or len(shown) < 2:
            raise BadInput(
                f"no stretch from {start:g} s in {name}, which ends at {len(signal) / rate:g} s"
            )
        block = -(-len(shown) // points)
        shown = shown[: len(shown) // block * block].reshape(-1, block).mean(1)
        scaled = centred(shown) * np.sqrt(len(shown))
        times = (first + (np.arange(len(shown)) + 0.5) * block - 0.5) / rate
        rows += [
            {"signal": name, "second": float(t), "value": float(value)}
            for t, value in zip(times, scaled, strict=True)
        ]
    return rows


def kernel_rows(weights: ArrayLike, rate: float, *, first: int = 0, most: int = 8) -> Rows:
    """The strongest filters' courses over time, from weights (filters, channels, taps).

    Each is the leading singular vector over time, times its singular value: the one course that
    explains most of what the filter does on all channels. Its largest value is positive.
    """
    kernels = np.asarray(weights, np.float64)
    if kernels.ndim != 3:
        raise BadInput(f"kernels must be (filters, channels, taps), not {kernels.shape}")
    strongest = np.argsort(-np.linalg.norm(kernels, axis=(1, 2)), kind="stable")[:most]
    rows: Rows = []
    for place in strongest:
        _, sizes, courses = np.linalg.svd(kernels[place], full_matrices=False)
        course = sizes[0] * courses[0]
        course = course * (np.sign(course[np.abs(course).argmax()]) or 1.0)
        rows += [
            {"filter": int(place), "ms": 1000 * (first + tap) / rate, "weight": float(value)}
            for tap, value in enumerate(course)
        ]
    return rows


def channel_rows(importance: ArrayLike, channels: Sequence[str]) -> Rows:
    """Each channel's importance, the largest first."""
    values = np.asarray(importance, np.float64)
    if values.shape != (len(channels),):
        raise BadInput(f"{len(channels)} channels need as many values, not {values.shape}")
    if not np.isfinite(values).all():
        raise BadInput("channel importance has values that are not finite")
    order = np.argsort(-values, kind="stable")
    return [{"channel": channels[i], "importance": float(values[i])} for i in order]


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


_RIM = 1.15  # of the head's radius: how far the map goes
_LIMIT = 1.3  # of the head's radius: channels beyond are on the face or the neck


def scalp_positions(channels: Sequence[str]) -> dict[str, tuple[float, float]]:
    """x (to the right) and y (to the nose) of each channel; the head's circle has radius 1.

    The positions are those of the montage of MNE that knows every name. The angle from the top of
    the head becomes the distance from the middle, so that the circle runs through the ears.
    """
    try:
        import mne
    except ImportError:
        raise BadInput("a scalp map needs mne; pip install 'frostlab[eeg]'") from None
    built_in = mne.channels.get_builtin_montages()
    dense = "colin27_1005" if "colin27_1005" in built_in else "standard_1005"  # older MNE
    montages = ("biosemi64", "biosemi128", dense)
    missing: list[str] = []
    for name in montages:
        places = mne.channels.make_standard_montage(name).get_positions()["ch_pos"]
        known = {each.lower(): place for each, place in places.items()}
        unknown = [each for each in channels if each.lower() not in known]
        if not unknown:
            middle = np.array([0.0, *_middle(np.array(list(places.values())))])
            return {each: _flat(known[each.lower()] - middle) for each in channels}
        missing = unknown if not missing or len(unknown) < len(missing) else missing
    raise BadInput(
        f"no montage of {', '.join(montages)} knows channel {missing[0]}, so there is no map"
    )


def scalp_rows(
    importance: ArrayLike, places: Sequence[tuple[float, float]], cells: int = 64
) -> Rows:
    """A smooth map through the channels: cells of a grid within the head's rim."""
    from scipy.interpolate import RBFInterpolator  # takes a while to load

    values, known = np.asarray(importance, np.float64), np.array(places, np.float64)
    near = np.hypot(*known.T) <= _LIMIT
    try:
        smooth = RBFInterpolator(known[near], values[near], kernel="thin_plate_spline")
    except (ValueError, np.linalg.LinAlgError):  # fewer than three, or all on one line
        raise BadInput(f"{near.sum()} channels on the head do not span a map") from None
    side = 2 * _RIM / cells
    middles = -_RIM + side * (np.arange(cells) + 0.5)
    grid = np.stack(np.meshgrid(middles, middles), -1).reshape(-1, 2)
    grid = grid[np.hypot(*grid.T) <= _RIM]
    found = np.clip(smooth(grid), values.min(), values.max())
    half = side / 2
    return [
        {"x": x - half, "x2": x + half, "y": y - half, "y2": y + half, "importance": value}
        for (x, y), value in zip(grid.tolist(), found.tolist(), strict=True)
    ]


def _middle(places: Floats) -> tuple[float, float]:
    """y and z of the centre of the sphere that fits the electrodes best."""
    square = (places**2).sum(1)
    rows = np.column_stack([2 * places, np.ones(len(places))])
    solved = np.linalg.lstsq(rows, square, rcond=None)[0]
    return float(solved[1]), float(solved[2])


def _flat(place: Floats) -> tuple[float, float]:
    x, y, z = place
    around = float(np.hypot(x, y))
    far = float(np.arctan2(around, z)) / (np.pi / 2)
    return (far * float(x) / around, far * float(y) / around) if around > 1e-9 else (0.0, 0.0)


_TITLE = "EEG to speech envelope"
_STYLE = "body{font-family:sans-serif;max-width:60em;margin:2em auto}pre{overflow-x:auto}"


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
    """Write `index.html` and a PNG of each figure into the folder, and return the page.

    `scores` and `best` go by split, then `scores` by decoder; `excerpts` are rows by title, as
    `excerpt_rows` makes them; `kernels` are `kernel_rows`; `importance` is channel names and one
    value each; `titles` call the splits by other names.
    """
    if not scores:
        raise BadInput("an EEG page needs the scores of at least one split")
    altair()  # before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"<p>{escape(caution)}</p>"] if caution else []
    for split, decoders in scores.items():
        reach = (best or {}).get(split)
        table = escape(scores_table(decoders, reach))
        parts.append(f"<h2>{escape((titles or {}).get(split, split))}</h2>\n<pre>{table}</pre>")
        parts.append(_figure(folder, f"r-{split}", draw_subjects(subject_rows(decoders), reach)))
    for place, (title, rows) in enumerate((excerpts or {}).items(), 1):
        parts.append(_figure(folder, f"excerpt-{place}", draw_excerpt(rows, title)))
    if kernels:
        parts.append(_figure(folder, "kernels", draw_kernels(kernels)))
    if importance is not None:
        chart, note = _channels(*importance)
        parts.append(_figure(folder, "channels", chart))
        parts += [f"<p>{escape(note)}</p>"] if note else []
    page = folder / "index.html"
    body = "\n".join(parts)
    page.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_TITLE}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n<h1>{_TITLE}</h1>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    return page


def _figure(folder: Path, name: str, chart: Any) -> str:
    """Write a chart as PNG, and return it as SVG for the page."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    chart.save(str(folder / f"{plain}.png"), scale_factor=2)
    drawn = StringIO()
    chart.save(drawn, format="svg")
    return f"<figure>{drawn.getvalue()}</figure>"


def _channels(names: Sequence[str], values: ArrayLike) -> tuple[Any, str | None]:
    """A scalp map where MNE is there and knows the channels, else bars and why."""
    rows = channel_rows(values, names)
    try:
        places = scalp_positions([row["channel"] for row in rows])
        spots = [places[row["channel"]] for row in rows]
        cells = scalp_rows([row["importance"] for row in rows], spots)
    except BadInput as error:
        return draw_channels(rows), f"Channels as bars: {error}."
    return draw_scalp(rows, cells, spots), None
