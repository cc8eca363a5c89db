"""Rows are sets of indices; every operation is checked against plain indexing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from frostlab.roles.parts import Rows, join


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    cuts = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6)))
    cuts = cuts[: len(cuts) // 2 * 2]
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    return Rows(draw(st.integers(cuts[-1], 14)), draw(st.integers(1, 4)), spans)


def indices(rows: Rows) -> list[int]:
    return [
        r * rows.period + i
        for r in range(rows.repeats)
        for start, stop in rows.spans
        for i in range(start, stop)
    ]


@given(some_rows())
def test_take_put_and_ranges_are_plain_indexing(rows: Rows) -> None:
    for axis, shape in ((0, (rows.size, 3)), (1, (3, rows.size))):
        whole = torch.randn(shape)
        index = torch.tensor(indices(rows))
        taken = rows.take(whole, axis)
        assert torch.equal(taken, whole.index_select(axis, index))
        changed, expected = whole.clone(), whole.clone()
        rows.put(changed, taken + 1, axis)
        expected.index_copy_(axis, index, taken + 1)
        assert torch.equal(changed, expected)
    spread = [i for start, stop in rows.ranges() for i in range(start, stop)]
    assert spread == indices(rows)
    assert len(rows) == len(spread)


@given(some_rows())
def test_rows_and_the_rest_make_the_whole(rows: Rows) -> None:
    rest = rows.rest()
    assert sorted(indices(rows) + indices(rest)) == list(range(rows.size))
    whole = torch.randn(rows.size, 2)
    if len(rest):
        assert torch.equal(join(rows, rows.take(whole), rest.take(whole)), whole)
        assert (rows | rest) == Rows(rows.period, rows.repeats, ((0, rows.period),))
    columns = whole.t().contiguous()
    if len(rest):
        assert torch.equal(join(rows, rows.take(columns, 1), rest.take(columns, 1), 1), columns)
