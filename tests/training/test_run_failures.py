"""What can go wrong on the way: one line, a status in the record, nothing finished lost."""

import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import frostlab as fl
from forked import attempt, limited, outcome, run_command, wait_for
from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.schema import EndEvent, FlowEvent, StepEvent
from frostlab.timing.clock import Stopwatch
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute, World
from frostlab.training.step.eager import Diverged, EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step_log import Entry, StepLog
from tiny import tiny

COMPUTE = Compute(torch.device("cpu"), torch.float32)


def test_a_diverged_run_names_step_and_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the fifth step one weight's gradient overflows."""
    summed, taken = EagerStep.gradients, []

    def overflow(self: EagerStep, *args: Any) -> torch.Tensor:
        loss = summed(self, *args)
        taken.append(loss)
        if len(taken) == 5:
            dict(self.objective.named_parameters())["model.blocks.1.up.weight"].grad[0, 0] = float(
                "inf"
            )
        return loss

    monkeypatch.setattr(EagerStep, "gradients", overflow)
    recipe = tiny(evaluate={"every": 1})
    said = r"step 5: the gradient of blocks.1.up.weight is not finite"
    with pytest.raises(fl.RunFailed, match=said):
        fl.run(recipe, runs=tmp_path)
    record = fl.RunRecord(tmp_path / "run-none-s0")
    assert record.status == "diverged"
    assert record.result.error.startswith("step 5: ")
    assert record.events(EndEvent)[-1].status == "diverged"
    assert isinstance(record.events()[-1], EndEvent)
    kept = checkpoints_in(record.folder)
    assert kept[-1].step == 4, "the last good checkpoint is kept"
    assert all(bool(t.isfinite().all()) for t in kept[-1].model().values())
    with pytest.raises(fl.BadInput, match="is diverged"):
        fl.run(recipe, runs=tmp_path, resume=True)


def test_a_broken_gradient_is_found_at_its_step_and_moves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = EagerStep(model, optimizer, COMPUTE, 1.0)
    step.gradients = lambda parts, scored: _backward(model)  # type: ignore[method-assign]
    ledger = StepLog(step, Stopwatch(torch.device("cpu")), World(), None)

    def take(number: int) -> None:
        ledger.add(Entry(number, step([], 1, 0.1), 0.1, 1, 1, 1, (0.0, 0.001), ""))

    take(1)
    before = [p.clone() for p in model.parameters()]
    model[1].weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(Diverged, match="step 2: the gradient of 1.weight is not finite"):
        take(2)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def _backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss.detach()


def test_clipping_equals_torch() -> None:
    def gradients(clip: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = EagerStep(Objective(model), optimizer, COMPUTE, 0.5 if clip == "ours" else None)
        batch = Batch({"input": torch.randn(4, 5) * 9}, torch.tensor([0, 1, 2, 0]), 4, 4, 4)
        step.gradients([batch], 4)
        if clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            _, share, broken = step._measure()
            step._update(share, broken)
        return [p.grad for p in model.parameters()]

    for mine, theirs in zip(gradients("ours"), gradients("torch"), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(gradients("ours")[0], gradients(None)[0])


@pytest.mark.parametrize(
    "signals", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_stops_with_a_checkpoint_and_goes_on(
    signals: signal.Signals, tmp_path: Path
) -> None:
    recipe = tiny(train={"batch": 8, "epochs": 8, "threads": 1}, evaluate={"every": 200})
    whole, folder = tmp_path / "whole", tmp_path / "run"
    process = run_command(tmp_path, recipe, "--out", str(folder))
    wait_for(folder / "events.jsonl", '"kind": "step"')
    process.signal(signals)
    done = process.wait()
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "frostlab: stopped; `--resume` continues the run"
    assert "Traceback" not in done.stderr
    record = fl.RunRecord(folder)
    assert record.status == "stopped"
    assert checkpoints_in(folder)[-1].step == record.result.steps
    again = run_command(tmp_path, recipe, "--out", str(folder), "--resume").wait()
    assert again.returncode == 0
    assert (folder / "result-1.json").exists(), "the first attempt's result is kept"
    assert attempt(recipe, whole) == 0
    assert outcome(folder) == outcome(whole)


def test_a_file_that_cannot_grow_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    recipe = tiny(train__epochs=4)
    folder = tmp_path / "run"
    said = limited(resource.RLIMIT_FSIZE, 30_000, recipe, folder)
    assert "\n" not in said
    assert said.endswith(".safetensors: File too large")
    assert fl.RunRecord(folder).status == "failed"
    assert not list(folder.rglob("*.tmp"))
    assert attempt(recipe, folder) == 0
    assert attempt(recipe, tmp_path / "whole") == 0
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_out_of_memory_is_one_line(tmp_path: Path) -> None:
    recipe = tiny(model__width=1024, model__layers=2, train__steps=3, train__epochs=None)
    said = limited(resource.RLIMIT_AS, 300_000_000, recipe, tmp_path / "run")
    assert said.startswith("out of memory; lower train.batch 32 or data.length 12")
    assert fl.RunRecord(tmp_path / "run").status == "failed"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "failed"),
        (ZeroDivisionError("a bug"), "failed"),
        (KeyboardInterrupt(), "stopped"),  # the second Ctrl-C
    ],
    ids=["memory", "bug", "interrupted"],
)
def test_the_steps_before_a_failure_are_written(
    error: BaseException, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, taken = EagerStep.gradients, []

    def fail(self: EagerStep, *args: Any) -> torch.Tensor:
        taken.append(1)
        if len(taken) == 7:
            raise error
        return summed(self, *args)

    monkeypatch.setattr(EagerStep, "gradients", fail)
    with pytest.raises((fl.RunFailed, ZeroDivisionError)):
        fl.run(tiny(watch={"every_n_steps": 2}), out=tmp_path / "run")
    record = fl.RunRecord(tmp_path / "run")
    assert (record.status, record.result.steps) == (status, 6)
    (block,) = record.events(StepEvent)
    assert (block.first, block.step) == (1, 6)
    assert len(block.loss) == len(block.ms) == 6
    assert record.result.clocks.tokens == block.tokens > 0
    assert [e.step for e in record.events(FlowEvent)] == [1, 3, 5]


def test_a_device_that_cannot_be_read_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: StepLog, count: int) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(StepLog, "_write", lost)
    monkeypatch.setattr(EagerStep, "name_of", lambda self, index: "")

    def fail(self: EagerStep, *args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(EagerStep, "gradients", fail)
    with pytest.raises(fl.RunFailed, match="^out of memory; "):
        fl.run(tiny(), out=tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
                          capture_output=True)  # fmt: skip
    if done.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line(small_disk: Path, tmp_path: Path) -> None:
    recipe = tiny(train__epochs=4)
    (small_disk / "ballast").write_bytes(bytes(900_000))
    done = run_command(tmp_path, recipe, "--out", str(small_disk / "run")).wait()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the disk is full" in done.stderr.strip().splitlines()[-1]
    (small_disk / "ballast").unlink()
    assert attempt(recipe, small_disk / "run") == 0
    assert attempt(recipe, tmp_path / "whole") == 0
    assert outcome(small_disk / "run") == outcome(tmp_path / "whole")


def test_what_nobody_expected_keeps_its_traceback_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frostlab.training import loop

    def bug(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(loop, "rate_at", bug)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fl.run(tiny(), runs=tmp_path)
    record = fl.RunRecord(tmp_path / "run-none-s0")
    assert (record.status, record.result.error) == ("failed", "a bug")
