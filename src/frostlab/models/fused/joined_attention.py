"""Attention by Triton kernels that read the queries, keys and values of a joined linear map.

The gradient is written in the layout of the map's output, and its sum over tokens, the gradient of
the map's bias, is computed in the same kernels. `frostlab.training.step.fusion` puts this operation
into compiled layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frostlab import devices
from frostlab.models import fused

# Tokens, and columns of a head. Against torch's kernels, these were timed with heads of 64 columns
# and up to 512 tokens; heads of 128 columns would not leave enough registers.
LONGEST, _SIZES = 512, (16, 32, 64)
_DTYPES = (torch.bfloat16, torch.float16)


def fits(dtype: torch.dtype, length: Any, size: int) -> bool:
    """Return whether the kernels can attend over this many tokens with heads of this size."""
    fixed = isinstance(length, int)  # and not a symbol that stands for several lengths
    typed = devices.HAS_TRITON and dtype in _DTYPES
    return typed and size in _SIZES and fixed and length <= LONGEST


def attend(
    joined: Tensor,
    biases: Sequence[Tensor],
    starts: tuple[int, int, int],
    size: int,
    scale: float,
    dropout: float,
    causal: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """Attend with the queries, keys and values in joined (B, T, 3 · width).

    `starts` are the first columns of queries, keys and values, and `size` is the number of columns
    of a head. Return (B, T, heads, size). `biases` are what the last columns of `joined` already
    contain: they get their gradients here, so these columns must have been computed with detached
    biases. A missing seed of dropout is drawn.
    """
    if dropout and seed is None:
        seed = fused.draw_seeds(joined.device, 1)[0]
    settings = (list(starts), size, scale, dropout, causal)
    out: Tensor = _Attention.apply(joined, seed, *settings, *biases)
    return out.unflatten(-1, (-1, size))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        seed: Tensor | None,
        starts: list[int],
        size: int,
        scale: float,
        dropout: float,
        causal: bool,
        *biases: Tensor,
    ) -> Tensor:
        ctx.settings = starts, size, scale, dropout, causal
        ctx.counts, ctx.dtype = [len(bias) for bias in biases], biases and biases[0].dtype
        out, stats = fused.chosen(mix, _MIX, joined)(joined, seed, *ctx.settings)
        ctx.save_for_backward(joined, out, stats, seed)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        operation = fused.chosen(differentiate, _DIFFERENTIATE, upstream)
        by_joined, sums = operation(upstream, *ctx.saved_tensors, *ctx.settings, bool(ctx.counts))
        by_biases: Sequence[Tensor] = ()
        if ctx.counts:
            by_biases = sums[len(sums) - sum(ctx.counts) :].to(ctx.dtype).split(ctx.counts)
        return by_joined, *[None] * 6, *by_biases


@fused.starts_kernels
def mix(
    joined: Tensor,
    seed: Tensor | None,
    starts: list[int],
    size: int,
    scale: float,
    dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel."""
    from frostlab.models.fused import joined_attention_kernels as kernels

    return kernels.attend(joined.contiguous(), seed, starts, size, scale, dropout, causal)


@fused.starts_kernels
def differentiate(
    upstream: Tensor,
    joined: Tensor,
    out: Tensor,
    stats: Tensor,
    seed: Tensor | None,
    starts: list[int],
    size: int,
    scale: float,
    dropout: float,
    causal: bool,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    """Run the backward kernels; return the gradient of `joined` and, if `biased`, its sum."""
    from frostlab.models.fused import joined_attention_kernels as kernels

    return kernels.differentiate(
        upstream.contiguous(), joined.contiguous(), out, stats, seed, starts, size, scale, dropout,
        causal, biased,
    )  # fmt: skip


_MIX = torch.library.custom_op("frostlab::joined_attention", mix, mutates_args=())
_DIFFERENTIATE = torch.library.custom_op(
    "frostlab::joined_attention_backward", differentiate, mutates_args=()
)


@_MIX.register_fake
def _(
    joined: Tensor, seed: Any, starts: Any, size: int, scale: float, dropout: float, causal: bool
) -> tuple[Tensor, Tensor]:
    batch, length, stride = joined.shape
    width = stride // 3
    stats = joined.new_empty(batch * (width // size), length, dtype=torch.float32)
    return joined.new_empty(batch, length, width), stats


@_DIFFERENTIATE.register_fake
def _(
    upstream: Tensor, joined: Tensor, out: Any, stats: Any, seed: Any, starts: Any, size: int,
    scale: float, dropout: float, causal: bool, biased: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count = joined.shape[-1] if biased else 0
    return joined.new_empty(joined.shape), joined.new_empty(count, dtype=torch.float32)
