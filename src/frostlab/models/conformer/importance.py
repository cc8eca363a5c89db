"""Which electrodes a Conformer listens to."""

import torch
from torch import Tensor

from frostlab.models.conformer.model import Conformer


def electrode_importance(
    model: Conformer, eeg: Tensor, subject: Tensor | None = None, *, probes: int = 8, seed: int = 0
) -> Tensor:
    """Say how much the decoded envelope moves with each electrode of (B, T, channels).

    The root mean square of the envelope's derivatives, all samples by all samples, times the
    electrode's own deviation; estimated with random signs (Hutchinson 1990). Channel attention
    weighs features, which mix electrodes, so it is asked through the whole model. Returns
    (channels,), sum 1.
    """
    training = model.training
    model.eval()
    eeg = eeg.detach().requires_grad_()
    draw = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        envelope = model(eeg, subject)
    squares = torch.zeros_like(eeg[0, 0])
    for _ in range(probes):
        signs = torch.randint(0, 2, envelope.shape, generator=draw).to(envelope) * 2 - 1
        (moved,) = torch.autograd.grad(envelope, eeg, signs, retain_graph=True)
        squares += moved.square().mean((0, 1))
    model.train(training)
    strength = squares.sqrt() * eeg.detach().std((0, 1))
    return strength / strength.sum()
