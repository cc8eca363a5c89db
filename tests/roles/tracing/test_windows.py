"""Forms that models of images use: windows, padding, position networks, mixed heads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl

WIDTH, HEADS, SIDE = 16, 2, 4  # width of the model, heads, tokens along a window's side
TOKENS = SIDE * SIDE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def sides(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    def bias(self) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = q @ k.transpose(-1, -2) + self.bias()
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attn = Attention() if attention is None else attention
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Model(nn.Module):
    """Layers over a batch of tokens."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def roles(model: nn.Module, tokens: int = TOKENS) -> dict[str, set[str]]:
    torch.manual_seed(0)
    found: dict[str, set[str]] = {}
    for part in fl.anatomy(model, torch.randn(2, tokens, 3)).parts:
        found.setdefault(part.name, set()).add(part.role)
    return found


class Numbered(Model):
    """Layers that are attributes with a number at the end of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_0, self.layer_1, self.layer_2 = Layer(), Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in (self.layer_0, self.layer_1, self.layer_2):
            x = layer(x)
        return self.head(x.mean(1))


def test_layers_may_be_numbered_at_the_end_of_their_names() -> None:
    model = Numbered()
    found = roles(model)
    assert found["layer_2.fc1.weight"] == {"up"}
    assert found["layer_2.fc2.weight"] == {"down"}
    assert found["head.weight"] == {"head"}
    layers = {p.name: p.place.layers for p in fl.anatomy(model).parts}
    assert layers["layer_1.attn.qkv.weight"] == (1,)
    assert layers["layer_2.fc2.bias"] == (2,)


class Talking(Attention):
    """Heads that are mixed before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = self.before((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_talking_heads_are_refused_beside_others() -> None:
    with pytest.raises(fl.UnknownArchitecture, match="not an attention in a form that can be read"):
        roles(Model(Layer(Talking()), Layer()))


class Continuous(Attention):
    """A small network computes a bias for the scores from distances; keys have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(2, 8), nn.Linear(8, HEADS, bias=False)
        self.register_buffer("distances", torch.randn(TOKENS, TOKENS, 2))

    def bias(self) -> Tensor:
        return 16 * self.far(F.relu(self.near(self.distances))).permute(2, 0, 1).sigmoid()

    def sides(self, x: Tensor) -> tuple[Tensor, ...]:
        bias = self.qkv.bias.clone()
        bias[WIDTH : 2 * WIDTH].zero_()
        x = F.linear(x, self.qkv.weight, bias)
        return x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()


class Padded(Continuous):
    """The tokens are padded to a whole window."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return super().forward(F.pad(x, (0, 0, 0, TOKENS - tokens)))[:, :tokens]


@pytest.mark.parametrize(("kind", "tokens"), [(Continuous, TOKENS), (Padded, TOKENS - 3)])
def test_a_network_of_positions_and_padding(kind: Any, tokens: int) -> None:
    model = Model(Layer(kind()), Layer(kind()))
    found = roles(model, tokens)
    for name in ("near.weight", "near.bias", "far.weight"):
        assert found[f"layers.1.attn.{name}"] == {"position"}
    assert found["layers.1.attn.qkv.weight"] == {"query", "key", "value"}
    assert found["layers.1.attn.qkv.bias"] == {"query", "other", "value"}
    (key,) = [p for p in fl.anatomy(model).select("key") if p.name == "layers.0.attn.qkv.weight"]
    assert key.heads is not None
    assert key.heads.count == HEADS


class Table(Attention):
    """A table of biases that is looked up by products with constants."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 2 * SIDE - 1, 2 * SIDE - 1))
        steps = torch.arange(SIDE)
        places = steps[:, None] - steps + SIDE - 1
        self.register_buffer("lookup", F.one_hot(places, 2 * SIDE - 1).float())

    def bias(self) -> Tensor:
        rows = torch.einsum("nhw,ixh->nixw", self.table, self.lookup)
        return torch.einsum("nixw,jyw->nijxy", rows, self.lookup).reshape(HEADS, TOKENS, TOKENS)


def test_a_table_that_constants_look_up_is_a_position() -> None:
    found = roles(Model(Layer(Table()), Layer(Table())))
    assert found["layers.0.attn.table"] == {"position"}
    assert found["layers.1.attn.qkv.weight"] == {"query", "key", "value"}


class Windows(Attention):
    """Windows and heads lie on one axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.flatten(0, 1) for side in self.sides(x.reshape(-1, 2, WIDTH)))
        weights = torch.bmm(q, k.transpose(-1, -2)).softmax(-1)
        mixed = torch.bmm(weights, v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)
        return self.proj(mixed).reshape(x.shape)


def test_windows_and_heads_on_one_axis() -> None:
    model = Model(Layer(Windows()), Layer(Windows()))
    roles(model, tokens=64)  # 2 × 32 windows × 2 heads
    for role in ("query", "key", "value"):
        part = next(p for p in fl.anatomy(model).select(role) if p.kind == "weight")
        assert part.heads is not None
        assert part.heads.count == HEADS
        assert part.parameters == WIDTH * WIDTH


class Fused(nn.Module):
    """A layer, and a projection of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Layer()])
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.inner[0](x))


def test_the_projection_after_the_last_layer_is_what_the_earlier_ones_are() -> None:
    found = roles(Model(Fused(), Fused(), Fused()))
    assert found["layers.0.back.weight"] == found["layers.2.back.weight"]
    assert found["layers.2.back.weight"] != {"head"}
    assert found["head.weight"] == {"head"}


class Stem(Model):
    """Convolutions before the layers, some of them 1 × 1."""

    def __init__(self) -> None:
        super().__init__(Layer(), Layer())
        self.wide, self.thin = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.deep, self.last = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.thin(F.relu(self.wide(x))))
        return super().forward(self.last(F.relu(self.deep(x))).flatten(2).transpose(1, 2))


def test_a_stem_of_convolutions() -> None:
    torch.manual_seed(0)
    parts = fl.anatomy(Stem(), torch.randn(1, 3, 8, 8)).parts
    found = {part.name: part.role for part in parts if part.kind == "weight"}
    assert {found[f"{name}.weight"] for name in ("wide", "thin", "deep", "last")} == {"conv"}
    assert found["embed.weight"] == "embedding"
