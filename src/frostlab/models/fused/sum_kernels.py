"""A Triton kernel that completes sums over rows: it adds the partial sums of many programs.

The partial sums are called shares.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from frostlab.devices import multiprocessors

_ROWS, _COLUMNS = 256, 16  # of the block of shares that a program loads at once


@triton.jit  # type: ignore[untyped-decorator]
def _add_shares(
    shares, first, second, third, programs, width,
    lines: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add the shares of all programs in a fixed order, for some columns of one of `lines` sums."""
    line = tl.program_id(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    begin = shares + line * width + column[None, :]
    added = tl.zeros((rows, columns), tl.float32)
    for start in range(0, programs, rows):
        program = (start + tl.arange(0, rows)[:, None]).to(tl.int64)
        inside = (program < programs) & (column < width)[None, :]
        added += tl.load(begin + program * lines * width, inside, 0.0)
    total = tl.sum(added, 0)
    if line == 0:
        tl.store(first + column, total.to(first.dtype.element_ty), column < width)
    elif line == 1:
        tl.store(second + column, total.to(second.dtype.element_ty), column < width)
    else:
        tl.store(third + column, total.to(third.dtype.element_ty), column < width)


def add_shares(shares: Tensor, sums: Sequence[Tensor]) -> None:
    """Add shares of shape (programs, lines, width) over the programs.

    Each line belongs to one sum, such as the gradient of a bias. `sums` are up to three tensors of
    `width` elements; the first receives the sum of line 0, and so on.
    """
    programs, lines, width = shares.shape
    first, second, third = (sums[min(i, len(sums) - 1)] for i in range(3))
    _add_shares[(triton.cdiv(width, _COLUMNS), len(sums))](
        shares, first, second, third, programs, width,
        lines=lines, columns=_COLUMNS, rows=_ROWS, num_warps=8,
    )  # fmt: skip


def programs_down(x: Tensor, across: int, rows: int, per_processor: int) -> int:
    """Return into how many parts to divide the rows of x, with its columns in `across` parts.

    A program takes one part of the rows and one of the columns. There are about `per_processor`
    programs per multiprocessor, or fewer, because no part is smaller than a block of `rows` rows.
    """
    processors = multiprocessors(x.device)
    most = triton.cdiv(x.numel() // x.shape[-1], rows)
    return max(1, min(triton.cdiv(per_processor * processors, across), most))
