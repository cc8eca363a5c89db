"""Runs on CUDA: precision, clocks, telemetry, divergence without stalls, resuming, DDP."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import frostlab as fl
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.schema import StepEvent
from frostlab.timing.clock import Stopwatch
from frostlab.training.distributed import Compute, World
from frostlab.training.progress import Bar, Display, Nowhere
from frostlab.training.step import build_step
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.eager import Diverged, EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step_log import Entry, StepLog
from packed import build
from stepping import epochs
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(record: fl.RunRecord) -> list[float]:
    return [x for e in record.events(StepEvent) for x in e.loss]


def test_a_run_uses_the_gpu_in_bf16_and_says_so(tmp_path: Path) -> None:
    record = fl.run(tiny(treatment="oelm", train__epochs=30), runs=tmp_path)
    start = record.start
    assert start.device == "cuda:0"
    assert start.precision == "bfloat16"
    result = record.result
    assert result.device_memory_peak > 0
    assert len(losses(record)) == 240
    assert result.clocks.step_ms.count == 235
    assert 0.1 < result.clocks.step_ms.median < 1000
    gpu = record.environment["gpu"]
    assert gpu is None or torch.cuda.get_device_name(0) in str(gpu)
    print("environment", record.environment["gpu"], record.environment["gpu_reason"])
    print("before", result.gpu_before, "after", result.gpu_after)
    print("telemetry", result.telemetry)


def test_the_shown_loss_is_fresh_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_waiting: Any
) -> None:
    """Its step is at most a second old, although losses are recorded a hundred steps late."""
    shown: list[tuple[float, int, float]] = []

    class Recorded(Nowhere):
        every = 0.1

        def draw(self, bar: Bar) -> None:
            if bar.loss is not None:
                shown.append((time.monotonic(), bar.step, bar.loss))

    latest_loss = StepLog.latest_loss

    def asked(log: StepLog) -> float | None:
        with no_waiting():
            return latest_loss(log)

    monkeypatch.setattr(StepLog, "latest_loss", asked)
    record = fl.run(tiny(train__epochs=300), runs=tmp_path, progress=Display(Recorded()))
    steps = {loss: step for step, loss in enumerate(losses(record), 1)}  # rounded to 7 digits
    assert len(shown) >= 5
    pace = (shown[-1][0] - shown[0][0]) / (shown[-1][1] - shown[0][1])  # seconds per step
    for _, step, loss in shown:
        assert 0 <= (step - steps[float(f"{loss:.7g}")]) * pace < 1.0


def test_the_peak_of_memory_is_the_runs_own(tmp_path: Path) -> None:
    """Not that of what the process did before, nor of what it still holds."""
    first = fl.run(tiny(), runs=tmp_path).result.device_memory_peak
    held, gone = (torch.zeros(2**28, device="cuda") for _ in range(2))  # a GiB each
    del gone
    again = fl.run(tiny(), runs=tmp_path).result.device_memory_peak
    assert held.numel() == 2**28
    assert 0 < again < 2**28
    assert again == pytest.approx(first, abs=2**22)  # the allocator's blocks differ by MiBs


@pytest.mark.parametrize("kind", ["eager", "captured"])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_warming_up_changes_nothing(kind: StepKind, precision: torch.dtype) -> None:
    """Not the weights, the moments, the generator, nor the steps that follow."""
    model = build("bert classifier").cuda().train()
    step = build_step(Objective(model), Optim(), Train(step=kind),
                      Compute(torch.device("cuda", 0), precision), steps=10)  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.cuda.get_rng_state()
    (parts,) = epochs("bert classifier", 1, packed=True)
    step.warm_up(parts, parts[0].scored)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for state in step.optimizer.state.values():
        assert not any(bool(value.any()) for value in state.values())
    assert all(p.grad is None for p in model.parameters())
    step(parts, parts[0].scored, 1e-3)
    assert {float(state["step"]) for state in step.optimizer.state.values()} == {1.0}
    assert not torch.equal(model.state_dict()["classifier.weight"], before["classifier.weight"])


def test_training_takes_at_least_its_steps(tmp_path: Path) -> None:
    """Batches are made while the GPU works: their time is not taken off."""
    result = fl.run(tiny(train__epochs=30, train__checkpoint=1000), runs=tmp_path).result
    clocks = result.clocks
    assert clocks.data_overlapped_seconds > 0
    steps = clocks.step_ms.count * clocks.step_ms.mean + sum(clocks.warmup_ms)
    assert clocks.train_seconds >= 1e-3 * steps
    assert sum(clocks.epoch_seconds) >= 1e-3 * steps
    parts = ("train", "validation", "checkpoint", "data")
    total = (
        sum(getattr(clocks, f"{part}_seconds") for part in parts) - clocks.data_overlapped_seconds
    )
    assert total == pytest.approx(clocks.total_seconds, abs=1e-3)


def test_float32_on_cuda_follows_the_cpu(tmp_path: Path) -> None:
    recipe = tiny(model__dropout=0.0, train__precision="float32")
    one = fl.run({**recipe, "train": {**recipe["train"], "device": "cpu"}}, runs=tmp_path)
    two = fl.run({**recipe, "train": {**recipe["train"], "device": "cuda"}}, runs=tmp_path)
    assert losses(two) == pytest.approx(losses(one), rel=2e-3)
    assert one.digests == two.digests


def test_the_same_run_twice(tmp_path: Path) -> None:
    one, two = (fl.run(tiny(train__epochs=4), runs=tmp_path) for _ in range(2))
    assert losses(one) == pytest.approx(losses(two), rel=1e-3)


def test_a_broken_gradient_moves_nothing_though_nobody_waits() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = EagerStep(model, optimizer, Compute(torch.device("cuda", 0), torch.float32), 1.0)

    def backward(parts: Any, scored: int) -> torch.Tensor:
        loss = model(torch.ones(2, 4, device="cuda")).square().mean()
        loss.backward()
        return loss.detach()

    step.gradients = backward  # type: ignore[method-assign]
    watch = Stopwatch(torch.device("cuda", 0))
    ledger = StepLog(step, watch, World(), None)

    def take(number: int) -> None:
        began = watch.mark()
        outcome = step([], 1, 0.1)
        ledger.add(Entry(number, outcome, 0.1, 1, 1, 1, (began, watch.mark()), ""))

    take(1)
    before = [p.clone() for p in model.parameters()]
    model[1].weight.register_hook(lambda gradient: gradient * float("inf"))
    for number in range(2, 6):
        take(number)  # nothing is read yet
    with pytest.raises(Diverged, match="step 2: the gradient of 1.weight is not finite"):
        ledger.flush()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_diverging_run_keeps_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sixth step, a replayed one, the loss is divided by nothing."""
    called, taken = CapturedStep.__call__, []

    def divide(self: CapturedStep, parts: Any, scored: int, rate: float) -> Any:
        taken.append(len(self._graphs))
        return called(self, parts, 0 if len(taken) == 6 else scored, rate)

    monkeypatch.setattr(CapturedStep, "__call__", divide)
    recipe = tiny(evaluate={"every": 1}, train={"batch": 32, "epochs": 40, "batching": "padded"})
    with pytest.raises(fl.RunFailed, match=r"step 6: the gradient of .* is not finite"):
        fl.run(recipe, runs=tmp_path)
    assert taken[5] > 0, "it was a replay"
    kept = checkpoints_in(tmp_path / "run-none-s0")
    assert kept[-1].step == 5
    assert all(bool(t.isfinite().all()) for t in kept[-1].model().values())


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="is about one GPU")
@pytest.mark.parametrize(
    ("way", "step", "becomes"),
    [("ddp", "auto", "eager"), ("ddp", "compiled", "compiled"), ("fsdp", "auto", "")],
)
def test_two_processes_on_one_gpu(
    way: str, step: str, becomes: str, tmp_path: Path, free_port: int
) -> None:
    recipe = tiny(model__dropout=0.0, treatment="oelm", train__precision="float32")
    alone = fl.run(recipe, runs=tmp_path / "alone")
    recipe["train"] |= {"parallel": way, "step": step}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
            "--master_addr=127.0.0.1", f"--master_port={free_port}",
            "-m", "frostlab", "run", str(path), "--out", str(tmp_path / "run"),
        ],
        capture_output=True, text=True, timeout=240, env=dict(os.environ),
    )  # fmt: skip
    if way == "fsdp":
        problem = "needs a GPU for each of 2 processes, but this machine has 1"
        assert f"{problem}; set train.parallel: ddp" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    record = fl.RunRecord(tmp_path / "run")
    assert [event.how for event in record.result.stepping] == [becomes]
    assert losses(record) == pytest.approx(losses(alone), rel=2e-3)
