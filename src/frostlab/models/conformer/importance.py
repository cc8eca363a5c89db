"""Which electrodes a Conformer listens to, as its channel attention and convolutions say."""

import torch
from torch import Tensor

from frostlab.models.conformer.model import Conformer, ConvolutionBlock


@torch.no_grad()
def electrode_importance(model: Conformer, eeg: Tensor) -> Tensor:
    """Share out what channel attention lets through of (B, T, channels) over the electrodes.

    The mean weight of each feature goes back through the sizes of the convolutions' weights,
    summed over their taps; signs and non-linearities play no part. Returns (channels,), sum 1.
    """
    training = model.training
    model.eval()
    share = model.channels.weights(model.cnn(eeg)).mean(0)  # (width,)
    model.train(training)
    for block in reversed(list(model.cnn)):
        assert isinstance(block, ConvolutionBlock)
        gain = block.norm.weight.abs()[:, None] * block.conv.weight.abs().sum(-1)  # (out, in)
        share = share @ (gain / gain.sum(1, keepdim=True).clamp(min=1e-12))
    return share / share.sum()
