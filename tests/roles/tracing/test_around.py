"""Roles around attentions in the forms that people write: gates, networks, norms, heads, loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from blocks import IDS, WIDE, WIDTH, Block, Mix, Model, Network, apart, attend, roles

# ---- rows ----


class SquareGate(nn.Module):
    """Gate and up are columns of a square weight, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.two = nn.Parameter(torch.randn(WIDTH // 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        up, gate = (x @ self.both).chunk(2, -1)
        return (up * F.silu(gate)) @ self.two


def test_the_columns_of_a_square_weight() -> None:
    model = Model(lambda: Block(network=SquareGate()))
    said = roles(model)["blocks.0.network.both"]
    assert said == "up (0, 8) of axis 1, gate (8, 16) of axis 1"
    fl.freeze(model, "gate")
    before = model.blocks[0].network.both.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    model(IDS).square().sum().backward()
    optimizer.step()
    moved = model.blocks[0].network.both.detach() != before
    assert not moved[:, 8:].any()
    assert moved[:, :8].all()


class OneHead(Mix):
    """The query has one head, and its weight, stored (in, out), has other columns, too."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, more = (x @ self.both).chunk(2, -1)
        mixed = (q @ self.k(x).mT).softmax(-1) @ self.v(x)
        return self.o(mixed * torch.sigmoid(more))


def test_other_columns_of_a_weight_with_one_head_are_not_its_query() -> None:
    said = roles(Model(lambda: Block(OneHead())))["blocks.1.mix.both"]
    assert said == "query (0, 16) of axis 1, other (16, 32) of axis 1"


class Parallel(nn.Module):
    """Query, key, value, up and gate are rows of one weight, as are output and down of another."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.into = nn.Linear(WIDTH, 3 * WIDTH + 2 * WIDE, bias=False)
        self.out = nn.Linear(WIDTH + WIDE, WIDTH, bias=False)
        self.o, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, up, gate = self.into(x).split([WIDTH] * 3 + [WIDE] * 2, -1)
        mixed, network = attend(apart(q), apart(k), apart(v)), up * F.silu(gate)
        if self.joined:
            return x + self.out(torch.cat([mixed, network], -1))
        return x + self.o(mixed) + self.two(network)


@pytest.mark.parametrize("joined", [False, True])
def test_a_network_beside_an_attention_in_one_weight(joined: bool) -> None:
    said = roles(Model(lambda: Parallel(joined)))
    rows = said["blocks.0.into"].split(", ")
    assert said["blocks.0.into"].endswith("up (48, 80) of axis 0, gate (80, 112) of axis 0"), rows
    if joined:
        assert said["blocks.0.out"] == "output (0, 16) of axis 1, down (16, 48) of axis 1"
    else:
        assert (said["blocks.0.o"], said["blocks.0.two"]) == ("output", "down")


# ---- networks ----


def square(x: Tensor) -> Tensor:
    return x * x


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.1 * x)


@pytest.mark.parametrize(
    "function",
    [
        torch.sin,
        F.softsign,
        F.softshrink,
        torch.abs,
        square,
        lambda x: torch.where(x > 0, x, 0.1 * x),
    ],
)
def test_every_activation_function_makes_a_network(function: Callable[[Tensor], Tensor]) -> None:
    said = roles(Model(lambda: Block(network=Network(function))))
    assert (said["blocks.1.network.one"], said["blocks.1.network.two"]) == ("up", "down")


def test_the_second_half_of_glu_is_the_gate() -> None:
    said = roles(Model(lambda: Block(network=Network(F.glu, 2 * WIDE))))
    assert said["blocks.0.network.one"] == "up (0, 32) of axis 0, gate (32, 64) of axis 0"


def test_a_list_of_two_is_no_expert() -> None:
    def listed() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))

    parts = fl.anatomy(Model(lambda: Block(network=listed())), IDS).parts
    assert {part.role for part in parts if "network" in part.name} == {"up", "down"}
    assert {part.place.expert for part in parts} == {None}


class Experts(nn.Module):
    """Every expert runs; the router's weights mix their results by a product or a sum."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product = product
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Network() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.product:
            each = torch.stack([expert(x) for expert in self.experts], -2)
            return torch.einsum("bte,bted->btd", weights, each)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts))


@pytest.mark.parametrize("product", [False, True])
def test_experts_that_are_all_mixed(product: bool) -> None:
    parts = fl.anatomy(Model(lambda: Block(network=Experts(product))), IDS).parts
    found = {part.name: part for part in parts}
    assert found["blocks.1.network.router.weight"].role == "router"
    up = found["blocks.1.network.experts.2.one.weight"]
    assert (up.role, up.place.expert) == ("up", 2)


# ---- gates ----


class Gated(Mix):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(x)) * torch.sigmoid(self.gate(x))


@pytest.mark.parametrize("width", [1, WIDTH])
def test_a_gate_of_an_attention_chooses_no_experts(width: int) -> None:
    said = roles(Model(lambda: Block(Gated(width))))
    assert said["blocks.0.mix.gate"] == "other"
    assert said["blocks.0.mix.o"] == "output"


# ---- outputs and heads ----


class WithValue(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(x) + self.v(x))


def test_an_output_of_a_sum() -> None:
    assert roles(Model(lambda: Block(WithValue())))["blocks.0.mix.o"] == "output"


class Classifier(nn.Module):
    """One attention without an output projection, then a mean over tokens and a classifier."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(50, WIDTH), Mix()
        self.after = nn.LSTM(WIDTH, WIDTH, batch_first=True) if recurrent else None
        self.classify = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix.mixed(self.embed(ids))
        x = x if self.after is None else self.after(x)[0]
        return self.classify(x.mean(1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_classifier_is_no_output(recurrent: bool) -> None:
    assert roles(Classifier(recurrent))["classify"] == "head"


class NoResidual(Block):
    """A network follows the attention directly; nothing goes around the attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(self.mix.mixed(x))
        return self.n2(x + self.network(x))


def test_layers_without_a_residual_around_the_attention() -> None:
    said = roles(Model(NoResidual))
    assert (said["blocks.1.network.one"], said["blocks.1.mix.q"]) == ("up", "query")


# ---- norms ----


class Norm(nn.Module):
    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.form = form
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.scale, self.shift)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


NORMS: dict[str, Callable[..., Tensor]] = {
    "scaled first": lambda x, g, b: g * (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-6) + b,
    "scaled last": lambda x, g, b: (x - mean(x)) * torch.rsqrt(x.var(-1, keepdim=True)) * g + b,
    "shifted": lambda x, g, b: F.layer_norm(x, (WIDTH,)) * g + b,
    "one more": lambda x, g, b: F.layer_norm(x, (WIDTH,), g + 1, b),
    "addcmul": lambda x, g, b: torch.addcmul(b, g, F.layer_norm(x, (WIDTH,))),
}


@pytest.mark.parametrize("form", NORMS)
def test_norms_by_hand(form: str) -> None:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.n1 = Norm(NORMS[form])

    said = roles(Model(Own))
    assert (said["blocks.0.n1.scale"], said["blocks.0.n1.shift"]) == ("norm", "norm")


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.temperature = Model(), nn.Parameter(torch.tensor(2.6))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.normalize(self.model(ids)[:, 0], dim=-1)
        return self.temperature.exp() * x @ x.flip(0).T


def test_a_temperature_is_no_norm() -> None:
    assert roles(Towers())["temperature"] == "other"


# ---- places ----


class Added(Block):
    """Positions are added to what queries and keys are computed from, apart from each other."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k = self.mix.q(x + positions), self.mix.k(x + positions)
        x = x + self.mix.o(attend(apart(q), apart(k), apart(self.mix.v(x))))
        return x + self.network(self.n2(x))


class WithPositions(Model):
    def __init__(self) -> None:
        super().__init__(Added)
        self.positions = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x, positions = self.embed(ids), self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def test_self_attention_with_positions_is_not_called_cross() -> None:
    parts = fl.anatomy(WithPositions(), IDS).parts
    assert not any(part.place.cross for part in parts)
    assert {part.role for part in parts if part.name == "positions.weight"} == {"position"}


def test_tokens_that_count_up_are_no_positions() -> None:
    assert roles(Model(), torch.arange(6)[None])["embed"] == "embedding"


class SideBySide(Model):
    """Attentions, networks and norms in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.mixes = nn.ModuleList(Mix() for _ in range(3))
        self.networks = nn.ModuleList(Network() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for mix, network, norm in zip(self.mixes, self.networks, self.norms, strict=True):
            x = x + mix(x)
            x = norm(x + network(x))
        return self.head(x)


class SharedKeys(Model):
    """The later layers have queries of their own, and share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.late = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Any:
        x = self.blocks[0](self.embed(ids))
        k, v = apart(self.k(x)), apart(self.v(x))
        for block in self.late:
            x = x + block.mix.o(attend(apart(block.mix.q(block.n1(x))), k, v))
            x = x + block.network(block.n2(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "name"), [(SideBySide, "networks.2.one.weight"), (SharedKeys, "late.1.mix.q.weight")]
)
def test_layers_in_other_lists_are_counted(kind: type[Model], name: str) -> None:
    (place,) = [p.place for p in fl.anatomy(kind(), IDS).parts if p.name == name]
    assert place.layers == (int(name.split(".")[1]),)


# ---- other ways to mix tokens ----


class Loop(nn.Module):
    """A recurrence that is written as a loop over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.new, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keep, new = torch.sigmoid(self.keep(x)), self.new(x)
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + (1 - keep[:, t]) * new[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1))


def test_a_loop_over_tokens_is_recurrent() -> None:
    model = Model()
    model.blocks.insert(0, Block(Loop()))
    said = roles(model)
    assert {said[f"blocks.0.mix.{name}"] for name in ("keep", "new", "out")} == {"recurrent"}
    assert said["blocks.1.mix.q"] == "query"


class Short(nn.Module):
    """1 × 1 convolutions, and depthwise ones after them."""

    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.deep = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, 1, 1, 1, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.thin, self.deep, strict=True)
        return self.o(attend(*(apart(deep(thin(x.mT)).mT) for thin, deep in pairs)))


def test_short_convolutions_after_thin_ones() -> None:
    said = roles(Model(lambda: Block(Short())))
    assert [said[f"blocks.0.mix.thin.{i}"] for i in range(3)] == ["query", "key", "value"]
    assert {said[f"blocks.0.mix.deep.{i}"] for i in range(3)} == {"conv"}


class Listed(nn.Module):
    """Query, key, value and output in one list, as in the Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (apart(linear(x)) for linear in self.linears[:3])
        return self.linears[3](attend(q, k, v))


def test_projections_in_one_list() -> None:
    said = roles(Model(lambda: Block(Listed())))
    found = [said[f"blocks.1.mix.linears.{i}"] for i in range(4)]
    assert found == ["query", "key", "value", "output"]
