"""Presentation of a flow: a table and a heat map in the terminal, and an HTML page.

A flow holds the reports of a run, one for each measured step.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from frostlab.charts import require_drawing
from frostlab.errors import BadInput, FrostlabError
from frostlab.flow.diagnosis import (
    FLOW_TARGETS,
    findings_of,
    join_names,
    sentence_of,
)
from frostlab.flow.figures import (
    BROKEN,
    DECADES,
    MEANINGS,
    MOST_ROWS,
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
    rows_of,
    too_many_rows,
)
from frostlab.flow.judge import FROZEN, LEARNING
from frostlab.html import fragment, render
from frostlab.storage import whole_file, write_whole
from frostlab.text import NONE, columns, counted, plain, wrapped

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


_QUANTITIES = ("gradient", "before_clip", "weight", "update")
SHADES = "▁▂▃▄▅▆▇█"  # from the smallest to the largest number
NARROWEST = 40  # minimum width of a heat map, in characters
_LEFT_OUT = ("before clip", "weight", "gradient")  # dropped in this order if a table is too wide
_ROWS = 60  # in a terminal, more parts than this are merged into layers


def as_text(flow: "Flow", width: int | None = None) -> str:
    """Return the last report as a table, the findings, and a comparison of gradients."""
    caution = [f"caution: {flow.caution}"] if flow.caution else []
    if not flow.reports:
        return "\n".join(map(plain, [f"{flow.model}: no step has been measured yet", *caution]))
    last, verdicts = flow.reports[-1], flow.verdicts()
    rows: list[tuple[str, ...]] = [
        ("part", "gradient", "before clip", "weight", "update", "update/weight", "verdict")
    ]
    for i, part in enumerate(flow.parts):
        numbers = [*(last.of(quantity, i) for quantity in _QUANTITIES), last.ratio(i)]
        rows.append((part.name, *map(_number, numbers), verdicts[part.name].word))
    if all(row[2] == NONE for row in rows[1:]):  # omit an empty column "before clip"
        rows = [(*row[:2], *row[3:]) for row in rows]
    left_out = []
    for name in _LEFT_OUT if width is not None else ():
        if name in rows[0] and max(map(len, columns(rows))) > (width or 0):
            place = rows[0].index(name)
            rows = [(*row[:place], *row[place + 1 :]) for row in rows]
            left_out.append(name)
    lines = [f"{flow.model}, step {last.step}, {counted(len(flow.reports), 'reports')}"]
    lines += [*caution, ""]
    lines += columns(rows, range(1, len(rows[0]) - 1), width)
    lines += [f"--wide also shows {' and '.join(left_out)}"] if left_out else []
    for finding in findings_of(flow):
        if finding.word not in (LEARNING, FROZEN):
            first, *others = finding.parts
            more = f" and {len(others)} more" if others else ""
            lines += ["", f"{first}{more}: {finding.word}: {finding.why}", f"  try: {finding.hint}"]
    lines += _depth_lines(flow)
    return "\n".join(part for line in lines for part in wrapped(plain(line), width))


def _depth_lines(flow: "Flow") -> list[str]:
    ratios = flow.depth_ratios()
    if math.isnan(ratios.front_ratio):
        return []
    wanted = dict.fromkeys(FLOW_TARGETS, "")
    if _is_alarming(flow):
        wanted = {name: f" (wanted > {target:g})" for name, target in FLOW_TARGETS.items()}
    text = f"front/output gradient {ratios.front_ratio:.3g}, {ratios.word}{wanted['front_ratio']}"
    text += f"; back/output {ratios.back_ratio:.3g}"
    if not math.isnan(ratios.weight_change):
        text += f"; front weight change {ratios.weight_change:.4f}{wanted['weight_change']}"
    return ["", "front: the first two layers; back: the last two; output: the head", text]


def _is_alarming(flow: "Flow") -> bool:
    """Return whether a part needs attention; only then are the flow targets shown."""
    return any(verdict.alarming for verdict in flow.verdicts().values())


def _number(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.3g}"


def flow_map_text(flow: "Flow", width: int = 100) -> str:
    """Draw gradients and updates side by side: by part or layer, and by report."""
    if not flow.reports:
        return plain(f"{flow.model}: no step has been measured yet")
    rows, width = rows_of(flow, _ROWS), max(width, NARROWEST)
    words = _row_verdicts(flow, rows)
    word_width = max(map(len, words)) if width >= 80 else 0  # narrow maps have no verdicts
    names = [plain(row.name) for row in rows]
    longest = max(map(len, names))
    # a line is a name, two maps of at least 4 cells, and a verdict, separated by 3 × 2 spaces
    name_width = min(longest, width - word_width - 2 * 4 - 6, max(12, width // 3))
    cell_count = max(4, (width - name_width - word_width - 6) // 2)
    gradient, ratio = (grid_of(flow, quantity, rows, cell_count) for quantity in TITLES)
    titles = list(TITLES.values()) if cell_count >= 15 else ["gradient", "update"]
    map_width = max(len(gradient.steps), len(titles[0]))
    steps = f"{flow.reports[0].step} … {gradient.steps[-1]}"
    lines = [
        plain(f"{flow.model}, steps {steps}") + _column_meaning(gradient),
        "",
        "  ".join([" " * name_width, titles[0].ljust(map_width), titles[1]]),
    ]
    for name, left, right, word in zip(names, gradient.cells, ratio.cells, words, strict=True):
        maps = [_shaded(gradient, left).ljust(map_width), _shaded(ratio, right).ljust(map_width)]
        shown = _end_of(name, name_width).ljust(name_width)
        lines.append("  ".join([shown, *maps, word if word_width else ""]).rstrip())
    return "\n".join([*lines, "", *_legend(gradient, ratio, width)])


def _row_verdicts(flow: "Flow", rows: Sequence[Row]) -> list[str]:
    """Return, for each row, the verdict on all of its parts, or how many of them are frozen.

    The text is empty if all parts learn, or if the verdicts differ and none is frozen.
    """
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
    """Return the legend: the smallest numbers of shades, and the meaning of each sign."""
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
    require_drawing("drawing a flow")
    text, drawing = page_of(flow), heat_png(flow)  # raise an error before anything is written
    folder = Path(folder)
    page, picture = folder / "flow.html", folder / "flow.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(page, text)
        with whole_file(picture) as temporary:
            temporary.write_bytes(drawing)
    except OSError as error:
        raise BadInput(f"flow_page: {folder}: {error.strerror}") from None
    return [page, picture]


_PAGE = """
{% if run %}<p>Run <strong>{{ run }}</strong></p>{% endif %}

<p>{{ optimizer }}, {{ reports }}, steps {{ first }} to {{ last }}</p>
{% if caution %}<p>Caution: {{ caution }}</p>{% endif %}
<p class="verdict{{ " alarm" if alarm }}">{{ sentence }}</p>
<h2>Verdicts</h2>
<table class="findings"><thead><tr><th scope="col">verdict</th><th scope="col">parts</th>
<th scope="col">why</th><th scope="col">what to try</th></tr></thead><tbody>
{% for finding in findings %}
<tr><td>{% if finding.alarming %}<strong class="alarm">{{ finding.word }}</strong>
{%- else %}{{ finding.word }}{% endif %}</td><td>{{ finding.names }}</td>
<td>{{ finding.why }}</td><td>{{ finding.hint }}</td></tr>
{% endfor %}
</tbody></table>
{% if depth %}
<h2>Front and output</h2>
<p>For each tensor, the largest absolute gradient is taken. Its average over the first two layers is
<strong>{{ depth.front }}</strong> times the head's average: <strong>{{ depth.word }}</strong>
{%- if alarm %} (more than {{ wanted.front_ratio }} is wanted){% endif %}. Its average over the last
two layers is {{ depth.back }} times the head's.
{% if depth.change %}
Since the first report, the range (largest minus smallest weight) of a tensor in the first two
layers has changed by a fraction of <strong>{{ depth.change }}</strong> on average
{%- if alarm %} (more than {{ wanted.weight_change }} is wanted){% endif %}.
{% endif %}
</p>
{% endif %}
<h2>Heat maps</h2>
<div class="charts">{% for chart in heat_maps %}{{ figure(*chart) }}{% endfor %}</div>
<p>{{ key }}</p>
<h2>Step by step</h2>
<div class="charts">{% for chart in lines %}{{ figure(*chart) }}{% endfor %}</div>
<h2>Numbers of step {{ last }}</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Numbers of the last report">
<table class="numbers"><thead><tr>
{% for title in titles %}<th scope="col">{{ title }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}
<tr><td>{{ row.name }}</td>{% for number in row.numbers %}
<td data-title="{{ titles[loop.index] }}">{{ number }}</td>{% endfor %}
<td{% if row.alarm %} class="alarm"{% endif %}>{{ row.word }}</td></tr>
{% endfor %}
</tbody></table></div>
"""


def page_of(flow: "Flow") -> str:
    """Return the HTML of `flow.html`: summary, findings, `DepthRatios`, figures and numbers."""
    key = _heat_key(flow)
    return render(
        _PAGE,
        title=f"Gradient flow of {flow.model}",
        run=flow.run,
        optimizer=flow.optimizer,
        reports=counted(len(flow.reports), "reports"),
        caution=flow.caution,
        first=flow.reports[0].step,
        last=flow.reports[-1].step,
        alarm=_is_alarming(flow),
        sentence=sentence_of(flow),
        findings=_shown_findings(flow),
        depth=_shown_depth(flow),
        wanted={name: f"{target:g}" for name, target in FLOW_TARGETS.items()},
        heat_maps=_heat_figures(flow, key),
        key=key,
        lines=_line_figures(flow),
        titles=("part", *_SHOWN, "update/weight", "verdict"),
        rows=_number_rows(flow),
    )


def as_html(flow: "Flow") -> str:
    """Return the verdicts and the heat maps as a part of a page, for notebooks.

    Without altair it has a table of the last report instead of the maps.
    """
    title = f"Gradient flow of {flow.model}"
    if not flow.reports:
        return fragment(title, "no step has been measured yet")
    alarming = _is_alarming(flow)
    sentence = sentence_of(flow)
    about = "; ".join(part for part in (flow.run, "" if alarming else sentence) if part)
    alarms = [line for line in (flow.caution, sentence if alarming else "") if line]
    try:
        drawings = heat_svgs(flow).values()
    except FrostlabError:
        head = ("part", *_SHOWN, "update/weight", "verdict")
        rows = [(row["name"], *row["numbers"], row["word"]) for row in _number_rows(flow)]
        return fragment(title, about, head, rows, alarms)
    return fragment(title, about, alarms=alarms, drawings=drawings)


def _shown_findings(flow: "Flow") -> list[dict[str, Any]]:
    findings = []
    for finding in findings_of(flow):
        expected = finding.word in (LEARNING, FROZEN)
        count = f"{len(finding.parts)} part" + "s" * (len(finding.parts) != 1)
        names = join_names(finding.parts, 3 if expected else len(finding.parts))
        why = "" if finding.word == LEARNING else finding.why
        findings.append({**vars(finding), "names": f"{count}: {names}", "why": why})
    return findings


def _shown_depth(flow: "Flow") -> dict[str, str]:
    ratios = flow.depth_ratios()
    if math.isnan(ratios.front_ratio):
        return {}
    change = ratios.weight_change
    return {
        "front": f"{ratios.front_ratio:.3g}",
        "back": f"{ratios.back_ratio:.3g}",
        "word": ratios.word,
        "change": "" if math.isnan(change) else f"{change:.4f}",
    }


def _heat_key(flow: "Flow") -> str:
    key = (
        "A row is a part (all tensors of one role in a layer or outside the layers, or all tensors "
        "of one module) or a whole layer. A column is a report (a measured step). If there are too "
        "many reports, a column is the median of several reports, labelled with the last of them. "
        f"Brighter is larger; the colours span at most {DECADES} powers of ten. "
        "Signs: · frozen, 0 zero, - no gradient, ! NaN or infinity. The numbers of "
        "the last report are in the table below."
    )
    return f"{key} Only the first {MOST_ROWS} rows are drawn." if too_many_rows(flow) else key


def _heat_figures(flow: "Flow", key: str) -> list[tuple[str, str, str]]:
    """Return each heat map with its alternative text and its caption."""
    captions = {
        "gradient": "Norm of the gradient the optimizer got.",
        "ratio": "How far a step moved the weights, relative to their norm.",
    }
    return [
        (svg, f"{TITLES[quantity]}. {captions[quantity]} {key}", captions[quantity])
        for quantity, svg in heat_svgs(flow).items()
    ]


def _line_figures(flow: "Flow") -> list[tuple[str, str, str]]:
    """Return each line chart with its alternative text and its caption."""
    norms = [norm for norm in flow.norms().values() if math.isfinite(norm)]
    caption = "no norm is a finite number"
    if norms:
        caption = f"first {norms[0]:.3g}, last {norms[-1]:.3g}, largest {max(norms):.3g}"
    figures: list[tuple[str, str, str]] = [
        (norm_svg(flow), f"Norm of the whole gradient by step: {caption}.", caption)
    ]
    if (svg := front_svg(flow)) is not None:
        ratios = flow.depth_ratios()
        caption = f"last {ratios.front_ratio:.3g}: {ratios.word}"
        caption = "unknown at the last report" if math.isnan(ratios.front_ratio) else caption
        figures.append((svg, f"Front over output gradient by step: {caption}.", caption))
    return figures


_SHOWN = ("gradient", "weight", "update")


def _number_rows(flow: "Flow") -> list[dict[str, Any]]:
    last, verdicts, rows = flow.reports[-1], flow.verdicts(), []
    for i, part in enumerate(flow.parts):
        numbers = [*(last.of(quantity, i) for quantity in _SHOWN), last.ratio(i)]
        verdict = verdicts[part.name]
        rows.append({
            "name": part.name, "numbers": list(map(_number, numbers)),
            "word": verdict.word, "alarm": verdict.alarming,
        })  # fmt: skip
    return rows
