"""Fuzz targets of what people look at: pages, Markdown, the terminal, and texts in charts."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from markdown_it import MarkdownIt
from markupsafe import Markup

import frostlab.flow.show as flow_show
from frostlab.charts import LONGEST, checked_svg, cleaned
from frostlab.flow.measurements import Flow, GroupFacts, PartFacts, Report, load_flow
from frostlab.text import columns, escaped, markdown, plain
from fuzz.mutate import Target

_DRAWING = Markup('<svg viewBox="0 0 1 1"></svg>')
_TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "main", "h1", "h2", "p", "div",
    "strong", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg",
}  # fmt: skip


def small_flow(name: str = "layers[0].query") -> Flow:
    """Return a flow of two parts and two reports."""
    flow = Flow("GPT", "AdamW")
    flow.parts = tuple(
        PartFacts(part, "role", "", layer, "trainable", (part,), (part,), (), (0,), "float32", 4)
        for layer, part in enumerate((name, "head"))
    )
    flow.groups = (GroupFacts(0.1, 0.9, 1e-8),)
    norms = {"gradient": (0.5, 0.1), "before_clip": (1.0, 2.0), "weight": (2.0, 3.0),
             "update": (1e-3, 0.0), "distance": (0.1, 0.2), "weight_cosine": (1.0, 0.9),
             "gradient_cosine": (0.1, -0.2)}  # fmt: skip
    sizes = {"front": 0.1, "back": 0.2, "output": 0.4}
    flow.reports.extend(
        Report(step, norms, (1e-3,), (), sizes, {name: 1.0 + step}, dead={"gelu": 0.1},
               entropy={"attention": (0.5, 0.7)})
        for step in (1, 2)
    )  # fmt: skip
    return flow


class _Tags(HTMLParser):
    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS, f"the page holds <{tag}>"
        for name, value in attributes:
            assert not name.startswith("on"), f"the page holds {name}"
            assert name not in ("href", "src") or value == "data:,", f"the page links to {value}"


def check_html(text: str) -> None:
    """Raise an error if a page holds anything that its template does not."""
    parser = _Tags()
    parser.feed(text)
    parser.close()


def _flow_page(data: bytes, folder: Path) -> None:
    """Read a flow, and show it as a table, as a map and as a page without charts."""
    path = folder / "flow.json"
    path.write_bytes(data)
    flow = load_flow(path)
    _is_shown(flow_show.as_text(flow))
    _is_shown(flow_show.flow_map_text(flow))
    if flow.reports:
        maps = {"gradient": _DRAWING, "ratio": _DRAWING}
        drawn = {"norm_svg": lambda flow: _DRAWING, "front_svg": lambda flow: _DRAWING}
        with patch.multiple(flow_show, heat_svgs=lambda flow: maps, **drawn):
            check_html(flow_show.page_of(flow))


def _is_shown(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))


_RENDER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def tokens(text: str) -> list[Any]:
    """Return the tokens of a Markdown text, with those inside paragraphs."""
    return [inner for token in _RENDER.parse(text) for inner in (token, *(token.children or ()))]


def shown_text(text: str) -> str:
    """Return what a reader of a Markdown text sees."""
    return "".join(token.content for token in tokens(text) if token.type in ("text", "code_inline"))


_PLACES = (("", ""), ("- ", ": x"), ("  - ", ""), ("1. **", "** x"), ("# ", ""), ("Caution: ", "."))


def check_markdown(foreign: str) -> None:
    """Raise an error if an escaped text is obeyed anywhere where a page puts texts."""
    safe, wanted = escaped(foreign), plain(foreign).strip()
    assert escaped(safe) is safe
    for before, after in _PLACES if wanted else ():
        text = f"{before}{safe}{after}"
        assert _kinds(text) <= _kinds(f"{before}word{after}") | {"text_special"}, text
        if not after:
            assert shown_text(text).split() == wanted.split(), text
    table = markdown(["a", "b"], [[foreign, "x"]])
    assert _kinds(table) <= _kinds(markdown(["a", "b"], [["word", "x"]])) | {"text_special"}, table
    assert sum(token.type == "td_open" for token in tokens(table)) == 2


def _kinds(text: str) -> set[str]:
    return {token.type for token in tokens(text)}


def _markdown(data: bytes, folder: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    escaped(text)
    check_markdown(text[:500])  # the reader of Markdown that checks it is slow


def _terminal(data: bytes, folder: Path) -> None:
    """Show any text on one line of printable characters, and the same text again unchanged."""
    for text in (data.decode("utf-8", "surrogateescape"), data.decode("latin-1")):
        shown = plain(text)
        assert shown.isprintable()
        assert plain(shown) == shown
        shown.encode("utf-8")
        (line,) = columns([[text, "x"]])
        assert line.isprintable()


def _chart(data: bytes, folder: Path) -> None:
    """Clean a specification, which may hold anything, and check a drawing of its texts."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError):
        spec = {"title": text}
    written = json.dumps(cleaned(spec), allow_nan=False)
    for value in _strings(json.loads(written)):
        assert value.isprintable()
        assert len(value) <= LONGEST
    checked_svg(text, "name")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return [text for item in inner for text in _strings(item)] if isinstance(inner, list) else []


_TEXTS = [
    "oelm-random", "a|b`c", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "# a\nb",
    "1. a", "*a* __b__ ~~c~~ $d$", "&lt;b&gt;", "![x][y]", "[a]: http://b.c", "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://x\x07y\x1b]8;;\x07", "a\u202eb\u200bc\r\x00\x85", "[red]a[/red]", "\\",
]  # fmt: skip
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" viewBox="0 0 9 9">'
    '<g fill="url(#gradient_0)"><path aria-label="a" d="M0,0"/><text>b</text></g></svg>'
)
_ACTIVE = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:l="http://www.w3.org/1999/xlink" width="9">'
    '<script>x()</script><a l:href="javascript:x()" onload="x()"><foreignObject/></a></svg>'
)
_SPEC = {"title": "a", "data": {"values": [{"row": "b", "x": 1.5}]}, "mark": "point"}

TARGETS = {
    "flow-page": Target(
        lambda: [json.dumps(small_flow().to_dict()).encode()], _flow_page, "json"
    ),
    "markdown": Target(lambda: [text.encode() for text in _TEXTS], _markdown, "bytes"),
    "terminal": Target(lambda: [text.encode() for text in _TEXTS], _terminal, "bytes"),
    "chart": Target(
        lambda: [json.dumps(_SPEC).encode(), _SVG.encode(), _ACTIVE.encode()], _chart, "bytes"
    ),
}  # fmt: skip
