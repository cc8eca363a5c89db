"""A report as one HTML file, which needs no other file and loads nothing.

The page holds every figure as an SVG picture. If the browser runs JavaScript, Vega, which the page
contains, draws the same charts again, so that a reader can point at them, zoom, and hide arms. The
page's Content-Security-Policy forbids every request, and allows two scripts only: Vega and
report.js.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from frostlab.charts import PALETTE, cleaned, label, page_svg, require_drawing, still, themed
from frostlab.html import environment
from frostlab.pages.content import Block, Document, Figure, Paragraph, Table
from frostlab.pages.languages.phrases import translated
from frostlab.pages.languages.sentences import in_its_language
from frostlab.storage import build_once, cache_folder

_BUNDLE = "vega.js"


def page(document: Document, drawings: Mapping[str, str] | None = None) -> str:
    """Return the HTML of a report.

    `drawings` has, by name, the SVG that `charts.still` drew of each figure; if it is None, the
    figures are drawn here.
    """
    document = in_its_language(document)
    if drawings is None:
        drawings = {figure.name: still(figure.chart) for figure in document.figures}
    scripts = [vega(), _file("report.js")]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = (
        # Vega compiles its expressions, which 'unsafe-eval' allows; all of them are frostlab's.
        f"default-src 'none'; script-src {hashes} 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    arms = [
        {"name": arm, "label": label(arm), "colour": Markup(colour_of(number))}
        for number, arm in enumerate(document.arms)
    ]
    language = document.language
    sections = [
        {
            "name": section.name,
            "title": section.title,
            "blocks": _blocks(section.blocks, drawings),
        }
        for section in document.sections
    ]
    template = environment.from_string(_file("report.html.jinja"))
    return template.render(
        title=document.title, about=document.about, language=language, arms=arms,
        switch=translated("light or dark", language), files=translated("Files:", language),
        first=_blocks(document.first, drawings), sections=sections,
        problems=document.problems, policy=policy, style=Markup(_file("report.css")),
        vega=Markup(scripts[0]), script=Markup(scripts[1]),
    )  # fmt: skip


def colour_of(number: int) -> str:
    """Return the colour of an arm, by its place among the report's arms, from 0."""
    return PALETTE[number % len(PALETTE)]


def _file(name: str) -> str:
    return files("frostlab.pages").joinpath(name).read_text(encoding="utf-8")


def _blocks(blocks: Sequence[Block], drawings: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the template's values for blocks; list items that follow each other form one list."""
    listed = groupby(blocks, lambda block: isinstance(block, Paragraph) and block.item)
    return [
        values
        for is_list, members in listed
        for values in (
            [{"kind": "list", "entries": list(members)}]
            if is_list
            else (_block(member, drawings) for member in members)
        )
    ]


def _block(block: Block, drawings: Mapping[str, str]) -> dict[str, Any]:
    values = {field.name: getattr(block, field.name) for field in fields(block)}
    if isinstance(block, Table):
        values["numeric"] = block.numeric
    if isinstance(block, Figure):
        values["svg"] = page_svg(drawings[block.name], block.name)
        values["spec"] = _data(cleaned(themed(block.chart, in_page=True)))
    return values | {"kind": type(block).__name__.lower()}


def _data(value: Any) -> Markup:
    """Return a value as JSON that cannot close the script element around it."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def vega() -> str:
    """Return the scripts of Vega, Vega-Lite and Vega-Embed, which are bundled once and cached."""
    _, vl_convert = require_drawing("a report")
    return (build_vega(vl_convert.javascript_bundle) / _BUNDLE).read_text(encoding="utf-8")


def build_vega(bundle: Callable[[], str]) -> Path:
    """Return the cached folder with Vega's scripts; `bundle` makes them if there is none yet."""
    _, vl_convert = require_drawing("a report")

    def build(folder: Path) -> None:
        scripts = bundle().replace("</script", "<\\/script")
        (folder / _BUNDLE).write_text(scripts, encoding="utf-8")

    version = f"{vl_convert.get_vega_version()}-{vl_convert.get_vega_embed_version()}"
    return build_once(cache_folder(None) / "vega" / version, build)
