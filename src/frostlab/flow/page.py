"""A flow as one page of HTML that needs nothing else: verdicts first, then what they rest on."""

import math
from html import escape
from typing import TYPE_CHECKING

from frostlab.flow.charts import front_svg, heat_svgs, norm_svg
from frostlab.flow.front import WANTED
from frostlab.flow.grid import DECADES, TITLES
from frostlab.flow.rules import FROZEN, LEARNING
from frostlab.flow.sentence import findings_of, listed, sentence_of

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow

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
        names = escape(listed(each.parts, 3 if expected else len(each.parts)))
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
    ends = flow.ends()
    if math.isnan(ends.front_ratio):
        return ""
    said = (
        f"The gradient of the first two layers is <strong>{ends.front_ratio:.3g}</strong> of the "
        f"output's: <strong>{ends.word}</strong> (above {WANTED['front_ratio']:g} is wanted); "
        f"that of the last two is {ends.back_ratio:.3g}."
    )
    if not math.isnan(ends.weight_change):
        said += (
            f" The front's weights changed by <strong>{ends.weight_change:.4f}</strong> of their "
            f"range (above {WANTED['weight_change']:g} is wanted)."
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
        ends = flow.ends()
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
