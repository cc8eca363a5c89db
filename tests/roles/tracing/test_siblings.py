"""Which modules are layers, and what a weight's role in other layers says about it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from blocks import IDS, WIDTH, Block, Mix, Model, Network, apart, attend, roles

WORDS = 50


def layers_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {part.name: part.place.layers for part in fl.anatomy(model, IDS).parts}


# ---- what is a layer ----


def sequence(*middle: nn.Module, wide: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, wide))


@pytest.mark.parametrize(
    ("blocks", "wide"), [(2, 5), (1, 5), (2, WIDTH)]
)  # with WIDTH, the head has the shape of a projection of a block
def test_the_ends_of_a_sequence_are_no_layers(blocks: int, wide: int) -> None:
    norm = nn.LayerNorm(WIDTH)
    model = sequence(*(Block() for _ in range(blocks)), norm, wide=wide)
    said, layers = roles(model), layers_of(model)
    head, last = str(blocks + 2), str(blocks)
    assert (said["0"], said[head], said[str(blocks + 1)]) == ("embedding", "head", "norm")
    assert layers["0.weight"] == layers[f"{head}.weight"] == ()
    assert layers["1.mix.q.weight"] == (0,)
    assert layers[f"{last}.network.two.weight"] == (blocks - 1,)


class Recurrent(Block):
    """A layer without an attention, but with the norms and the network of the others."""

    def __init__(self) -> None:
        super().__init__(mix=nn.Identity())
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.cell(self.n1(x))[0]
        return x + self.network(self.n2(x))


def test_a_layer_without_an_attention_is_a_layer_at_an_end_too() -> None:
    model = sequence(Recurrent(), Block(), Recurrent())
    said, layers = roles(model), layers_of(model)
    assert layers["1.network.one.weight"] == (0,)
    assert layers["3.cell.weight_ih_l0"] == (2,)
    assert (said["1.cell.weight_ih_l0"], said["3.network.one"]) == ("recurrent", "up")
    assert said["4"] == "head"


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_attentions_and_networks_that_alternate_in_a_list_are_layers() -> None:
    model = sequence(*(Residual(kind()) for kind in (Mix, Network) * 2))
    layers = layers_of(model)
    assert [layers[f"{i}.inner.q.weight"] for i in (1, 3)] == [(0,), (2,)]
    assert [layers[f"{i}.inner.one.weight"] for i in (2, 4)] == [(1,), (3,)]


class Projected(nn.Module):
    def __init__(self, words: int | None = None) -> None:
        super().__init__()
        self.look = nn.Identity() if words is None else nn.Embedding(words, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.look(x))


def test_a_stem_and_a_head_with_the_same_names_and_shapes() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(Block(), Block())
    said = roles(nn.Sequential(Projected(WORDS), encoder, Projected()))
    assert (said["0.proj"], said["2.proj"]) == ("embedding", "head")


# ---- what another layer says about a weight ----


class Wider(Block):
    """The weight `shift` is used only in the last layer, or has another shape there."""

    def __init__(self, shape: tuple[int, ...], used: bool) -> None:
        super().__init__()
        self.used = used
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (WIDTH,), self.shift if self.used else None)


def test_a_weight_of_another_shape_is_no_norm() -> None:
    model = Model()
    model.blocks = nn.ModuleList([Wider((WIDTH,), True), Wider((WIDTH, 2), False)])
    said = roles(model)
    assert (said["blocks.0.shift"], said["blocks.1.shift"]) == ("norm", "other")


def test_a_head_of_another_shape_is_a_head() -> None:
    """`proj` of the first module stands between attentions, `proj` of the last is the head."""

    class Merged(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.part = nn.Sequential(Block(), Block())
            self.proj = nn.Linear(WIDTH, wide)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(self.part(x))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Merged(WIDTH), Merged(5))
    assert (roles(model)["1.proj"], roles(model)["2.proj"]) == ("other", "head")


class ListedMix(nn.Module):
    """Query, key, value, output and a projection that nobody uses, in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (apart(linear(x)) for linear in self.all[:3])
        return self.all[3](attend(q, k, v))


def test_an_unused_projection_beside_those_of_an_attention_has_no_role() -> None:
    model = Model(lambda: Block(ListedMix()))
    said = roles(model)
    assert [said[f"blocks.1.mix.all.{i}"] for i in (0, 3, 4)] == ["query", "output", "other"]
    unused = {f"blocks.{i}.mix.all.4.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert set(fl.anatomy(model, IDS).evidence.unreached) == unused


class EarlyExit(Model):
    """Short inputs leave after two of four blocks."""

    def __init__(self, late: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks.extend(Block(late()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks[: 2 if ids.shape[1] < 100 else 4]:
            x = block(x)
        return self.head(x)


class Exchanged(Mix):
    def mixed(self, x: Tensor) -> Tensor:
        return attend(apart(self.k(x)), apart(self.q(x)), apart(self.v(x)))


class Flagged(Mix):
    def __init__(self, exchanged: bool) -> None:
        super().__init__()
        self.exchanged = exchanged

    def mixed(self, x: Tensor) -> Tensor:
        q, k = (self.k, self.q) if self.exchanged else (self.q, self.k)
        return attend(apart(q(x)), apart(k(x)), apart(self.v(x)))


@pytest.mark.parametrize(
    ("late", "known"),
    [
        (Mix, True),
        (Exchanged, False),
        (lambda: Flagged(False), True),
        (lambda: Flagged(True), False),
    ],
)
def test_a_layer_that_is_not_reached_is_like_those_of_its_class_and_settings(
    late: Callable[[], nn.Module], known: bool
) -> None:
    model = EarlyExit(late)
    if isinstance(late(), Flagged):
        for block in model.blocks[:2]:
            block.mix = Flagged(False)  # type: ignore[union-attr]
    said, unreached = roles(model), fl.anatomy(model, IDS).evidence.unreached
    assert said["blocks.3.mix.q"] == ("query" if known else "other")
    assert ("blocks.3.mix.q.weight" in unreached) is not known
    assert said["blocks.3.network.one"] == "up"
