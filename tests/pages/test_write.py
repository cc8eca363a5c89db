"""The files of a report."""

import altair as alt
import pytest

from frostlab.drawing import Drawer
from frostlab.pages.content import Document, Figure
from frostlab.pages.write import _files


@pytest.mark.parametrize("caution", [None, "scale tiny"])
def test_a_figure_that_is_shown_alone_has_the_caution(caution: str | None) -> None:
    chart = alt.Chart(alt.Data(values=[{"x": 1}])).mark_point().encode(x="x:Q")
    figure = Figure("drawn", "A title", chart, "What it shows.", [{"x": 1}])
    document = Document("title", "about", (figure,), (), caution=caution)
    with Drawer() as drawer:
        drawing = _files(document, drawer)["figures/drawn.svg"].decode()
    assert ("Caution: scale tiny" in drawing) == (caution is not None)
