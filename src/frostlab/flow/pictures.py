"""A flow to look at: a heat map in the terminal, and a page with a picture of it."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from frostlab.errors import BadInput
from frostlab.flow.grid import (
    BROKEN,
    MEANINGS,
    NUMBER,
    SIGNS,
    TITLES,
    Cell,
    Grid,
    Row,
    grid_of,
    rows_of,
)
from frostlab.flow.rules import FROZEN, LEARNING
from frostlab.records.folder import write_whole

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow

SHADES = "▁▂▃▄▅▆▇█"
NARROWEST = 40
_ROWS = 60  # in a terminal; more parts than that are joined into layers


def flow_map_text(flow: "Flow", width: int = 100) -> str:
    """Draw gradients and updates side by side, a row a part, a column a report or some of them."""
    if not flow.reports:
        return f"{flow.model}: no step has been measured yet"
    rows, width = rows_of(flow, _ROWS), max(width, NARROWEST)
    words = _words(flow, rows)
    aside = max(map(len, words)) if width >= 80 else 0
    longest = max(len(row.name) for row in rows)
    names = min(longest, width - aside - 2 * 4 - 6, max(12, width // 3))
    columns = max(4, (width - names - aside - 6) // 2)
    gradient, ratio = (grid_of(flow, quantity, rows, columns) for quantity in TITLES)
    titles = list(TITLES.values()) if columns >= 15 else ["gradient", "update"]
    size = max(len(gradient.steps), len(titles[0]))
    steps = f"{flow.reports[0].step} … {gradient.steps[-1]}"
    lines = [
        f"{flow.model}, steps {steps}" + _together(gradient),
        "",
        "  ".join([" " * names, titles[0].ljust(size), titles[1]]),
    ]
    for row, left, right, word in zip(rows, gradient.cells, ratio.cells, words, strict=True):
        drawn = [_drawn(gradient, left).ljust(size), _drawn(ratio, right).ljust(size)]
        cells = [_short(row.name, names).ljust(names), *drawn, word if aside else ""]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", *_legend(gradient, ratio, width)])


def flow_page(flow: "Flow", folder: Path) -> list[Path]:
    """Write `flow.html`, a page that opens offline, and `flow.png`, its heat map; needs altair."""
    from frostlab.flow.charts import heat_png
    from frostlab.flow.page import page_of

    if not flow.reports:
        raise BadInput("flow_page: no step has been measured yet, so there is nothing to draw")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"flow_page: {folder}: {error.strerror}") from None
    page, picture = folder / "flow.html", folder / "flow.png"
    write_whole(page, page_of(flow))
    picture.write_bytes(heat_png(flow))
    return [page, picture]


def _words(flow: "Flow", rows: Sequence[Row]) -> list[str]:
    """A word for each row that does more or less than learn."""
    verdicts, words = flow.verdicts(), []
    for row in rows:
        own = [verdicts[flow.parts[i].name].word for i in row.places]
        frozen = own.count(FROZEN)
        if len(own) == 1 or len(set(own)) == 1:
            words.append("" if own[0] == LEARNING else own[0])
        else:
            words.append(f"{frozen} of {len(own)} frozen" if frozen else "")
    return words


def _together(grid: Grid) -> str:
    if grid.together == 1:
        return ", a column a report"
    return f", a column the median of {grid.together} reports"


def _short(name: str, width: int) -> str:
    """A name that fits; its end tells more than its beginning."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _drawn(grid: Grid, cells: tuple[Cell, ...]) -> str:
    return "".join(
        SHADES[_level(grid, cell.value)] if cell.kind == NUMBER else SIGNS[cell.kind]
        for cell in cells
    )


def _level(grid: Grid, value: float) -> int:
    """Which of the shades: all are equally wide on a logarithmic scale."""
    first, last = grid.power(0.0), grid.power(grid.high)
    share = (grid.power(value) - first) / (last - first) if last > first else 1.0
    return min(int(share * len(SHADES)), len(SHADES) - 1)


def _legend(gradient: Grid, ratio: Grid, width: int) -> list[str]:
    """What the shades and signs mean: each shade begins at the number after it."""
    lines = []
    for grid in (gradient, ratio):
        first, last = grid.power(0.0), grid.power(grid.high)
        each = (last - first) / len(SHADES)
        marks = [f"{shade} {10 ** (first + i * each):.0e}" for i, shade in enumerate(SHADES)]
        shown = marks if width >= 90 else [marks[0], marks[4], marks[-1]]
        shown = shown if last > first else marks[-1:]
        lines.append(f"{TITLES[grid.quantity]}: " + "  ".join(shown))
    kinds = dict.fromkeys(kind for grid in (gradient, ratio) for kind in grid.kinds())
    signs = [f"{SIGNS[kind]} {MEANINGS[kind]}" for kind in SIGNS if kind in kinds]
    if BROKEN in kinds and gradient.together > 1:
        signs[-1] += " in one of a column's reports"
    told = [*lines, "   ".join(signs)]
    return [line for each in told for line in wrap(each, width, subsequent_indent="  ")]
