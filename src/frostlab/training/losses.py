"""A language-model head's cross-entropy, a chunk of tokens at a time: the logits are never kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from frostlab.errors import BadInput, FrostlabError
from frostlab.training.batching import IGNORED
from frostlab.training.products import on_host
from frostlab.training.sweeping import Sweep


@dataclass(frozen=True)
class _Options:
    shares: list[float]  # of each layer in the total
    ignore: int


@_disable_dynamo  # as optimizers do: torch.compile of a caller goes around it
def head_loss(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = IGNORED,
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of a linear head on one or several supervised layers.

    `hidden` is (…, width), or several of that shape that share the head; `weight` is
    (vocabulary, width) and `targets` (…). Returns the sum of the layers' losses, each times its
    weight, and the layers' own losses without gradient. Gradients are made chunk by chunk in the
    forward pass; only what requires one gets one.
    """
    layers = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    shares = [1.0] * len(layers) if weights is None else [float(w) for w in weights]
    _check(layers, weight, targets, bias, shares)
    options = _Options(shares, ignore)
    given = (weight, bias, *layers)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return _HeadLoss.apply(options, targets, *given)
    total, each, _ = _sweep(options, targets, weight, bias, layers, [False] * len(given))
    return total, each


def _check(
    layers: list[Tensor], weight: Tensor, targets: Tensor, bias: Tensor | None, shares: list[float]
) -> None:
    """Refuse what does not fit together."""
    if not layers or len(shares) != len(layers):
        raise BadInput(f"{len(shares)} weights for {len(layers)} supervised layers")
    shapes = {tuple(layer.shape) for layer in layers}
    if shapes != {(*targets.shape, weight.shape[-1])}:
        others = f"targets of {tuple(targets.shape)} and a head of {tuple(weight.shape)}"
        raise BadInput(f"hidden states of {sorted(shapes)} do not fit {others}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"a bias of {tuple(bias.shape)} for a head of {tuple(weight.shape)}")


class _HeadLoss(torch.autograd.Function):
    """The total with its gradients ready: the backward pass has only to scale them."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *layers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[2:]
        total, each, made = _sweep(options, targets, weight, bias, layers, wanted)
        ctx.save_for_backward(*made)
        ctx.mark_non_differentiable(each)
        return total, each

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """In place, unless the graph is kept for another; autograd turns to the inputs' dtypes."""
        if torch.is_grad_enabled():  # once_differentiable would only speak up now and then
            raise FrostlabError("head_loss has no second derivative: leave out create_graph=True")
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        one = on_host(upstream) and bool(upstream == 1)
        scaled: list[Tensor | None] = [None, None]
        for gradient in ctx.saved_tensors:
            if gradient is not None and kept:
                gradient = gradient * upstream
            elif gradient is not None and not one:
                gradient.mul_(upstream)
            scaled.append(gradient)
        return tuple(scaled)


@torch.no_grad()
def _sweep(
    options: _Options,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layers: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The total, each layer's loss, and the wanted gradients of weight, bias and layers."""
    sweep = Sweep(weight, bias, targets, layers[0].dtype, options.ignore, wanted)
    with torch.autocast(weight.device.type, enabled=False):
        found = [
            sweep.layer(layer, share, learns)
            for layer, share, learns in zip(layers, options.shares, wanted[2:], strict=True)
        ]
    each = torch.stack([loss for loss, _ in found])
    total = torch.stack([loss * share for loss, share in zip(each, options.shares, strict=True)])
    return total.sum(), each, [sweep.weight, sweep.bias, *(gradient for _, gradient in found)]
