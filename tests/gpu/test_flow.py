"""Measuring on a GPU: the numbers of the CPU, in a CUDA graph too, and nothing waits."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import frostlab as fl
from flowing import adamw, batch, tiny_gpt
from frostlab.flow.measurements import flows_of, load_flow
from frostlab.flow.probe import Probe, own_gradient
from frostlab.flow.tensors import read_layout
from frostlab.recipe.settings import Optim, Train
from frostlab.records.schema import StepEvent
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.objective import Objective
from packed import build
from stages import progressive
from stepping import epochs
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


NoWaiting = Callable[[], AbstractContextManager[None]]


def flow_on(device: str, allowed: NoWaiting) -> fl.Flow:
    model = tiny_gpt().to(device)
    optimizer = adamw(model, foreach=True)
    batches = [tuple(t.to(device) for t in batch(step)) for step in range(4)]
    with (
        fl.watch(model, optimizer, every_n_steps=1, distance=True, gradient_cosine=True) as flow,
        allowed(),
    ):
        for ids, classes in batches:
            torch.nn.functional.cross_entropy(model(ids), classes).backward()
            flow.before_clip()
            optimizer.step()
            optimizer.zero_grad()
    return flow


def test_a_gpu_gives_the_numbers_of_the_cpu_without_waiting(no_waiting: NoWaiting) -> None:
    found, expected = flow_on("cuda", no_waiting), flow_on("cpu", nullcontext)
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in ("gradient", "before_clip", "weight", "update"):
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=2e-2, abs=1e-5
            ), quantity


@pytest.mark.parametrize("asked", [{}, {"distance": True, "gradient_cosine": True}])
def test_a_captured_measurement_is_the_eager_one(asked: dict[str, Any]) -> None:
    model = tiny_gpt().cuda()
    optimizer = adamw(model, capturable=True)
    ids, classes = (t.cuda() for t in batch(0))
    probe = Probe(read_layout(model, [optimizer]), [optimizer], **asked)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(ids), classes).backward()
        probe.before_step(torch.ones((), device="cuda"))
        optimizer.step()
        probe.after_step()
        optimizer.zero_grad()

    start = [p.detach().clone() for p in model.parameters()]
    torch.cuda.synchronize()  # side streams do not wait for this one
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    torch.nn.functional.cross_entropy(model(ids), classes).backward()
    size = sum(float(p.grad.double().square().sum()) for p in model.parameters())  # type: ignore[union-attr]
    optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    held = sum(float(w.double().square().sum()) for w in weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    graph.replay()
    torch.cuda.synchronize()

    def distance(others: list[Tensor]) -> float:
        pairs = zip(model.parameters(), others, strict=True)
        return sum(float((p.detach() - other).double().square().sum()) for p, other in pairs)

    found = {name: float(view.sum()) for name, view in probe.views.items()}
    assert distance(weights) > 0
    assert found["update"] == pytest.approx(distance(weights), rel=1e-3)
    assert found["weight"] == pytest.approx(held, rel=1e-4)
    assert found["gradient"] == pytest.approx(size, rel=1e-2)
    if asked:
        assert found["moved"] == pytest.approx(distance(start), rel=1e-3)
        assert found["energy"] == pytest.approx(size, rel=1e-2)
        before = found["energy"]
        graph.replay()
        assert float(probe.views["former"].sum()) == pytest.approx(before, rel=1e-6)


def watched_run(folder: Path, **changes: Any) -> fl.RunRecord:
    settings = {"model__dropout": 0.0, "optim__lr": 1e-4, "optim__clip": 0.3, **changes}
    watch = settings.pop("watch", {"every_n_steps": 5, "distance": True, "gradient_cosine": True})
    return fl.run(tiny(watch=watch, train__epochs=4, **settings), out=folder)


def close(found: fl.Flow, wanted: fl.Flow, rel: float, shared: float) -> None:
    """`shared`: of a report's largest number, below which rounding decides."""
    assert found.parts == wanted.parts
    assert [r.step for r in found.reports] == [r.step for r in wanted.reports]
    for mine, theirs in zip(found.reports, wanted.reports, strict=True):
        for name in ("gradient", "before_clip", "weight", "update", "distance"):
            least = shared * max(theirs.values[name])
            assert mine.values[name] == pytest.approx(
                theirs.values[name], rel=rel, abs=least, nan_ok=True
            ), (mine.step, name)
        assert mine.rates == pytest.approx(theirs.rates)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_a_captured_run_is_measured_as_an_eager_one(
    precision: str, batching: str, tmp_path: Path
) -> None:
    """In bf16 gradients lie in the copies, and the optimizer's kernel clips."""
    flows = {}
    for kind in ("eager", "captured"):
        record = watched_run(
            tmp_path / kind, train__step=kind, train__precision=precision, train__batching=batching
        )
        assert record.result.stepping[-1].how == kind, record.result.stepping
        flows[kind] = load_flow(record.folder)
        norms = [x for e in record.events(StepEvent) for x in e.norm]
        for step, norm in flows[kind].norms("before_clip").items():
            assert norm == pytest.approx(norms[step - 1], rel=1e-3)
        for step, norm in flows[kind].norms().items():
            assert norm == pytest.approx(min(0.3, norms[step - 1]), rel=1e-3)
    close(flows["captured"], flows["eager"], *(
        (1e-2, 1e-3) if precision == "float32" else (0.1, 2e-2)
    ))  # fmt: skip
    assert [r.step for r in flows["captured"].reports] == [1, 6, 11, 16, 21, 26, 31]
    agreed = [r.of("gradient_cosine", 0) for r in flows["captured"].reports]
    assert math.isnan(agreed[0])
    assert not any(map(math.isnan, agreed[1:]))


@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_watching_leaves_a_run_as_it_is(kind: str, tmp_path: Path) -> None:
    """As near as two runs that nobody watched are to each other."""
    records = [
        watched_run(tmp_path / str(i), train__step=kind, train__precision="float32", watch=asked)
        for i, asked in enumerate((None, None, {"every_n_steps": 3}))
    ]
    losses = [[x for e in r.events(StepEvent) for x in e.loss] for r in records]
    noise = max(abs(a - b) for a, b in zip(*losses[:2], strict=True))
    off = max(abs(a - b) for a, b in zip(losses[0], losses[2], strict=True))
    assert off <= max(2 * noise, 1e-5)
    digests = [r.result.weights_digest for r in records]
    if digests[0] == digests[1]:
        assert digests[2] == digests[0]


def test_every_stage_of_a_captured_run_is_measured(tmp_path: Path) -> None:
    captured = {**progressive()["train"], "step": "captured"}
    record = fl.run(progressive(train=captured, watch={"every_n_steps": 2}), out=tmp_path / "run")
    flows = flows_of(record.folder)
    assert {name: [r.step for r in flow.reports] for name, flow in flows.items()} == {
        "1": [1, 3, 5, 7], "grown": [9, 11], "3": [13, 15, 17],
    }  # fmt: skip
    assert not any(flow.frozen_by_accident() for flow in flows.values())


def test_measuring_waits_for_nothing(no_waiting: NoWaiting) -> None:
    """A captured and measured step is sent off; nobody looks at a value of it."""
    model = build("gpt classifier").train()
    step = build_step(Objective(model.cuda()), Optim(), Train(step="captured"),
                      Compute(torch.device("cuda", 0), torch.bfloat16), steps=10)  # fmt: skip
    gradient = own_gradient if step.copies is None else step.copies.gradient
    step.flow = fl.watch(model, step.optimizer, every_n_steps=2, gradient=gradient).start(
        hooks=False
    )
    (parts,) = epochs("gpt classifier", 1, packed=True)
    for _ in range(6):  # seen, captured both ways, replayed
        step(parts, parts[0].scored, 1e-3)
    with no_waiting():
        for _ in range(4):
            step(parts, parts[0].scored, 1e-3)
    assert step.kind == "captured", step.reason
    assert isinstance(step, CapturedStep)
    assert {measured for _, measured in step._graphs} == {False, True}
    step.flow.stop()
    assert [r.step for r in step.flow.reports] == [1, 3, 5, 7, 9]
    assert all(min(r.values["update"]) > 0 for r in step.flow.reports)
