"""The theme of all charts, and their drawing as files and as SVG that is safe in a page.

Texts in a chart come from models and data, so they can be anything. The drawing library aborts the
whole process at a character that XML does not allow, and takes minutes for a very long label.
`cleaned` escapes such characters and shortens long texts before a chart is drawn.
"""

import json
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from xml.etree import ElementTree

from markupsafe import Markup

from frostlab.errors import FrostlabError, first_line, require
from frostlab.text import plain

_Drawing = TypeVar("_Drawing", str, bytes)
# Colours of arms (the variants in a comparison), which differ for people with every kind of colour
# vision (after Okabe and Ito) and are legible on white and on black.
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a8760b", "#3f9bd9", "#8a63b0", "#7f7f7f",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
GREY, RED = "#8c8c8c", "#d62728"
_FONT = "Liberation Sans, Arial, Helvetica, Noto Sans CJK SC, Noto Sans CJK JP, sans-serif"
_INK = "#222222"  # text on white; in a page, text has the page's own colour
LONGEST = 100  # most characters of a text in a chart
_LARGEST = 1e300  # larger numbers, such as infinity, are not drawn
_PIXELS = 2  # pixels of a PNG per unit of length of a drawing
LABEL = 40  # most characters of a label at an axis: the width of a long one is slow to measure
# an id that the drawing library numbers, such as clip3, where it is defined or used
_ID = re.compile(r'( id="|"url\(#)((?:clip|gradient_)\d+)(?=[")])')
_ATTRIBUTE = re.compile(r' ([\w:-]+)="([^"]*)"')
_SHAPE = re.compile(r'<(path|rect|line|circle)((?: [\w:-]+="[^"]*")+)(/?)>')
# the only elements and attributes of a drawing in a page
_ELEMENTS = frozenset({
    "svg", "g", "path", "rect", "circle", "line", "text", "tspan", "title", "defs", "clipPath",
    "linearGradient", "stop",
})  # fmt: skip
_ATTRIBUTES = frozenset({
    "clip-path", "cx", "cy", "d", "display", "dominant-baseline", "fill", "fill-opacity",
    "fill-rule", "font-family", "font-size", "font-style", "font-weight", "gradientUnits", "height",
    "id", "offset", "opacity", "pointer-events", "r", "stop-color", "stroke", "stroke-dasharray",
    "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit", "stroke-opacity",
    "stroke-width", "text-anchor", "transform", "viewBox", "width", "x", "x1", "x2", "y", "y1",
    "y2",
})  # fmt: skip
INNER_CHARTS = ("layer", "hconcat", "vconcat", "concat")  # keys of a chart that holds charts
_NAMESPACE = "{http://www.w3.org/2000/svg}"


def require_drawing(purpose: str) -> tuple[Any, Any]:
    """Import altair and vl_convert, or raise an error that names the extra to install."""
    return require("altair", "report", purpose), require("vl_convert", "report", purpose)


def label(text: str, most: int = LABEL) -> str:
    """Return a text for a chart; a long one loses its beginning, because its end says more."""
    text = plain(text)
    return text if len(text) <= most else f"…{text[1 - most :]}"


def themed(
    chart: Any, in_page: bool, data: dict[str, Sequence[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """Return a chart's specification in frostlab's theme, for a page or on a white background.

    `chart` is an Altair chart or its specification; a theme that it has already is replaced.
    `data` maps the names of its datasets to their rows, which are only added here, because Altair
    copies and validates all data at every call.
    """
    ink = "currentColor" if in_page else _INK
    spec = dict(chart) if isinstance(chart, dict) else chart.to_dict(validate=False)
    config = spec.get("config", {})
    text = {"labelColor": ink, "titleColor": ink}
    spec["config"] = config | {
        "background": "transparent" if in_page else "white",
        "font": _FONT,
        "axis": text | {"domainColor": GREY, "tickColor": GREY, "titleFontWeight": "normal",
                        "labelFontSize": 11, "titleFontSize": 12, "gridColor": GREY,
                        "gridOpacity": 0.25},
        "legend": text | {"labelFontSize": 12},
        "header": text,
        "title": {"color": ink, "fontSize": 13},
        "text": {"color": ink},
        "range": {"category": list(PALETTE), "symbol": list(SHAPES)},
        "view": config.get("view", {}) | {"stroke": None},
    }  # fmt: skip
    spec["datasets"] = {**spec.get("datasets", {}), **(data or {})}
    return spec


def png(spec: dict[str, Any], scale: float) -> bytes:
    """Draw a Vega-Lite specification as a PNG file."""
    _, vl_convert = require_drawing("drawing a chart")
    return _compressed(_draw(spec, partial(vl_convert.vegalite_to_png, scale=scale)))


def still(chart: Any, draw: Callable[[str], str] | None = None) -> str:
    """Draw a chart or its specification as SVG on a white background, without zoom.

    A chart that can be zoomed clips its marks at the axes. A still picture shows all marks anyway,
    so zoom and clipping are removed; turning clipped SVG into PNG takes several times as long.
    `draw` turns a specification, as JSON, into SVG; `drawing.Drawer.svg` does so in another
    process. By default, this process draws.
    """
    spec = themed(chart, in_page=False)
    if _has_zoom(spec):
        spec = _unclipped(spec)
    return _SHAPE.sub(_with_own_opacity, _drawn_svg(spec, draw))


def _has_zoom(spec: dict[str, Any]) -> bool:
    members = [member for key in INNER_CHARTS for member in spec.get(key, [])]
    own = any(param.get("bind") == "scales" for param in spec.get("params", []))
    return own or any(map(_has_zoom, members))


def _unclipped(spec: dict[str, Any]) -> dict[str, Any]:
    spec = dict(spec)
    if isinstance(spec.get("mark"), dict):
        spec["mark"] = {key: value for key, value in spec["mark"].items() if key != "clip"}
    if "params" in spec:
        spec["params"] = [param for param in spec["params"] if param.get("bind") != "scales"]
    for key in INNER_CHARTS:
        if key in spec:
            spec[key] = list(map(_unclipped, spec[key]))
    return spec


def _with_own_opacity(shape: re.Match[str]) -> str:
    """Move the opacity of a shape to its fill or stroke, if the shape has only one of the two.

    The shape looks the same, but becomes PNG several times faster, because nothing is blended.
    """
    attributes = dict(_ATTRIBUTE.findall(shape[2]))
    painted = [paint for paint in ("fill", "stroke")
               if attributes.get(paint, "none") not in ("none", "transparent")]  # fmt: skip
    opacity = float(attributes.get("opacity", 1))
    if opacity == 1 or len(painted) != 1:
        return shape[0]
    del attributes["opacity"]
    own = f"{painted[0]}-opacity"
    attributes[own] = f"{opacity * float(attributes.get(own, 1)):.6g}"
    written = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f"<{shape[1]}{written}{shape[3]}>"


def page_svg(drawing: str, name: str) -> Markup:
    """Return a drawing by `still` in the colours of the page's text and background."""
    drawing = drawing.replace('fill="white"', 'fill="transparent"', 1)  # the background comes first
    return checked_svg(drawing.replace(f'"{_INK}"', '"currentColor"'), name)


def figure_files(drawing: str) -> dict[str, bytes]:
    """Return the files of a drawing by `still`: extension (svg, png, pdf) → content."""
    _, vl_convert = require_drawing("drawing a chart")
    return {
        "svg": drawing.encode(),
        "png": vl_convert.svg_to_png(drawing, scale=_PIXELS),
        "pdf": vl_convert.svg_to_pdf(drawing),
    }


def svg(spec: dict[str, Any], name: str) -> Markup:
    """Draw a Vega-Lite specification as SVG for a page, with tooltips and a flexible width.

    The ids of the drawing begin with `name`, because a page can hold several drawings.
    """
    return checked_svg(_drawn_svg(spec), name)


def _drawn_svg(spec: dict[str, Any], draw: Callable[[str], str] | None = None) -> str:
    _, vl_convert = require_drawing("drawing a chart")
    return _numbered(_draw(spec, draw or vl_convert.vegalite_to_svg))


def _draw(spec: dict[str, Any], draw: Callable[[str], _Drawing]) -> _Drawing:
    text = json.dumps(cleaned(spec), allow_nan=False)
    try:
        return draw(text)
    except ValueError as error:  # the only error of vl_convert; its text is a JavaScript trace
        lines = str(error).splitlines()
        reason = lines[1] if len(lines) > 1 else first_line(error)
        raise FrostlabError(f"the chart cannot be drawn: {plain(reason)}") from None


def _numbered(drawing: str) -> str:
    """Number the ids of a drawing from 0; the library continues the previous drawing's numbers."""
    numbers: dict[str, int] = {}
    for match in _ID.finditer(drawing):
        numbers.setdefault(match[2], len(numbers))
    return _ID.sub(lambda match: f"{match[1]}id{numbers[match[2]]}", drawing)


def cleaned(value: Any) -> Any:
    """Return a specification with short printable texts, and None for NaN and huge numbers."""
    if isinstance(value, dict):
        return {cleaned(key): cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(inner) for inner in value]
    if isinstance(value, str):
        return label(value, LONGEST)
    if isinstance(value, bool) or value is None:
        return value
    return value if abs(value) < _LARGEST else None  # NaN is not less


def checked_svg(drawing: str, name: str) -> Markup:
    """Return a drawing as markup that has only shapes and text.

    Other elements, event handlers and links are refused; other unknown attributes are removed.
    """
    try:
        if "<!" in drawing:
            raise ElementTree.ParseError("it holds a declaration or a comment")
        root = ElementTree.fromstring(drawing)
        width = float(root.get("width", ""))
    except (ElementTree.ParseError, ValueError) as error:
        raise FrostlabError(f"the chart is not valid SVG: {plain(first_line(error))}") from None
    for element in root.iter():
        _simplify(element, name)
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib |= {"aria-hidden": "true", "viewBox": box, "style": f"width:{width:g}px"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _simplify(element: ElementTree.Element, name: str) -> None:
    """Check an element and its attributes, turn its label into a tooltip, and prefix its ids."""
    tag = str(element.tag).removeprefix(_NAMESPACE)
    if tag not in _ELEMENTS:
        raise FrostlabError(f"the chart holds an element `{plain(tag)}`, not allowed in a page")
    element.tag = tag
    tooltip = element.get("aria-label")
    for key, value in list(element.attrib.items()):
        if key.startswith("on") or key.endswith("href"):
            raise FrostlabError(
                f"the chart holds an attribute `{plain(key)}`, not allowed in a page"
            )
        if key not in _ATTRIBUTES:
            del element.attrib[key]
        elif key == "id":
            element.set(key, f"{name}-{value}")
        elif "url(" in value:
            if not re.fullmatch(r"url\(#\w+\)", value):
                raise FrostlabError(f"the chart refers to {plain(value)}, not to a part of itself")
            element.set(key, value.replace("#", f"#{name}-"))
    if tooltip and tag == "path":
        ElementTree.SubElement(element, "title").text = tooltip


def _compressed(png: bytes) -> bytes:
    """Recompress a PNG at the highest zlib level, which makes it about eight times smaller."""
    # after 8 bytes of signature come chunks: length (4 bytes), kind (4), content, checksum (4)
    at, data, output = 8, b"", png[:8]
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        elif kind == b"IEND":
            body = b"IDAT" + zlib.compress(zlib.decompress(data), 9)
            output += struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        if kind != b"IDAT":
            output += png[at : at + 12 + size]
        at += 12 + size
    return output
