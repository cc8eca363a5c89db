"""Triton kernels: the norm of many tensors' gradients, and AdamW over these tensors.

The kernels read addresses from a table. Each row has the addresses of a tensor's weight, two
moments, gradient, bf16 copy (or 0) and step count; then the tensor's size, whether its gradient is
bf16, and whether it is even: whether its size and these addresses are multiples of 16, so that wide
loads are possible. Several rows may be stretches of one parameter, with one step count. A tensor is
divided into blocks: `owners` and `starts` have an entry per block, its row and its first element.
"""

# mypy: disable-error-code="assignment, unreachable"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tensor that is not even which a program handles at once. With more, the program
# would take more registers, and fewer programs would run at a time.
_PART = 512
_WARPS, _NORM_WARPS = 8, 4  # of a program that updates a block, and of one that adds its squares
# Blocks whose sums the one program of `_clipping` adds at once, and its warps.
_CHUNK, _CHUNK_WARPS = 8192, 32


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    row, places, inside, aligned: tl.constexpr, half: tl.constexpr
):
    """Return elements of a gradient in float32; `aligned` divides its address (0: unknown)."""
    dtype: tl.constexpr = tl.bfloat16 if half else tl.float32
    gradient = tl.load(row + 3).to(tl.pointer_type(dtype))
    if aligned > 0:
        gradient = tl.multiple_of(gradient, aligned)
    return tl.load(gradient + places, inside, 0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_squares(  # type: ignore[no-untyped-def]
    row, start, even: tl.constexpr, half: tl.constexpr, block: tl.constexpr
):
    """Return the sum of squares of some elements of a gradient."""
    size = tl.load(row + 6)
    if even:
        size = tl.multiple_of(size, 16)
    places = start + tl.arange(0, block)
    g = _gradient(row, places, places < size, 16 if even else 0, half)
    return tl.sum(g * g, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _squares(  # type: ignore[no-untyped-def]
    table, owners, starts, squares, columns: tl.constexpr, block: tl.constexpr, part: tl.constexpr
):
    """Write the sum of squares of one block of a gradient per program."""
    row = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * columns
    start = tl.multiple_of(tl.load(starts + tl.program_id(0)), block)
    half, even = tl.load(row + 7) != 0, tl.load(row + 8) != 0
    total = 0.0
    if even:
        if half:
            total = _sum_of_squares(row, start, True, True, block)
        else:
            total = _sum_of_squares(row, start, True, False, block)
    else:
        for at in range(0, block, part):
            if half:
                total += _sum_of_squares(row, start + at, False, True, part)
            else:
                total += _sum_of_squares(row, start + at, False, False, part)
    tl.store(squares + tl.program_id(0), total)


@triton.jit  # type: ignore[untyped-decorator]
def _clipping(squares, owners, values, blocks, clip, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the five values of `measure_gradients`, in one program, whose order of sums is fixed.

    `squares` has the sum of squares of each block.
    """
    total = tl.zeros((chunk,), tl.float64)
    broken = tl.full((chunk,), blocks, tl.int32)  # the first block that is not finite
    for first in range(0, blocks, chunk):
        places = first + tl.arange(0, chunk)
        square = tl.load(squares + places, places < blocks, 0.0)
        total += square.to(tl.float64)
        # NaN is not below infinity, either
        broken = tl.minimum(broken, tl.where(square < float("inf"), blocks, places))
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    factor = tl.div_rn(clip, norm + 1e-6)
    factor = tl.where(factor > 1.0, 1.0, factor)  # NaN stays NaN
    block = tl.min(broken, 0)
    stops = block < blocks
    index = tl.load(owners + block, stops, 0)
    tl.store(values, norm)
    tl.store(values + 1, factor)
    tl.store(values + 2, tl.where(stops, index, -1).to(tl.float32))
    tl.store(values + 3, tl.div_rn(1.0, factor))
    tl.store(values + 4, stops.to(tl.float32))


def measure_gradients(
    table: Tensor, owners: Tensor, starts: Tensor, clip: float, *, block: int
) -> Tensor:
    """Measure all gradients together, and return five values in float32.

    These are the norm; the factor, at most 1, that clips it to `clip`; the row of the first
    gradient that is not finite, or −1; the factor's reciprocal; and whether there is such a row.
    """
    squares = torch.empty(len(owners), dtype=torch.float32, device=table.device)
    values = torch.empty(5, dtype=torch.float32, device=table.device)
    _squares[(len(owners),)](
        table, owners, starts, squares, columns=table.shape[1], block=block, part=min(_PART, block),
        num_warps=_NORM_WARPS,
    )  # fmt: skip
    _clipping[(1,)](
        squares, owners, values, len(owners), clip, chunk=_CHUNK, num_warps=_CHUNK_WARPS
    )
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _count_steps(  # type: ignore[no-untyped-def]
    table, corrections, stopped, rows,
    log_beta1: tl.constexpr, log_beta2: tl.constexpr, stops: tl.constexpr, columns: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    """Count a step and write each row's bias corrections, in one program of `wide` ≥ `rows`."""
    places = tl.arange(0, wide)
    inside = places < rows
    counts = tl.load(table + places * columns + 5, inside, 0).to(tl.pointer_type(tl.float32))
    count = tl.load(counts, inside, 0.0)
    if stops:
        count += tl.where(tl.load(stopped) == 0.0, 1.0, 0.0)
    else:
        count += 1.0
    tl.debug_barrier()  # rows of one parameter have read its count before it changes
    tl.store(counts, count, inside)
    # 1 − beta^count in float64: in float32, a beta close to 1 would leave few correct digits
    exact = count.to(tl.float64)
    correction1 = 1.0 - tl.exp(exact * log_beta1)
    correction2 = 1.0 - tl.exp(exact * log_beta2)
    tl.store(corrections + 2 * places, correction1.to(tl.float32), inside)
    tl.store(corrections + 2 * places + 1, correction2.to(tl.float32), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    row, start, lr, decay, correction1, correction2, scale, beta1, beta2, eps,
    scaled: tl.constexpr, measures: tl.constexpr, even: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Update some elements of a tensor, and return the two sums of squares of `_adamw`."""
    weight = tl.load(row).to(tl.pointer_type(tl.float32))
    mean = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    square = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    has_copy = tl.load(row + 4) != 0
    copy = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16))
    size = tl.load(row + 6)
    if even:  # a thread reads 4 elements at once: 16 bytes, and 8 bytes in bf16
        weight = tl.multiple_of(weight, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
        copy = tl.multiple_of(copy, 8)
        size = tl.multiple_of(size, 16)
    places = start + tl.arange(0, block)
    inside = places < size
    g = tl.zeros((block,), tl.float32)
    if tl.load(row + 7) != 0:
        g = _gradient(row, places, inside, 8 if even else 0, True)
    else:
        g = _gradient(row, places, inside, 16 if even else 0, False)
    if scaled:
        g = g / tl.load(scale)
    p = tl.load(weight + places, inside, 0.0)
    before = p
    m = tl.load(mean + places, inside, 0.0)
    v = tl.load(square + places, inside, 0.0)
    p -= lr * decay * p
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    root = tl.sqrt(v) / tl.sqrt(correction2) + eps
    p -= lr / correction1 * m / root
    tl.store(weight + places, p, inside)
    tl.store(mean + places, m, inside)
    tl.store(square + places, v, inside)
    if has_copy:
        tl.store(copy + places, p.to(tl.bfloat16), inside)
    kept, moved = 0.0, 0.0
    if measures:
        change = p - before
        kept, moved = tl.sum(before * before, 0), tl.sum(change * change, 0)
    return kept, moved


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    table, owners, starts, decays, corrections, rates, rate_indices, scale, stopped, sums,
    beta1, beta2, eps,
    scaled: tl.constexpr, stops: tl.constexpr, measures: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Update one block of a tensor per program.

    `sums` receives two sums of squares per block: of its weights before the step, and of their
    changes.
    """
    updates = True
    if stops:
        updates = tl.load(stopped) == 0.0
    if updates:
        tensor = tl.load(owners + tl.program_id(0))
        row = table + tensor.to(tl.int64) * columns
        start = tl.multiple_of(tl.load(starts + tl.program_id(0)), block)
        lr = tl.load(rates + tl.load(rate_indices + tensor))
        decay = tl.load(decays + tensor)
        correction1 = tl.load(corrections + 2 * tensor)
        correction2 = tl.load(corrections + 2 * tensor + 1)
        kept, moved = 0.0, 0.0
        if tl.load(row + 8) != 0:
            kept, moved = _update(
                row, start, lr, decay, correction1, correction2, scale, beta1, beta2, eps,
                scaled, measures, True, block,
            )  # fmt: skip
        else:
            for at in range(0, block, part):
                more_kept, more_moved = _update(
                    row, start + at, lr, decay, correction1, correction2, scale, beta1, beta2, eps,
                    scaled, measures, False, part,
                )  # fmt: skip
                kept += more_kept
                moved += more_moved
        if measures:
            tl.store(sums + 2 * tl.program_id(0), kept)
            tl.store(sums + 2 * tl.program_id(0) + 1, moved)


def adamw_blocks(
    table: Tensor, owners: Tensor, starts: Tensor, decays: Tensor, rates: Tensor,
    rate_indices: Tensor, scale: Tensor | None, stopped: Tensor | None, sums: Tensor | None, *,
    betas: tuple[float, float], eps: float, block: int,
) -> None:  # fmt: skip
    """Take and count an AdamW step over a table of tensors.

    `decays` (weight decays) and `rate_indices` (indices into `rates`, the learning rates) have an
    entry per row. `scale` divides gradients; `stopped` above 0 skips the step; `sums`, which is
    (blocks, 2) or None, receives the sums of `_adamw`.
    """
    rows, stops = len(decays), stopped is not None
    corrections = torch.empty(rows, 2, dtype=torch.float32, device=table.device)
    _count_steps[(1,)](
        table, corrections, stopped, rows, log_beta1=_log(betas[0]), log_beta2=_log(betas[1]),
        stops=stops, columns=table.shape[1], wide=triton.next_power_of_2(rows), num_warps=_WARPS,
    )  # fmt: skip
    _adamw[(len(owners),)](
        table, owners, starts, decays, corrections, rates, rate_indices, scale, stopped, sums,
        *betas, eps, scaled=scale is not None, stops=stops, measures=sums is not None,
        columns=table.shape[1], block=block, part=min(_PART, block), num_warps=_WARPS,
    )  # fmt: skip


def _log(beta: float) -> float:
    """Return the logarithm of beta; of 0, a number whose exponential is 0."""
    return math.log(beta) if beta > 0 else -1e4
