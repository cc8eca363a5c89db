"""Presentation of a flow: a table and a heat map in the terminal, and an HTML page."""

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
from frostlab.text import NONE, columns

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


_QUANTITIES = ("gradient", "before_clip", "weight", "update")
SHADES = "▁▂▃▄▅▆▇█"  # from the smallest to the largest number
NARROWEST = 40  # minimum width of a heat map, in characters
_ROWS = 60  # in a terminal, more parts than this are merged into layers


def as_text(flow: "Flow") -> str:
    """Return the last report as a table, then the findings and the ratios over depth."""
    if not flow.reports:
        return f"{flow.model}: no step has been measured yet"
    last, verdicts = flow.reports[-1], flow.verdicts()
    rows: list[tuple[str, ...]] = [
        ("part", "gradient", "before clip", "weight", "update", "update/weight", "verdict")
    ]
    for i, part in enumerate(flow.parts):
        numbers = [*(last.of(quantity, i) for quantity in _QUANTITIES), last.ratio(i)]
        rows.append((part.name, *map(_number, numbers), verdicts[part.name].word))
    if all(row[2] == NONE for row in rows[1:]):  # omit an empty column "before clip"
        rows = [(*row[:2], *row[3:]) for row in rows]
    lines = [f"{flow.model}, step {last.step}, {len(flow.reports)} reports", ""]
    lines += columns(rows, right=range(1, len(rows[0]) - 1))
    for finding in findings_of(flow):
        if finding.word not in (LEARNING, FROZEN):
            first, *others = finding.parts
            more = f" and {len(others)} more" if others else ""
            lines += ["", f"{first}{more}: {finding.word}: {finding.why}", f"  try: {finding.hint}"]
    return "\n".join([*lines, *_depth_lines(flow)])


def _depth_lines(flow: "Flow") -> list[str]:
    ratios = flow.depth_ratios()
    if math.isnan(ratios.front_ratio):
        return []
    text = f"front/output gradient {ratios.front_ratio:.3g} ({ratios.word}"
    text += f", wanted > {FLOW_TARGETS['front_ratio']:g})"
    text += f", back/output {ratios.back_ratio:.3g}"
    if not math.isnan(ratios.weight_change):
        text += f", front weight change {ratios.weight_change:.4f}"
        text += f" (wanted > {FLOW_TARGETS['weight_change']:g})"
    return ["", text]


def _number(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.3g}"


def flow_map_text(flow: "Flow", width: int = 100) -> str:
    """Draw gradients and updates side by side: rows are parts or layers, columns are reports."""
    if not flow.reports:
        return f"{flow.model}: no step has been measured yet"
    rows, width = rows_of(flow, _ROWS), max(width, NARROWEST)
    words = _row_verdicts(flow, rows)
    word_width = max(map(len, words)) if width >= 80 else 0  # narrow maps have no verdicts
    longest = max(len(row.name) for row in rows)
    # a line is a name, two maps of at least 4 cells, and a verdict, separated by 3 × 2 spaces
    name_width = min(longest, width - word_width - 2 * 4 - 6, max(12, width // 3))
    cell_count = max(4, (width - name_width - word_width - 6) // 2)
    gradient, ratio = (grid_of(flow, quantity, rows, cell_count) for quantity in TITLES)
    titles = list(TITLES.values()) if cell_count >= 15 else ["gradient", "update"]
    map_width = max(len(gradient.steps), len(titles[0]))
    steps = f"{flow.reports[0].step} … {gradient.steps[-1]}"
    lines = [
        f"{flow.model}, steps {steps}" + _column_meaning(gradient),
        "",
        "  ".join([" " * name_width, titles[0].ljust(map_width), titles[1]]),
    ]
    for row, left, right, word in zip(rows, gradient.cells, ratio.cells, words, strict=True):
        maps = [_shaded(gradient, left).ljust(map_width), _shaded(ratio, right).ljust(map_width)]
        name = _end_of(row.name, name_width).ljust(name_width)
        lines.append("  ".join([name, *maps, word if word_width else ""]).rstrip())
    return "\n".join([*lines, "", *_legend(gradient, ratio, width)])


def _row_verdicts(flow: "Flow", rows: Sequence[Row]) -> list[str]:
    """Return the verdict that a row's parts share ("" for learning), or how many are frozen."""
    verdicts, row_words = flow.verdicts(), []
    for row in rows:
        words = [verdicts[flow.parts[i].name].word for i in row.parts]
        frozen = words.count(FROZEN)
        if len(set(words)) == 1:
            row_words.append("" if words[0] == LEARNING else words[0])
        else:
            row_words.append(f"{frozen} of {len(words)} frozen" if frozen else "")
    return row_words


def _column_meaning(grid: Grid) -> str:
    if grid.reports_a_column == 1:
        return ", one report per column"
    return f", each column is the median of {grid.reports_a_column} reports"


def _end_of(name: str, width: int) -> str:
    """Shorten a name from the left, because its end is more specific."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _shaded(grid: Grid, cells: tuple[Cell, ...]) -> str:
    return "".join(
        SHADES[_level(grid, cell.value)] if cell.kind == NUMBER else SIGNS[cell.kind]
        for cell in cells
    )


def _level(grid: Grid, value: float) -> int:
    """Return the index of a number's shade; the shades divide the logarithmic scale equally."""
    first, last = grid.power(0.0), grid.power(grid.high)
    fraction = (grid.power(value) - first) / (last - first) if last > first else 1.0
    return min(int(fraction * len(SHADES)), len(SHADES) - 1)


def _legend(gradient: Grid, ratio: Grid, width: int) -> list[str]:
    """Return the legend: the smallest number of each shade, and the meaning of each sign."""
    lines = []
    for grid in (gradient, ratio):
        first, last = grid.power(0.0), grid.power(grid.high)
        step = (last - first) / len(SHADES)
        marks = [f"{shade} {10 ** (first + i * step):.0e}" for i, shade in enumerate(SHADES)]
        shown = marks if width >= 90 else [marks[0], marks[4], marks[-1]]
        shown = shown if last > first else marks[-1:]
        lines.append(f"{TITLES[grid.quantity]}: " + "  ".join(shown))
    kinds = dict.fromkeys(kind for grid in (gradient, ratio) for kind in grid.kinds())
    signs = [f"{SIGNS[kind]} {MEANINGS[kind]}" for kind in SIGNS if kind in kinds]
    if BROKEN in kinds and gradient.reports_a_column > 1:
        signs[-1] += " in one of a column's reports"
    lines.append("   ".join(signs))
    return [part for line in lines for part in wrap(line, width, subsequent_indent="  ")]


def flow_page(flow: "Flow", folder: Path) -> list[Path]:
    """Write `flow.html`, a self-contained page, and `flow.png`, its heat maps; needs altair."""
    if not flow.reports:
        raise BadInput("flow_page: no step has been measured yet, so there is nothing to draw")
    require_drawing()  # raise an error before anything is written
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"flow_page: {folder}: {error.strerror}") from None
    page, picture = folder / "flow.html", folder / "flow.png"
    write_whole(page, page_of(flow))
    picture.write_bytes(heat_png(flow))
    return [page, picture]


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; --alarm: #c5221f; --well: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --alarm: #ff8a80; --well: #7ee08f } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  background: Canvas; color: CanvasText }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.verdict { font-size: 1.15rem; border-left: .3rem solid var(--well); padding: .3rem 0 .3rem .8rem }
.verdict.alarm { border-color: var(--alarm) }
.findings td:first-child, .numbers td { white-space: nowrap }
.findings td:nth-child(2) { overflow-wrap: anywhere; min-width: 12rem }
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
  .findings thead { display: none } .findings td { display: block; border: 0; padding: 0 }
  .findings td:first-child { white-space: normal }
  .findings td:last-child:not(:empty)::before { content: "try: " }
  .findings tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0 }
}
"""


def page_of(flow: "Flow") -> str:
    """Return the page as HTML: summary, findings, depth ratios, figures and numbers."""
    alarm = any(verdict.alarming for verdict in flow.verdicts().values())
    first, last = flow.reports[0].step, flow.reports[-1].step
    title = f"Gradient flow of {flow.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(flow.optimizer)}, {len(flow.reports)} reports, steps {first} to {last}</p>",
        f'<p class="verdict{" alarm" * alarm}">{escape(sentence_of(flow))}</p>',
        _findings_html(flow),
        _depth_html(flow),
        _heat_html(flow),
        _lines_html(flow),
        _numbers_html(flow),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in body if section)
        + "\n</main></body></html>\n"
    )


def _findings_html(flow: "Flow") -> str:
    rows = []
    for finding in findings_of(flow):
        word = escape(finding.word)
        if finding.alarming:
            word = f'<strong class="alarm">{word}</strong>'
        count = f"{len(finding.parts)} part" + "s" * (len(finding.parts) != 1)
        expected = finding.word in (LEARNING, FROZEN)
        names = escape(join_names(finding.parts, 3 if expected else len(finding.parts)))
        why = "" if finding.word == LEARNING else escape(finding.why)
        hint = escape(finding.hint)
        rows.append(
            f"<tr><td>{word}</td><td>{count}: {names}</td><td>{why}</td><td>{hint}</td></tr>"
        )
    return (
        '<h2>Verdicts</h2><table class="findings"><thead><tr><th scope="col">verdict</th>'
        '<th scope="col">parts</th><th scope="col">why</th><th scope="col">what to try</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _depth_html(flow: "Flow") -> str:
    ratios = flow.depth_ratios()
    if math.isnan(ratios.front_ratio):
        return ""
    text = (
        f"The gradient of the first two layers is <strong>{ratios.front_ratio:.3g}</strong> of the "
        f"output's: <strong>{ratios.word}</strong> (above {FLOW_TARGETS['front_ratio']:g} is "
        f"wanted). The gradient of the last two layers is {ratios.back_ratio:.3g} of the output's."
    )
    if not math.isnan(ratios.weight_change):
        text += (
            f" The front's weights changed by <strong>{ratios.weight_change:.4f}</strong> of their "
            f"range (above {FLOW_TARGETS['weight_change']:g} is wanted)."
        )
    return f"<h2>Front and output</h2><p>{text}</p>"


def _heat_html(flow: "Flow") -> str:
    captions = {
        "gradient": "Norm of the gradient the optimizer got.",
        "ratio": "How far a step moved the weights, relative to their norm.",
    }
    key = (
        " Rows are parts or layers, columns are reported steps. Brighter is larger; the colours "
        f"span at most {DECADES} powers of ten. Signs: · frozen, 0 zero, - no gradient, ! NaN or "
        "infinity. The numbers of the last report are in the table below."
    )
    figures = [
        _figure(svg, f"{TITLES[quantity]}. {captions[quantity]}{key}", captions[quantity])
        for quantity, svg in heat_svgs(flow).items()
    ]
    return f'<h2>Heat maps</h2><div class="charts">{"".join(figures)}</div><p>{escape(key)}</p>'


def _lines_html(flow: "Flow") -> str:
    norms = [norm for norm in flow.norms().values() if math.isfinite(norm)]
    caption = "no norm is a finite number"
    if norms:
        caption = f"first {norms[0]:.3g}, last {norms[-1]:.3g}, largest {max(norms):.3g}"
    figures = [_figure(norm_svg(flow), f"Norm of the whole gradient by step: {caption}.", caption)]
    if (svg := front_svg(flow)) is not None:
        ratios = flow.depth_ratios()
        caption = f"last {ratios.front_ratio:.3g}: {ratios.word}"
        caption = "unknown at the last report" if math.isnan(ratios.front_ratio) else caption
        figures.append(_figure(svg, f"Front over output gradient by step: {caption}.", caption))
    return f'<h2>Step by step</h2><div class="charts">{"".join(figures)}</div>'


def _figure(svg: str, alternative: str, caption: str) -> str:
    return (
        f'<figure><div class="scroll" role="img" aria-label="{escape(alternative)}">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _numbers_html(flow: "Flow") -> str:
    last, verdicts = flow.reports[-1], flow.verdicts()
    quantities, rows = ("gradient", "weight", "update"), []
    for i, part in enumerate(flow.parts):
        numbers = [*(last.of(quantity, i) for quantity in quantities), last.ratio(i)]
        cells = "".join(f"<td>{_number(x)}</td>" for x in numbers)
        word = escape(verdicts[part.name].word)
        alarm = ' class="alarm"' * verdicts[part.name].alarming
        rows.append(f"<tr><td>{escape(part.name)}</td>{cells}<td{alarm}>{word}</td></tr>")
    titles = ("part", *quantities, "update/weight", "verdict")
    header = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        f"<h2>Numbers of step {last.step}</h2><div class='scroll' tabindex='0' role='region' "
        "aria-label='Numbers of the last report'><table class='numbers'><thead><tr>"
        f"{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
