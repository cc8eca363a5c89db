"""Weights whose use is hard to see, or that are used twice: each is read rightly, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import frostlab as fl

WIDTH, HEADS = 16, 2
IDS = torch.arange(12).view(2, 6)


def apart(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return together((apart(q) @ apart(k).mT).softmax(-1) @ apart(v))


class Layer(nn.Module):
    """An attention and a feed-forward network."""

    def __init__(self, mix: "Mix | None" = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        mixed = attend(self.q(x), self.k(x), self.v(x)) if self.mix is None else self.mix(self, x)
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(x)))


Mix = Callable[[Layer, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(mix: Mix | None = None) -> Model:
    torch.manual_seed(0)
    return Model(Layer(mix), Layer(mix)).double()


def roles(model: nn.Module) -> dict[str, list[str]]:
    """Return the roles of each parameter's rows, without repetitions that follow one another."""
    rows: dict[str, list[tuple[int, str]]] = {}
    for part in fl.anatomy(model, IDS).parts:
        ranges = [(0, 1)] if part.rows is None else part.rows.ranges()
        rows.setdefault(part.name, []).extend((start, part.role) for start, _ in ranges)
    return {name: [role for _, role in sorted(own)] for name, own in rows.items()}


def refusal(model: nn.Module) -> str:
    with pytest.raises(fl.UnknownArchitecture) as error:
        fl.anatomy(model, IDS)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- projections that are not seen ----


class Own(torch.autograd.Function):
    """A projection with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), grad.flatten(0, -2).sum(0)


class InOwn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Own.apply(x, self.weight, self.bias)
        return result


# Functions of TorchScript without their source in Python, as in a program that was loaded. Those of
# `torch.jit.script` and `torch.jit.trace` run uncompiled, so they are seen (test_unwatched.py).
COMPILED = torch.jit.CompilationUnit("""
def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight.t()) + bias

def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)
""")


class Scripted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = COMPILED.project(x, self.weight, self.bias)
        return result


class ByHand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None] * self.weight).sum(-2)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("side", ["q", "k", "v", "o"])
def test_a_projection_in_a_function_of_the_user_is_refused(side: str, frozen: bool) -> None:
    model = made()
    for layer in model.layers:
        setattr(layer, side, InOwn(WIDTH, WIDTH).double().requires_grad_(not frozen))
    assert f"layers.0.{side}.weight is used by Own" in refusal(model)


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_projection_by_torchscript_is_refused(side: str) -> None:
    model = made()
    for layer in model.layers:
        setattr(layer, side, Scripted(WIDTH, WIDTH).double())
    for _ in range(3):  # TorchScript compiles after the first calls
        model(IDS)
    assert f"layers.0.{side}.weight is used by a function of TorchScript" in refusal(model)


def test_an_attention_by_torchscript_is_refused() -> None:
    model = made()
    model.layers[1].mix = lambda self, x: together(
        COMPILED.attend(apart(self.q(x)), apart(self.k(x)), apart(self.v(x)))
    )
    for _ in range(3):
        model(IDS)
    assert "layers.1 calls a function of TorchScript to mix vectors" in refusal(model)


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_projection_without_a_matrix_product_is_refused(side: str) -> None:
    model = made()
    for layer in model.layers:
        setattr(layer, side, ByHand(WIDTH, WIDTH, bias=False).double())
    assert f"layers.0.{side}.weight is multiplied entry by entry" in refusal(model)


def test_a_weight_that_a_function_of_the_user_takes_is_used() -> None:
    model = made()
    for layer in model.layers:
        layer.up = InOwn(WIDTH, WIDTH).double()
    assert not fl.anatomy(model, IDS).evidence.unreached
    assert roles(model)["layers.1.q.weight"] == ["query"]


def test_the_message_names_the_parametrization() -> None:
    model = made()
    parametrizations.spectral_norm(model.layers[1].k)
    message = refusal(model)
    assert "layers.1.k computes the key of an attention" in message
    assert "of which layers.1.k.parametrizations.weight.0 makes one" in message


# ---- weights that are used twice ----


def test_a_weight_that_is_value_and_output_is_refused() -> None:
    def mix(self: Layer, x: Tensor) -> Tensor:
        return attend(self.q(x), self.k(x), self.v(x)) @ self.v.weight

    assert "layers.0.v.weight is value and output at once" in refusal(made(mix))


def test_a_weight_that_is_key_and_up_is_refused() -> None:
    model = made()
    for layer in model.layers:
        layer.up = layer.k
    assert "is key and up at once" in refusal(model)


class Joined(nn.Module):
    """An attention whose four weights are one parameter."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.flat = flat
        if flat:
            self.weight = nn.Parameter(self.weight.detach().flatten())

    def forward(self, x: Tensor) -> Tensor:
        if self.flat:
            q, k, v, o = self.weight.view(4, WIDTH, WIDTH)
        else:
            q, k, v, o = (self.weight[index] for index in range(4))
        return x + attend(x @ q, x @ k, x @ v) @ o


@pytest.mark.parametrize("flat", [False, True])
def test_the_rows_of_the_output_projection_in_a_joined_weight(flat: bool) -> None:
    torch.manual_seed(0)
    model = Model(Joined(flat), Joined(flat)).double()
    assert roles(model)["layers.1.weight"] == ["query", "key", "value", "output"]
    frozen = {part.role for part in fl.anatomy(model).select("output")}
    assert frozen == {"output"}


class Stacked(nn.Module):
    """All layers in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.qkv = nn.Parameter(torch.randn(2, 3 * WIDTH, WIDTH) / 4)
        self.o = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for qkv, o in zip(self.qkv, self.o, strict=True):
            x = x + F.linear(attend(*F.linear(x, qkv).chunk(3, -1)), o)
        result: Tensor = self.head(x)
        return result


def test_layers_that_are_stacked_in_one_parameter() -> None:
    torch.manual_seed(0)
    model = Stacked().double()
    assert roles(model)["qkv"] == ["query", "key", "value"]
    assert roles(model)["o"] == ["output"]
    assert {part.axis for part in fl.anatomy(model).parts if part.name == "qkv"} == {1}


# ---- attentions without a softmax ----


def of_one(scores: Tensor) -> Tensor:
    shares = scores.sigmoid()
    return shares / shares.sum(-1, keepdim=True)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.relu, torch.square, of_one])
@pytest.mark.parametrize("alone", [False, True])
def test_another_function_instead_of_the_softmax_is_refused(
    function: Callable[[Tensor], Tensor], alone: bool
) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = apart(self.q(x)) @ apart(self.k(x)).mT / 4
            return together(function(scores) @ apart(self.v(x)))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Other()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.attention(x)
            return result

    layers = [Holder()] if alone else [Layer(), Holder()]
    message = refusal(Model(*layers).double())
    assert f"layers.{len(layers) - 1}.attention multiplies the " in message or (
        "multiplies a power of a product" in message
    )


# ---- rows without a gradient ----


def off(x: Tensor) -> Tensor:
    return F.relu(x - 100 * torch.eye(WIDTH, dtype=x.dtype)[3])


@pytest.mark.parametrize(
    "change",
    [off, lambda x: x.clamp(-0.05, 0.05), lambda x: (x * 8).round() / 8, lambda x: F.gelu(off(x))],
    ids=["a unit that is off", "clamped", "rounded", "gelu"],
)
def test_rows_without_a_gradient_on_this_input_are_read(change: Callable[[Tensor], Tensor]) -> None:
    def mix(self: Layer, x: Tensor) -> Tensor:
        return attend(change(self.q(x)), change(self.k(x)), change(self.v(x)))

    found = roles(made(mix))
    for kind in ("weight", "bias"):
        names = [f"layers.{layer}.{side}.{kind}" for layer in (0, 1) for side in "qkv"]
        assert [found[name] for name in names] == [["query"], ["key"], ["value"]] * 2


@pytest.mark.parametrize("kept", [5, 0])
def test_rows_that_are_pruned_keep_the_role_of_their_head(kept: int) -> None:
    model = made()
    for layer in model.layers:
        layer.q.bias = layer.q.bias if kept else None
        mask = torch.arange(WIDTH) % 8 < kept
        prune.custom_from_mask(layer.q, "weight", mask[:, None].expand(-1, WIDTH))
    assert roles(model)["layers.1.q.weight_orig"] == ["query"]


class Decoder(nn.Module):
    """A decoder that begins with zeros, like that of DETR."""

    def __init__(self, layers: int, bias: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.asked = nn.Parameter(torch.randn(3, WIDTH))
        for name in ("own", "cross"):
            blocks = nn.ModuleList()
            for _ in range(layers):
                blocks.append(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
            setattr(self, name, blocks)

    def forward(self, ids: Tensor) -> Any:
        given = self.embed(ids)
        place = self.asked.expand(len(ids), -1, -1)
        x = torch.zeros_like(place)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = x + own(x + place, x + place, x, need_weights=False)[0]
            x = x + cross(x + place, given, given, need_weights=False)[0]
        return self.head(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_values_that_are_computed_from_zeros(layers: int, bias: bool) -> None:
    torch.manual_seed(0)
    found = roles(Decoder(layers, bias).double())
    for name in ("own", "cross"):
        for kind in ("weight", "bias") if bias else ("weight",):
            assert found[f"{name}.0.in_proj_{kind}"] == ["query", "key", "value"]


def test_values_without_a_gradient_are_refused() -> None:
    def mix(self: Layer, x: Tensor) -> Tensor:
        return attend(self.q(x), self.k(x), self.v(x).detach())

    assert "computes the value of an attention without gradients" in refusal(made(mix))


def test_constants_that_are_weighed_are_no_values_without_a_gradient() -> None:
    """The mean place of what a query finds is read: there is no weight in it."""

    class Located(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            shares = (x @ x.mT).softmax(-1)
            return self.head(x), shares @ torch.arange(6, dtype=x.dtype)[:, None]

    found = roles(Located(Layer(), Layer()).double())
    assert found["layers.1.v.weight"] == ["value"]


class Masked(nn.Module):
    def __init__(self, axes: int, first: bool = True) -> None:
        super().__init__()
        self.whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, add_bias_kv=axes == 2)
        self.mask = nn.Parameter(torch.randn(*[HEADS, 6, 6][3 - axes :]))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask if self.mask.ndim == 2 else self.mask.repeat(len(x), 1, 1)
        result: Tensor = x + self.whole(x, x, x, attn_mask=mask, need_weights=False)[0]
        return result


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_a_learned_mask_of_torchs_attention_is_a_position(axes: int, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Model(Masked(axes), Masked(axes)).double()
    model.requires_grad_(not frozen)
    assert roles(model)["layers.1.mask"] == ["position"]
    assert roles(model)["layers.1.whole.in_proj_weight"] == ["query", "key", "value"]
    assert not fl.anatomy(model, IDS).evidence.unreached


# ---- weights that change a query, key or value in a way that gradients do not show ----


def with_side(number: int, change: Callable[[Tensor], Tensor]) -> Mix:
    """Return an attention whose query, key or value (0, 1 or 2) is changed by a function."""

    def mix(layer: Layer, x: Tensor) -> Tensor:
        sides = [layer.q(x), layer.k(x), layer.v(x)]
        sides[number] = change(sides[number])
        return attend(sides[0], sides[1], sides[2])

    return mix


@pytest.mark.parametrize("number", [0, 1, 2])
def test_rows_that_a_condition_keeps_from_these_inputs_are_seen_to_matter(number: int) -> None:
    """A row whose entries are all negative here has no gradient behind a ReLU written by hand."""
    model = made(with_side(number, lambda t: torch.where(t > 0, t, torch.zeros_like(t))))
    with torch.no_grad():
        [model.layers[0].q, model.layers[0].k, model.layers[0].v][number].bias[3] = -50
    assert "changed, although its rows" in refusal(model)


@pytest.mark.parametrize("number", [0, 1])
def test_a_softmax_between_projection_and_attention_is_refused(number: int) -> None:
    side = ("query", "key")[number]
    error = refusal(made(with_side(number, lambda t: t.softmax(-1))))
    assert f"the {side} of an attention changes with layers.0.{'qk'[number]}.weight" in error


def test_a_softmax_behind_the_first_projection_does_not_make_it_an_embedding() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return attend(self.q(x).softmax(-1), self.k(x), self.v(x))

    assert "the query of an attention changes with q.weight" in refusal(Alone().double())


def test_values_without_gradients_are_seen_to_come_from_a_weight() -> None:
    def mix(layer: Layer, x: Tensor) -> Tensor:
        values = apart((8 * layer.v(x)).to(torch.int8).to(x.dtype))
        q, k = apart(layer.q(x)), apart(layer.k(x))
        return together(F.scaled_dot_product_attention(q, k, values))

    assert "the value of an attention changes with layers.0.v.weight" in refusal(made(mix))
