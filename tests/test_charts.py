"""Charts: any text and any number can be drawn, and a drawing holds only shapes and text."""

import subprocess
import sys

import pytest

from frostlab.charts import LONGEST, checked_svg, label, still, svg, themed
from frostlab.errors import FrostlabError

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" viewBox="0 0 9 9">'
_DRAW = """
import math
from frostlab.charts import png, svg
for code in (0, 1, 8, 0x1b, 0x7f, 0x85, 0x202e, 0xd800, 0xfffe, 0xffff, 0x10ffff):
    text = f"a{chr(code)}</text><script>]]>&\\"'"
    values = [{"row": text, "x": x} for x in (1, math.nan, math.inf, 10**400)]
    spec = {"data": {"values": values}, "mark": "point", "title": text, "encoding": {
        "x": {"field": "x", "type": "quantitative"}, "y": {"field": "row", "type": "nominal"},
        "description": {"field": "row"}}}
    drawing = svg(spec, "name")
    assert "<script" not in drawing and "&lt;script&gt;" in drawing
png(spec, 1)
"""


def test_no_character_ends_the_process() -> None:
    """The drawing library aborts at characters that XML lacks, so this is a process of its own."""
    pytest.importorskip("vl_convert")
    made = subprocess.run([sys.executable, "-c", _DRAW], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stderr) == (0, "")


def test_a_long_label_is_cut_before_it_is_drawn() -> None:
    pytest.importorskip("vl_convert")
    spec = {
        "data": {"values": [{"row": "x" * 200_000 + "end"}]}, "mark": "point",
        "encoding": {"y": {"field": "row", "type": "nominal"}},
    }  # fmt: skip
    assert len(svg(spec, "name")) < 20_000
    assert label("x" * 200_000 + "end").endswith("xend")
    assert len(label("x" * 200_000, LONGEST)) == LONGEST


def test_the_opacity_of_a_shape_belongs_to_what_it_paints() -> None:
    pytest.importorskip("vl_convert")
    marks = [
        {"type": "area", "opacity": 0.2},
        {"type": "line", "opacity": 0.5, "strokeOpacity": 0.6},
        {"type": "bar", "opacity": 0.75, "stroke": "red"},  # fill and stroke overlap
    ]
    encoding = {field: {"field": field, "type": "quantitative"} for field in ("x", "y")}
    values = [{"x": 0, "y": 1}, {"x": 1, "y": 2}]
    layers = [{"mark": mark, "encoding": encoding} for mark in marks]
    drawing = still({"data": {"values": values}, "layer": layers})
    assert drawing.count(' fill-opacity="0.2"') == 1
    assert drawing.count(' stroke-opacity="0.3"') == 1
    assert drawing.count(' opacity="0.75"') == 2
    assert drawing.count(' opacity="0') == 2


def test_what_cannot_be_drawn_is_one_line() -> None:
    pytest.importorskip("vl_convert")
    with pytest.raises(FrostlabError, match="^the chart cannot be drawn: .*$"):
        svg({"mark": "no such mark", "data": {"values": []}}, "name")


@pytest.mark.parametrize(
    "inside",
    [
        "<script>x()</script>", '<g onload="x()"/>', "<foreignObject/>", "<image/>", "<a/>",
        '<g href="javascript:x()"/>', '<path fill="url(http://a.b)"/>', "<style>a{}</style>",
        '<g xmlns:l="http://www.w3.org/1999/xlink" l:href="#a"/>', "<!-- a -->", "<g>", "\x00",
        '<animate attributeName="href"/>', "<use/>", '<b xmlns="http://www.w3.org/1999/xhtml"/>',
    ],
)  # fmt: skip
def test_a_drawing_that_can_act_is_refused(inside: str) -> None:
    with pytest.raises(FrostlabError, match="^the chart "):
        checked_svg(f"{HEAD}{inside}</svg>", "name")
    bomb = '<!DOCTYPE svg [<!ENTITY a "b">]>'
    with pytest.raises(FrostlabError, match="a declaration or a comment"):
        checked_svg(f"{bomb}{HEAD}&a;</svg>", "name")


def test_a_second_drawing_is_the_same() -> None:
    pytest.importorskip("vl_convert")
    spec = {
        "data": {"values": [{"x": 1}, {"x": 2}]}, "mark": {"type": "point", "clip": True},
        "encoding": {"x": {"field": "x", "type": "quantitative"}},
    }  # fmt: skip
    first = svg(spec, "name")
    assert 'id="name-id0"' in first
    assert "url(#name-id0)" in first
    assert svg(spec, "name") == first


def test_ids_and_tooltips() -> None:
    drawing = checked_svg(
        f'{HEAD}<defs><clipPath id="clip0"/></defs>'
        '<path aria-label="a &lt;b&gt;" clip-path="url(#clip0)" class="x" d="M0,0"/></svg>',
        "flow",
    )
    assert drawing == (
        '<svg aria-hidden="true" viewBox="0 0 9 9" style="width:9px"><defs>'
        '<clipPath id="flow-clip0" /></defs><path clip-path="url(#flow-clip0)" d="M0,0">'
        "<title>a &lt;b&gt;</title></path></svg>"
    )


def test_a_drawing_does_not_depend_on_those_before() -> None:
    pytest.importorskip("vl_convert")
    x = {"field": "a", "type": "quantitative"}
    chart = {"mark": {"type": "bar", "clip": True}, "encoding": {"x": x},
             "data": {"values": [{"a": 1}]}}  # fmt: skip
    first, second = (svg(themed(chart, in_page=True), "name") for _ in range(2))
    assert first == second
    assert "url(#name-id0)" in first
