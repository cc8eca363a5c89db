"""GPT with pre-norm blocks and learned positions, for language modelling or classification."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.attention import KeyValueCache, Packing, QKNorm, attend
from frostlab.models.fused.embedding import look_up
from frostlab.models.fused.gelu import gelu_of
from frostlab.models.fused.residual_norm import add, add_and_norm, keep_and_norm


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; the defaults give the model that the docs call GPT Medium-512."""

    vocabulary: int = 50257
    positions: int = 512
    width: int = 512
    layers: int = 6
    heads: int = 8
    hidden: int = 2048  # hidden units of each feed-forward network
    dropout: float = 0.1
    # "feed-forward": biases in feed-forward networks and norms, but not in attention
    bias: bool | Literal["feed-forward"] = True
    causal: bool = True
    classes: int = 0  # 0: a language model whose head is tied to the token embedding
    # input of a classifier's head: the mean over all tokens, or the last token
    pooling: Literal["mean", "last"] = "mean"
    qk_norm: bool = False  # RMSNorm of every head's queries and keys

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")


class GPTBlock(nn.Module):
    """Pre-norm attention and a pre-norm feed-forward network, both residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, bias, attention_bias = config.width, bool(config.bias), config.bias is True
        self.heads, self.causal, self.dropout = config.heads, config.causal, config.dropout
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=attention_bias)
        self.qk_norm = QKNorm(width // config.heads) if config.qk_norm else None
        self.out = nn.Linear(width, width, bias=attention_bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, config.hidden, bias=bias)
        self.down = nn.Linear(config.hidden, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        packing: Packing | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x, normed = keep_and_norm(x, self.norm1)
        mixed = self.attend(normed, mask, packing, cache)
        dropout = self.dropout if self.training else 0.0
        x, normed = add_and_norm(x, self.out, mixed, self.norm2, dropout)
        return add(x, self.down, gelu_of(self.up, normed, "tanh"), dropout)

    def attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        packing: Packing | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, heads, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, head_dim)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        if cache is not None:
            key, value = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(
            query, key, value, mask=mask, packing=packing, causal=self.causal, dropout=dropout
        )
        return mixed.flatten(2)  # (B, T, width)


class GPT(nn.Module):
    """A stack of GPT blocks; `attention_mask` is 1 for tokens and 0 for padding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=bool(config.bias))
        self.head = nn.Linear(config.width, config.classes or config.vocabulary, bias=False)
        self.initialise()
        if not config.classes:
            self.head.weight = self.tokens.weight

    def initialise(self) -> None:
        """Draw the weights as GPT-2 does: std 0.02, less for projections into the residual sum."""
        self._draw(self)

    def new_block(self) -> GPTBlock:
        """Return a new block with the initialisation of a model that has `config.layers` layers."""
        block = GPTBlock(self.config)
        self._draw(block)
        return block

    @torch.no_grad()
    def _draw(self, root: nn.Module) -> None:
        for module in root.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for module in root.modules():
            if isinstance(module, GPTBlock):
                module.out.weight.normal_(0.0, residual)
                module.down.weight.normal_(0.0, residual)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits: (B, T, vocabulary), or (B, classes) of a classifier.

        Padding may only be at the end of a row.
        """
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids, places)
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].bool()  # (B, 1, 1, T)
            if self.config.causal:
                mask = mask & (places[:, None] >= places)  # (B, 1, T, T)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        if self.config.classes:
            pool = mean_over_tokens if self.config.pooling == "mean" else last_token
            x = pool(x, attention_mask)  # (B, width)
        return self.head(x)

    def next_logits(
        self, input_ids: Tensor, places: Tensor, mask: Tensor, caches: Sequence[KeyValueCache]
    ) -> Tensor:
        """Read the next tokens (B, T) of each row; return logits (B, vocabulary) after the last.

        `places` (B, T) are the positions of these tokens. `mask` (B, 1, T, S) is true where they
        see one of the S tokens read so far; S includes the T new ones. Each block has its own
        cache.
        """
        x = self.embed(input_ids, places)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, mask, cache=cache)
        return self.head(self.norm(x[:, -1]))

    def embed(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Embed (B, T) tokens and their positions, (T,) or (B, T), as (B, T, width)."""
        x = look_up(self.tokens, input_ids) + self.positions(places)
        return F.dropout(x, self.config.dropout, self.training)


def mean_over_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Average (B, T, width) over the tokens that are not padding."""
    if attention_mask is None:
        return x.mean(1)
    weight = attention_mask.to(x.dtype).unsqueeze(-1)  # (B, T, 1)
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1.0)


def last_token(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the last vector of each row that is not padding: (B, T, width) → (B, width)."""
    if attention_mask is None:
        return x[:, -1]
    last = (attention_mask.sum(1) - 1).clamp(min=0)
    return x[torch.arange(len(x), device=x.device), last]
