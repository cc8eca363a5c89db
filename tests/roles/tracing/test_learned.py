"""Learned tokens attend to themselves before any input reaches them, as in a Q-Former."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from blocks import WIDTH, Mix, Network, apart, attend


class Fused(Mix):
    """torch's own function computes the attention."""

    def mixed(self, x: Tensor) -> Tensor:
        sides = (apart(side(x)) for side in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(*sides).transpose(1, 2).flatten(2)


class Cross(Mix):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = apart(self.q(x)), apart(self.k(context)), apart(self.v(context))
        return self.o(attend(q, k, v))


class Layer(nn.Module):
    def __init__(self, mix: type[Mix]) -> None:
        super().__init__()
        self.norm, self.own, self.cross = nn.LayerNorm(WIDTH), mix(), Cross()
        self.network = Network()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.own(self.norm(x))
        x = x + self.cross(x, context)
        return x + self.network(x)


class Former(nn.Module):
    def __init__(self, mix: type[Mix], layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.tokens = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.layers = nn.ModuleList(Layer(mix) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        context, tokens = self.embed(x), self.tokens.expand(len(x), -1, -1)
        for layer in self.layers:
            tokens = layer(tokens, context)
        return self.head(tokens)


@pytest.mark.parametrize("mix", [Mix, Fused])
@pytest.mark.parametrize("layers", [1, 2])
def test_learned_tokens_that_attend_to_themselves(mix: type[Mix], layers: int) -> None:
    anatomy = fl.anatomy(Former(mix, layers), torch.randn(2, 7, 6))
    found = {part.name.removesuffix(".weight"): part for part in anatomy.parts}
    wanted = {"q": "query", "k": "key", "v": "value", "o": "output"}
    for i in range(layers):
        for name, role in wanted.items():
            own, cross = (found[f"layers.{i}.{which}.{name}"] for which in ("own", "cross"))
            assert (own.role, own.place.cross) == (role, False)
            assert (cross.role, cross.place.cross) == (role, True)
    assert (found["layers.0.norm"].role, found["head"].role) == ("norm", "head")
    assert anatomy.evidence.unreached == ()
