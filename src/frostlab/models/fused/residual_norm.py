"""A residual sum, alone or with the layer norm after it: in Triton kernels on CUDA, else torch's.

One kernel adds a branch to the residual stream, normalises the sum, and writes the result in the
dtype in which the next linear map needs it. Two more compute all gradients, including those of the
branch before its dropout, and of the bias of the linear map that ends the branch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from frostlab import devices
from frostlab.devices import on_gpu
from frostlab.models import fused

WIDEST = 8192  # columns; wider rows do not fit into a program's registers


def add_and_norm(
    x: Tensor, linear: nn.Module, inputs: Tensor, norm: nn.Module, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return x + dropout(linear(inputs)), and this sum normalised.

    Under autocast, the kernels return the normalised sum in autocast's dtype, not in float32.
    """
    if not has_kernel(x, norm):
        added = x + F.dropout(linear(inputs), dropout)
        return added, norm(added)
    branch, bias = apply_linear(linear, inputs)
    assert isinstance(norm, nn.LayerNorm)
    total, _, low = residual_norm(
        x, branch, norm.weight, norm.bias, bias, dropout, norm.eps, True, False, True
    )
    assert total is not None
    return total, low


def add(x: Tensor, linear: nn.Module, inputs: Tensor, dropout: float) -> Tensor:
    """Return x + dropout(linear(inputs))."""
    if not on_gpu(x) or not fits_sum(x) or torch.compiler.is_compiling():
        return x + F.dropout(linear(inputs), dropout)
    branch, bias = apply_linear(linear, inputs)
    return residual_sum(x, branch, bias, dropout)


def keep_and_norm(x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x, and x normalised.

    If the caller goes on with the returned x, one kernel adds the gradients of both results.
    """
    if not has_kernel(x, norm):
        return x, norm(x)
    assert isinstance(norm, nn.LayerNorm)
    total, _, low = residual_norm(
        x, None, norm.weight, norm.bias, None, 0.0, norm.eps, True, False, True
    )
    assert total is not None
    return total, low


def apply_linear(linear: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply a linear map; also return its bias if the caller must compute the bias's gradient."""
    if type(linear) is not nn.Linear or linear.bias is None or is_hooked(linear):
        return linear(inputs), None
    if not linear.bias.requires_grad:
        return linear(inputs), None
    return F.linear(inputs, linear.weight, linear.bias.detach()), linear.bias


def has_kernel(x: Tensor, norm: nn.Module) -> bool:
    """Return whether the kernels can take the place of a norm, whose module is then not called.

    While a layer is compiled, the kernels cannot; `frostlab.training.step.fusion` may then put them
    into the layer's graph.
    """
    if not on_gpu(x) or type(norm) is not nn.LayerNorm or torch.compiler.is_compiling():
        return False
    return not is_hooked(norm) and fits(x, norm.weight, norm.bias, norm.normalized_shape)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module must be called, for its hooks or a `forward` of its own to run."""
    changed = "forward" in vars(module) or bool(module._forward_hooks or module._backward_hooks)
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(changed or before or hooks._has_any_global_hook())


def fits_sum(x: Tensor) -> bool:
    """Return whether the kernels can add up rows like x: float32, and not too wide."""
    return devices.HAS_TRITON and x.dtype == torch.float32 and x.shape[-1] <= WIDEST


def fits(x: Tensor, weight: Tensor | None, shift: Tensor | None, shape: Any) -> bool:
    """Return whether the kernels can normalise x: float32 rows that are not too wide."""
    if weight is None or tuple(shape) != (x.shape[-1],):
        return False
    typed = weight.dtype == x.dtype and (shift is None or shift.dtype == x.dtype)
    return typed and fits_sum(x)


def residual_sum(
    x: Tensor, branch: Tensor, bias: Tensor | None, dropout: float, seed: Tensor | None = None
) -> Tensor:
    """Return x + dropout(branch); bias and seed are as in `residual_norm`."""
    if dropout and seed is None:
        seed = fused.draw_seeds(x.device, 1)[0]
    total: Tensor = _ResidualSum.apply(x, branch, bias, seed, dropout)
    return total


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        dropout: float,
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.dropout, ctx.branch_dtype = dropout, branch.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        total: Tensor = fused.chosen(add_up, _ADD_UP, x)(x, branch, seed, dropout)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        operation = fused.chosen(differentiate_sum, _DIFFERENTIATE_SUM, upstream)
        by_branch, by_bias = operation(
            upstream, *ctx.saved_tensors, ctx.dropout, ctx.branch_dtype, ctx.bias_dtype
        )
        return upstream, by_branch, None if ctx.bias_dtype is None else by_bias, None, None


def residual_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    eps: float,
    keeps: bool,
    exact: bool,
    low: bool,
    seed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x + dropout(branch), and this sum normalised, in float32 and in autocast's dtype.

    Without a branch, the sum is x. Use the returned sum from then on, not x, because one kernel
    adds the gradients of all results. The caller uses the sum if `keeps`, the normalised float32
    result if `exact`, and the one in autocast's dtype if `low`. Without `keeps`, the sum is None.
    If only one normalised result is used, or without autocast, both are the same tensor. `weight`
    and `shift` are the norm's weight and bias. `bias` is the bias that the branch already contains:
    it gets its gradient here, so the branch must have been computed with `bias.detach()`. A missing
    seed of dropout is drawn.
    """
    if branch is not None and dropout and seed is None:
        seed = fused.draw_seeds(x.device, 1)[0]
    device = x.device.type
    dtype = None
    if low and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    exact = exact or dtype is None
    outputs = _ResidualNorm.apply(
        x, branch, weight, shift, bias, seed, dropout, eps, keeps, exact, dtype
    )
    rest = list(outputs)
    total = rest.pop(0) if keeps else None
    return total, rest[0], rest[-1]


class _ResidualNorm(torch.autograd.Function):
    """The autograd function of `residual_norm`; it returns only the results that are used."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        shift: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        dropout: float,
        eps: float,
        keeps: bool,
        exact: bool,
        low: torch.dtype | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.keeps, ctx.exact, ctx.low = keeps, exact, low is not None
        ctx.dropout, ctx.shifts = dropout, shift is not None
        writes_sum = keeps and branch is not None
        total, full, half, means, scales = fused.chosen(normalise, _NORMALISE, x)(
            x, branch, weight, shift, seed, dropout, eps, writes_sum, exact, low
        )
        if writes_sum:
            ctx.save_for_backward(total, None, weight, seed, means, scales)
        else:
            ctx.save_for_backward(x, branch, weight, seed, means, scales)
        outputs = [total if writes_sum else x] if keeps else []
        outputs += [full] if exact else []
        outputs += [half] if low is not None else []
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = list(gradients)
        by_total = rest.pop(0) if ctx.keeps else None
        by_exact = rest.pop(0) if ctx.exact else None
        by_low = rest.pop(0) if ctx.low else None
        x, branch, weight, seed, means, scales = ctx.saved_tensors
        operation = fused.chosen(differentiate, _DIFFERENTIATE, x)
        by_x, by_branch, by_weight, by_shift, by_bias = operation(
            x, branch, weight, seed, ctx.dropout, means, scales, by_total, by_exact, by_low,
            ctx.branch_dtype, ctx.bias_dtype or torch.float32,
        )  # fmt: skip
        return (
            by_x,
            None if ctx.branch_dtype is None else by_branch,
            by_weight,
            by_shift if ctx.shifts else None,
            None if ctx.bias_dtype is None else by_bias,
            *[None] * 6,
        )


@fused.starts_kernels
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
    """Run the forward kernel; results that are not used are empty."""
    from frostlab.models.fused import residual_norm_kernels as kernels

    branch = None if branch is None else branch.contiguous()
    return kernels.normalise(
        x.contiguous(), branch, weight, shift, seed, dropout, eps, keeps, exact, low
    )


@fused.starts_kernels
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
    """Run the backward kernels; results that are not used are empty."""
    from frostlab.models.fused import residual_norm_kernels as kernels

    optional = [
        None if tensor is None else tensor.contiguous()
        for tensor in (branch, by_total, by_exact, by_low)
    ]
    branch, by_total, by_exact, by_low = optional
    return kernels.differentiate(
        x.contiguous(), branch, weight, seed, dropout, means, scales, by_total, by_exact, by_low,
        branch_dtype, bias_dtype,
    )  # fmt: skip


@fused.starts_kernels
def add_up(x: Tensor, branch: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Run the forward kernel of a sum without a norm."""
    from frostlab.models.fused import residual_norm_kernels as kernels

    return kernels.add(x.contiguous(), branch.contiguous(), seed, dropout)


@fused.starts_kernels
def differentiate_sum(
    by_total: Tensor,
    seed: Tensor | None,
    dropout: float,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Run the backward kernels of a sum without a norm."""
    from frostlab.models.fused import residual_norm_kernels as kernels

    by_total = by_total.contiguous()
    return kernels.differentiate_sum(by_total, seed, dropout, branch_dtype, bias_dtype)


_NORMALISE = torch.library.custom_op("frostlab::residual_norm", normalise, mutates_args=())
_DIFFERENTIATE = torch.library.custom_op(
    "frostlab::residual_norm_backward", differentiate, mutates_args=()
)


@_NORMALISE.register_fake
def _(
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
) -> tuple[Tensor, ...]:
    means = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return (
        x.new_empty(x.shape if keeps else 0),
        x.new_empty(x.shape if exact else 0),
        x.new_empty(x.shape if low else 0, dtype=low),
        means,
        torch.empty_like(means),
    )


@_DIFFERENTIATE.register_fake
def _(
    x: Tensor, branch: Any, weight: Tensor, seed: Any, dropout: float, means: Any, scales: Any,
    by_total: Any, by_exact: Any, by_low: Any, branch_dtype: torch.dtype | None,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    width, branches = x.shape[-1], branch_dtype is not None
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if branches else 0, dtype=branch_dtype),
        x.new_empty(width),
        x.new_empty(width),
        x.new_empty(width if branches else 0, dtype=bias_dtype if branches else None),
    )


_ADD_UP = torch.library.custom_op("frostlab::residual_sum", add_up, mutates_args=())
_DIFFERENTIATE_SUM = torch.library.custom_op(
    "frostlab::residual_sum_backward", differentiate_sum, mutates_args=()
)


@_ADD_UP.register_fake
def _(x: Tensor, branch: Tensor, seed: Any, dropout: float) -> Tensor:
    return x.new_empty(x.shape)


@_DIFFERENTIATE_SUM.register_fake
def _(
    by_total: Tensor, seed: Any, dropout: float, branch_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = by_total.shape[-1] if bias_dtype is not None else 0
    return (
        by_total.new_empty(by_total.shape, dtype=branch_dtype),
        by_total.new_empty(width, dtype=bias_dtype),
    )
