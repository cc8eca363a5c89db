"""Checkpoints that a thread writes while training goes on."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.records.checkpoint import Checkpoint, checkpoints_in
from frostlab.records.schema import StepEvent
from frostlab.storage import BackgroundWriter, plain_tensors
from frostlab.training import loop
from frostlab.training import run as running
from frostlab.training.restore import best_model
from frostlab.training.state import Best
from frostlab.training.step.eager import EagerStep
from frostlab.training.treatment import state_digest
from tiny import tiny

RECIPE = tiny(train={"batch": 32, "epochs": 2, "threads": 1, "checkpoint": 3})
Tensors = dict[str, torch.Tensor]


class Steps:
    """The number of steps taken, which another thread can wait for."""

    def __init__(self) -> None:
        self.count, self._changed = 0, threading.Condition()

    def take(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            going_on = self._changed.wait_for(lambda: self.count >= count, timeout=60)
        assert going_on, "training waits for the checkpoint"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counted, step = Steps(), EagerStep.__call__

    def count(*given: Any) -> Any:
        outcome = step(*given)
        counted.take()
        return outcome

    monkeypatch.setattr(EagerStep, "__call__", count)
    return counted


def saved(monkeypatch: pytest.MonkeyPatch, wait: Any, folder: Path) -> dict[int, list[Tensors]]:
    """Run; return the tensors of every checkpoint, each written after `wait` returns."""
    found: dict[int, list[Tensors]] = {}
    save = loop.save_checkpoint

    def slow(path: Path, step: int, *given: Any) -> Checkpoint:
        wait(step)
        checkpoint = save(path, step, *given)
        found[step] = [checkpoint.model(), checkpoint.optimizer()]
        return checkpoint

    with monkeypatch.context() as patches:
        patches.setattr(loop, "save_checkpoint", slow)
        fl.run(RECIPE, runs=folder)
    return found


def test_training_goes_on_and_does_not_change_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    """Every checkpoint but the last is written after one more step, which moves the weights."""
    plain = saved(monkeypatch, lambda step: None, tmp_path / "plain")
    steps.count = 0
    slow = saved(monkeypatch, lambda step: steps.wait_for(min(step + 1, 16)), tmp_path / "slow")
    assert list(plain) == list(slow) == [3, 6, 8, 9, 12, 15, 16]
    for step, halves in plain.items():
        for one, other in zip(halves, slow[step], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), step
    moved = plain[3][0]["blocks.0.up.weight"], plain[6][0]["blocks.0.up.weight"]
    assert not torch.equal(*moved)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = loop.save_checkpoint

    def full(path: Path, step: int, *given: Any) -> Checkpoint:
        if step == 6:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save(path, step, *given)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(fl.RunFailed, match="No space left on device .the disk is full"):
        fl.run(RECIPE, runs=tmp_path)
    record = fl.RunRecord(tmp_path / "run-none-s0")
    assert record.status == "failed"
    assert [checkpoint.step for checkpoint in checkpoints_in(record.folder)] == [3]
    assert 6 <= record.events(StepEvent)[-1].step < 9, "the next checkpoint was not waited for"
    monkeypatch.setattr(loop, "save_checkpoint", save)
    assert fl.run(RECIPE, runs=tmp_path, resume=True).status == "finished"


def test_one_thing_is_written_at_a_time_and_an_error_is_raised_once() -> None:
    writer, written, gate = BackgroundWriter(), [], threading.Event()
    writer.start(lambda: (gate.wait(60), written.append(1)))
    assert not written
    threading.Timer(0.05, gate.set).start()
    writer.start(lambda: written.append(2))
    assert written[0] == 1
    writer.wait()
    assert written == [1, 2]

    def fail() -> None:
        raise ValueError("no")

    writer.start(fail)
    with pytest.raises(ValueError, match="no"):
        writer.wait()
    writer.check()
    writer.wait()


def test_a_copy_keeps_its_values_and_shared_tensors_once() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "tied": weight, "turned": weight.t(), "empty": torch.zeros(0)}
    copies = plain_tensors(tensors, copy=True)
    assert list(copies) == ["a", "empty"], "memory that is shared is stored once"
    weight.zero_()
    assert copies["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert plain_tensors(tensors)["a"].data_ptr() == weight.data_ptr()


def test_the_report_does_not_wait_for_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step has the best weights, which the model still holds; the run's end waits."""
    measured = threading.Event()
    measure, save = running.measure, loop.save_checkpoint

    def report(*given: Any) -> Any:
        metrics = measure(*given)
        measured.set()
        return metrics

    def slow(path: Path, step: int, *given: Any) -> Checkpoint:
        if step == 16:
            assert measured.wait(60), "the report waits for the checkpoint"
        return save(path, step, *given)

    monkeypatch.setattr(running, "measure", report)
    monkeypatch.setattr(loop, "save_checkpoint", slow)
    record = fl.run(RECIPE, {"evaluate.metric": "loss", "optim.lr": 1e-3}, runs=tmp_path)
    assert record.result.best.step == 16, "this test needs a loss that falls to the end"
    assert [c.step for c in checkpoints_in(record.folder)][-1] == 16
    assert state_digest(best_model(record)) == record.result.weights_digest


def test_the_report_loads_weights_that_are_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    load = running.load_weights

    def watched(model: Any, checkpoint: Checkpoint) -> None:
        loaded.append(checkpoint.step)
        load(model, checkpoint)

    monkeypatch.setattr(running, "load_weights", watched)
    see = Best.see  # the last evaluation, at step 16, counts as no improvement
    monkeypatch.setattr(Best, "see", lambda self, value, step: step == 8 and see(self, value, step))
    record = fl.run(RECIPE, runs=tmp_path)
    assert loaded == [record.result.best.step] == [8]


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_last_checkpoint_that_fails_during_the_report(
    ends_well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has failed, and its record reports nothing about weights that are not saved."""
    save = loop.save_checkpoint

    def full(path: Path, step: int, *given: Any) -> Checkpoint:
        if step == 16 and not ends_well:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(path, step, *given)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    settings = {"evaluate.metric": "loss", "optim.lr": 1e-3}
    if ends_well:
        result = fl.run(RECIPE, settings, runs=tmp_path, name="r").result
        assert (result.status, result.report is None) == ("finished", False)
        return
    with pytest.raises(running.RunFailed, match="the disk is full"):
        fl.run(RECIPE, settings, runs=tmp_path, name="r")
    (folder,) = tmp_path.glob("r-*")
    result = fl.load_run(folder).result
    assert (result.status, result.report, result.weights_digest) == ("failed", None, None)
    assert 16 not in [checkpoint.step for checkpoint in checkpoints_in(folder)]
