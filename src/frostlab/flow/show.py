"""A flow as text: a line a part, then what is wrong, then the ends."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from frostlab.errors import BadInput
from frostlab.flow.diagnosis import FLOW_TARGETS, findings_of, join_names, sentence_of
from frostlab.flow.figures import (
    BROKEN,
    DECADES,
    MEANINGS,
    NUMBER,
    SIGNS,
    TITLES,
    Cell,
    Grid,
    Row,
    front_svg,
    grid_of,
    heat_png,
    heat_svgs,
    norm_svg,
    require_drawing,
    rows_of,
)
from frostlab.flow.judge import FROZEN, LEARNING
from frostlab.storage import write_whole

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


_HEADER = ("part", "gradient", "before clip", "weight", "update", "update/weight", "verdict")
_NONE = "–"


def as_text(flow: "Flow") -> str:
    """Draw the last report; frozen parts have no numbers."""
    if not flow.reports:
        return f"{flow.model}: no step has been measured yet"
    last, verdicts = flow.reports[-1], flow.verdicts()
    rows: list[tuple[str, ...]] = [_HEADER]
    for i, part in enumerate(flow.parts):
        quantities = ("gradient", "before_clip", "weight", "update")
        numbers = [last.of(quantity, i) for quantity in quantities]
        cells = [_number(x) for x in (*numbers, last.ratio(i))]
        rows.append((part.name, *cells, verdicts[part.name].word))
    if all(row[2] == _NONE for row in rows[1:]):
        rows = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{flow.model}, step {last.step}, {len(flow.reports)} reports", ""]
    for row in rows:
        first, *middle, word = row
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, word]))
    told: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.word not in (LEARNING, FROZEN):
            told.setdefault((verdict.word, verdict.hint), []).append(name)
    for (word, hint), names in told.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += ["", f"{names[0]}{more}: {word}: {verdicts[names[0]].why}", f"  try: {hint}"]
    return "\n".join([*lines, *_ends_lines(flow)])


def _ends_lines(flow: "Flow") -> list[str]:
    ends = flow.depth_ratios()
    if math.isnan(ends.front_ratio):
        return []
    text = f"front/output gradient {ends.front_ratio:.3g} ({ends.word}"
    text += f", wanted > {FLOW_TARGETS['front_ratio']:g})"
    text += f", back/output {ends.back_ratio:.3g}"
    if not math.isnan(ends.weight_change):
        text += f", front weight change {ends.weight_change:.4f}"
        text += f" (wanted > {FLOW_TARGETS['weight_change']:g})"
    return ["", text]


def _number(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.3g}"


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
    if not flow.reports:
        raise BadInput("flow_page: no step has been measured yet, so there is nothing to draw")
    require_drawing()  # before anything is written
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
        own = [verdicts[flow.parts[i].name].word for i in row.parts]
        frozen = own.count(FROZEN)
        if len(own) == 1 or len(set(own)) == 1:
            words.append("" if own[0] == LEARNING else own[0])
        else:
            words.append(f"{frozen} of {len(own)} frozen" if frozen else "")
    return words


def _together(grid: Grid) -> str:
    if grid.reports_a_column == 1:
        return ", a column a report"
    return f", a column the median of {grid.reports_a_column} reports"


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
    if BROKEN in kinds and gradient.reports_a_column > 1:
        signs[-1] += " in one of a column's reports"
    told = [*lines, "   ".join(signs)]
    return [line for each in told for line in wrap(each, width, subsequent_indent="  ")]


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; --alarm: #c5221f; --well: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --alarm: #ff8a80; --well: #7ee08f } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  background: Canvas; color: CanvasText }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.verdict { font-size: 1.15rem; border-left: .3rem solid var(--well); padding: .3rem 0 .3rem .8rem }
.verdict.alarm { border-color: var(--alarm) }
.told td:first-child, .numbers td { white-space: nowrap }
.told td:nth-child(2) { overflow-wrap: anywhere; min-width: 12rem }
.scroll { overflow-x: auto } .charts { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; min-width: 0; max-width: 100% } figcaption { font-size: .85rem }
svg { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-size: .9rem; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line) }
.numbers td:not(:first-child):not(:last-child), .numbers th:not(:first-child):not(:last-child) {
  text-align: right; font-variant-numeric: tabular-nums }
.alarm { color: var(--alarm) } .verdict.alarm { color: inherit }
@media (max-width: 40rem) {
  .told thead { display: none } .told td { display: block; border: 0; padding: 0 }
  .told td:first-child { white-space: normal }
  .told td:last-child:not(:empty)::before { content: "try: " }
  .told tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0 }
}
"""
_QUANTITIES = ("gradient", "weight", "update")


def page_of(flow: "Flow") -> str:
    """The whole page."""
    alarm = any(verdict.alarming for verdict in flow.verdicts().values())
    first, last = flow.reports[0].step, flow.reports[-1].step
    title = f"Gradient flow of {flow.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(flow.optimizer)}, {len(flow.reports)} reports, steps {first} to {last}</p>",
        f'<p class="verdict{" alarm" * alarm}">{escape(sentence_of(flow))}</p>',
        _told(flow),
        _ends_table(flow),
        _heat(flow),
        _lines(flow),
        _numbers(flow),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _told(flow: "Flow") -> str:
    rows = []
    for each in findings_of(flow):
        word = escape(each.word)
        if each.alarming:
            word = f'<strong class="alarm">{word}</strong>'
        count = f"{len(each.parts)} part" + "s" * (len(each.parts) != 1)
        expected = each.word in (LEARNING, FROZEN)
        names = escape(join_names(each.parts, 3 if expected else len(each.parts)))
        why = "" if each.word == LEARNING else escape(each.why)
        hint = escape(each.hint)
        rows.append(
            f"<tr><td>{word}</td><td>{count}: {names}</td><td>{why}</td><td>{hint}</td></tr>"
        )
    return (
        '<h2>Verdicts</h2><table class="told"><thead><tr><th scope="col">verdict</th>'
        '<th scope="col">parts</th><th scope="col">why</th><th scope="col">what to try</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _ends_table(flow: "Flow") -> str:
    ends = flow.depth_ratios()
    if math.isnan(ends.front_ratio):
        return ""
    said = (
        f"The gradient of the first two layers is <strong>{ends.front_ratio:.3g}</strong> of the "
        f"output's: <strong>{ends.word}</strong> (above {FLOW_TARGETS['front_ratio']:g} is "
        f"wanted); that of the last two is {ends.back_ratio:.3g}."
    )
    if not math.isnan(ends.weight_change):
        said += (
            f" The front's weights changed by <strong>{ends.weight_change:.4f}</strong> of their "
            f"range (above {FLOW_TARGETS['weight_change']:g} is wanted)."
        )
    return f"<h2>Front and output</h2><p>{said}</p>"


def _heat(flow: "Flow") -> str:
    said = {
        "gradient": "Norm of the gradient the optimizer got.",
        "ratio": "How far a step moved the weights, relative to their norm.",
    }
    more = (
        f" Rows are parts or layers, columns reported steps, brighter is larger, over at most "
        f"{DECADES} powers of ten. · is frozen, 0 zero, - without a gradient, ! NaN or "
        "infinity. The numbers of the last report are in the table below."
    )
    drawn = [
        _figure(svg, f"{TITLES[quantity]}. {said[quantity]}{more}", said[quantity])
        for quantity, svg in heat_svgs(flow).items()
    ]
    return f'<h2>Heat maps</h2><div class="charts">{"".join(drawn)}</div><p>{escape(more)}</p>'


def _lines(flow: "Flow") -> str:
    norms = [norm for norm in flow.norms().values() if math.isfinite(norm)]
    told = "no norm is a finite number"
    if norms:
        told = f"first {norms[0]:.3g}, last {norms[-1]:.3g}, largest {max(norms):.3g}"
    drawn = [_figure(norm_svg(flow), f"Norm of the whole gradient by step: {told}.", told)]
    if (svg := front_svg(flow)) is not None:
        ends = flow.depth_ratios()
        told = f"last {ends.front_ratio:.3g}: {ends.word}"
        told = "unknown at the last report" if math.isnan(ends.front_ratio) else told
        drawn.append(_figure(svg, f"Front over output gradient by step: {told}.", told))
    return f'<h2>Step by step</h2><div class="charts">{"".join(drawn)}</div>'


def _figure(svg: str, alternative: str, caption: str) -> str:
    return (
        f'<figure><div class="scroll" role="img" aria-label="{escape(alternative)}">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _numbers(flow: "Flow") -> str:
    last, verdicts = flow.reports[-1], flow.verdicts()
    rows = []
    for i, part in enumerate(flow.parts):
        numbers = [*(last.of(quantity, i) for quantity in _QUANTITIES), last.ratio(i)]
        cells = "".join(f"<td>{'–' if math.isnan(x) else f'{x:.3g}'}</td>" for x in numbers)
        word = escape(verdicts[part.name].word)
        alarm = ' class="alarm"' * verdicts[part.name].alarming
        rows.append(f"<tr><td>{escape(part.name)}</td>{cells}<td{alarm}>{word}</td></tr>")
    named = ("part", *_QUANTITIES, "update/weight", "verdict")
    header = "".join(f'<th scope="col">{name}</th>' for name in named)
    return (
        f"<h2>Numbers of step {last.step}</h2><div class='scroll' tabindex='0' role='region' "
        "aria-label='Numbers of the last report'><table class='numbers'><thead><tr>"
        f"{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
