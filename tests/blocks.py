"""A small transformer whose attention, network or block a test replaces."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl

WIDTH, HEADS, WIDE = 16, 4, 32
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def apart(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the result of an attention, its heads together."""
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def mixed(self, x: Tensor) -> Tensor:
        return attend(apart(self.q(x)), apart(self.k(x)), apart(self.v(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(x))


class Network(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] = F.gelu, wide: int = WIDE) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Linear(WIDTH, wide), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self.one(x)))


class Block(nn.Module):
    def __init__(self, mix: nn.Module | None = None, network: nn.Module | None = None) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = Mix() if mix is None else mix
        self.network = Network() if network is None else network

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        return x + self.network(self.n2(x))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def roles(model: nn.Module, ids: Tensor = IDS) -> dict[str, str]:
    """Return the role of every weight, or `role rows, role rows` of one with several."""
    found: dict[str, list[str]] = {}
    for part in fl.anatomy(model, ids).parts:
        spans = "" if part.rows is None else f" {part.rows.ranges()[0]} of axis {part.axis}"
        found.setdefault(part.name.removesuffix(".weight"), []).append(f"{part.role}{spans}")
    return {name: ", ".join(said) for name, said in found.items()}
