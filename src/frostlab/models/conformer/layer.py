"""One Conformer layer: half a feed-forward network, attention, convolution, the other half.

Gulati et al., Conformer: Convolution-augmented Transformer for Speech Recognition (2020).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.attention import attend
from frostlab.models.conformer.config import ConformerConfig, Norm


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Return (T, width) sines and cosines of places, in turn, as Vaswani et al. (2017)."""
    pairs = torch.arange(0, width, 2, device=places.device).float()
    angles = places.float()[:, None] * torch.exp(pairs * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def distances(length: int, device: torch.device) -> Tensor:
    """How far a key can lie before a query: length − 1 down to 1 − length."""
    return torch.arange(length - 1, -length, -1, device=device)


class FeedForward(nn.Module):
    """A norm, a wide hidden layer with swish, and back."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.silu(self.up(self.norm(x))), self.dropout, self.training)
        return F.dropout(self.down(hidden), self.dropout, self.training)


class Attention(nn.Module):
    """Self-attention over the window; relative positions are Transformer-XL's (Dai et al. 2019).

    Then query i scores key j with (q_i + content_bias)·k_j + (q_i + place_bias)·p_{i−j}.
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

    def forward(self, x: Tensor, places: Tensor | None) -> Tensor:
        """Mix (B, T, width); `places` are the sinusoids of all distances, if they are relative."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, size)
        bias = None
        if places is not None:
            bias = self._bias(query, places)
            query = query + self.content_bias[:, None].to(query.dtype)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, mask=bias, dropout=dropout)
        return F.dropout(self.out(mixed.flatten(2)), self.dropout, self.training)

    def _bias(self, query: Tensor, places: Tensor) -> Tensor:
        """(B, heads, T, T): what each query adds to a key's score for its distance."""
        at = self.position(places).unflatten(-1, (self.heads, -1))  # (2T − 1, heads, size)
        scores = (query + self.place_bias[:, None].to(query.dtype)) @ at.permute(1, 2, 0)
        bias = by_distance(scores) * query.shape[-1] ** -0.5
        return bias.to(query.dtype)


def by_distance(scores: Tensor) -> Tensor:
    """Turn (…, T, 2T − 1), where [i, d] is of distance T − 1 − d, into (…, T, T) of i − j.

    Row i has to move left by T − 1 − i: one column more at the left, read with rows one shorter.
    """
    length = scores.shape[-2]
    moved = F.pad(scores, (1, 0)).flatten(-2).unflatten(-1, (2 * length, length))
    return moved[..., 1:, :].flatten(-2).unflatten(-1, (length, -1))[..., :length]


class Depthwise(nn.Conv1d):
    """A convolution along time, a channel each, of (B, T, width) as it lies in memory.

    To torch it is an image of one row with its channels last: CUDA's kernels for that are three
    times as fast as those for (B, width, T).
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.transpose(1, 2)[:, :, None], self.weight[:, :, None]
        padding = (0, self.weight.shape[-1] // 2)
        mixed = F.conv2d(rows, weight, self.bias, padding=padding, groups=self.groups)
        return mixed[:, :, 0].transpose(1, 2)


class Convolution(nn.Module):
    """A gated linear unit, a convolution along time a channel, a norm, swish, and back."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, self.dropout = config.width, config.dropout
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 2 * width)
        self.depthwise = Depthwise(width, config.kernel)
        self.middle = _norm(config.norm, width)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.enter(self.norm(x)), -1)
        x = self.depthwise(x)
        if isinstance(self.middle, nn.GroupNorm):
            x = self.middle(x.transpose(1, 2)).transpose(1, 2)
        elif isinstance(self.middle, nn.LayerNorm):
            x = self.middle(x)
        else:  # a batch's statistics are those of all its samples
            x = self.middle(x.flatten(0, 1)).view_as(x)
        return F.dropout(self.leave(F.silu(x)), self.dropout, self.training)


def _norm(kind: Norm, width: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(width)
    return nn.BatchNorm1d(width) if kind == "batch" else nn.GroupNorm(math.gcd(8, width), width)


class ConformerLayer(nn.Module):
    """Feed-forward halves around attention and convolution, each added to its input; a norm."""

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
