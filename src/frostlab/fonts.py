"""Embedding of fonts in SVG files, so that a figure looks the same on every machine.

The drawing library, vl-convert, draws texts with its built-in font; letters that this font lacks
come from fonts of the system. The library gives out no font files, but it can write PDF, in which
the used glyphs of each font are embedded. So, for each style of text (family, weight and slant),
all letters that the figures show in this style are written into one PDF. The fonts in the PDF get
the tables that browsers need, and become `@font-face` rules of every figure with that style. Texts
stay texts, which can be selected and searched.
"""

import base64
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from frostlab.errors import require

_TEXTS = ("{http://www.w3.org/2000/svg}text", "{http://www.w3.org/2000/svg}tspan")
_OBJECT = re.compile(rb"(\d+) 0 obj\s(.*?)\sendobj", re.DOTALL)
# an entry of a CMap, a PDF's table from the glyphs of a font to letters in UTF-16
_CODES = re.compile(rb"<([0-9A-F]{4})> <((?:[0-9A-F]{4})+)>")
_UNITS = 1000  # units per em of a CFF font in a PDF


@dataclass(frozen=True, order=True)
class Style:
    """The attributes of texts that choose a font."""

    family: str  # names of fonts, the first choice first
    weight: str
    slant: str


def require_fonts(purpose: str) -> None:
    """Import fontTools, or raise an error that names the extra to install."""
    require("fontTools", "report", purpose)


def with_fonts(drawings: Mapping[str, bytes]) -> dict[str, bytes]:
    """Embed in each SVG drawing the fonts of its texts; `drawings` maps names to drawings."""
    letters: dict[Style, set[str]] = {}
    styles: dict[str, set[Style]] = {name: set() for name in drawings}
    for name, drawing in drawings.items():
        for style, text in _texts(drawing):
            letters.setdefault(style, set()).update(text)
            styles[name].add(style)
    rules = {style: "".join(_rules(style, used)) for style, used in letters.items()}
    return {
        name: _insert(drawing, "".join(rules[style] for style in sorted(styles[name])))
        for name, drawing in drawings.items()
    }


def _insert(drawing: bytes, rules: str) -> bytes:
    """Insert the rules of a style sheet after the opening tag of the drawing."""
    if not rules:
        return drawing
    end = drawing.index(b">", drawing.index(b"<svg")) + 1
    return drawing[:end] + f"<defs><style>{rules}</style></defs>".encode() + drawing[end:]


def _texts(drawing: bytes) -> Iterator[tuple[Style, str]]:
    """Yield every text of a drawing with its style; attributes are inherited."""

    def walk(element: ElementTree.Element, style: Style) -> Iterator[tuple[Style, str]]:
        style = Style(
            element.get("font-family", style.family),
            element.get("font-weight", style.weight),
            element.get("font-style", style.slant),
        )
        if element.tag in _TEXTS:
            yield style, element.text or ""
        for child in element:
            yield from walk(child, style)
            if element.tag in _TEXTS:
                yield style, child.tail or ""

    yield from walk(ElementTree.fromstring(drawing), Style("", "normal", "normal"))


def _rules(style: Style, letters: Iterable[str]) -> Iterator[str]:
    """Yield the `@font-face` rules of a style: one for each font that its letters need."""
    name = style.family.partition(",")[0].strip().strip("\"'")
    shown = sorted(letter for letter in letters if letter.isprintable())
    if not name or not shown:
        return
    for font in _fonts(style, shown):
        codes = sorted(font.getBestCmap())
        data = io.BytesIO()
        font.save(data)
        address = base64.b64encode(data.getvalue()).decode()
        yield (
            f'@font-face{{font-family:"{escape(name)}";font-weight:{style.weight};'
            f"font-style:{style.slant};unicode-range:{','.join(f'U+{code:X}' for code in codes)};"
            f'src:url(data:font/woff;base64,{address})format("woff")}}'
        )


def _fonts(style: Style, letters: Iterable[str]) -> list[Any]:
    """Return the fonts with which the drawing library draws letters, in order of their names."""
    vl_convert = require("vl_convert", "report", "drawing a chart")
    # one text for each letter, so that no ligatures form; a lone space would be dropped
    texts = "".join(
        f'<text xml:space="preserve">{"n n" if letter == " " else escape(letter)}</text>'
        for letter in letters
    )
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">'
        f"<g font-family={quoteattr(style.family)} font-weight={quoteattr(style.weight)} "
        f"font-style={quoteattr(style.slant)}>{texts}</g></svg>"
    )
    objects = {
        int(number): body for number, body in _OBJECT.findall(vl_convert.svg_to_pdf(drawing))
    }
    fonts = {}
    for body in objects.values():
        if b"/DescendantFonts" not in body:
            continue
        descriptor = objects[
            _reference(objects[_reference(body, "DescendantFonts")], "FontDescriptor")
        ]
        codes = {
            ord(letter): int(glyph, 16)
            for glyph, code in _CODES.findall(_stream(objects[_reference(body, "ToUnicode")]))
            if len(letter := bytes.fromhex(code.decode()).decode("utf-16-be", "replace")) == 1
        }
        codes = {code: glyph for code, glyph in codes.items() if glyph}  # 0: not in the font
        title = re.search(rb"/FontName /(?:\w+\+)?([\w-]+)", descriptor)
        for key, make in (("FontFile2", _true_type), ("FontFile3", _cff)):
            if codes and title is not None and f"/{key}".encode() in descriptor:
                data = _stream(objects[_reference(descriptor, key)])
                fonts[title[1].decode()] = make(data, codes, title[1].decode())
    return [fonts[title] for title in sorted(fonts)]


def _reference(body: bytes, key: str) -> int:
    """Return the number of the object that a key of a PDF object refers to."""
    match = re.search(rb"/" + key.encode() + rb" \[?(\d+) 0 R", body)
    assert match is not None, key
    return int(match[1])


def _stream(body: bytes) -> bytes:
    head, _, data = body.partition(b"stream")
    data = data.lstrip(b"\r\n")
    return zlib.decompressobj().decompress(data) if b"/FlateDecode" in head else data


def _true_type(data: bytes, codes: Mapping[int, int], title: str) -> Any:
    """Return a TrueType font of a PDF, without its hinting for small screens."""
    from fontTools.ttLib import TTFont

    font = TTFont(io.BytesIO(data), recalcTimestamp=False)
    for name in ("cvt ", "fpgm", "prep"):
        if name in font:
            del font[name]
    for name in font.getGlyphOrder():
        font["glyf"][name].removeHinting()
    return _completed(font, codes, title)


def _cff(data: bytes, codes: Mapping[int, int], title: str) -> Any:
    """Return a font with PostScript outlines, of which a PDF holds only the CFF table."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.basePen import NullPen
    from fontTools.ttLib import TTFont, newTable

    font = TTFont(sfntVersion="OTTO", recalcTimestamp=False)
    font["CFF "] = newTable("CFF ")
    font["CFF "].decompile(data, font)
    outlines = font["CFF "].cff[0]
    font.setGlyphOrder(outlines.getGlyphOrder())
    for part in getattr(outlines, "FDArray", ()):
        # The FontMatrix of a part (an element of FDArray) multiplies that of the whole font.
        # fontTools does not write the whole font's, because it is the default, so the part's must
        # go, too.
        part.rawDict.pop("FontMatrix", None)
    widths = {}
    for name in font.getGlyphOrder():
        outline = outlines.CharStrings[name]
        outline.draw(NullPen())
        widths[name] = (round(outline.width), 0)
    builder = FontBuilder(font=font)
    builder.setupHead(unitsPerEm=_UNITS, created=0, modified=0)
    builder.setupHorizontalMetrics(widths)
    builder.setupHorizontalHeader(ascent=880, descent=-120)
    builder.setupMaxp()
    return _completed(font, codes, title)


def _completed(font: Any, codes: Mapping[int, int], title: str) -> Any:
    """Add the tables that a browser needs and a font in a PDF lacks."""
    from fontTools.fontBuilder import FontBuilder

    order = font.getGlyphOrder()
    builder = FontBuilder(font=font)
    builder.setupCharacterMap({code: order[glyph] for code, glyph in codes.items()})
    builder.setupNameTable({"familyName": title, "styleName": "subset"})
    builder.setupOS2()
    builder.setupPost(keepGlyphNames=False)
    font.flavor = "woff"
    return font
