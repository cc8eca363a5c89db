"""Conformer for EEG, which decodes the envelope of speech (its loudness) sample by sample.

The layers follow Gulati et al. (2020). The config sets the head, the residual connection around
the whole stack of layers, and the factor by which the gradient into the stack is scaled. The
variant `published` has the layers, the channel attention, the subject projection and the initial
weights of the code that the authors of this EEG decoder published (docs/conformer.md).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.errors import BadInput
from frostlab.models.attention import attend
from frostlab.models.fused.depthwise import Depthwise
from frostlab.recipe.model import LONGEST

Residual = Literal["none", "plain", "gated"]
Head = Literal["linear", "mlp"]
Norm = Literal["batch", "layer", "group"]
Attending = Literal["plain", "relative"]
Unseen = Literal["mean", "none"]
Variant = Literal["frostlab", "published"]

KERNELS = (7, 5, 3)  # kernel sizes of the convolutions before the stack


@dataclass(frozen=True)
class ConformerConfig:
    """The shape of a Conformer; the defaults give the authors' second version, v2.

    Their first version, v1, is `residual="none"`, `head="linear"`, `gradient_scale=1.0`. Both have
    frostlab's layers, or with `variant="published"` the layers of the authors' code.
    """

    channels: int = 64  # EEG channels
    subjects: int = 71  # training subjects, each with its own embedding
    width: int = 256
    layers: int = 8
    heads: int = 4
    hidden: int = 1024  # hidden units of each feed-forward network
    kernel: int = 31  # kernel size of the depthwise convolution, in samples
    dropout: float = 0.3
    residual: Residual = "gated"  # residual connection around the stack
    gate_bias: float = 0.0  # initial gate bias; 0 mixes the stack's output and input about equally
    gradient_scale: float = 2.0  # factor of the gradient into the stack, not into the residual
    head: Head = "mlp"
    norm: Norm = "batch"  # norm in the convolution module
    attention: Attending = "plain"  # plain: sinusoidal positions are added before the stack
    # embedding of an unseen subject: the mean of all subjects' embeddings, or zeros; in the
    # published variant, where a linear layer embeds subjects, that layer's bias instead of zeros
    unseen: Unseen = "mean"
    variant: Variant = "frostlab"

    @property
    def published(self) -> bool:
        """Whether the model has the layers of the published code."""
        return self.variant == "published"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd; sines and cosines come in pairs")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} is even; choose an odd one")
        if self.published and self.attention != "plain":
            raise ValueError(f"attention is {self.attention}; the published variant has only plain")


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Return sinusoidal position embeddings, (T, width) (Vaswani et al. 2017)."""
    pairs = torch.arange(0, width, 2, device=places.device).float()
    angles = places.float()[:, None] * torch.exp(pairs * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def distances(length: int, device: torch.device) -> Tensor:
    """Return all distances i − j between a query i and a key j: length − 1 down to 1 − length."""
    return torch.arange(length - 1, -length, -1, device=device)


class FeedForward(nn.Module):
    """A norm and a feed-forward network with swish."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        if config.published:
            nn.init.xavier_uniform_(self.up.weight)
            nn.init.xavier_uniform_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.silu(self.up(self.norm(x))), self.dropout, self.training)
        return F.dropout(self.down(hidden), self.dropout, self.training)


class Attention(nn.Module):
    """Self-attention over the window, with optional relative positions.

    The score of query i and key j is, before it is divided by the root of the head's size,

        q_i·k_j                                                 plain
        (q_i + content_bias)·k_j + (q_i + place_bias)·p_{i−j}   relative (Dai et al. 2019)
        q_i·k_j + q_i·r_{i−j}                                   published (Shaw et al. 2018)

    where p is a projection of sinusoids, and r a learned table that all heads share.
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = config.attention == "relative"
        if self.relative:
            self.position = nn.Linear(width, width, bias=False)
            self.content_bias = nn.Parameter(torch.zeros(self.heads, width // self.heads))
            self.place_bias = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.published = config.published
        if self.published:
            size = width // self.heads
            # row n is for the distance n − (LONGEST − 1)
            self.relative_positions = nn.Parameter(torch.randn(2 * LONGEST - 1, size) * size**-0.5)
            for weight in (*self.qkv.weight.chunk(3), self.out.weight):
                nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, places: Tensor | None) -> Tensor:
        """Attend over (B, T, width).

        Args:
            places: the sinusoids of all distances, (2T − 1, width), for `relative` only.
        """
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, size)
        bias = None
        if places is not None:
            bias = self._bias(query, places)
            query = query + self.content_bias[:, None].to(query.dtype)
        if self.published:
            bias = self._learned_bias(query)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, mask=bias, dropout=dropout)
        return F.dropout(self.out(mixed.flatten(2)), self.dropout, self.training)

    def _bias(self, query: Tensor, places: Tensor) -> Tensor:
        """Return (q_i + place_bias)·p_{i−j} of each query and key, scaled: (B, heads, T, T)."""
        keys = self.position(places).unflatten(-1, (self.heads, -1))  # (2T − 1, heads, size)
        scores = (query + self.place_bias[:, None].to(query.dtype)) @ keys.permute(1, 2, 0)
        bias = by_distance(scores) * query.shape[-1] ** -0.5
        return bias.to(query.dtype)

    def _learned_bias(self, query: Tensor) -> Tensor:
        """Return q_i·r_{i−j} of each query and key, scaled: (B, heads, T, T)."""
        length, size = query.shape[-2:]
        keys = self.relative_positions[LONGEST - length : LONGEST + length - 1]
        # from the distance length − 1 down to 1 − length, as `by_distance` needs them
        scores = query @ keys.flip(0).to(query.dtype).T
        return (by_distance(scores) * size**-0.5).to(query.dtype)


def by_distance(scores: Tensor) -> Tensor:
    """Turn scores per distance, (…, T, 2T − 1), into scores per key, (…, T, T).

    Entry [i, d] of the input has distance T − 1 − d, and entry [i, j] of the result has distance
    i − j, so row i must shift left by T − 1 − i. Padding one column on the left, dropping the first
    T values and cutting rows of length 2T − 1 again shifts each row by one less than the row above.
    """
    length = scores.shape[-2]
    shifted = F.pad(scores, (1, 0)).flatten(-2).unflatten(-1, (2 * length, length))
    return shifted[..., 1:, :].flatten(-2).unflatten(-1, (length, -1))[..., :length]


class Convolution(nn.Module):
    """A gated linear unit, a depthwise convolution along time, a norm, swish and a projection.

    The published variant has twice the width between the gated linear unit and the projection.
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, self.dropout = config.width, config.dropout
        inner = 2 * width if config.published else width
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 2 * inner)
        self.depthwise = Depthwise(inner, config.kernel)
        self.middle = _norm(config.norm, inner)
        self.leave = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.enter(self.norm(x)), -1)
        x = self.depthwise(x)
        if isinstance(self.middle, nn.GroupNorm):
            x = self.middle(x.transpose(1, 2)).transpose(1, 2)
        elif isinstance(self.middle, nn.LayerNorm):
            x = self.middle(x)
        else:  # BatchNorm, with statistics over all time samples of the batch
            x = self.middle(x.flatten(0, 1)).view_as(x)
        return F.dropout(self.leave(F.silu(x)), self.dropout, self.training)


def _norm(kind: Norm, width: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(width)
    return nn.BatchNorm1d(width) if kind == "batch" else nn.GroupNorm(math.gcd(8, width), width)


class ConformerLayer(nn.Module):
    """Feed-forward network, attention, convolution and feed-forward network, then a norm.

    The output of each module is added to its input; feed-forward outputs are halved before that.
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.feed1 = FeedForward(config)
        self.attention = Attention(config)
        self.convolution = Convolution(config)
        self.feed2 = FeedForward(config)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        x = x + 0.5 * self.feed1(x)
        x = x + self.attention(x, places)
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.feed2(x))


class ConvolutionBlock(nn.Module):
    """A convolution along time over all channels, a norm, LeakyReLU and dropout."""

    def __init__(self, channels: int, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv = nn.Conv1d(channels, width, kernel, padding=kernel // 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)  # (B, T, width)
        return F.dropout(F.leaky_relu(self.norm(x)), self.dropout, self.training)


class ChannelAttention(nn.Module):
    """Squeeze-and-excitation: weights of the features, from their means (Hu et al. 2018).

    The channels of the paper are the `width` features here, not the EEG channels. The published
    variant has no biases, and LeakyReLU instead of ReLU.
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, bias = config.width, not config.published
        self.slope = 0.01 if config.published else 0.0  # LeakyReLU's slope for negative inputs
        self.squeeze = nn.Linear(width, max(1, width // 16), bias=bias)
        self.excite = nn.Linear(max(1, width // 16), width, bias=bias)

    def weights(self, x: Tensor) -> Tensor:
        """Return the weights of the features, (B, width), for (B, T, width), between 0 and 1."""
        squeezed = F.leaky_relu(self.squeeze(x.mean(1)), self.slope)
        return torch.sigmoid(self.excite(squeezed))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x).unsqueeze(1)


class Gate(nn.Module):
    """A gate for each of the `width` features that mixes the stack's output and input.

    The gates are computed from the mean of the stack's output over time.
    """

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, max(1, width // 4))
        self.up = nn.Linear(max(1, width // 4), width)
        nn.init.constant_(self.up.bias, bias)

    def opening(self, out: Tensor) -> Tensor:
        """Return the share of the stack's output in each feature: (B, 1, width), from 0 to 1."""
        return torch.sigmoid(self.up(F.relu(self.down(out.mean(1))))).unsqueeze(1)

    def forward(self, out: Tensor, into: Tensor) -> Tensor:
        opening = self.opening(out)
        return opening * out + (1 - opening) * into


class _GradientScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x, and multiply its gradient by the scale in the backward pass."""
    return x if scale == 1.0 else _GradientScale.apply(x, scale)


class Conformer(nn.Module):
    """A Conformer that decodes a speech envelope from EEG, sample by sample."""

    compiled_parts = ("cnn", "channels", "gate", "head")  # compiled in addition to the layers

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        inputs = (config.channels, width, width)  # input channels of the convolutions
        self.cnn = nn.Sequential(
            *(
                ConvolutionBlock(channels, width, kernel, config.dropout)
                for channels, kernel in zip(inputs, KERNELS, strict=True)
            )
        )
        self.channels = ChannelAttention(config)
        self.subjects: nn.Embedding | nn.Linear
        if config.published:
            self.subjects = nn.Linear(config.subjects, width)  # reads a subject's one-hot code
        else:
            self.subjects = nn.Embedding(config.subjects, width)
            nn.init.normal_(self.subjects.weight, std=0.02)
        self.blocks = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))
        if config.residual == "gated":
            self.gate = Gate(width, config.gate_bias)
        self.head = _head(config)

    def forward(self, eeg: Tensor, subject: Tensor | None = None) -> Tensor:
        """Decode EEG (B, T, channels) of subjects (B,) into envelopes (B, T).

        A negative subject is unseen: it was not in training (see `ConformerConfig.unseen`). Without
        `subject`, all are unseen.
        """
        into = self.embed(eeg, subject)
        places = None
        if self.config.attention == "relative":
            places = self.waves(distances(eeg.shape[1], eeg.device))
        out = into
        for block in self.blocks:
            out = block(out, places)
        out = self.join(scale_gradient(out, self.config.gradient_scale), into)
        with torch.autocast(eeg.device.type, enabled=False):  # correlations need full precision
            envelope = self.head(out.to(self.subjects.weight.dtype)).squeeze(-1)
        return envelope.to(torch.promote_types(envelope.dtype, torch.float32))

    def embed(self, eeg: Tensor, subject: Tensor | None) -> Tensor:
        """Return the stack's input (B, T, width): features plus the subjects' embeddings.

        With plain attention, position embeddings are added as well.
        """
        if eeg.dim() != 3:
            raise BadInput(f"the EEG is {tuple(eeg.shape)}, not (B, T, channels)")
        if eeg.shape[-1] != self.config.channels:
            raise BadInput(
                f"the EEG has {eeg.shape[-1]} channels; the model reads {self.config.channels}"
            )
        if self.config.published and eeg.shape[1] > LONGEST:
            raise BadInput(
                f"the EEG has {eeg.shape[1]} samples; the published variant has learned positions "
                f"for windows of at most {LONGEST}"
            )
        x = self.channels(self.cnn(eeg)) + self.rows(subject)
        if self.config.attention == "plain":
            x = x + self.waves(torch.arange(eeg.shape[1], device=eeg.device))
        dropout = 0.0 if self.config.published else self.config.dropout
        return F.dropout(x, dropout, self.training)

    def waves(self, places: Tensor) -> Tensor:
        """Return the sinusoids of positions or distances, in the dtype of the weights."""
        return sinusoids(places, self.config.width).to(self.subjects.weight.dtype)

    def rows(self, subject: Tensor | None) -> Tensor:
        """Return the subjects' embeddings, (B, 1, width), or (width,) if `subject` is None."""
        if isinstance(self.subjects, nn.Linear):
            return self.subjects(self.codes(subject))
        table = self.subjects.weight
        unseen = table.mean(0) if self.config.unseen == "mean" else torch.zeros_like(table[0])
        if subject is None:
            return unseen
        seen = self.subjects(subject.clamp(min=0))  # (B, width)
        return torch.where((subject < 0)[:, None], unseen, seen).unsqueeze(1)

    def codes(self, subject: Tensor | None) -> Tensor:
        """Return one-hot codes of the subjects, (B, 1, subjects), or (subjects,) without `subject`.

        An unseen subject has the mean of all codes, or zeros.
        """
        count, weight = self.config.subjects, self.subjects.weight
        unseen = weight.new_full((count,), 1 / count if self.config.unseen == "mean" else 0.0)
        if subject is None:
            return unseen
        codes = (subject[:, None] == torch.arange(count, device=subject.device)).to(weight.dtype)
        return torch.where((subject < 0)[:, None], unseen, codes).unsqueeze(1)

    def join(self, out: Tensor, into: Tensor) -> Tensor:
        """Combine the stack's output with its input by the residual connection of the config."""
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


def electrode_importance(
    model: Conformer, eeg: Tensor, subject: Tensor | None = None, *, probes: int = 8
) -> Tensor:
    """Return how strongly the envelope depends on each electrode: (channels,), summing to 1.

    The importance is proportional to the electrode's standard deviation times the root mean square
    of the derivatives of all envelope samples with respect to all samples of the electrode. The
    root mean square is estimated with `probes` draws of random signs (Hutchinson 1990). The weights
    of the channel attention cannot show the importance of electrodes, because they belong to
    features that mix electrodes.

    Args:
        eeg: (B, T, channels).
    """
    training = model.training
    model.eval()
    eeg = eeg.detach().requires_grad_()
    draw = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        envelope = model(eeg, subject)
    squares = torch.zeros_like(eeg[0, 0])
    for _ in range(probes):
        signs = torch.randint(0, 2, envelope.shape, generator=draw).to(envelope) * 2 - 1
        (gradient,) = torch.autograd.grad(envelope, eeg, signs, retain_graph=True)
        squares += gradient.square().mean((0, 1))
    model.train(training)
    strength = squares.sqrt() * eeg.detach().std((0, 1))
    return strength / strength.sum()
