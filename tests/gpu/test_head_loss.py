"""The chunked loss on CUDA: the plain values, no wait for the host, one CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.training.step import head_loss as module
from frostlab.training.step.head_loss import (
    TiedGradient,
    expect_gradient,
    head_loss,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CLASSES, WIDTH, TOKENS = 5003, 64, 600
SHARES = [0.5, 2.0]


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_chunk_bytes", lambda device: 4 * CLASSES * 170)


def inputs() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    hidden = [torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True) for _ in SHARES]
    weight = (0.2 * torch.randn(CLASSES, WIDTH, device="cuda")).requires_grad_()
    bias = torch.randn(CLASSES, device="cuda", requires_grad=True)
    targets = torch.randint(CLASSES, (TOKENS,), device="cuda")
    targets[::3] = -100
    return hidden, weight, bias, targets


def plain(hidden: list[Tensor], weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    each = [
        F.cross_entropy(F.linear(x, weight, bias).float(), targets, reduction="sum") for x in hidden
    ]
    return SHARES[0] * each[0] + SHARES[1] * each[1]


def error(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().norm())


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_value_and_gradients_are_the_plain_ones(
    precision: str, in_kernel: bool, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision may err by the 1/256 of a bfloat16, and no more than the plain way does."""
    assert module.has_kernel(torch.device("cuda"), torch.float32)
    if not in_kernel:
        monkeypatch.setattr(module, "has_kernel", lambda device, dtype: False)
    hidden, weight, bias, targets = inputs()
    leaves = [*hidden, weight, bias]
    exact, factor = plain(hidden, weight, bias, targets), torch.tensor(1 / TOKENS, device="cuda")
    true = [exact, *torch.autograd.grad(exact, leaves, factor)]
    if precision == "bfloat16":
        leaves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    found = []
    for ours in (True, False):
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"),
            expect_gradient(factor) if announced else nullcontext(),
        ):
            if ours:
                total, _ = head_loss(leaves[:2], leaves[2], targets, bias=leaves[3], weights=SHARES)
            else:
                total = plain(leaves[:2], leaves[2], leaves[3], targets)
        found.append([total, *torch.autograd.grad(total, leaves, factor.to(total.dtype))])
    limit = 1e-5 if precision == "float32" else 1 / 128
    for made, theirs, truth in zip(*found, true, strict=True):
        assert made.dtype == theirs.dtype
        assert error(made, truth) < limit
        assert error(made, truth) < max(1.2 * error(theirs, truth), 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_waits_for_the_device(
    autocast: bool, no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    hidden, weight, bias, targets = inputs()
    with no_waiting():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total, _ = head_loss(hidden, weight, targets, bias=bias, weights=SHARES)
        (total * 0.37).backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_one_graph_serves_other_targets(autocast: bool) -> None:
    """Captured once, replayed with other tokens scored: the same as without a graph."""
    hidden, weight, bias, targets = inputs()
    leaves = [*hidden, weight, bias]

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total, each = head_loss(hidden, weight, targets, bias=bias, weights=SHARES)
        made = torch.autograd.grad(total * 0.37, leaves)
        return [total.detach(), each.detach(), *made]  # the graph of what is kept would stay

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for every in (2, 5, 1):  # the last scores nothing
        targets.copy_(torch.randint(CLASSES, (TOKENS,)))
        targets[::every] = -100
        graph.replay()
        for made, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert all(not x.any() for x in captured)


def test_what_is_not_scored_may_be_anything() -> None:
    hidden, weight, bias, targets = inputs()
    with torch.no_grad():
        hidden[0][0] = torch.nan
    total, _ = head_loss(hidden, weight, targets, bias=bias)
    for gradient in torch.autograd.grad(total, [*hidden, weight, bias]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
def test_memory_is_that_of_a_few_chunks(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 32 * 2**20
    monkeypatch.setattr(module, "_chunk_bytes", lambda device: bound)
    classes, tokens = 50_000, 4096
    hidden = torch.randn(tokens, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(classes, WIDTH, device="cuda", requires_grad=True)
    targets = torch.randint(classes, (tokens,), device="cuda")

    def once() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total, _ = head_loss(hidden, weight, targets)
        torch.autograd.grad(total, [hidden, weight])

    once()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    used = torch.cuda.max_memory_allocated() - before
    heads = 3 * weight.nbytes  # its gradient, a product to add to it, a copy in half precision
    assert used < 3 * bound + heads + 4 * hidden.nbytes
    assert used < tokens * classes * 4 / 4


@pytest.mark.parametrize("autocast", [False, True])
def test_a_tied_embedding_in_a_graph(autocast: bool) -> None:
    """The gradient of head and embedding together, captured once and replayed with other ids."""
    embedding = nn.Embedding(CLASSES, WIDTH, device="cuda")
    ids, targets = (torch.randint(CLASSES, (TOKENS,), device="cuda") for _ in range(2))
    weight = embedding.weight

    def step(shared: bool) -> Tensor:
        tied = TiedGradient()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            with tied.embedding_of(embedding, weight) if shared else nullcontext():
                x = embedding(ids)
            total, _ = head_loss(x, weight, targets, tied=tied if shared else None)
        return torch.autograd.grad(total / 3, weight)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(True)
    for _ in range(2):
        ids.copy_(torch.randint(CLASSES // 50, (TOKENS,)))
        targets.copy_(torch.randint(CLASSES, (TOKENS,)))
        graph.replay()
        assert error(captured, step(False)) < 1e-5
