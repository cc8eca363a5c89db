"""The second process that draws charts: the same drawings, clear errors, and it ends."""

import os
import signal
from pathlib import Path

import pytest

from frostlab.charts import still
from frostlab.drawing import Drawer
from frostlab.errors import FrostlabError

pytest.importorskip("vl_convert")
pytest.importorskip("altair")
CHART = {
    "data": {"values": [{"row": "naïve \n <b>", "x": 1.5}]}, "mark": "bar",
    "encoding": {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "row"}},
}  # fmt: skip


def process_of(drawer: Drawer) -> int:
    assert drawer._process is not None
    return drawer._process.pid


def test_a_drawing_is_the_same_in_either_process() -> None:
    other = CHART | {"mark": {"type": "point", "clip": True}}
    with Drawer() as drawer:
        drawn = [drawer.later(still, chart, drawer.svg) for chart in (CHART, other, CHART)]
        assert [drawing.result() for drawing in drawn] == [still(CHART), still(other), still(CHART)]


def test_what_cannot_be_drawn_is_one_line_and_the_next_chart_is_drawn() -> None:
    with Drawer() as drawer:
        with pytest.raises(FrostlabError, match="^the chart cannot be drawn: .*$"):
            still({"mark": "no such mark", "data": {"values": []}}, drawer.svg)
        assert still(CHART, drawer.svg) == still(CHART)


def test_a_process_that_was_killed_is_named_and_replaced() -> None:
    with Drawer() as drawer:
        os.kill(process_of(drawer), signal.SIGKILL)
        with pytest.raises(FrostlabError, match=r"charts ended \(signal 9\)$"):
            drawer.later(still, CHART, drawer.svg).result()
        assert drawer.later(still, CHART, drawer.svg).result() == still(CHART)


def test_the_process_ends_with_the_block() -> None:
    with Drawer() as drawer:
        process = process_of(drawer)
        waiting = [drawer.later(still, CHART, drawer.svg) for _ in range(100)]
    assert not Path(f"/proc/{process}").exists()
    assert waiting[-1].cancelled()
