"""A decoder with rotary positions, RMSNorm and a gated feed-forward network, without biases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.attention import KeyValueCache, Packing, QKNorm, attend
from frostlab.models.fused.embedding import look_up


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    The defaults give the 4-layer model of the study that docs/progressive.md repeats.
    """

    vocabulary: int = 69830
    width: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 256  # hidden units of each feed-forward network
    norm: Literal["before", "after"] = "after"  # before each sublayer, or after its residual sum
    final_norm: bool = False  # a norm between the last layer and the head
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, before their rotation
    eps: float = 1e-6
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} cannot be divided into {self.heads} heads of even size"
            )


def rotary_angles(places: Tensor, size: int, base: float) -> Tensor:
    """Return the cosines and sines of the rotation at positions (…, T): (2, …, T, size).

    Both halves of a head have the same frequencies.
    """
    frequencies = base ** (-torch.arange(0, size, 2, device=places.device).float() / size)
    angles = places.float()[..., None] * frequencies  # (…, T, size/2)
    angles = torch.cat([angles, angles], -1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate queries or keys, (B, heads, T, size), with the cosines and sines of `angles`."""
    cos, sin = angles.to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class DecoderBlock(nn.Module):
    """Causal attention and a gated feed-forward network, with the norm before or after each."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.heads, self.norm_first = config.heads, config.norm == "before"
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.qk_norm = QKNorm(width // config.heads, config.eps) if config.qk_norm else None
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1 = nn.RMSNorm(width, config.eps)
        self.norm2 = nn.RMSNorm(width, config.eps)

    def forward(
        self,
        x: Tensor,
        angles: Tensor,
        packing: Packing | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x), angles, packing, mask, cache)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x, angles, packing, mask, cache))
        return self.norm2(x + self.feed(x))

    def attend(
        self,
        x: Tensor,
        angles: Tensor,
        packing: Packing | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # each (B, heads, T, size)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        query, key = rotate(query, angles), rotate(key, angles)
        if cache is not None:
            key, value = cache.extend(key, value)
        mixed = attend(query, key, value, mask=mask, packing=packing, causal=True)
        return self.out(mixed.flatten(2))  # (B, T, width)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """A causal language model whose head is not tied to its embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.eps) if config.final_norm else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw matrices with std 1/√width, truncated at 2 std, and embeddings with std 0.02."""
        self._draw(self)
        self.tokens.weight.normal_(0.0, 0.02)

    def new_block(self) -> DecoderBlock:
        """Return a new block with the model's initialisation, without adding it to the model."""
        block = DecoderBlock(self.config)
        self._draw(block)
        return block

    def _draw(self, root: nn.Module) -> None:
        std = self.config.width**-0.5
        for module in root.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary)."""
        x = look_up(self.tokens, input_ids)  # (B, T, width)
        angles = self.angles(torch.arange(input_ids.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))

    def next_logits(
        self, input_ids: Tensor, places: Tensor, mask: Tensor, caches: Sequence[KeyValueCache]
    ) -> Tensor:
        """Read the next tokens (B, T) of each row; return logits (B, vocabulary) after the last.

        `places` (B, T) are the positions of these tokens. `mask` (B, 1, T, S) is true where they
        see one of the S tokens read so far; S includes the T new ones. Each block has its own
        cache.
        """
        x = look_up(self.tokens, input_ids)
        angles = self.angles(places[:, None])  # (2, B, 1, T, size)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, angles, mask=mask, cache=cache)
        return self.head(self.norm(x[:, -1]))

    def angles(self, places: Tensor) -> Tensor:
        """Return the cosines and sines that rotate tokens at these positions."""
        config = self.config
        return rotary_angles(places, config.width // config.heads, config.rotary_base)
