"""Time a split projection (Q and K frozen) against the fused one that it replaces.

Forward and backward at BERT-base size: width 768, 32 × 128 tokens. The weight-gradient matmul is
one third of the work and two thirds of it disappear, so the ceiling is 7/9 = 0.778 of the fused
time.

    python benchmarks/projection.py
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common import device, interleaved, repeated, report
from frostlab.roles.parts import Rows
from frostlab.surgery.split import FrozenRows, SplitProjection

WIDTH, TOKENS, HEADS = 768, (32, 128), 12
CEILING = 7 / 9


def frozen_rows(interleaved_layout: bool) -> Rows:
    if not interleaved_layout:
        return Rows(3 * WIDTH, 1, ((0, 2 * WIDTH),))
    size = WIDTH // HEADS
    return Rows(3 * size, HEADS, ((0, 2 * size),))


def work(module: nn.Module, x: Tensor, grad: Tensor, autocast: bool) -> Callable[[], None]:
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]

    def once() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y = module(x)
        torch.autograd.grad(y, inputs, grad)

    return once


def captured(once: Callable[[], None]) -> Callable[[], None]:
    """Capture the same work in a CUDA graph, so that launches cost nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


def compare(layout: str, dtype: torch.dtype, autocast: bool, graph: bool) -> None:
    where = device()
    cuda = where.type == "cuda"
    torch.manual_seed(0)
    fused: nn.Module = (
        Conv1D(3 * WIDTH, WIDTH) if layout == "conv1d" else nn.Linear(WIDTH, 3 * WIDTH)
    )
    fused = fused.to(where, dtype)
    axis = int(layout == "conv1d")
    rows = frozen_rows(layout == "interleaved")
    split = SplitProjection(copy.deepcopy(fused), FrozenRows(axis, rows, rows))
    x = torch.randn(*TOKENS, WIDTH, device=where, dtype=dtype, requires_grad=True)
    grad = torch.randn(*TOKENS, 3 * WIDTH, device=where, dtype=dtype)
    if autocast:
        grad = grad.bfloat16()
    sides = [work(module, x, grad, autocast) for module in (split, fused)]
    if graph:
        sides = [captured(side) for side in sides]
    sides = [repeated(side, 200 if cuda else 3) for side in sides]
    result = interleaved(sides[0], sides[1], 15, where)
    times = 200 if cuda else 3
    for key in ("ours_ms", "theirs_ms"):
        result[key] = round(result[key] / times, 4)
    name = "autocast bf16" if autocast else str(dtype).removeprefix("torch.")
    report(
        "projection",
        {"layout": layout, "precision": name, "graph": graph, "ceiling": round(CEILING, 3)}
        | result,
    )


def main() -> None:
    cuda = device().type == "cuda"
    for layout in ("concatenated", "interleaved", "conv1d"):
        if not cuda:
            compare(layout, torch.float32, autocast=False, graph=False)
            continue
        for graph in (True, False):
            for dtype, autocast in (
                (torch.bfloat16, False),
                (torch.float32, False),
                (torch.float32, True),
            ):
                compare(layout, dtype, autocast, graph)


if __name__ == "__main__":
    main()
