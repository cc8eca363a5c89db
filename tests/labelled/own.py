"""Small GPTs as people write them, each in another style, and one of x-transformers.

einsum over heads; one module a head; a fused weight with chunk; a fused weight with view and split
per head; raw parameters with `x @ w`; and a three-dimensional parameter with an axis of heads.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labelled.truth import Entry, Labelled, Table, Whole, made, shares, under
from zoo import Inputs, text, words

WIDTH, HEADS, SIZE, VOCABULARY, POSITIONS = 32, 4, 8, 99, 64


def later(tokens: int) -> Tensor:
    """Return a mask of the tokens that come later."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


class EinsumBlock(nn.Module):
    """Queries, keys and values apart, heads as an axis of every einsum; a gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.w3 = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (to(y).unflatten(-1, (HEADS, SIZE)) for to in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * SIZE**-0.5
        weights = scores.masked_fill(later(x.shape[1]), -math.inf).softmax(-1)
        x = x + self.to_out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
        y = self.ln2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Head(nn.Module):
    """One head with its own three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, SIZE, bias=False)
        self.query = nn.Linear(WIDTH, SIZE, bias=False)
        self.value = nn.Linear(WIDTH, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.query(x) @ self.key(x).transpose(-2, -1) * SIZE**-0.5
        weights = F.softmax(weights.masked_fill(later(x.shape[1]), -math.inf), dim=-1)
        return weights @ self.value(x)


class HeadsBlock(nn.Module):
    """A module for each head, joined by a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.proj(torch.cat([head(y) for head in self.heads], dim=-1))
        return x + self.net(self.ln2(x))


class ChunkBlock(nn.Module):
    """One fused weight, cut in three, and torch's attention; norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.ln1(x + self.o(mixed.transpose(1, 2).flatten(2)))
        return self.ln2(x + self.mlp(x))


class ViewBlock(nn.Module):
    """One fused weight whose rows are query, key and value of the first head, then the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.back = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        each = self.attn(self.ln1(x)).view(batch, tokens, HEADS, 3 * SIZE).transpose(1, 2)
        q, k, v = each.split(SIZE, dim=-1)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(SIZE)
        scores = scores.masked_fill(later(tokens), torch.finfo(scores.dtype).min)
        mixed = torch.matmul(F.softmax(scores, -1), v)
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(batch, tokens, WIDTH))
        return x + self.back(F.gelu(self.fc(self.ln2(x))))


class RawBlock(nn.Module):
    """Raw parameters, stored (in, out), and biases beside them; a norm of the root mean square."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1))
        self.bq = nn.Parameter(torch.zeros(WIDTH))
        self.w1 = nn.Parameter(torch.randn(WIDTH, 64) * 0.1)
        self.w2 = nn.Parameter(torch.randn(64, WIDTH) * 0.1)
        self.g1, self.g2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x, self.g1)
        q, k, v = (
            t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for t in (y @ self.wq + self.bq, y @ self.wk, y @ self.wv)
        )
        scores = (q @ k.mT / SIZE**0.5).masked_fill(later(x.shape[1]), -1e9)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.wo
        return x + F.relu(self.norm(x, self.g2) @ self.w1) @ self.w2


class PerHeadBlock(nn.Module):
    """Parameters with an axis of heads: (heads, in, size), and (heads, size, out) after."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) * 0.1)
        self.k = nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) * 0.1)
        self.v = nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) * 0.1)
        self.o = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) * 0.1)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (torch.einsum("btc,hcd->bhtd", y, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / SIZE**0.5
        weights = scores.masked_fill(later(x.shape[1]), -math.inf).softmax(-1)
        mixed = torch.einsum("bhts,bhsd->bhtd", weights, v)
        x = x + torch.einsum("bhtd,hdc->btc", mixed, self.o)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Written(nn.Module):
    """A GPT of two such blocks."""

    def __init__(self, block: Callable[[], nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.Sequential(*(block() for _ in range(2)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.layers(self.wte(input_ids) + self.wpe(places))
        return self.lm_head(self.ln_f(x))


NORMS: Table = {"ln1": "norm", "ln2": "norm"}


def written(block: Callable[[], nn.Module], layer: Table, tied: bool = False) -> Labelled:
    """Return the truth about a GPT of these blocks."""
    table: dict[str, Entry] = {
        "wte": "embedding",
        "wpe": "position",
        **under("layers.{i}", layer),
        "ln_f": "norm",
    }
    if not tied:  # a tied tensor is labelled under its first name
        table["lm_head"] = "head"
    return Labelled(made(lambda: Written(block, tied)), text, table)


WRITTEN: dict[str, Labelled] = {
    "einsum": written(
        EinsumBlock,
        {
            **NORMS,
            "to_q": "query",
            "to_k": "key",
            "to_v": "value",
            "to_out": "output",
            "w1": "gate",  # the activation function is on this one
            "w3": "up",
            "w2": "down",
        },
    ),
    "module-per-head": written(  # each weight holds one head
        HeadsBlock,
        {
            **NORMS,
            "heads.*.query": Whole("query", heads=1),
            "heads.*.key": Whole("key", heads=1),
            "heads.*.value": Whole("value", heads=1),
            "proj": "output",
            "net.0": "up",
            "net.2": "down",
        },
        tied=True,
    ),
    "fused-chunk": written(
        ChunkBlock,
        {
            **NORMS,
            "qkv": shares(("query", 32), ("key", 32), ("value", 32)),
            "o": "output",
            "mlp.0": "up",
            "mlp.2": "down",
        },
    ),
    "fused-view-split": written(
        ViewBlock,
        {
            **NORMS,
            "attn": shares(("query", 8), ("key", 8), ("value", 8), repeats=4),
            "proj": "output",
            "fc": "up",
            "back": "down",
        },
    ),
    "raw-parameters": written(
        RawBlock,
        {
            "g1": "norm",
            "g2": "norm",
            "wq": Whole("query", axis=1),
            "bq": Whole("query", kind="bias"),
            "wk": Whole("key", axis=1),
            "wv": Whole("value", axis=1),
            "wo": Whole("output", axis=1),
            "w1": Whole("up", axis=1),
            "w2": Whole("down", axis=1),
        },
    ),
    "axis-of-heads": written(  # index h of the first axis is head h: one row a head
        PerHeadBlock,
        {
            **NORMS,
            "q": "query",
            "k": "key",
            "v": "value",
            "o": "output",
            "up": "up",
            "down": "down",
        },
    ),
}


def x_transformer() -> nn.Module:
    """Build a decoder of x-transformers with grouped keys, gates and rotary positions."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH,
        depth=2,
        heads=HEADS,
        attn_dim_head=SIZE,
        attn_kv_heads=2,
        ff_glu=True,
        ff_mult=2,
        rotary_pos_emb=True,
    )
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=POSITIONS, attn_layers=layers)


def first_argument() -> Inputs:
    return {"x": words()}


# x_transformers.py, version 2.31: Attention.forward projects with to_q, to_k and to_v (q is
# rearranged 'b n (h d) -> b h n d') and ends with to_out; GLU.forward is
# `up, gate = self.proj(x).chunk(2, dim = -1)` and `up * self.act(gate)`. Attention and feed-forward
# network are separate entries of `layers`, so a layer here is one of the two. In attend.py keys are
# repeated 'b kvh n d -> b (r kvh) n d': query heads 0 and 2 share the first head of keys.
OUTSIDE: dict[str, Labelled] = {}
if find_spec("x_transformers") is not None:  # not among frostlab's requirements
    OUTSIDE["x-transformers"] = Labelled(
        made(x_transformer),
        first_argument,
        {
            "token_emb.emb": "embedding",
            "attn_layers.layers.{i}.0.0": "norm",
            "attn_layers.layers.{i}.1.to_q": "query",
            "attn_layers.layers.{i}.1.to_k": "key",
            "attn_layers.layers.{i}.1.to_v": "value",
            "attn_layers.layers.{i}.1.to_out": "output",
            "attn_layers.layers.{i}.1.ff.0.proj": shares(("up", 64), ("gate", 64)),
            "attn_layers.layers.{i}.1.ff.2": "down",
            "attn_layers.final_norm": "norm",
            "to_logits": "head",
        },
        heads=(4, 2),
        strided_groups=True,
    )
