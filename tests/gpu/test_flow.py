"""Measuring on a GPU: the numbers of the CPU, in a CUDA graph too, and nothing waits."""

from typing import Any

import pytest
import torch

import frostlab as fl
from flowing import adamw, batch, tiny_gpt
from frostlab.flow.places import look
from frostlab.flow.probe import Probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def flow_on(device: str, waits: str) -> fl.Flow:
    model = tiny_gpt().to(device)
    optimizer = adamw(model, foreach=True)
    batches = [tuple(t.to(device) for t in batch(step)) for step in range(4)]
    with fl.watch(model, optimizer, every=1, change=True, agreement=True) as flow:
        torch.cuda.set_sync_debug_mode(waits)
        try:
            for ids, classes in batches:
                torch.nn.functional.cross_entropy(model(ids), classes).backward()
                flow.before_clip()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return flow


def test_a_gpu_gives_the_numbers_of_the_cpu_without_waiting() -> None:
    found, expected = flow_on("cuda", "error"), flow_on("cpu", "default")
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in ("gradient", "before_clip", "weight", "update"):
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=2e-2, abs=1e-5
            ), quantity


@pytest.mark.parametrize("asked", [{}, {"change": True, "agreement": True}])
def test_a_captured_measurement_is_the_eager_one(asked: dict[str, Any]) -> None:
    model = tiny_gpt().cuda()
    optimizer = adamw(model, capturable=True)
    ids, classes = (t.cuda() for t in batch(0))
    probe = Probe(look(model, [optimizer]), [optimizer], **asked)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(ids), classes).backward()
        probe.before_step(torch.ones((), device="cuda"))
        optimizer.step()
        probe.after_step()
        optimizer.zero_grad()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    weights = [p.detach().clone() for p in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    graph.replay()
    torch.cuda.synchronize()
    moved = sum(
        float((p.detach() - w).double().square().sum())
        for p, w in zip(model.parameters(), weights, strict=True)
    )
    assert float(probe.views["update"].sum()) == pytest.approx(moved, rel=1e-3)
    assert moved > 0
