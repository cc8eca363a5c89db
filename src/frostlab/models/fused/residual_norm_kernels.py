"""Triton kernels of a residual sum, with or without a layer norm, forward and backward.

A program holds one row at a time in registers, at most eight columns per lane. In the backward
pass, it takes one row after another and adds up, in registers, its share of three gradients that
are sums over all rows: of the norm's weight, of the norm's bias (called shift) and of the branch's
bias (called bias). A second kernel adds the shares in a fixed order, so that the result does not
depend on which program was faster.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from frostlab.devices import multiprocessors
from frostlab.models.fused.dropout_kernels import dropped_out, keys_of, threshold_of
from frostlab.models.fused.sum_kernels import add_shares

# Of the backward pass: warps per multiprocessor, and the most rows in a program's memory at once.
# 8 to 32 warps and 1 to 4 rows were tried on an H200.
_WARPS, _STAGES = 8, 4
_AHEAD = 4096  # elements of rows that are loaded ahead: more do not fit into shared memory


@triton.jit  # type: ignore[untyped-decorator]
def _norm_forward(
    x, branch, weight, shift, seed, total, exact, low, means, scales, eps,
    width: tl.constexpr, adds: tl.constexpr, threshold: tl.constexpr, keeps: tl.constexpr,
    shifts: tl.constexpr, writes_exact: tl.constexpr, writes_low: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Normalise a row of x or x + dropout(branch); write the result, and the row's mean and scale.

    The scale is 1 / standard deviation.
    """
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    place = row.to(tl.int64) * width + column
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if adds:
        added = tl.load(branch + place, inside, 0.0).to(tl.float32)
        if threshold > 0:
            first, second = keys_of(seed, row)
            added = dropped_out(added, first, second, column, threshold)
        value += added
    if keeps:
        tl.store(total + place, value.to(total.dtype.element_ty), inside)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + column, inside, 0.0).to(tl.float32)
    if shifts:
        normed += tl.load(shift + column, inside, 0.0).to(tl.float32)
    if writes_exact:
        tl.store(exact + place, normed, inside)
    if writes_low:
        tl.store(low + place, normed.to(low.dtype.element_ty), inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(
    x, branch, weight, seed, means, scales, by_total, by_exact, by_low, by_x, by_branch, shares,
    count,
    width: tl.constexpr, adds: tl.constexpr, threshold: tl.constexpr, has_total: tl.constexpr,
    has_exact: tl.constexpr, has_low: tl.constexpr, branches: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the branch; add up those of weight, shift and bias.

    `by_total` is the gradient of the sum, `by_exact` and `by_low` are the gradients of the two
    normalised results (in float32 and in autocast's dtype). `by_branch` is the gradient of the
    branch before its dropout. Without `adds`, x already is the sum.
    """
    column = tl.arange(0, block)
    inside = column < width
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    weight_sum = tl.zeros((block,), tl.float32)
    shift_sum = tl.zeros((block,), tl.float32)
    bias_sum = tl.zeros((block,), tl.float32)
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=stages):
        row = tl.full((), at, tl.int64)
        place = row * width + column
        value = tl.load(x + place, inside, 0.0).to(tl.float32)
        first, second = 0, 0
        if threshold > 0:
            first, second = keys_of(seed, row)
        if adds:
            added = tl.load(branch + place, inside, 0.0).to(tl.float32)
            if threshold > 0:
                added = dropped_out(added, first, second, column, threshold)
            value += added
        upstream = tl.zeros((block,), tl.float32)
        if has_exact:
            upstream += tl.load(by_exact + place, inside, 0.0).to(tl.float32)
        if has_low:
            upstream += tl.load(by_low + place, inside, 0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normal = (value - tl.load(means + row)) * scale
        scaled = upstream * gain  # 0 outside the row
        along, level = tl.reduce((scaled * normal, scaled), 0, _add_pairs)
        weight_sum += upstream * normal
        shift_sum += upstream
        gradient = (scaled - (level + normal * along) / width) * scale
        if has_total:
            gradient += tl.load(by_total + place, inside, 0.0).to(tl.float32)
        tl.store(by_x + place, gradient.to(by_x.dtype.element_ty), inside)
        if branches:
            if threshold > 0:
                gradient = dropped_out(gradient, first, second, column, threshold)
            tl.store(by_branch + place, gradient.to(by_branch.dtype.element_ty), inside)
            bias_sum += gradient
    start = shares + tl.program_id(0) * 3 * width + column
    tl.store(start, weight_sum, inside)
    tl.store(start + width, shift_sum, inside)
    if branches:
        tl.store(start + 2 * width, bias_sum, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_forward(
    x, branch, seed, total, width: tl.constexpr, threshold: tl.constexpr, block: tl.constexpr
):
    """Write a row of x + dropout(branch)."""
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    place = row.to(tl.int64) * width + column
    added = tl.load(branch + place, inside, 0.0).to(tl.float32)
    if threshold > 0:
        first, second = keys_of(seed, row)
        added = dropped_out(added, first, second, column, threshold)
    value = tl.load(x + place, inside, 0.0).to(tl.float32) + added
    tl.store(total + place, value.to(total.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_backward(
    by_total, seed, by_branch, shares, count,
    width: tl.constexpr, threshold: tl.constexpr, summed: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the branch before its dropout; if `summed`, add it up for the bias."""
    column = tl.arange(0, block)
    inside = column < width
    bias_sum = tl.zeros((block,), tl.float32)
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=stages):
        row = tl.full((), at, tl.int64)
        place = row * width + column
        gradient = tl.load(by_total + place, inside, 0.0).to(tl.float32)
        if threshold > 0:
            first, second = keys_of(seed, row)
            gradient = dropped_out(gradient, first, second, column, threshold)
        tl.store(by_branch + place, gradient.to(by_branch.dtype.element_ty), inside)
        bias_sum += gradient
    if summed:
        tl.store(shares + tl.program_id(0) * width + column, bias_sum, inside)


def _tile(width: int) -> dict[str, int]:
    """Return the block that holds a row, and the number of warps of its program."""
    block = max(triton.next_power_of_2(width), 32)
    return {"block": block, "num_warps": min(max(1, block // 256), 32)}


def normalise(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    eps: float,
    keeps: bool,
    exact: bool,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise contiguous rows of x, or of x + dropout(branch).

    Return the sum (empty unless `keeps`), the normalised rows in float32 (empty unless `exact`) and
    in the dtype `low` (empty if None), and each row's mean and scale (1 / standard deviation).
    """
    width = x.shape[-1]
    count = x.numel() // width
    total = torch.empty_like(x) if keeps else x.new_empty(0)
    full = torch.empty_like(x, dtype=torch.float32) if exact else x.new_empty(0)
    half = x.new_empty(0) if low is None else torch.empty_like(x, dtype=low)
    means = x.new_empty(count, dtype=torch.float32)
    scales = torch.empty_like(means)
    if count:
        _norm_forward[(count,)](
            x, branch, weight, shift, seed, total, full, half, means, scales, eps, width=width,
            adds=branch is not None, threshold=threshold_of(dropout), keeps=keeps,
            shifts=shift is not None,
            writes_exact=exact, writes_low=low is not None, **_tile(width),
        )  # fmt: skip
    return total, full, half, means, scales


def differentiate(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    seed: Tensor | None,
    dropout: float,
    means: Tensor,
    scales: Tensor,
    by_total: Tensor | None,
    by_exact: Tensor | None,
    by_low: Tensor | None,
    branch_dtype: torch.dtype | None,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the branch, and of weight, shift and the branch's bias.

    The gradients of the branch and of its bias are empty if `branch_dtype` is None.
    """
    width = x.shape[-1]
    count = x.numel() // width
    branches = branch_dtype is not None
    by_x, by_branch, by_bias = torch.empty_like(x), x.new_empty(0), x.new_empty(0)
    if branches:
        by_branch = torch.empty_like(x, dtype=branch_dtype)
        by_bias = x.new_empty(width, dtype=bias_dtype)
    sums = [x.new_empty(width), x.new_empty(width), *([by_bias] if branches else [])]
    if not count:
        for total in sums:
            total.zero_()
        return by_x, by_branch, sums[0], sums[1], by_bias
    tile = _tile(width)
    programs = min(_programs(x, tile), count)
    shares = x.new_empty(programs, 3, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        x, branch, weight, seed, means, scales, by_total, by_exact, by_low, by_x, by_branch,
        shares, count,
        width=width, adds=branch is not None, threshold=threshold_of(dropout),
        has_total=by_total is not None, has_exact=by_exact is not None,
        has_low=by_low is not None, branches=branches,
        stages=_stages(tile), **tile,
    )  # fmt: skip
    add_shares(shares, sums)
    return by_x, by_branch, sums[0], sums[1], by_bias


def add(x: Tensor, branch: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Return x + dropout(branch), both contiguous, in the dtype of x."""
    width, total = x.shape[-1], torch.empty_like(x)
    if x.numel():
        _sum_forward[(x.numel() // width,)](
            x, branch, seed, total, width=width, threshold=threshold_of(dropout), **_tile(width)
        )
    return total


def differentiate_sum(
    by_total: Tensor, seed: Tensor | None, dropout: float, branch_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of the branch of a contiguous sum, and its sum over all rows.

    Without a dtype for that sum, it is empty.
    """
    width = by_total.shape[-1]
    count = by_total.numel() // width
    by_branch = torch.empty_like(by_total, dtype=branch_dtype)
    summed = bias_dtype is not None
    by_bias = by_total.new_empty(width if summed else 0, dtype=bias_dtype)
    if not count:
        by_bias.zero_()
    else:
        tile = _tile(width)
        programs = min(_programs(by_total, tile), count)
        shares = by_total.new_empty(programs if summed else 0, 1, width, dtype=torch.float32)
        _sum_backward[(programs,)](
            by_total, seed, by_branch, shares, count, width=width,
            threshold=threshold_of(dropout), summed=summed, stages=_stages(tile), **tile,
        )  # fmt: skip
        if summed:
            add_shares(shares, [by_bias])
    return by_branch, by_bias


def _programs(x: Tensor, tile: dict[str, int]) -> int:
    """Return the number of programs of a backward pass."""
    return max(1, _WARPS // tile["num_warps"]) * multiprocessors(x.device)


def _stages(tile: dict[str, int]) -> int:
    """Return how many rows are in a program's memory at once."""
    return max(1, min(_STAGES, _AHEAD // tile["block"]))
