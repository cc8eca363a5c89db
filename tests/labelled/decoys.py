"""Models that mislead: by a name, an order or a pattern that is not what it looks like.

Each decoy is one way to mix tokens, in a model around which nothing else is unusual. The comment
before a truth says why it is the honest one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labelled.truth import Entry, Labelled, Table, Whole, made, shares
from zoo import text

WIDTH, HEADS, SIZE = 32, 4, 8


def apart(x: Tensor, heads: int = HEADS) -> Tensor:
    """Return (batch, heads, tokens, size) of (batch, tokens, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what attention mixes, with its scores written out."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores, -1) @ v


class Mix(nn.Module):
    """An ordinary attention, without its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.query(x)), apart(self.key(x)), apart(self.value(x))
        return together(attend(q, k, v))


class UnusedQuery(nn.Module):
    """`query` is never called; `a`, `b` and `c` are."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.a(x)), apart(self.b(x)), apart(self.c(x))
        return together(attend(q, k, v))


class Swapped(Mix):
    """`key` makes the queries, and `query` the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.key(x)), apart(self.query(x)), apart(self.value(x))
        return together(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class BeforeQuery(Mix):
    """A linear layer that only the queries are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.query(self.first(x))), apart(self.key(x)), apart(self.value(x))
        return together(attend(q, k, v))


class BeforeAll(Mix):
    """A linear layer that queries, keys and values are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class TiedQueryKey(nn.Module):
    """One projection makes both the queries and the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = apart(self.both(x))
        return together(attend(q, q, apart(self.value(x))))


class TwoAttentions(nn.Module):
    """Two attentions with different heads, in one module: their results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.query1 = nn.Linear(WIDTH, WIDTH)
        self.key1 = nn.Linear(WIDTH, WIDTH)
        self.value1 = nn.Linear(WIDTH, WIDTH)
        self.query2 = nn.Linear(WIDTH, WIDTH)
        self.key2 = nn.Linear(WIDTH, WIDTH)
        self.value2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.query1(x)), apart(self.key1(x)), apart(self.value1(x))
        first = together(attend(q, k, v))
        q, k, v = apart(self.query2(x), 2), apart(self.key2(x), 2), apart(self.value2(x), 2)
        return first + together(attend(q, k, v))


class Experts(nn.Module):
    """Two feed-forward networks, weighted by a softmax that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 2)
        self.expand = nn.ModuleList(nn.Linear(WIDTH, 48) for _ in range(2))
        self.shrink = nn.ModuleList(nn.Linear(48, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x), -1)  # (batch, tokens, experts)
        pairs = zip(self.expand, self.shrink, strict=True)
        each = torch.stack([b(F.gelu(a(x))) for a, b in pairs], -2)  # (…, experts, width)
        return (weights.unsqueeze(-2) @ each).squeeze(-2)


class AttentionAndExperts(Mix):
    """Experts that a softmax weighs, and an ordinary attention after them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.experts(x))


class ValueKeyQuery(nn.Module):
    """One fused weight whose rows are values, keys and queries, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, k, q = (apart(part) for part in self.qkv(x).chunk(3, -1))
        return together(attend(q, k, v))


class StridedHeads(Mix):
    """Row r of a projection belongs to head r % 4."""

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (SIZE, HEADS)).permute(0, 3, 1, 2)

        mixed = attend(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)))
        return mixed.permute(0, 2, 3, 1).flatten(2)


class TwoHalves(Mix):
    """The scores are the sum of those of each half of a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.query(x)), apart(self.key(x)), apart(self.value(x))
        (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
        scores = q1 @ k1.transpose(-2, -1) + q2 @ k2.transpose(-2, -1)
        return together(torch.softmax(scores / SIZE**0.5, -1) @ v)


class ScaledQueries(Mix):
    """A learned number a head multiplies its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = apart(self.query(x)), apart(self.key(x)), apart(self.value(x))
        return together(attend(q * self.scale, k, v))


class BareValue(nn.Module):
    """The values are the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return together(attend(apart(self.query(x)), apart(self.key(x)), apart(x)))


class ConstantQuery(nn.Module):
    """One learned query a head, the same at every token; it is not projected."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = nn.Parameter(torch.randn(HEADS, SIZE))
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = apart(self.key(x)), apart(self.value(x))
        mixed = together(attend(self.ask[None, :, None, :], k, v))
        return mixed.expand_as(x)


class Block(nn.Module):
    """One layer: tokens are mixed, then each goes through a feed-forward network."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.leave = mix, nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.leave(self.mix(self.norm1(x)))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Model(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(99, WIDTH)
        self.blocks = nn.ModuleList(Block(mix()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 99)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


AROUND: Table = {
    "tokens": "embedding",
    "blocks.{i}.norm1": "norm",
    "blocks.{i}.leave": "output",
    "blocks.{i}.norm2": "norm",
    "blocks.{i}.widen": "up",
    "blocks.{i}.narrow": "down",
    "norm": "norm",
    "head": "head",
}
PLAIN: Table = {"query": "query", "key": "key", "value": "value"}
EXPERTS: Table = {"query": "router", "expand.*": "up", "shrink.*": "down"}


def decoy(
    mix: Callable[[], nn.Module], table: Table, refused: str = "", may_refuse: str = ""
) -> Labelled:
    """Return the truth about a model that mixes tokens in this way."""
    mixing: dict[str, Entry] = {f"blocks.{{i}}.mix.{path}": e for path, e in table.items()}
    build = made(lambda: Model(mix))
    whole = {**AROUND, **mixing}
    return Labelled(build, text, whole, refused=refused, may_refuse=may_refuse)


DECOYS: dict[str, Labelled] = {
    # Nothing depends on the weight called query: it has no role in attention.
    "unused-query": decoy(UnusedQuery, {"query": "other", "a": "query", "b": "key", "c": "value"}),
    "swapped-names": decoy(Swapped, {"query": "key", "key": "query", "value": "value"}),
    # Freezing one of the two would leave the queries trainable; no head has rows of the first.
    "before-query": decoy(BeforeQuery, {**PLAIN, "first": Whole("query", heads=0)}),
    # Not one of query, key and value, since all three depend on it. It has full rank, so it is
    # less than a latent; but what a latent is, a place that all three come from, it is too.
    "before-all": decoy(BeforeAll, {**PLAIN, "first": "other|latent"}),
    # To freeze the queries is to freeze the keys, so neither word is true of any row.
    "tied-query-key": decoy(
        TiedQueryKey, {}, refused="`mix.both` makes both the queries and the keys"
    ),
    "two-attentions": decoy(
        TwoAttentions,
        {
            "query1": "query",
            "key1": "key",
            "value1": "value",
            "query2": Whole("query", heads=2),
            "key2": Whole("key", heads=2),
            "value2": Whole("value", heads=2),
        },
    ),
    # The weights are chosen for each token from itself alone: no token looks at another.
    "experts-only": decoy(Experts, {}, refused="no attention: the softmax weighs experts"),
    "attention-and-experts": decoy(
        AttentionAndExperts, {**PLAIN, **{f"experts.{p}": e for p, e in EXPERTS.items()}}
    ),
    "value-key-query": decoy(
        ValueKeyQuery, {"qkv": shares(("value", 32), ("key", 32), ("query", 32))}
    ),
    # The roles are ordinary. Heads of 8 rows one after another would be wrong: either the reader
    # says that the heads' rows lie apart, or gives no heads, or refuses.
    "strided-heads": decoy(
        StridedHeads,
        {role: Whole(role, strided=True) for role in PLAIN},
        may_refuse="the rows of a head do not lie together",
    ),
    "two-halves": decoy(TwoHalves, PLAIN),
    # Like a layer scale, and CLIP's `logit_scale`. As it moves the queries and nothing else, to
    # call it a query is honest too.
    "scaled-queries": decoy(ScaledQueries, {**PLAIN, "scale": Whole("other|query", heads=0)}),
    # Nothing is a value: the norm before stays a norm, the embedding an embedding.
    "bare-value": decoy(
        BareValue, {"query": "query", "key": "key"}, may_refuse="there is no value weight"
    ),
    # The parameter is itself the queries, a row a head. torch's `bias_k`, a key of its own that is
    # not projected either, is `other` in the tables.
    "constant-query": decoy(
        ConstantQuery,
        {"ask": Whole("query|other"), "key": "key", "value": "value"},
        may_refuse="there is no query weight",
    ),
}
