"""The Conformer that decodes a speech envelope from EEG: v1, and v2's additions as switches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.errors import BadInput
from frostlab.models.conformer.config import ConformerConfig
from frostlab.models.conformer.layer import ConformerLayer, distances, sinusoids

KERNELS = (7, 5, 3)
UNSEEN = -1  # the index of a subject that was not trained on


class ConvolutionBlock(nn.Module):
    """A convolution along time over all channels, a norm, LeakyReLU, dropout."""

    def __init__(self, channels: int, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv = nn.Conv1d(channels, width, kernel, padding=kernel // 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)  # (B, T, width)
        return F.dropout(F.leaky_relu(self.norm(x)), self.dropout, self.training)


class ChannelAttention(nn.Module):
    """Squeeze and excitation: a weight a channel, from all channels' means (Hu et al. 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, max(1, width // 16))
        self.excite = nn.Linear(max(1, width // 16), width)

    def weights(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, width), between 0 and 1."""
        return torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(1)))))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x).unsqueeze(1)


class Gate(nn.Module):
    """How much of the stack's output a channel keeps, from the output's mean over time."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, max(1, width // 4))
        self.up = nn.Linear(max(1, width // 4), width)
        nn.init.constant_(self.up.bias, bias)

    def share(self, out: Tensor) -> Tensor:
        """(B, T, width) to (B, 1, width), between 0 and 1."""
        return torch.sigmoid(self.up(F.relu(self.down(out.mean(1))))).unsqueeze(1)

    def forward(self, out: Tensor, into: Tensor) -> Tensor:
        share = self.share(out)
        return share * out + (1 - share) * into


class _GradientScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x itself; what flows back through it is multiplied."""
    return x if scale == 1.0 else _GradientScale.apply(x, scale)


class Conformer(nn.Module):
    """EEG to a speech envelope, sample by sample."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        wide = (config.channels, width, width)
        self.cnn = nn.Sequential(
            *(
                ConvolutionBlock(channels, width, kernel, config.dropout)
                for channels, kernel in zip(wide, KERNELS, strict=True)
            )
        )
        self.channels = ChannelAttention(width)
        self.subjects = nn.Embedding(config.subjects, width)
        nn.init.normal_(self.subjects.weight, std=0.02)
        self.blocks = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))
        if config.residual == "gated":
            self.gate = Gate(width, config.gate_bias)
        self.head = _head(config)

    def forward(self, eeg: Tensor, subject: Tensor | None = None) -> Tensor:
        """Decode (B, T, channels) of subjects (B,) into (B, T); None is unseen subjects only."""
        into = self.embed(eeg, subject)
        places = None
        if self.config.attention == "relative":
            places = self.waves(distances(eeg.shape[1], eeg.device))
        out = into
        for block in self.blocks:
            out = block(out, places)
        out = self.join(scale_gradient(out, self.config.gradient_scale), into)
        with torch.autocast(eeg.device.type, enabled=False):  # r sees small differences
            envelope = self.head(out.to(self.subjects.weight.dtype)).squeeze(-1)
        return envelope.to(torch.promote_types(envelope.dtype, torch.float32))

    def embed(self, eeg: Tensor, subject: Tensor | None) -> Tensor:
        """What the stack is given: features, whose they are, and when: (B, T, width)."""
        if eeg.dim() != 3:
            raise BadInput(f"the EEG is {tuple(eeg.shape)}, not (B, T, channels)")
        if eeg.shape[-1] != self.config.channels:
            raise BadInput(
                f"the EEG has {eeg.shape[-1]} channels, the model {self.config.channels}"
            )
        x = self.channels(self.cnn(eeg)) + self.rows(subject)
        if self.config.attention == "plain":
            x = x + self.waves(torch.arange(eeg.shape[1], device=eeg.device))
        return F.dropout(x, self.config.dropout, self.training)

    def waves(self, places: Tensor) -> Tensor:
        """The sinusoids of places, as precise as the weights are."""
        return sinusoids(places, self.config.width).to(self.subjects.weight.dtype)

    def rows(self, subject: Tensor | None) -> Tensor:
        """The subjects' embeddings, (B, 1, width), or (width,) for unseen subjects only."""
        table = self.subjects.weight
        unseen = table.mean(0) if self.config.unseen == "mean" else torch.zeros_like(table[0])
        if subject is None:
            return unseen
        known = self.subjects(subject.clamp(min=0))  # (B, width)
        return torch.where((subject < 0)[:, None], unseen, known).unsqueeze(1)

    def join(self, out: Tensor, into: Tensor) -> Tensor:
        """The stack's output with its input, as the residual says."""
        if self.config.residual == "gated":
            return self.gate(out, into)
        return out + into if self.config.residual == "plain" else out


def _head(config: ConformerConfig) -> nn.Module:
    width = config.width
    if config.head == "linear":
        return nn.Linear(width, 1)
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, width // 2),
        nn.GELU(),
        nn.Dropout(config.dropout),
        nn.Linear(width // 2, 1),
    )
