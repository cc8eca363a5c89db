"""Products of one input are joined, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import frostlab as fl
from frostlab.models.stack import take_apart
from frostlab.training.joining import join_products
from packed import build

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Joining:
    """A backend that joins, counts and does no more."""

    def __init__(self) -> None:
        self.before, self.after = 0, 0

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.before += self._count(module)
        join_products(module.graph)
        module.recompile()
        self.after += self._count(module)
        return module.forward

    def _count(self, module: GraphModule) -> int:
        return sum(node.target is F.linear for node in module.graph.nodes)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    out = run()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# query, key and value; gate and up
@pytest.mark.parametrize(
    ("name", "freeze", "before", "after"),
    [
        ("bert classifier", (), 6, 4),
        ("bert classifier", ("query", "key"), 6, 5),
        ("bert classifier", ("query",), 6, 5),
        ("llama", (), 7, 4),
        ("gpt", (), 4, 4),
    ],
)
def test_a_layer_computes_the_same_in_fewer_products(
    name: str, freeze: tuple[str, ...], before: int, after: int
) -> None:
    model: Any = build(name).eval()
    if freeze:
        fl.freeze(model, *freeze)
    stack = take_apart(model)
    assert stack is not None
    ids = torch.randint(5, 60, (2, 9))

    def run() -> Tensor:
        return stack.vectors(ids)

    wanted, backend = gradients(model, run), Joining()
    stack.layers[0].compile(backend=backend)
    found = gradients(model, run)
    assert (backend.before, backend.after) == (before, after)
    for made, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(made, expected)


class Two(nn.Module):
    """Two linear maps of what may be one input."""

    def __init__(self, between: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 5, bias=bias)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        first = self.one(x)
        return torch.cat([first, self.other(self.between(x))], -1)


@pytest.mark.parametrize(
    ("between", "bias", "after"),
    [
        (lambda x: x, True, 1),
        (lambda x: x, False, 2),
        (lambda x: x + 1, True, 2),
        (lambda x: x.add_(1), True, 2),
        (lambda x: F.relu(x, inplace=True), True, 2),
        (lambda x: torch.add(x, 1, out=x), True, 2),
    ],
    ids=[
        "the same",
        "one without bias",
        "another",
        "written to",
        "written to by a function",
        "out",
    ],
)
def test_only_what_reads_the_same_is_joined(
    between: Callable[[Tensor], Tensor], bias: bool, after: int
) -> None:
    torch.manual_seed(0)
    model, backend, x = Two(between, bias), Joining(), torch.randn(6, 4)
    wanted = model(x.clone())
    found = torch.compile(model, backend=backend)(x.clone())
    torch.testing.assert_close(found, wanted)
    assert backend.after == after


def test_inplace_operators_count_as_writing() -> None:
    def work(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        x = x * 2
        first = F.linear(x, one)
        x += 1
        return first + F.linear(x, other)

    given = [torch.randn(6, 4), torch.randn(3, 4), torch.randn(3, 4)]
    backend = Joining()
    torch.testing.assert_close(torch.compile(work, backend=backend)(*given), work(*given))
    assert backend.after == 2
