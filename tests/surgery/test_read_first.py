"""A model that was read on a batch is then frozen without one: exactly query and key stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from blocks import WIDTH, apart, attend

CONTEXT = 12


class OfTorch(nn.Module):
    """torch's attention with keys and values of another width, whose biases are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 4, kdim=CONTEXT, vdim=CONTEXT, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.mix(x, context, context)[0]

    def fixed(self) -> dict[str, slice]:
        both = slice(0, 2 * WIDTH)
        every = slice(None)
        return {"q_proj_weight": every, "k_proj_weight": every, "in_proj_bias": both}


class Raw(nn.Module):
    """Query, key and value are rows, or columns, of one raw parameter."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.columns = columns
        shape = (WIDTH, 3 * WIDTH) if columns else (3 * WIDTH, WIDTH)
        self.w, self.b = nn.Parameter(torch.randn(shape) / 4), nn.Parameter(torch.randn(3 * WIDTH))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        sides = F.linear(x, self.w.T if self.columns else self.w, self.b).chunk(3, -1)
        return self.o(attend(*(apart(side) for side in sides)))

    def fixed(self) -> dict[str, slice]:
        return {"w": slice(0, 2 * WIDTH), "b": slice(0, 2 * WIDTH)}


class Whole(nn.Module):
    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(mix() for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x, context)
        return self.head(x)


@pytest.mark.parametrize("mix", [OfTorch, lambda: Raw(False), lambda: Raw(True)])
def test_exactly_query_and_key_are_frozen_after_reading_on_a_batch(
    mix: Callable[[], nn.Module],
) -> None:
    model, batch = Whole(mix), (torch.randn(2, 7, 6), torch.randn(2, 5, CONTEXT))
    fl.anatomy(model, batch)
    fl.freeze(model, "query", "key")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(*batch).square().mean().backward()
        optimizer.step()
    still = {name: after == before[name] for name, after in model.state_dict().items()}
    fixed = mix().fixed()  # type: ignore[operator]
    for name, same in still.items():
        local = name.rpartition(".")[2]
        wanted = torch.zeros_like(same)
        if name.startswith("layers.") and local in fixed:
            columns = local == "w" and getattr(model.layers[0], "columns", False)
            (wanted.mT if columns else wanted)[fixed[local]] = True
        assert torch.equal(same, wanted), name
