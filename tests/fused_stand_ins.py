"""Torch's operations in the place of the Triton kernels of `frostlab.models.fused`."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frostlab import devices
from frostlab.models import fused

NORM = "frostlab.models.fused.residual_norm_kernels"
GELU = "frostlab.models.fused.gelu_kernels"


def normalise(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    eps: float,
    keeps: bool,
    exact: bool,
    low: torch.dtype | None,
) -> tuple[Tensor, ...]:
    total = x.clone() if branch is None else x + branch
    normed = F.layer_norm(total, weight.shape, weight, shift, eps)
    empty = x.new_empty(0)
    return (
        total if keeps else empty.clone(),
        normed if exact else empty.clone(),
        empty.clone() if low is None else normed.to(low),
        total.mean(-1).flatten(),
        (total.var(-1, unbiased=False) + eps).rsqrt().flatten(),
    )


def differentiate(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    by_total: Tensor | None,
    by_exact: Tensor | None,
    by_low: Tensor | None,
    mask: Tensor | None,
    factor: float,
    branch_dtype: torch.dtype | None,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    total = (x if branch is None else x + branch).flatten(0, -2)
    normal = (total - means[:, None]) * scales[:, None]
    upstream = sum(g.flatten(0, -2).to(x.dtype) for g in (by_exact, by_low) if g is not None)
    scaled = upstream * weight
    gradient = scaled - scaled.mean(1, True) - normal * (scaled * normal).mean(1, True)
    gradient = gradient * scales[:, None]
    if by_total is not None:
        gradient = gradient + by_total.flatten(0, -2)
    dropped = gradient if mask is None else gradient * mask.flatten(0, -2) * factor
    by_branch, by_bias = x.new_empty(0), x.new_empty(0)
    if branch_dtype is not None:
        by_branch = dropped.to(branch_dtype).view(x.shape).clone()
        by_bias = by_branch.flatten(0, -2).to(x.dtype).sum(0).to(bias_dtype)
    by_weight, by_shift = (upstream * normal).sum(0), upstream.sum(0)
    return gradient.view(x.shape), by_branch, by_weight, by_shift, by_bias


def activate(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def differentiate_gelu(
    upstream: Tensor, x: Tensor, tanh: bool, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    how = "tanh" if tanh else "none"
    by_x = torch.ops.aten.gelu_backward(upstream, x, approximate=how)
    return by_x, by_x.flatten(0, -2).float().sum(0).to(bias_dtype)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled layers on the CPU use the fused operations, with these functions as kernels."""
    norms, gelus = ModuleType(NORM), ModuleType(GELU)
    norms.normalise, norms.differentiate = normalise, differentiate
    gelus.activate, gelus.differentiate = activate, differentiate_gelu
    for name, module in ((NORM, norms), (GELU, gelus)):
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(fused, name.rpartition(".")[2], module, raising=False)
    monkeypatch.setattr(devices, "HAS_TRITON", True)
