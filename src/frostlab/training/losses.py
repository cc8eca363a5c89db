"""Stand-in: the loss of a language-model head, unfused."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def head_loss(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the layers' summed losses, and each of them."""
    layers = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    each = torch.stack(
        [
            F.cross_entropy(
                F.linear(x, weight, bias).flatten(0, -2).float(),
                targets.flatten(),
                ignore_index=ignore,
                reduction="sum",
            )
            for x in layers
        ]
    )
    return (each * each.new_tensor(weights or [1.0] * len(layers))).sum(), each
