"""Several linear maps of one input as one product, whose weights are stacked without a copy.

For that, the weights must lie next to each other in memory, as their bf16 copies do (`Bf16Copies`
of training/step/optimizer.py); others are concatenated. `frostlab.training.step.joining` puts this
operation into compiled layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frostlab.models import fused


def joined_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], frozen: int
) -> Tensor:
    """Return the outputs of linear maps of x side by side.

    The first `frozen` maps get no gradient, and the others learn. `biases` holds a bias for every
    map, or is empty. There is one product in the forward pass, and two in the backward pass: the
    input's gradient, and the gradient of the trainable weights.
    """
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        out: Tensor = _JoinedLinear.apply(x.to(dtype), frozen, len(weights), *weights, *biases)
    return out


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: int, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.frozen, ctx.rows = frozen, [len(weight) for weight in weights]
        ctx.dtypes = weights[-1].dtype, parameters[-1].dtype
        low = _cast(weights, x.dtype)
        ctx.save_for_backward(x, *low)
        return fused.chosen(multiply, _MULTIPLY, x)(x, low, _cast(biases, x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        by_input, _, _, *learn = ctx.needs_input_grad
        count, learning = len(ctx.rows), ctx.rows[ctx.frozen :]
        columns = upstream.reshape(-1, sum(ctx.rows))[:, sum(ctx.rows[: ctx.frozen]) :]
        by_x = None
        if by_input:
            by_x = fused.chosen(multiply_back, _MULTIPLY_BACK, upstream)(upstream, weights)
        gradients: list[Tensor | None] = [None] * len(learn)
        if any(learn[:count]):
            by_weight = columns.t() @ x.reshape(-1, x.shape[-1])
            gradients[ctx.frozen : count] = by_weight.to(ctx.dtypes[0]).split(learning)
        if any(learn[count:]):
            by_bias = columns.sum(0)
            gradients[count + ctx.frozen :] = by_bias.to(ctx.dtypes[1]).split(learning)
        return by_x, None, None, *gradients


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in a dtype; if one must be cast, they are first joined into one tensor."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    return [torch.cat(list(tensors)).to(dtype)]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along the rows: a view of all of them if they lie side by side.

    Else return a copy. The result is no part of autograd's graph.
    """
    first = tensors[0].detach()
    begin = end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != end or not tensor.is_contiguous():
            return torch.cat([tensor.detach() for tensor in tensors])
        end += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((end - begin,), (1,)).view(rows, *first.shape[1:])


def multiply(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Return the product of x with the stacked weights, plus the stacked biases if there are any.

    Weights and biases may be stacked already: then the lists hold one tensor each.
    """
    return F.linear(x, stacked(weights), stacked(biases) if biases else None).contiguous()


def multiply_back(upstream: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the gradient of x."""
    return (upstream @ stacked(weights)).contiguous()


_MULTIPLY = torch.library.custom_op("frostlab::joined_linear", multiply, mutates_args=())
_MULTIPLY_BACK = torch.library.custom_op(
    "frostlab::joined_linear_backward", multiply_back, mutates_args=()
)


@_MULTIPLY.register_fake
def _(x: Tensor, weights: list[Tensor], biases: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(len(weight) for weight in weights))


@_MULTIPLY_BACK.register_fake
def _(upstream: Tensor, weights: list[Tensor]) -> Tensor:
    return upstream.new_empty(*upstream.shape[:-1], weights[0].shape[1])
