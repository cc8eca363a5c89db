"""Triton kernel: cross-entropy over rows of logits."""

# Triton has no unpacking, so tuples grow by `+`.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, unreachable"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a chunk, warps of a program, and the most chunks of a
# 16-bit row that fit into registers. Longer rows and 32-bit rows are read twice, by `_WIDE_WARPS`
# warps. With these values, an earlier form of the kernel was the fastest of seven on an H200.
_BLOCK, _WARPS, _HELD = 4096, 16, 16
_WIDE_WARPS = 8
_LOG2 = 1.4426950408889634  # exp(x) = 2^(x · log₂ e), and the device computes powers of 2


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    logits, labels, losses, stride, columns, wide, factor, scale,
    writes: tl.constexpr, scaled: tl.constexpr, block: tl.constexpr, held: tl.constexpr,
    full: tl.constexpr, log2: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row per program; a row with a negative label has loss and gradient 0.

    If `writes`, also overwrite the logits with factor × gradient; if `scaled`, with `scale` times
    that. `wide` is the length of a row with its padding, which keeps loads aligned and fast. The
    first `held` chunks of the row are read once and stay in registers; the others are read twice.
    The first `full` chunks lie within the columns, so that their loads need no mask.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    label = tl.load(labels + row)
    scored = label >= 0
    lane = tl.arange(0, block)
    own = tl.load(begin + tl.where(scored, label, 0)).to(tl.float32) * log2
    peak = tl.full((block,), -float("inf"), tl.float32)
    chunks = ()
    for c in tl.static_range(held):
        if c < full:
            chunk = tl.load(begin + c * block + lane)
        else:
            places = c * block + lane
            chunk = tl.load(begin + places, mask=places < columns, other=-float("inf"))
        peak = tl.maximum(peak, chunk.to(tl.float32))
        chunks = chunks + (chunk,)
    top = -float("inf")  # running maximum of the logits, times log₂ e
    total = 0.0  # running sum of exp(logit - top)
    if held > 0:
        top = tl.max(peak, 0) * log2
        added = tl.zeros((block,), tl.float32)
        powers = ()
        for c in tl.static_range(held):
            power = tl.exp2(chunks[c].to(tl.float32) * log2 - top)
            added += power
            powers = powers + (power,)
        chunks = powers  # so that each power is computed once
        total = tl.sum(added, 0)
    for start in range(held * block, columns, block):
        places = start + lane
        x = tl.load(begin + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        x *= log2
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher), 0)
        top = higher
    tl.store(losses + row, tl.where(scored, tl.log(total) + (top - own) / log2, 0.0))
    if writes:
        if scaled:
            factor = factor * tl.load(scale)
        share = factor / total
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        if scored:
            for c in tl.static_range(held):
                places = c * block + lane
                gradient = (share * chunks[c]).to(logits.dtype.element_ty)
                if c < full:
                    tl.store(begin + places, gradient)
                else:
                    tl.store(begin + places, gradient, mask=places < wide)
            for start in range(held * block, wide, block):
                places = start + lane
                x = tl.load(begin + places, mask=places < columns, other=-float("inf"))
                x = x.to(tl.float32)
                gradient = (share * tl.exp2(x * log2 - top)).to(logits.dtype.element_ty)
                tl.store(begin + places, gradient, mask=places < wide)
            tl.debug_barrier()  # the label's gradient is written after the others
            last = share * tl.exp2(own - top) - factor
            tl.store(begin + label, last.to(logits.dtype.element_ty))
        else:  # without a product, because the logits may be NaN
            for start in range(0, wide, block):
                places = start + lane
                zero = tl.zeros((block,), logits.dtype.element_ty)
                tl.store(begin + places, zero, mask=places < wide)


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
            block=_BLOCK, held=held, full=logits.shape[1] // _BLOCK if held else 0, log2=_LOG2,
            num_warps=_WARPS if held else _WIDE_WARPS,
        )  # fmt: skip
    return losses
