"""Triton kernels: cross-entropy over rows of logits, and AdamW over many tensors."""

# Triton has no unpacking, so tuples grow by `+`.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, unreachable"

import torch
import triton
import triton.language as tl
from torch import Tensor

# For the cross-entropy kernel: columns of a chunk, warps of a program, and the most chunks of a
# 16-bit row that fit into registers. Longer rows and 32-bit rows are read twice, by `_WIDE_WARPS`
# warps. These values are the fastest of seven combinations on an H200 for 50,304 classes.
_BLOCK, _WARPS, _HELD = 4096, 16, 16
_WIDE_WARPS = 8
_LOG2 = 1.4426950408889634  # exp(x) = 2^(x · log₂ e), and the device computes powers of 2


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    logits, labels, losses, stride, columns, wide, factor, scale,
    writes: tl.constexpr, scaled: tl.constexpr, block: tl.constexpr, held: tl.constexpr,
    log2: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row per program; a row with a negative label has loss and gradient 0.

    If `writes`, also overwrite the logits with factor × gradient; if `scaled`, with `scale` times
    that. `wide` is the length of a row with its padding, which keeps loads aligned and fast. The
    first `held` chunks of the row are read once and stay in registers; the others are read twice.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    label = tl.load(labels + row)
    scored = label >= 0
    own = tl.load(begin + tl.where(scored, label, 0)).to(tl.float32)
    peak = tl.full((block,), -float("inf"), tl.float32)
    chunks = ()
    for c in tl.static_range(held):
        places = c * block + tl.arange(0, block)
        chunk = tl.load(begin + places, mask=places < columns, other=-float("inf"))
        peak = tl.maximum(peak, chunk.to(tl.float32))
        chunks = chunks + (chunk,)
    top = -float("inf")  # running maximum of the logits
    total = 0.0  # running sum of exp(logit - top)
    if held > 0:
        top = tl.max(peak, 0)
        added = tl.zeros((block,), tl.float32)
        for c in tl.static_range(held):
            added += tl.exp2(chunks[c].to(tl.float32) * log2 - top * log2)
        total = tl.sum(added, 0)
    for start in range(held * block, columns, block):
        places = start + tl.arange(0, block)
        x = tl.load(begin + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(losses + row, tl.where(scored, tl.log(total) + top - own, 0.0))
    if writes:
        if scaled:
            factor = factor * tl.load(scale)
        share = factor / total
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        for c in tl.static_range(held):
            places = c * block + tl.arange(0, block)
            gradient = share * tl.exp2(chunks[c].to(tl.float32) * log2 - top * log2)
            gradient -= tl.where(places == label, factor, 0.0)
            gradient = tl.where(scored, gradient, 0.0)
            tl.store(begin + places, gradient.to(logits.dtype.element_ty), mask=places < wide)
        for start in range(held * block, wide, block):
            places = start + tl.arange(0, block)
            x = tl.load(begin + places, mask=places < columns, other=-float("inf")).to(tl.float32)
            gradient = share * tl.exp(x - top) - tl.where(places == label, factor, 0.0)
            gradient = tl.where(scored, gradient, 0.0)
            tl.store(begin + places, gradient.to(logits.dtype.element_ty), mask=places < wide)


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, factor: float | None, scale: Tensor | None = None
) -> Tensor:
    """Return each row's loss in float32; with `factor`, write factor × gradient over the logits.

    `scale`, a tensor of one element, multiplies the gradient, too. With `factor`, the padding after
    each row is set to 0.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        held = triton.cdiv(logits.stride(0), _BLOCK)
        if logits.dtype.itemsize != 2 or held > _HELD:
            held = 0
        _rows[(len(logits),)](
            logits, labels, losses, logits.stride(0), logits.shape[1], logits.stride(0),
            factor or 0.0, scale, writes=factor is not None, scaled=scale is not None,
            block=_BLOCK, held=held, log2=_LOG2, num_warps=_WARPS if held else _WIDE_WARPS,
        )  # fmt: skip
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    table, owners, starts, decays, correction1, correction2, rates, rate_indices, scale, stopped,
    sums, beta1, beta2, eps,
    scaled: tl.constexpr, stops: tl.constexpr, measures: tl.constexpr, even: tl.constexpr,
    block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Update one block of a tensor per program; `owners` and `starts` say which tensor and where.

    Each row of `table` holds a tensor's addresses (weight, two moments, gradient, bf16 copy or 0),
    its size, and whether its gradient is bf16. `even`: addresses and sizes are multiples of 16.
    `sums` receives two sums of squares per block: of its weights before the step, and of their
    changes.
    """
    updates = True
    if stops:
        updates = tl.load(stopped) == 0.0
    if updates:
        tensor = tl.load(owners + tl.program_id(0))
        row = table + tensor * columns
        weight = tl.load(row).to(tl.pointer_type(tl.float32))
        mean = tl.load(row + 1).to(tl.pointer_type(tl.float32))
        square = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        gradient, copy = tl.load(row + 3), tl.load(row + 4)
        size = tl.load(row + 5)
        half = tl.load(row + 6) != 0
        if even:
            weight = tl.multiple_of(weight, 16)
            mean = tl.multiple_of(mean, 16)
            square = tl.multiple_of(square, 16)
            gradient = tl.multiple_of(gradient, 16)
            copy = tl.multiple_of(copy, 16)
            size = tl.multiple_of(size, 16)
        start = tl.multiple_of(tl.load(starts + tl.program_id(0)), block)
        places = start + tl.arange(0, block)
        inside = places < size
        g = tl.zeros((block,), tl.float32)
        if half:
            g = tl.load(gradient.to(tl.pointer_type(tl.bfloat16)) + places, inside, 0.0).to(
                tl.float32
            )
        else:
            g = tl.load(gradient.to(tl.pointer_type(tl.float32)) + places, inside, 0.0)
        if scaled:
            g = g / tl.load(scale)
        p = tl.load(weight + places, inside, 0.0)
        before = p
        m = tl.load(mean + places, inside, 0.0)
        v = tl.load(square + places, inside, 0.0)
        lr = tl.load(rates + tl.load(rate_indices + tensor))
        p -= lr * tl.load(decays + tensor) * p
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        root = tl.sqrt(v) / tl.sqrt(tl.load(correction2 + tensor)) + eps
        p -= lr / tl.load(correction1 + tensor) * m / root
        tl.store(weight + places, p, inside)
        if measures:
            moved = p - before
            tl.store(sums + 2 * tl.program_id(0), tl.sum(before * before, 0))
            tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(moved * moved, 0))
        tl.store(mean + places, m, inside)
        tl.store(square + places, v, inside)
        if copy != 0:
            half_copy = copy.to(tl.pointer_type(tl.bfloat16))
            tl.store(half_copy + places, p.to(tl.bfloat16), inside)


def adamw_blocks(
    table: Tensor, owners: Tensor, starts: Tensor, decays: Tensor, correction1: Tensor,
    correction2: Tensor, rates: Tensor, rate_indices: Tensor, scale: Tensor | None,
    stopped: Tensor | None, sums: Tensor | None, *,
    betas: tuple[float, float], eps: float, even: bool, block: int, columns: int,
) -> None:  # fmt: skip
    """Take an AdamW step over a table of tensors; `_adamw` describes the columns of the table.

    `owners` and `starts` have an entry per block: its tensor and first element. `decays` (weight
    decays), `correction1` and `correction2` (the moments' bias corrections) and `rate_indices`
    (indices into `rates`, the learning rates) have an entry per tensor. `scale` divides gradients;
    `stopped` above 0 skips the step; `sums` is (blocks, 2) or None.
    """
    _adamw[(len(owners),)](
        table, owners, starts, decays, correction1, correction2, rates, rate_indices, scale,
        stopped, sums, *betas, eps, scaled=scale is not None, stops=stopped is not None,
        measures=sums is not None, even=even, block=block, columns=columns, num_warps=8,
    )  # fmt: skip
