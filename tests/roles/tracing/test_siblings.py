"""Which modules are layers, and what a weight's role in other layers says about it."""

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from blocks import IDS, WIDTH, Block, Mix, Network, roles

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
