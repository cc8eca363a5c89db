"""Fonts in SVG files: every letter of every style has its glyph."""

import base64
import io
import re
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("vl_convert")
pytest.importorskip("fontTools")

from fontTools.pens.boundsPen import BoundsPen
from fontTools.ttLib import TTFont

from frostlab.charts import still
from frostlab.fonts import with_fonts

_RULE = re.compile(
    r'@font-face\{font-family:"([^"]*)";font-weight:(\w+);font-style:(\w+);'
    r"unicode-range:([^;]*);src:url\(data:font/woff;base64,([^)]*)\)"
)
_SVG = "{http://www.w3.org/2000/svg}"


def faces(drawing: bytes) -> dict[str, list[Any]]:
    """The embedded fonts by weight; each covers the range that its rule claims."""
    fonts: dict[str, list[Any]] = {}
    for family, weight, slant, claimed, data in _RULE.findall(drawing.decode()):
        assert (family, slant) == ("Liberation Sans", "normal")
        font = TTFont(io.BytesIO(base64.b64decode(data)))
        assert [f"U+{code:X}" for code in sorted(font.getBestCmap())] == claimed.split(",")
        fonts.setdefault(weight, []).append(font)
    return fonts


def missing(drawing: bytes) -> set[str]:
    """Letters of a drawing that no embedded font has, or only without an outline."""
    fonts, without = faces(drawing), set()
    for text in ElementTree.fromstring(drawing).iter(f"{_SVG}text"):
        for letter in set("".join(text.itertext())):
            own = fonts.get(text.get("font-weight", "normal"), [])
            if not any(_has(font, letter) for font in own):
                without.add(letter)
    return without


def _has(font: Any, letter: str) -> bool:
    name = font.getBestCmap().get(ord(letter))
    if name is None:
        return False
    pen = BoundsPen(font.getGlyphSet())
    font.getGlyphSet()[name].draw(pen)
    return letter == " " or pen.bounds is not None


def chart(title: str, label: str) -> bytes:
    values = [{"row": label, "x": 1}]
    encoding = {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "row"}}
    return still({"data": {"values": values}, "mark": "point", "title": title,
                  "encoding": encoding}).encode()  # fmt: skip


def test_every_letter_has_its_glyph_and_texts_stay_texts() -> None:
    before = {"a": chart("An office", "fluffy − ± 0.5 <&>"), "b": chart("μ ≤ 3 ×", "a  b")}
    after = with_fonts(before)
    for name, drawing in after.items():
        assert missing(drawing) == set()
        assert set(faces(drawing)) == {"normal", "bold"}
        texts = [e.text for e in ElementTree.fromstring(before[name]).iter(f"{_SVG}text")]
        assert [e.text for e in ElementTree.fromstring(drawing).iter(f"{_SVG}text")] == texts
        assert len(drawing) < len(before[name]) + 20_000
    assert with_fonts(before) == after, "byte for byte"
    assert missing(before["a"]), "the check can fail"


def test_letters_that_the_first_font_lacks_come_from_another() -> None:
    drawing = with_fonts({"a": chart("结论", "ab 判定")})["a"]
    if missing(drawing):
        pytest.skip("no font here has Chinese letters")
    kinds = [sorted(font.keys())[0] for font in faces(drawing)["normal"]]
    assert len(kinds) == 2
    assert kinds.count("CFF ") <= 1


def test_a_drawing_without_texts_stays_as_it_is() -> None:
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0"/></svg>'
    assert with_fonts({"a": drawing}) == {"a": drawing}
