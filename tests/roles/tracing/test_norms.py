"""Means and sums are cut out of a norm, and of nothing else; a norm over all heads keeps heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl

WIDTH, HEADS = 16, 2
IDS = torch.arange(12).view(2, 6)
Change = Callable[["Layer", Tensor], Tensor]


def apart(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Layer(nn.Module):
    """An attention whose query is changed, such as normed."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.extra = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        q = self.change(self, self.q(x))
        mixed = F.scaled_dot_product_attention(apart(q), apart(self.k(x)), apart(self.v(x)))
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, change: Change, end: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(Layer(change) for _ in range(2))
        self.end = end

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.end is None else self.end(self.head, x)


def found(model: nn.Module) -> dict[str, fl.Part]:
    """Return the weights of the second layer, and the other weights."""
    parts = fl.anatomy(model, IDS).parts
    return {
        part.name.removeprefix("layers.1.").removesuffix(".weight"): part
        for part in parts if part.kind == "weight" and not part.name.startswith("layers.0.")
    }  # fmt: skip


def with_einsum(layer: Layer, q: Tensor) -> Tensor:
    return layer.scale * q * torch.rsqrt(torch.einsum("btd,btd->bt", q, q) + 1e-6)[..., None]


def so_far(layer: Layer, q: Tensor) -> Tensor:
    """Norm by the mean of squares of all entries up to a token."""
    count = torch.ones_like(q).sum(-1, keepdim=True).cumsum(1)
    return layer.scale * q * (q.pow(2).sum(-1, keepdim=True).cumsum(1) / count).rsqrt()


NORMS: dict[str, Change] = {
    "axes kept": lambda m, q: m.scale * (q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "axes restored": lambda m, q: m.scale * (q / (q * q).mean(-1).sqrt().unsqueeze(-1)),
    "restored by a view": lambda m, q: q / q.norm(dim=-1).view(*q.shape[:2], 1) * m.scale,
    "with einsum": with_einsum,
    "cumulative": so_far,
    "variance": lambda m, q: (q - q.mean(2)[..., None]) * q.var(2)[..., None].rsqrt() * m.scale,
    "expanded": lambda m, q: q / q.std(-1, keepdim=True).expand_as(q) * m.scale,
    "another shape": lambda m, q: (
        q.flatten(1) / q.flatten(1).norm(dim=1, keepdim=True)
    ).view_as(q) * m.scale,
    "in place": lambda m, q: q.clone().div_(q.norm(dim=-1, keepdim=True)).mul_(m.scale),
}  # fmt: skip


@pytest.mark.parametrize("form", NORMS)
def test_a_norm_over_all_heads_keeps_the_heads_apart(form: str) -> None:
    parts = found(Model(NORMS[form]))
    assert parts["q"].heads == parts["k"].heads == fl.Heads(HEADS, HEADS, WIDTH // HEADS)
    assert (parts["scale"].role, parts["extra"].role) == ("norm", "other")


class Hidden(torch.autograd.Function):
    """A norm whose statistic is not seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.result = ctx.x.softmax(-1)
        return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(ctx.result, ctx.x, grad, retain_graph=True)[0]


@pytest.mark.parametrize("mix", [lambda m, q: q.cumsum(-1), lambda m, q: Hidden.apply(q)])
def test_no_heads_are_stated_if_something_else_mixes_them(mix: Change) -> None:
    parts = found(Model(mix))
    assert [parts[name].role for name in "qkvo"] == ["query", "key", "value", "output"]
    assert parts["q"].heads is None
    assert parts["k"].heads == fl.Heads(HEADS, HEADS, WIDTH // HEADS)


OTHERS: dict[str, Change] = {
    "a mean of another projection": lambda m, q: q + m.extra(q).mean(1, keepdim=True),
    "a factor from another projection": lambda m, q: q * m.extra(q).mean(1, keepdim=True),
    "a sum": lambda m, q: q - m.extra(q).sum(1, keepdim=True),
    "the largest": lambda m, q: q * m.extra(q).amax(1, keepdim=True),
    "a norm": lambda m, q: q / m.extra(q).norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("form", OTHERS)
def test_a_statistic_of_another_tensor_is_no_norms(form: str) -> None:
    model = Model(OTHERS[form])
    parts = found(model)
    assert parts["extra"].role == "query"
    assert fl.anatomy(model, IDS).evidence.unreached == ("layers.0.scale", "layers.1.scale")


def masked(head: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(*x.shape[:2], 1)
    return head((x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


ENDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda head, x: head(x.mean(1, keepdim=True)),
    "masked mean": masked,
    "largest": lambda head, x: head(x.amax(1, keepdim=True)[:, 0]),
    "sum of the results": lambda head, x: F.normalize(head(x).sum(1, keepdim=True), dim=-1),
}


@pytest.mark.parametrize("form", ENDS)
def test_pooling_is_no_norm(form: str) -> None:
    parts = found(Model(lambda m, q: q, ENDS[form]))
    assert [parts[name].role for name in ("q", "k", "v", "o", "head", "embed")] == [
        "query", "key", "value", "output", "head", "embedding",
    ]  # fmt: skip


class Experts(nn.Module):
    """Experts in a loop; the weight of each is a sum over the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.ups, self.downs = (nn.Parameter(torch.randn(3, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            weight = (weights * (chosen == i)).sum(-1, keepdim=True)
            mixed = mixed + weight * (F.silu(x @ up) @ down)
        return x + mixed


def test_a_router_whose_weights_are_sums() -> None:
    model = Model(lambda m, q: q)
    for layer in model.layers:
        layer.o = nn.Sequential(layer.o, Experts())
    parts = found(model)
    assert parts["o.1.router"].role == "router"
    assert (parts["o.1.ups"].role, parts["o.1.downs"].role) == ("up", "down")


class Divided(nn.Linear):
    """A projection whose weight is divided by its norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


def test_a_weight_that_is_divided_by_its_norm_keeps_its_heads() -> None:
    model = Model(lambda m, q: q)
    for layer in model.layers:
        layer.q = Divided(WIDTH, WIDTH)
    assert found(model)["q"].heads == fl.Heads(HEADS, HEADS, WIDTH // HEADS)


def test_a_statistic_along_another_axis_is_no_norms() -> None:
    model = Model(lambda m, q: q * q.mean(1)[..., None])  # as many tokens as entries
    (part,) = fl.anatomy(model, torch.arange(2 * WIDTH).view(2, WIDTH)).select("layers[0].query")[
        :1
    ]
    assert (part.name, part.heads) == ("layers.0.q.weight", None)


class Grouped(Layer):
    """Two heads of the query share a key and a value."""

    def forward(self, x: Tensor) -> Tensor:
        q, half = self.change(self, self.q(x)), WIDTH // HEADS
        k, v = (part(x)[:, None, :, :half] for part in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(apart(q), k, v)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mixed", [True, False])
def test_keys_do_not_state_how_many_heads_an_unknown_query_has(mixed: bool) -> None:
    model = Model(lambda m, q: q)
    model.layers = nn.ModuleList(Grouped(lambda m, q: q.cumsum(-1) if mixed else q) for _ in "ab")
    heads = {part.heads for part in fl.anatomy(model, IDS).select("key")}
    assert heads == {None if mixed else fl.Heads(HEADS, 1, WIDTH // HEADS)}


class NormedMean(nn.Module):
    """A head of a mean over tokens, which is normed, and then has the size of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1)
        mean = self.scale * (mean * mean.pow(2).mean(-1, keepdim=True).rsqrt())
        last, other = self.last(mean), self.other(mean)
        return last * (other.norm(dim=-1, keepdim=True) / last.norm(dim=-1, keepdim=True))


def test_a_mean_may_be_normed_and_a_result_rescaled() -> None:
    model = Model(lambda m, q: q)
    model.head = NormedMean()  # type: ignore[assignment]
    parts = found(model)
    assert (parts["head.scale"].role, parts["head.last"].role) == ("norm", "head")


class OfFunction(torch.autograd.Function):
    """A norm with its scale; the gradient through the statistic is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return scale * (x * x.pow(2).mean(-1, keepdim=True).rsqrt())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).flatten(0, -2).sum(0)


def test_the_scale_of_a_norm_in_a_function_of_autograd() -> None:
    parts = found(Model(lambda m, q: OfFunction.apply(q, m.scale)))
    assert parts["scale"].role == "norm"
    assert parts["q"].heads == fl.Heads(HEADS, HEADS, WIDTH // HEADS)


def biased_once(m: Any, q: Tensor) -> Tensor:
    """Norm a query; the first pass alone computes what is added, and later passes read a cache."""
    if "added" not in vars(m):
        vars(m)["added"] = m.extra(torch.ones(WIDTH, device=q.device))
    return q * q.pow(2).mean(-1, keepdim=True).rsqrt() * m.scale + vars(m)["added"]


def test_a_norm_is_read_from_a_first_pass_that_fills_a_cache() -> None:
    assert found(Model(biased_once))["scale"].role == "norm"


class Mixed(nn.Module):
    """A model whose layers add its normed embeddings to what they are applied to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(Layer(lambda _, q: q) for _ in range(2))
        self.shares = nn.ParameterList(nn.Parameter(torch.tensor([0.9, 0.1])) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = F.rms_norm(self.embed(ids), (WIDTH,))
        for layer, shares in zip(self.layers, self.shares, strict=True):
            x = layer(shares[0] * x + shares[1] * first)
        return self.head(x)


def test_numbers_that_are_selected_from_a_vector_are_no_scale_of_a_norm() -> None:
    parts = {part.name: part.role for part in fl.anatomy(Mixed(), IDS).parts}
    assert "norm" not in parts.values()
