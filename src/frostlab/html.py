"""HTML pages without scripts: a template engine that escapes every text, and a common layout.

A page loads nothing; its Content-Security-Policy makes the browser refuse requests and scripts.
Reports, which have scripts, use this template engine with a layout of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from frostlab.text import plain, printable

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; --alarm: #c5221f; --well: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --alarm: #ff8a80; --well: #7ee08f } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  background: Canvas; color: CanvasText; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
pre { overflow-x: auto }
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
  .numbers thead { display: none } .numbers td { border: 0; padding: 0 }
  .numbers tr { display: grid; grid-template-columns: repeat(4, 1fr); column-gap: .5rem;
    border-bottom: 1px solid var(--line); padding: .4rem 0 }
  .numbers td:first-child, .numbers td:last-child { grid-column: span 4; white-space: normal }
  .numbers td:not(:first-child):not(:last-child) { text-align: left }
  .numbers td[data-title]::before { content: attr(data-title); display: block; font-size: .75rem;
    opacity: .75 }
}
"""
_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title><style>{{ style }}</style></head>
<body><main>
<h1>{{ title }}</h1>
{% block body %}{% endblock %}
</main></body></html>
"""
_FIGURE = """{% macro figure(svg, label, caption="") -%}
<figure><div class="scroll" role="img" aria-label="{{ label }}">{{ svg }}</div>
{%- if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}</figure>
{%- endmacro %}"""
_BODY = (
    """{% extends "frame" %}{% from "figure" import figure %}{% block body %}BODY{% endblock %}"""
)


def render(body: str, title: str, **values: Any) -> str:
    """Return a page; `body` is a Jinja template for the part of the page below its title.

    Every value is escaped; control characters become text, as in `\\x1b`. Only `Markup`, such as
    a drawing that `charts.svg` has checked, is inserted as it is. Templates can call
    `figure(svg, label, caption)`.
    """
    template = environment.from_string(_BODY.replace("BODY", body))
    return template.render(title=title, policy=POLICY, style=Markup(_STYLE), **values) + "\n"


_FRAGMENT = """<div style="overflow-x: auto">
<p><strong>{{ title }}</strong>{% if about %}<br>{{ about }}{% endif %}</p>
{% for line in alarms %}<p style="color: #d1242f">{{ line }}</p>
{% endfor %}
{% for drawing in drawings %}<div>{{ drawing }}</div>
{% endfor %}
{% if rows %}
<table>{% if head %}<thead><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr></thead>
{% endif %}<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td style="text-align: left">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table>
{% endif %}
</div>"""


def fragment(
    title: str,
    about: str = "",
    head: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    alarms: Iterable[str] = (),
    drawings: Iterable[Markup] = (),
) -> str:
    """Return a part of a page, for an object's output in a notebook; every text is escaped.

    Args:
        title: the first line, in bold.
        about: the second line.
        head: names of the table's columns.
        rows: cells of the table.
        alarms: lines in red.
        drawings: results of `charts.svg`.
    """
    template = environment.from_string(_FRAGMENT)
    return template.render(title=title, about=about, head=list(head), rows=list(rows),
                           alarms=list(alarms), drawings=list(drawings))  # fmt: skip


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else plain(value)


environment = Environment(
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=DictLoader({"frame": _FRAME, "figure": _FIGURE}),
)
# `{{ text|lines }}` keeps the line breaks of a text, which otherwise are shown as `\n`
environment.filters["lines"] = lambda text: escape(printable(text))
