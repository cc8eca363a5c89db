"""A depthwise convolution along time over (B, T, C): in Triton kernels on CUDA, else in torch's.

The kernels are wrapped in operators of torch, so that compiled layers and CUDA graphs can contain
them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.devices import runs_triton
from frostlab.models import fused

LARGEST = 31  # largest kernel size; a larger one needs more registers than a GPU thread has
_GRID_DEPTH = 65535  # largest size of a CUDA grid in its third dimension
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Depthwise(nn.Conv1d):
    """A depthwise convolution along time over (B, T, width), without a transposed copy.

    Where there is no Triton kernel, the input is viewed as a channels-last image of one row,
    because the CUDA kernels for this format are faster than the kernels for (B, width, T).
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        if has_kernel(x, self.weight):
            device = x.device.type
            if torch.is_autocast_enabled(device):
                x = x.to(torch.get_autocast_dtype(device))
            return depthwise(x, self.weight[:, 0].t().contiguous(), self.bias, False)
        image, weight = x.transpose(1, 2)[:, :, None], self.weight[:, :, None]
        padding = (0, self.weight.shape[-1] // 2)
        mixed = F.conv2d(image, weight, self.bias, padding=padding, groups=self.groups)
        return mixed[:, :, 0].transpose(1, 2)


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernels can convolve x (B, T, C) with weight (C, 1, kernel)."""
    kernel = weight.shape[-1]
    fits = x.shape[0] <= _GRID_DEPTH and kernel % 2 == 1 and kernel <= LARGEST
    typed = x.dtype in _DTYPES and weight.dtype in _DTYPES
    return fits and typed and runs_triton(x.device)


@torch.library.custom_op("frostlab::depthwise", mutates_args=())
@fused.starts_kernels
def depthwise(x: Tensor, taps: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    """Convolve x (B, T, C) along time with taps (kernel, C), the weights of the convolution.

    `flipped` reverses the taps. The taps need not have the dtype of x: under autocast they stay
    float32.
    """
    from frostlab.models.fused.depthwise_kernels import convolve

    return convolve(x.contiguous(), taps.contiguous(), bias, flipped)


@torch.library.custom_op("frostlab::depthwise_sums", mutates_args=())
@fused.starts_kernels
def depthwise_sums(gradient: Tensor, x: Tensor, kernel: int) -> Tensor:
    """Return the gradients of the taps and, in the last row, of the bias: (kernel + 1, C)."""
    from frostlab.models.fused.depthwise_kernels import correlate

    return correlate(gradient.contiguous(), x.contiguous(), kernel)


@depthwise.register_fake
def _(x: Tensor, taps: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    return x.new_empty(x.shape)


@depthwise_sums.register_fake
def _(gradient: Tensor, x: Tensor, kernel: int) -> Tensor:
    return x.new_empty((kernel + 1, x.shape[-1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, taps, bias, ctx.flipped = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, taps)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, taps = ctx.saved_tensors
    by_x = by_taps = by_bias = None
    if ctx.needs_input_grad[0]:
        by_x = depthwise(gradient, taps, None, not ctx.flipped)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        sums = depthwise_sums(gradient, x, len(taps))
        by_taps = (sums[:-1].flip(0) if ctx.flipped else sums[:-1]).to(taps.dtype)
        by_bias = None if ctx.bias_dtype is None else sums[-1].to(ctx.bias_dtype)
    return by_x, by_taps, by_bias, None


depthwise.register_autograd(_differentiate, setup_context=_keep)
