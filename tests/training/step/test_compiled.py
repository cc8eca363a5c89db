"""Products of one input are joined, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import frostlab as fl
from frostlab import devices
from frostlab.models.fused.joined_linear import joined_linear
from frostlab.models.stack import take_apart
from frostlab.training.step.compiled import joining_backend
from frostlab.training.step.joining import join_linears, writes_in_place
from frostlab.training.step.optimizer import Bf16Copies
from packed import build, exactly

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Joining:
    """A backend that joins, counts and does no more."""

    def __init__(self) -> None:
        self.before, self.after = 0, 0

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.before += self._count(module)
        join_linears(module.graph)
        module.recompile()
        self.after += self._count(module)
        return module.forward

    def _count(self, module: GraphModule) -> int:
        return sum(node.target in (F.linear, joined_linear) for node in module.graph.nodes)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled code, and no kernels, which cannot start on the CPU, even if Triton is here."""
    torch.compiler.reset()
    monkeypatch.setattr(devices, "HAS_TRITON", False)


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
        ("bert classifier", ("query", "key"), 6, 4),
        ("bert classifier", ("query",), 6, 4),
        ("bert classifier", ("key",), 6, 4),
        ("bert classifier", ("value",), 6, 4),
        ("bert classifier", ("query", "key", "value"), 6, 4),
        ("llama", ("key",), 7, 4),
        ("llama", (), 7, 4),
        ("gpt", (), 4, 4),
    ],
)
def test_a_layer_computes_the_same_in_fewer_products(
    name: str, freeze: tuple[str, ...], before: int, after: int
) -> None:
    model: Any = exactly(name).eval()
    if freeze:
        fl.freeze(model, *freeze)
    stack = take_apart(model)
    assert stack is not None
    ids = torch.randint(5, 60, (2, 9))

    def run() -> Tensor:
        return stack.read(stack.run(stack.embed(ids, None, None), None), ids, None)

    wanted, backend = gradients(model, run), Joining()
    stack.layers[0].compile(backend=backend)
    found = gradients(model, run)
    assert (backend.before, backend.after) == (before, after)
    for made, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


class Three(nn.Module):
    """Linear maps of one input, of different sizes."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, rows, bias=bias) for rows in (4, 3, 6))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = (linear(x) for linear in self.maps)
        return torch.cat([first, *(out.exp() for out in rest)], -1)


@pytest.mark.parametrize("half", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_joined_maps_are_the_plain_ones(frozen: tuple[int, ...], bias: bool, half: bool) -> None:
    torch.manual_seed(0)
    model, backend = Three(bias).to(torch.float32 if half else torch.float64), Joining()
    for i in frozen:
        model.maps[i].requires_grad_(False)
    x = torch.randn(2, 5, 8, dtype=model.maps[0].weight.dtype, requires_grad=True)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = []
    for run in (model, torch.compile(model, backend=backend)):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = run(x)
        made = torch.autograd.grad(out.to(x.dtype).square().sum(), leaves)
        found.append([out.detach(), *made])
    # bf16 keeps 8 bits; sums of what it rounded differ in the order of the products
    close = {"rtol": 2**-6, "atol": 2**-5} if half else {"rtol": 1e-10, "atol": 1e-10}
    for wanted, one in zip(*found, strict=True):
        torch.testing.assert_close(one, wanted, **close)
    assert (backend.before, backend.after) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert classifier", "llama"])
def test_the_backend_compiles_layers_with_some_rows_frozen(name: str) -> None:
    """Real compiling; dropout on, whose masks must be the eager ones."""
    model: Any = build(name).train()
    fl.freeze(model, "query", "key")
    stack, ids = take_apart(model), torch.randint(5, 60, (2, 9))
    assert stack is not None

    def run() -> Tensor:
        torch.manual_seed(3)
        return stack.read(stack.run(stack.embed(ids, None, None), None), ids, None)

    wanted = gradients(model, run)
    for layer in stack.layers:
        layer.compile(backend=joining_backend)
    for made, expected in zip(gradients(model, run), wanted, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "freeze", "joined"),
    [("gpt classifier", "key", 0), ("gpt classifier", "query", 0), ("bert classifier", "key", 2)],
)
def test_the_backend_compiles_layers_that_read_a_kept_weight(
    name: str, freeze: str, joined: int
) -> None:
    """The bf16 gradients of eager layers, from one compilation; no joined weight is copied."""
    model: Any = build(name).eval()
    fl.freeze(model, freeze)
    copies, ids, compiled = Bf16Copies(model), torch.randint(5, 60, (2, 9)), []

    def backend(module: GraphModule, inputs: Any) -> Any:
        compiled.append(module)
        return joining_backend(module, inputs)

    def gradients_of_copies() -> list[Tensor]:
        copies.clear()
        model.zero_grad()
        with copies.in_place(), torch.autocast("cpu", torch.bfloat16):
            out = model(ids)
            getattr(out, "logits", out).square().sum().backward()
        found = [copies.gradient(p) for p in model.parameters() if p.requires_grad]
        return [gradient.float() for gradient in found if gradient is not None]

    wanted, stack = gradients_of_copies(), take_apart(model)
    assert stack is not None
    for layer in stack.layers:
        layer.compile(backend=backend)
    found = gradients_of_copies()
    assert len(compiled) == 1
    assert len(found) == len(wanted) == sum(p.requires_grad for p in model.parameters())
    for made, expected in zip(found, wanted, strict=True):
        assert float((made - expected).norm() / expected.norm()) < 2e-2
    with torch.profiler.profile(acc_events=True) as profile:
        gradients_of_copies()
    names = [event.name for event in profile.events()]
    assert names.count("frostlab::joined_linear") == joined
    assert not joined or "aten::cat" not in names


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
    model, backend = Two(between, bias).double(), Joining()
    x = torch.randn(6, 4, dtype=torch.float64)
    wanted = model(x.clone())
    found = torch.compile(model, backend=backend)(x.clone())
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert backend.after == after


@torch.library.custom_op("frostlab_tests::scale", mutates_args=("x",))
def scale(x: Tensor) -> None:
    x.mul_(2)


VIEWS = {
    "narrow": lambda x: x.narrow(0, 0, 1),
    "select": lambda x: x.select(0, 1),
    "mT": lambda x: x.mT,
    "detach": lambda x: x.detach(),
    "index": lambda x: x[1:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_map_whose_view_is_written_to_stays(view: str) -> None:
    def work(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        first, second = F.linear(x, one), F.linear(x, other)
        VIEWS[view](first).mul_(2)
        return first + second

    torch.manual_seed(0)
    given = [torch.randn(*size, requires_grad=True) for size in ((6, 4), (3, 4), (3, 4))]
    backend = Joining()
    found = torch.compile(work, backend=backend)(*given)
    torch.testing.assert_close(found, work(*given))
    assert backend.after == 2


@pytest.mark.parametrize(
    ("operator", "writes"),
    [
        (torch.ops.aten.mul_.Tensor, True),
        (torch.ops.aten.copy_.default, True),
        (torch.ops.aten._foreach_add_.Scalar, True),
        (torch.ops.aten.add.out, True),
        (torch.ops.aten.mul.Tensor, False),
        (torch.ops.frostlab.joined_linear.default, False),
        (torch.ops.frostlab.joined_linear, False),
        (torch.ops.frostlab_tests.scale, True),
        (torch.ops.frostlab_tests.scale.default, True),
    ],
    ids=str,
)
def test_operators_that_write_in_place_are_known(operator: Any, writes: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert writes_in_place(graph.call_function(operator, (x, x))) == writes


def test_a_function_that_passes_on_its_output_writes() -> None:
    def add(x: Tensor, y: Tensor, **how: Any) -> Tensor:
        return torch.add(x, y, **how)

    graph = Graph()
    x = graph.placeholder("x")
    assert writes_in_place(graph.call_function(add, (x, x), {"out": x}))
    assert not writes_in_place(graph.call_function(add, (x, x), {"alpha": 2}))


def test_inplace_operators_count_as_writing() -> None:
    def work(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        x = x * 2
        first = F.linear(x, one)
        x += 1
        return first + F.linear(x, other)

    given = [torch.randn(*size, dtype=torch.float64) for size in ((6, 4), (3, 4), (3, 4))]
    backend = Joining()
    found = torch.compile(work, backend=backend)(*given)
    torch.testing.assert_close(found, work(*given), rtol=1e-10, atol=1e-10)
    assert backend.after == 2


def test_weights_are_joined_in_their_order_in_memory() -> None:
    """Some attentions call the map of the queries first, but have that of the keys first."""
    memory = torch.randn(9, 4, dtype=torch.float64)
    parts = [nn.Parameter(part) for part in memory.split([2, 3, 4])]

    def work(x: Tensor, *parts: Tensor) -> Tensor:
        x = x * 2
        return sum(F.linear(x, parts[i]).sum(-1) * i for i in (2, 0, 1))  # type: ignore[return-value]

    orders = []

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        join_linears(module.graph)
        module.recompile()
        (product,) = (node for node in module.graph.nodes if node.target is joined_linear)
        orders.append([weight.meta["example_value"].shape[0] for weight in product.args[1]])
        return module.forward

    x = torch.randn(6, 4, dtype=torch.float64)
    found = torch.compile(work, backend=backend)(x, *parts)
    torch.testing.assert_close(found, work(x, *parts), rtol=1e-10, atol=1e-10)
    assert orders == [[2, 3, 4]]
