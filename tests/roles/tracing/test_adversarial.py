"""Attentions that a careless reader would get wrong: each is read rightly, or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl

WIDTH, HEADS = 16, 2
IDS = torch.arange(12).view(2, 6)


def apart(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """An attention whose names say nothing: a is the query, b the key, c the value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.of_heads = nn.Linear(HEADS, HEADS)
        self.of_one = nn.Linear(WIDTH // HEADS, 1)
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.learned = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return together((q @ k.transpose(-1, -2)).softmax(-1) @ v)

    def sides(self, x: Tensor) -> list[Tensor]:
        return [apart(part(x)) for part in (self.a, self.b, self.c)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.mix(x))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


Mix = Callable[[Layer, Tensor], Tensor]


def made(mix: Mix) -> Model:
    """Return a model with an ordinary layer and one that mixes in this way."""
    torch.manual_seed(0)
    return Model(Layer(), type("Other", (Layer,), {"mix": mix})())


def found(model: nn.Module) -> dict[str, fl.Part]:
    """Return the weights of the second layer."""
    parts = fl.anatomy(model, IDS).parts
    return {
        part.name.removeprefix("layers.1.").removesuffix(".weight"): part
        for part in parts if part.name.startswith("layers.1.") and part.kind == "weight"
    }  # fmt: skip


def over_queries(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((q @ k.transpose(-1, -2)).softmax(-2) @ v)


def values_by_hand(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return together((weights[..., None] * v[:, :, None]).sum(-2))


def scores_by_hand(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1) @ v)


def additive(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    scores = self.of_one(torch.tanh(q[:, :, :, None] + k[:, :, None])).squeeze(-1)
    return together(scores.softmax(-1) @ v)


def distances(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((-torch.cdist(q, k)).softmax(-1) @ v)


def differential(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    weights = [(a @ b.mT).softmax(-1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)]
    return together((weights[0] - 0.3 * weights[1]) @ v)


def gated_weights(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    gate = self.extra(x)[..., :HEADS].sigmoid().transpose(1, 2)[..., None]
    return together((q @ k.transpose(-1, -2)).softmax(-1) * gate @ v)


def talking_before(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    scores = self.of_heads((q @ k.transpose(-1, -2)).movedim(1, -1)).movedim(-1, 1)
    return together(scores.softmax(-1) @ v)


def talking_after(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return together(self.of_heads(weights.movedim(1, -1)).movedim(-1, 1) @ v)


def log_softmax(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((q @ k.transpose(-1, -2)).log_softmax(-1).exp() @ v)


def own_softmax(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    powers = (q @ k.transpose(-1, -2)).exp()
    return together(powers / powers.sum(-1, keepdim=True) @ v)


def sigmoid(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((q @ k.transpose(-1, -2)).sigmoid() @ v)


def squared(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return together((weights @ weights) @ v)


def two_values(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return together(weights @ v + weights @ apart(self.extra(x)))


def made_weight(self: Layer, x: Tensor) -> Tensor:
    _, k, v = self.sides(x)
    q = apart(x @ self.a(self.extra.weight))
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def buffered(self: Layer, x: Tensor) -> Tensor:
    _, k, v = self.sides(x)
    q = apart((x @ torch.ones(WIDTH, WIDTH)) * self.scale.flatten()[0])
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def mean_query(self: Layer, x: Tensor) -> Tensor:
    _, k, v = self.sides(x)
    q = apart(self.a(x).mean(1, keepdim=True))
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ v).expand_as(x)


def fused_mean_query(self: Layer, x: Tensor) -> Tensor:
    _, k, v = self.sides(x)
    q = apart(self.a(x).mean(1, keepdim=True))
    return together(F.scaled_dot_product_attention(q, k, v)).expand_as(x)


def query_without_gradient(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((q.detach() @ k.transpose(-1, -2)).softmax(-1) @ v)


def fused_without_gradient(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together(F.scaled_dot_product_attention(q.detach(), k, v))


def fused_key_without_gradient(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        k = apart(x @ self.b.weight.T)
    q, _, v = self.sides(x)
    return together(F.scaled_dot_product_attention(q, k, v))


def fused_value_without_gradient(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together(F.scaled_dot_product_attention(q, k, v.detach()))


def keys_in_query(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together(F.scaled_dot_product_attention(q + k.mean(2, keepdim=True), k, v))


def keys_in_value(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together(F.scaled_dot_product_attention(q, k, v * k.mean(2, keepdim=True)))


@torch.no_grad()
def without_gradient(self: Layer, x: Tensor) -> Tensor:
    return Layer.mix(self, x)


def key_of_values(self: Layer, x: Tensor) -> Tensor:
    v = self.c(x)
    q, k = apart(self.a(x)), apart(self.b(v))
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ apart(v))


class Hidden(torch.autograd.Function):
    """An attention inside a function of autograd, as in flash-attn."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad, grad


def hidden(self: Layer, x: Tensor) -> Tensor:
    return together(Hidden.apply(*self.sides(x)))


class Packed(torch.autograd.Function):
    """An attention of one tensor that holds query, key and value."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.packed = packed.detach().requires_grad_()
            ctx.result = F.scaled_dot_product_attention(*ctx.packed.unbind(0))
        return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(ctx.result, ctx.packed, grad, retain_graph=True)[0]


def packed(self: Layer, x: Tensor) -> Tensor:
    joined = torch.cat([self.a.weight, self.b.weight, self.c.weight])
    return together(Packed.apply(torch.stack([apart(y) for y in (x @ joined.T).chunk(3, -1)])))


REFUSED: dict[str, tuple[Mix, str]] = {
    "a softmax over the queries": (over_queries, "sums the values along another"),
    "values by hand": (values_by_hand, "softmax over pairs of vectors"),
    "scores by hand": (scores_by_hand, "softmax over pairs of vectors"),
    "additive": (additive, "softmax over pairs of vectors"),
    "distances": (distances, "softmax over pairs of vectors"),
    "differential": (differential, "softmax over pairs of vectors"),
    "gated weights": (gated_weights, "softmax over pairs of vectors"),
    "talking heads before": (talking_before, "softmax over pairs of vectors"),
    "talking heads after": (talking_after, "softmax over pairs of vectors"),
    "log-softmax": (log_softmax, "use torch's softmax"),
    "own softmax": (own_softmax, "use torch's softmax"),
    "sigmoids": (sigmoid, "multiplies the sigmoids of a product of two activations by a third"),
    "squared weights": (squared, "by one another before"),
    "two values": (two_values, "by several values"),
    "a query's weight is computed": (made_weight, "as a product of two computed matrices"),
    "a query's weight is in a buffer": (buffered, "no parameter, such as a quantised weight"),
    "a query without gradient": (query_without_gradient, "the keys of an attention without grad"),
    "a fused query without gradient": (fused_without_gradient, "the query of an attention without"),
    "a fused key without gradient": (fused_key_without_gradient, "the key of an attention without"),
    "a fused value without gradient": (fused_value_without_gradient, "the value of an attention w"),
    "a mean of keys in the query": (keys_in_query, "layers.1.b.weight is query and key at once"),
    "a mean of keys in the value": (keys_in_value, "layers.1.b.weight is key and value at once"),
    "nothing has a gradient": (without_gradient, "layers.1.a.weight is used, but the outputs"),
    "keys of values": (key_of_values, "layers.1.c.weight is key and value at once"),
    "an autograd function": (hidden, "calls Hidden with three activations"),
    "an autograd function of one input": (packed, "calls Packed to mix vectors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused(case: str) -> None:
    mix, message = REFUSED[case]
    with pytest.raises(fl.UnknownArchitecture) as error:
        fl.anatomy(made(mix), IDS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def over_channels(self: Layer, x: Tensor) -> Tensor:
    q, k, v = (side.mT for side in self.sides(x))
    return together(((q @ k.mT).softmax(-1) @ v).mT)


def fused_over_channels(self: Layer, x: Tensor) -> Tensor:
    q, k, v = (side.mT for side in self.sides(x))
    return together(F.scaled_dot_product_attention(q, k, v).mT)


@pytest.mark.parametrize("mix", [over_channels, fused_over_channels])
def test_channels_are_not_heads(mix: Mix) -> None:
    parts = found(made(mix))
    assert [parts[name].role for name in "abco"] == ["query", "key", "value", "output"]
    assert [parts[name].heads for name in "abc"] == [None] * 3


def turned(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together((v.mT @ (k @ q.mT).softmax(-2)).mT)


def cosine(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return together((scores * self.scale.exp()).softmax(-1) @ v)


def learned_query(self: Layer, x: Tensor) -> Tensor:
    _, k, v = self.sides(x)
    q = apart(self.a(self.learned).expand(len(x), -1, -1))
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ v)


@pytest.mark.parametrize("mix", [turned, cosine, learned_query, mean_query, fused_mean_query])
def test_other_forms_are_read(mix: Mix) -> None:
    parts = found(made(mix))
    assert [parts[name].role for name in "abco"] == ["query", "key", "value", "output"]
    assert [parts[name].heads for name in "abc"] == [fl.Heads(HEADS, HEADS, 8)] * 3
    assert parts["scale"].role == "other"  # a temperature is no position


def linear_attention(self: Layer, x: Tensor) -> Tensor:
    q, k, v = self.sides(x)
    return together(q.softmax(-1) @ (k.softmax(-2).mT @ v))


def test_a_layer_that_mixes_without_an_attention_contradicts_its_siblings() -> None:
    with pytest.raises(fl.UnknownArchitecture, match=r"is query, but \S+ is other"):
        fl.anatomy(made(linear_attention), IDS)


def uses_weights(self: Layer, x: Tensor) -> Tensor:
    mixed, weights = self.whole(x, x, x)
    assert weights.shape == (2, 6, 6)
    return mixed * weights.mean()


def test_the_weights_of_torchs_attention_can_be_used() -> None:
    model = made(uses_weights)
    parts = [part for part in fl.anatomy(model, IDS).parts if "1.whole.in_proj_w" in part.name]
    assert [part.role for part in parts] == ["query", "key", "value"]


@dataclass
class Output:
    hidden: Tensor


class Returns(Model):
    def forward(self, ids: Tensor) -> Any:
        return Output(super().forward(ids))


class ReturnsNothing(Model):
    def forward(self, ids: Tensor) -> Any:
        return str(super().forward(ids).mean())


def test_a_model_may_return_an_object() -> None:
    assert found(Returns(Layer(), Layer()))["a"].role == "query"


def test_a_model_that_returns_no_tensor_is_told_so() -> None:
    with pytest.raises(fl.BadInput, match="returns no tensor that depends on its weights"):
        fl.anatomy(ReturnsNothing(Layer(), Layer()), IDS)


def test_values_that_are_not_finite_are_named() -> None:
    model = Model(Layer(), Layer())
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    with pytest.raises(fl.UnknownArchitecture, match="values that are not finite"):
        fl.anatomy(model, IDS)


class Flat(nn.Module):
    """Two layers written side by side, without a list, and a pooler before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.attn1, self.attn2 = Layer(), Layer()
        self.wide1, self.wide2 = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.thin1, self.thin2 = nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)
        self.pool, self.classify = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attn1(self.embed(ids))
        x = x + self.thin1(F.gelu(self.wide1(x)))
        x = self.attn2(x)
        x = x + self.thin2(F.gelu(self.wide2(x)))
        return self.classify(torch.tanh(self.pool(x.mean(1))))


def test_a_feed_forward_network_is_no_head_because_no_list_holds_it() -> None:
    torch.manual_seed(0)
    parts = {part.name: part for part in fl.anatomy(Flat(), IDS).parts}
    roles = {name.removesuffix(".weight"): part.role for name, part in parts.items()}
    assert [roles[f"wide{i}"] for i in (1, 2)] == ["up", "up"]
    assert [roles[f"thin{i}"] for i in (1, 2)] == ["down", "down"]
    assert roles["pool"] == roles["classify"] == "head"
    assert [parts[f"attn{i}.a.weight"].place.layers for i in (1, 2)] == [(0,), (1,)]


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class LastUnused(Model):
    """The result of the last layer is computed, and not returned."""

    def forward(self, ids: Tensor) -> Any:
        x = self.layers[0](self.embed(ids))
        self.layers[1](x)
        return x


def detached(self: Layer, x: Tensor) -> Tensor:
    q, k, v = (side.detach() for side in self.sides(x))
    return together((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def test_a_layer_that_nobody_uses_is_like_the_others() -> None:
    parts = found(LastUnused(Normed(), Normed()))
    assert [parts[name].role for name in "abco"] == ["query", "key", "value", "output"]


def test_a_layer_without_gradients_need_not_be_like_the_others() -> None:
    with pytest.raises(fl.UnknownArchitecture, match="the outputs have no gradient for it"):
        found(made(detached))


class Resampler(nn.Module):
    """Learned queries look at themselves and at a context, which all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, context: Tensor) -> Tensor:
        context = self.project(context)
        x = self.latents.expand(len(context), -1, -1)
        for layer in self.layers:
            both = torch.cat([context, x], 1)
            q, k, v = apart(layer.a(x)), apart(layer.b(both)), apart(layer.c(both))
            x = x + layer.o(together(F.scaled_dot_product_attention(q, k, v)))
        return x


def test_a_context_of_several_attentions_is_no_low_rank_key() -> None:
    torch.manual_seed(0)
    parts = fl.anatomy(Resampler(), torch.randn(2, 5, WIDTH)).parts
    roles = {part.name.removesuffix(".weight"): part.role for part in parts}
    assert roles["project"] not in ("latent", "key", "value")
    assert [roles[f"layers.1.{name}"] for name in "abc"] == ["query", "key", "value"]


def local(self: Layer, x: Tensor) -> Tensor:
    """A block of 128 queries looks at the keys of three blocks; nearly all are padding."""
    tokens = x.shape[1]
    q, k, v = (F.pad(side, (0, 0, 0, 128 - tokens)) for side in self.sides(x))
    k, v = (F.pad(side, (0, 0, 128, 128)) for side in (k, v))
    real = torch.zeros(384, dtype=torch.bool)
    real[128 : 128 + tokens] = True
    scores = (q @ k.transpose(-1, -2)).masked_fill(~real, -torch.inf)
    return together(scores.transpose(1, 2).transpose(1, 2).softmax(-1) @ v)[:, :tokens]


def test_an_attention_that_looks_at_padding_shows_its_query() -> None:
    parts = found(made(local))
    assert [parts[name].role for name in "abc"] == ["query", "key", "value"]
