"""Losses for envelopes (loudness of speech over time) decoded from EEG, and their objective."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.errors import BadInput, nearest
from frostlab.recipe.model import SCALES, EnvelopeLoss
from frostlab.training.batches.batch import Batch
from frostlab.training.step.objective import Exits, Objective

LossKind = Literal["pearson", "pearson-l1", "mse-pearson", "multiscale"]
KINDS: tuple[LossKind, ...] = get_args(LossKind)
_FLAT = 16.0  # a signal that varies by at most this many rounding errors counts as constant
_TINY = 1e-30  # smallest divisor, to avoid a division by zero


class EnvelopeObjective(Objective):
    """A model that maps (B, T, channels) of EEG to a (B, T) envelope, with its loss."""

    def __init__(self, model: nn.Module, loss: EnvelopeLoss) -> None:
        super().__init__(model)
        self.loss = loss

    def forward(self, batch: Batch, want: Literal["loss", "logits"] | Exits = "loss") -> Tensor:
        """Return the loss, summed over windows, or the prediction."""
        prediction: Tensor = self.model(**batch.inputs)
        return prediction if want == "logits" else self.loss_of(prediction, batch)

    def loss_of(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a prediction; 0 for the placeholder of an empty batch."""
        kind, weight, scales = self.loss.kind, self.loss.weight, self.loss.scales
        loss = envelope_loss(kind, prediction, batch.targets, weight=weight, scales=scales)
        return loss if batch.scored else 0.0 * loss


def envelope_loss(
    kind: LossKind,
    prediction: Tensor,
    target: Tensor,
    *,
    weight: float | None = None,
    scales: Sequence[int] | None = None,
) -> Tensor:
    """Return the loss of (B, T) windows, summed over the windows.

    Args:
        kind: "pearson" −r, "pearson-l1" −r + weight·L1, "mse-pearson" MSE + weight·(1 − r)²,
            "multiscale" the mean of −r over several scales of average pooling.
        weight: factor of the second term; 1 by default.
        scales: for multiscale, the numbers of samples averaged into one; default 1, 2, 4 and 8.
    """
    return window_losses(kind, prediction, target, weight=weight, scales=scales).sum()


def window_losses(
    kind: LossKind,
    prediction: Tensor,
    target: Tensor,
    *,
    weight: float | None = None,
    scales: Sequence[int] | None = None,
) -> Tensor:
    """Return the loss of each window: (B,) from (B, T)."""
    _check(kind, prediction, target, weight, scales)
    weight = 1.0 if weight is None else weight
    x, y = _exact(prediction), _exact(target)
    if kind == "multiscale":
        scales = SCALES if scales is None else scales
        by_scale = [pearson(_pool(x, scale), _pool(y, scale)) for scale in scales]
        return -torch.stack(by_scale).mean(0)
    r = pearson(x, y)
    if kind == "mse-pearson":
        return (x - y).square().mean(-1) + weight * (1 - r).square()
    return -r if kind == "pearson" else weight * (x - y).abs().mean(-1) - r


def pearson(prediction: Tensor, target: Tensor) -> Tensor:
    """Return Pearson's r along the last axis; 0, with a gradient of 0, if either is constant."""
    x, flat_x = _centred(_exact(prediction))
    y, flat_y = _centred(_exact(target))
    product, sizes = (x * y).sum(-1), x.square().sum(-1) * y.square().sum(-1)
    flat = flat_x | flat_y
    return torch.where(flat, 0.0, product * torch.where(flat, 1.0, sizes).rsqrt())


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Centre a signal and scale its largest value to 1; also return whether it was constant.

    Scaling keeps squares from underflow and overflow. Pearson's r does not depend on the factor, so
    its gradient is correct although the factor is treated as a constant. A constant signal becomes
    zeros.
    """
    with torch.no_grad():
        noise = (_FLAT * torch.finfo(x.dtype).eps * x.abs().amax(-1, keepdim=True)).clamp(min=_TINY)
    x = x - x.mean(-1, keepdim=True)
    with torch.no_grad():
        largest = x.abs().amax(-1, keepdim=True)
        flat = largest <= noise
        scale = torch.where(flat, 0.0, 1.0 / largest.clamp(min=_TINY))
    return x * scale, flat.squeeze(-1)


def _exact(x: Tensor) -> Tensor:
    """Return a float64 tensor unchanged, and any other tensor, such as autocast's, in float32."""
    return x if x.dtype == torch.float64 else x.float()


def _pool(x: Tensor, scale: int) -> Tensor:
    """Average (B, T) over blocks of `scale` samples; an incomplete last block is left out."""
    return F.avg_pool1d(x.unsqueeze(1), scale).squeeze(1)


def _check(
    kind: str,
    prediction: Tensor,
    target: Tensor,
    weight: float | None,
    scales: Sequence[int] | None,
) -> None:
    if kind not in KINDS:
        raise BadInput(f"envelope_loss: `{kind}` is not a loss{nearest(kind, KINDS)}")
    if prediction.shape != target.shape or prediction.dim() != 2:
        shapes = f"{tuple(prediction.shape)} and {tuple(target.shape)}"
        raise BadInput(f"envelope_loss: prediction and target are {shapes}, not both (B, T)")
    if weight is not None and kind in ("pearson", "multiscale"):
        raise BadInput(f"envelope_loss: weight {weight} is given, but {kind} has one term only")
    if scales is not None and kind != "multiscale":
        raise BadInput(f"envelope_loss: scales are given, but kind is {kind}, not multiscale")
    chosen = (SCALES if scales is None else scales) if kind == "multiscale" else (1,)
    if not chosen or min(chosen) < 1:
        raise BadInput(
            f"envelope_loss: scales {tuple(chosen)} must be one or more positive numbers"
        )
    if prediction.shape[1] < 2:
        raise BadInput(
            f"envelope_loss: a window of {prediction.shape[1]} samples has no correlation; "
            "the least is 2"
        )
    if prediction.shape[1] < 2 * max(chosen):
        raise BadInput(
            f"envelope_loss: a window of {prediction.shape[1]} samples gives fewer than two means "
            f"at scale {max(chosen)}; the largest scale that fits is {prediction.shape[1] // 2}"
        )
