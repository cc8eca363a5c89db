"""GELU after a linear map; on CUDA, its backward kernels also yield the map's bias gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab import devices
from frostlab.devices import on_gpu
from frostlab.models import fused
from frostlab.models.fused.residual_norm import apply_linear

_DTYPES = (torch.bfloat16, torch.float16)


def fits(dtype: torch.dtype) -> bool:
    """Return whether the kernels may replace torch's: not in float32, where they are less exact."""
    return devices.HAS_TRITON and dtype in _DTYPES


def gelu_of(linear: nn.Module, inputs: Tensor, approximate: str) -> Tensor:
    """Return GELU of a linear map's output, by the kernels where they can be used.

    While a layer is compiled, torch's GELU is called, which `frostlab.training.step.fusion` may
    then replace by `gelu`.
    """
    device = inputs.device.type
    autocasts = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else inputs.dtype
    if not on_gpu(inputs) or torch.compiler.is_compiling() or not fits(dtype):
        return F.gelu(linear(inputs), approximate=approximate)
    x, bias = apply_linear(linear, inputs)
    return gelu(x, bias, approximate)


def gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return GELU of x, which already contains `bias`.

    The bias gets its gradient here, so x must have been computed with `bias.detach()`.
    """
    out: Tensor = _Gelu.apply(x, bias, approximate == "tanh")
    return out


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh, ctx.bias_dtype = tanh, None if bias is None else bias.dtype
        return fused.chosen(activate, _ACTIVATE, x)(x, tanh)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        operation = fused.chosen(differentiate, _DIFFERENTIATE, x)
        by_x, by_bias = operation(upstream, x, ctx.tanh, ctx.bias_dtype or torch.float32)
        return by_x, None if ctx.bias_dtype is None else by_bias, None


@fused.starts_kernels
def activate(x: Tensor, tanh: bool) -> Tensor:
    """Run the forward kernel."""
    from frostlab.models.fused import gelu_kernels

    return gelu_kernels.activate(x.contiguous(), tanh)


@fused.starts_kernels
def differentiate(
    upstream: Tensor, x: Tensor, tanh: bool, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run the backward kernels; return the gradient of x and, summed over rows, of the bias."""
    from frostlab.models.fused import gelu_kernels

    return gelu_kernels.differentiate(upstream.contiguous(), x.contiguous(), tanh, bias_dtype)


_ACTIVATE = torch.library.custom_op("frostlab::gelu", activate, mutates_args=())
_DIFFERENTIATE = torch.library.custom_op("frostlab::gelu_backward", differentiate, mutates_args=())


@_ACTIVATE.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@_DIFFERENTIATE.register_fake
def _(upstream: Tensor, x: Tensor, tanh: bool, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=bias_dtype)
