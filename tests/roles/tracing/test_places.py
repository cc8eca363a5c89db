"""Roles of what stands between, beside and after the layers: factors, tied heads, exits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from blocks import HEADS, IDS, WIDTH, Block, Mix, Model, apart, attend, roles

WORDS = 50


class Factors(Model):
    """Numbers weigh the results of earlier layers; `kind` says in which form."""

    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, self.factors = kind, nn.Parameter(torch.randn(shape))

    def forward(self, ids: Tensor) -> Tensor:
        first = self.embed(ids)
        if self.kind == "stacked":
            both = torch.stack([first, self.embed(ids.flip(1))])
            x = self.blocks[0]((both * self.factors[:, None, None, None]).sum(0))
        elif self.kind == "entries":
            x = self.factors[0] * self.blocks[0](first) + self.factors[1] * first
        else:
            second = self.blocks[0](self.factors[0, 0] * first)
            x = self.factors[1, 0] * first + self.factors[1, 1] * second
        return self.head(self.blocks[1](x))


@pytest.mark.parametrize(
    ("kind", "shape"), [("entries", (2,)), ("table", (2, 2)), ("stacked", (2,))]
)
def test_factors_of_earlier_results_are_no_embedding(kind: str, shape: tuple[int, ...]) -> None:
    assert roles(Factors(kind, shape))["factors"] == "other"


class ValueFactors(Model):
    """The values of the first layer are added to those of the second, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, first = self.embed(ids), None
        for i, block in enumerate(self.blocks):
            mix = block.mix
            q, k, v = (apart(side(x)) for side in (mix.q, mix.k, mix.v))  # type: ignore[union-attr]
            first = v if first is None else first
            x = x + mix.o(attend(q, k, v + self.factors[i] * first))  # type: ignore[union-attr]
        return self.head(x)


def test_factors_of_earlier_values_are_no_embedding() -> None:
    said = roles(ValueFactors())
    assert (said["factors"], said["blocks.1.mix.v"]) == ("other", "value")


class Scaled(Model):
    """Every feature of the embedding has a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_scales_of_the_embedding_belong_to_it() -> None:
    assert roles(Scaled())["scale"] == "embedding"


# ---- tied decoders ----


class Tied(Model):
    """The decoder has the embedding's weight; `form` says where its bias is."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.head = nn.Linear(WIDTH, WORDS, bias=form == "linear")
        self.head.weight = self.embed.weight
        if form != "linear":
            self.bias = nn.Parameter(torch.randn(WORDS))
        if form == "bert":
            self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.form == "bert":
            x = self.norm(F.gelu(self.dense(x)))
        return self.head(x) if self.form == "linear" else self.head(x) + self.bias


@pytest.mark.parametrize(
    ("form", "name"), [("linear", "head.bias"), ("added", "bias"), ("bert", "bias")]
)
def test_the_bias_of_a_tied_decoder_is_the_heads(form: str, name: str) -> None:
    parts = {part.name: part for part in fl.anatomy(Tied(form), IDS).parts}
    assert (parts[name].role, parts[name].kind) == ("head", "bias")
    assert parts["embed.weight"].role == "embedding"


# ---- around attentions ----


class Alone(nn.Module):
    """One attention of torch outside all lists, with learned vectors beside keys and values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.mix = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(ids), -1, -1), self.embed(ids)], 1)
        return self.head(x + self.mix(x, x, x)[0])


def test_vectors_beside_keys_and_values_are_no_embeddings() -> None:
    said = roles(Alone())
    assert (said["mix.bias_k"], said["mix.bias_v"]) == ("other", "other")
    assert said["first"] == "embedding"


class Exits(Model):
    """Every layer has a head, in a list beside that of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, ids: Tensor) -> Any:
        x, outputs = self.embed(ids), []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            outputs.append(leave(x))
        return outputs, self.head(x)


def test_a_head_for_each_layer() -> None:
    said = roles(Exits())
    assert (said["exits.0"], said["exits.1"], said["head"]) == ("head", "head", "head")


class Image(nn.Module):
    """An attention of the pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.flatten(2).mT)
        return x + mixed.mT.unflatten(2, x.shape[2:])


def test_the_classifier_at_the_end_of_a_convolutional_network() -> None:
    torch.manual_seed(0)
    stem, later = nn.Conv2d(3, WIDTH, 3, 2, 1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
    pool = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(stem, nn.ReLU(), Image(), later, *pool, nn.Linear(WIDTH, 4))
    said = roles(model, torch.rand(2, 3, 16, 16))
    assert (said["3"], said["7"], said["2.mix.q"]) == ("conv", "head", "query")


class Convolutions(nn.Module):
    """The feed-forward network of FastSpeech: a larger convolution, then a 1 × 1 one."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Conv1d(WIDTH, 32, 3, padding=1), nn.Conv1d(32, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self.one(x.mT))).mT


@pytest.mark.parametrize(("function", "role"), [(F.relu, "down"), (nn.Identity(), "other")])
def test_a_network_of_two_convolutions(function: Callable[[Tensor], Tensor], role: str) -> None:
    said = roles(Model(lambda: Block(network=Convolutions(function))))
    assert (said["blocks.1.network.one"], said["blocks.1.network.two"]) == ("conv", role)
