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
ATTENTION = "frostlab.models.fused.joined_attention_kernels"
EMBEDDING = "frostlab.models.fused.embedding_kernels"
plain_attention = F.scaled_dot_product_attention


def masked(x: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Dropout by a mask that follows from the seed, in operations that can be traced."""
    if seed is None:
        return x
    places = torch.arange(x.numel(), dtype=torch.float64) + seed[0] % 1000003
    numbers = torch.frac(torch.sin(places * 12.9898) * 43758.5453).abs()
    return x * (numbers.view(x.shape) >= dropout) / (1 - dropout)


def seeded_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`F.dropout` with the masks of the fused operations, which draw a seed each."""
    return masked(x, fused.draw_seeds(x.device, 1)[0], p) if training and p else x


def seeded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Torch's attention with the masks of the fused operation."""
    if not dropout_p:
        return plain_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    assert attn_mask is None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        chances = _chances(query.float(), key.float(), scale, is_causal)
        chances = masked(chances, fused.draw_seeds(query.device, 1)[0], dropout_p)
        return (chances @ value.float()).to(value.dtype)


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
) -> tuple[Tensor, ...]:
    total = x.clone() if branch is None else x + masked(branch, seed, dropout)
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
    seed: Tensor | None,
    dropout: float,
    means: Tensor,
    scales: Tensor,
    by_total: Tensor | None,
    by_exact: Tensor | None,
    by_low: Tensor | None,
    branch_dtype: torch.dtype | None,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    total = (x if branch is None else x + masked(branch, seed, dropout)).flatten(0, -2)
    normal = (total - means[:, None]) * scales[:, None]
    upstream = sum(g.flatten(0, -2).to(x.dtype) for g in (by_exact, by_low) if g is not None)
    scaled = upstream * weight
    gradient = scaled - scaled.mean(1, True) - normal * (scaled * normal).mean(1, True)
    gradient = gradient * scales[:, None]
    if by_total is not None:
        gradient = gradient + by_total.flatten(0, -2)
    dropped = masked(gradient.view(x.shape), seed, dropout)
    by_branch, by_bias = x.new_empty(0), x.new_empty(0)
    if branch_dtype is not None:
        by_branch = dropped.to(branch_dtype).view(x.shape).clone()
        by_bias = by_branch.flatten(0, -2).to(x.dtype).sum(0).to(bias_dtype)
    by_weight, by_shift = (upstream * normal).sum(0), upstream.sum(0)
    return gradient.view(x.shape), by_branch, by_weight, by_shift, by_bias


def add(x: Tensor, branch: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    return x + masked(branch, seed, dropout)


def differentiate_sum(
    by_total: Tensor,
    seed: Tensor | None,
    dropout: float,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    by_branch = masked(by_total, seed, dropout).to(branch_dtype).clone()
    if bias_dtype is None:
        return by_branch, by_total.new_empty(0)
    return by_branch, by_branch.flatten(0, -2).to(by_total.dtype).sum(0).to(bias_dtype)


def activate(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def differentiate_gelu(
    upstream: Tensor, x: Tensor, tanh: bool, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    how = "tanh" if tanh else "none"
    by_x = torch.ops.aten.gelu_backward(upstream, x, approximate=how)
    return by_x, by_x.flatten(0, -2).float().sum(0).to(bias_dtype)


def _heads(joined: Tensor, starts: list[int], size: int) -> list[Tensor]:
    """Return queries, keys and values, (B, heads, T, size), in float32."""
    width = joined.shape[-1] // len(starts)
    parts = [joined[..., start : start + width].float() for start in starts]
    return [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts]


def _chances(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    scores = query @ key.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0]).tril().bool(), -torch.inf)
    return scores.softmax(-1)


def attend(
    joined: Tensor,
    seed: Tensor | None,
    starts: list[int],
    size: int,
    scale: float,
    dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    query, key, value = _heads(joined, starts, size)
    mixed = masked(_chances(query, key, scale, causal), seed, dropout) @ value
    out = mixed.transpose(1, 2).flatten(2).to(joined.dtype).contiguous()
    return out, joined.new_zeros(mixed[..., 0].flatten(0, 1).shape, dtype=torch.float32)


def differentiate_attention(
    upstream: Tensor,
    joined: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor | None,
    starts: list[int],
    size: int,
    scale: float,
    dropout: float,
    causal: bool,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    query, key, value = _heads(joined, starts, size)
    (above,) = _heads(upstream, [0], size)
    chances = _chances(query, key, scale, causal)
    by_value = masked(chances, seed, dropout).mT @ above
    by_chances = masked(above @ value.mT, seed, dropout)
    by_scores = chances * (by_chances - (chances * by_chances).sum(-1, True)) * scale
    by_joined = torch.empty_like(joined)
    for start, part in zip(starts, (by_scores @ key, by_scores.mT @ query, by_value), strict=True):
        part = part.transpose(1, 2).flatten(2)
        by_joined[..., start : start + part.shape[-1]] = part.to(joined.dtype)
    total = by_joined.float().sum((0, 1))
    return by_joined, total if biased else total[:0].clone()


def add_rows(table: Tensor, ids: Tensor, values: Tensor, skipped: int, adds: bool) -> None:
    kept = ids != skipped
    table.index_add_(0, ids[kept], values[kept].to(table.dtype))


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled layers on the CPU use the fused operations, with these functions as kernels."""
    norms, gelus, attentions = ModuleType(NORM), ModuleType(GELU), ModuleType(ATTENTION)
    embeddings = ModuleType(EMBEDDING)
    embeddings.add_rows = add_rows
    norms.normalise, norms.differentiate = normalise, differentiate
    norms.add, norms.differentiate_sum = add, differentiate_sum
    gelus.activate, gelus.differentiate = activate, differentiate_gelu
    attentions.attend, attentions.differentiate = attend, differentiate_attention
    for module in (norms, gelus, attentions, embeddings):
        name = module.__name__
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(fused, name.rpartition(".")[2], module, raising=False)
    monkeypatch.setattr(devices, "HAS_TRITON", True)
