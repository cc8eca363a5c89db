"""A reference for the loss of a head, and inputs for it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def plain(
    layers: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = -100,
) -> tuple[Tensor, Tensor]:
    each = []
    for layer in layers:
        logits = F.linear(layer, weight, bias)
        flat = logits.reshape(-1, len(weight))
        flat = flat if flat.dtype == torch.float64 else flat.float()
        each.append(
            F.cross_entropy(flat, targets.reshape(-1), ignore_index=ignore, reduction="sum")
        )
    shares = weights or [1.0] * len(each)
    total = sum((s * loss for s, loss in zip(shares, each, strict=True)), torch.zeros(()))
    return total, torch.stack(each).detach()


def inputs(
    classes: int,
    width: int,
    shape: tuple[int, ...],
    layers: int = 1,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    hidden = [torch.randn(*shape, width, dtype=dtype, requires_grad=True) for _ in range(layers)]
    weight = (scale * torch.randn(classes, width, dtype=dtype)).requires_grad_()
    bias = torch.randn(classes, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(classes, shape)


def gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(total, leaves))


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    """Relative to the largest entry; terms of size one that cancel leave rounding."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance * (1 + float(b.detach().abs().max()))
        )
