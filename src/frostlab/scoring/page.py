"""An EEG evaluation as a folder: one self-contained page, and its figures as PNG."""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from frostlab.errors import BadInput
from frostlab.scoring.drawing import Rows, channel_rows, subject_rows
from frostlab.scoring.figures import (
    altair,
    draw_channels,
    draw_excerpt,
    draw_kernels,
    draw_scalp,
    draw_subjects,
)
from frostlab.scoring.scalp import scalp_positions, scalp_rows
from frostlab.scoring.scores import EnvelopeScores
from frostlab.scoring.table import scores_table

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
