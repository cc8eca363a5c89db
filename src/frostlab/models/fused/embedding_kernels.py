"""Triton kernels that add rows to the rows of a table that their ids name, in a fixed order.

The rows are ordered by their ids, and rows of one id by their places. In this order, a segment is
all rows of one id, and a chunk is a fixed number of neighbours. A program adds up the rows of each
segment in its chunk, by a product with a matrix of zeros and ones. For a segment that goes on in
the next chunks, each of these programs keeps its part, and a second kernel adds the parts.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _COLUMNS = 32, 64  # rows of a chunk, and columns that a program adds up
_COUNTED = 8192  # rows; more are sorted, because counting takes a time that grows with their square
_RANKED, _COMPARED = 16, 256  # rows that a program counts for, and that it compares with at once


@triton.jit  # type: ignore[untyped-decorator]
def _rank_ids(ids, order, count, rows: tl.constexpr, compared: tl.constexpr):
    """Write the place of each row to where it comes in the order: how many rows come before it."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    own = tl.load(ids + row, row < count, 0).to(tl.int32)[:, None]
    before = tl.zeros((rows, compared), tl.int32)
    for start in range(0, count, compared):
        other = start + tl.arange(0, compared)
        found = tl.load(ids + other, other < count, 2147483647).to(tl.int32)[None, :]
        earlier = (found == own) & (other[None, :] < row[:, None])
        before += ((found < own) | earlier).to(tl.int32)
    tl.store(order + tl.sum(before, 1), row, row < count)


@triton.jit  # type: ignore[untyped-decorator]
def _add_segments(
    table, values, ids, order, firsts, heads, tails, count, width, skipped,
    adds: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Add a chunk's complete segments to the table; keep its parts of the others.

    `heads` gets the part of a segment that began in an earlier chunk, `tails` that of a segment
    that begins here and goes on, and `firsts` the first id. Rows with the id `skipped` count as 0.
    Without `adds`, the sums overwrite the table's rows.
    """
    chunk = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    number = tl.arange(0, rows)
    place = chunk * rows + number
    inside = place < count
    row = tl.load(order + place, inside, 0)
    own = tl.load(ids + row, inside, -1).to(tl.int32)
    before = tl.load(order + place - 1, inside & (place > 0), 0)
    before = tl.load(ids + before, inside & (place > 0), -1).to(tl.int32)
    segment = tl.cumsum(((own != before) & (number > 0)).to(tl.int32), 0)
    members = (segment[None, :] == number[:, None]) & inside[None, :]  # (segments, rows)
    filled = inside[:, None] & (column < width) & (own != skipped)[:, None]
    value = tl.load(values + row.to(tl.int64)[:, None] * width + column, filled, 0.0)
    sums = tl.dot(members.to(tl.float32), value.to(tl.float32), input_precision="ieee")
    target = tl.max(tl.where(members, own[None, :], -1), 1)  # the id of each segment

    first = tl.sum(tl.where(number == 0, own, 0), 0)
    earlier = tl.sum(tl.where(number == 0, before, 0), 0)
    last = tl.load(order + chunk * rows + rows - 1, chunk * rows + rows - 1 < count, 0)
    last = tl.load(ids + last, chunk * rows + rows - 1 < count, -2).to(tl.int32)
    later = tl.load(order + chunk * rows + rows, chunk * rows + rows < count, 0)
    later = tl.load(ids + later, chunk * rows + rows < count, -3).to(tl.int32)
    final = tl.max(segment, 0)  # the last segment, which may go on
    starts = (number != 0) | (first != earlier)  # whether a segment starts in this chunk
    ends = (number != final) | (last != later)  # whether it ends here
    complete = (target >= 0) & starts & ends
    written = complete[:, None] & (column < width)
    place = table + target.to(tl.int64)[:, None] * width + column
    total = sums
    if adds:  # by `fma`, because the compiler would fold a sum into the product, which then spills
        total = tl.fma(sums, 1.0, tl.load(place, written, 0.0).to(tl.float32))
    tl.store(place, total.to(table.dtype.element_ty), written)
    kept = chunk.to(tl.int64) * width + column
    kept += tl.zeros((rows, columns), tl.int64)
    head = (number == 0) & (first == earlier)
    tl.store(heads + kept, sums, head[:, None] & (column < width))
    tail = (number == final) & (last == later) & starts
    tl.store(tails + kept, sums, tail[:, None] & (column < width))
    tl.store(firsts + chunk, first)


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(
    table, firsts, heads, tails, ids, order, count, width, chunks,
    adds: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, compared: tl.constexpr,
):  # fmt: skip
    """Complete the segment that begins in a chunk and goes on in later ones, if there is one."""
    chunk = tl.program_id(0)
    end = chunk * rows + rows  # a place in the order
    last = tl.load(ids + tl.load(order + end - 1, end <= count, 0), end <= count, -1).to(tl.int32)
    follower = tl.load(firsts + chunk + 1, chunk + 1 < chunks, -2)
    first = tl.load(firsts + chunk)
    before = tl.load(order + chunk * rows - 1, chunk > 0, 0)
    before = tl.load(ids + before, chunk > 0, -1).to(tl.int32)
    if (last == follower) & ((first != last) | (before != last)):
        others = tl.zeros((compared,), tl.int32)
        for start in range(0, chunks, compared):
            other = start + tl.arange(0, compared)
            found = tl.load(firsts + other, other < chunks, -1)
            others += ((found == last) & (other > chunk)).to(tl.int32)
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        inside = column < width
        total = tl.load(tails + chunk.to(tl.int64) * width + column, inside, 0.0)
        for other in tl.range(chunk + 1, chunk + 1 + tl.sum(others, 0), num_stages=4):
            part = tl.full((), other, tl.int64) * width + column
            total += tl.load(heads + part, inside, 0.0)
        place = table + last.to(tl.int64) * width + column
        if adds:
            total += tl.load(place, inside, 0.0).to(tl.float32)
        tl.store(place, total.to(table.dtype.element_ty), inside)


def add_rows(table: Tensor, ids: Tensor, values: Tensor, skipped: int, adds: bool) -> None:
    """Add each row of `values` (N, width) to the row of the table that its id (N,) names.

    Rows with the id `skipped` are left out. Without `adds`, the rows of the table that some id
    names are overwritten by the sums. Sums are float32, and their order does not depend on which
    program was faster.
    """
    assert table.is_contiguous()
    count, width = values.shape
    if not values.numel():
        return
    if count <= _COUNTED:
        order = torch.empty(count, dtype=torch.int32, device=ids.device)
        _rank_ids[(triton.cdiv(count, _RANKED),)](
            ids, order, count, rows=_RANKED, compared=_COMPARED, num_warps=4
        )
    else:  # int32 is sorted in half the passes of int64
        order = ids.int().sort(stable=True).indices
    chunks = triton.cdiv(count, _CHUNK)
    firsts = torch.empty(chunks, dtype=torch.int32, device=ids.device)
    heads = torch.empty(chunks, width, dtype=torch.float32, device=ids.device)
    tails = torch.empty_like(heads)
    grid = (chunks, triton.cdiv(width, _COLUMNS))
    _add_segments[grid](
        table, values, ids, order, firsts, heads, tails, count, width, skipped, adds=adds,
        rows=_CHUNK, columns=_COLUMNS, num_warps=4,
    )  # fmt: skip
    _add_parts[grid](
        table, firsts, heads, tails, ids, order, count, width, chunks, adds=adds, rows=_CHUNK,
        columns=_COLUMNS, compared=_COMPARED, num_warps=4,
    )  # fmt: skip
