"""What the clocks of a run count, and what they leave out."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
from frostlab.timing import clock as stopwatch
from frostlab.timing.clock import Stopwatch
from frostlab.training import loop
from frostlab.training.batches.batch import epoch_order
from frostlab.training.step.eager import EagerStep
from frostlab.training.step_log import clocks
from stages import progressive
from tiny import tiny


def test_clocks_add_up(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    clocks = record.result["clocks"]
    parts = ("train", "validation", "data", "checkpoint")
    total = sum(clocks[f"{part}_seconds"] for part in parts)
    assert total == pytest.approx(clocks["total_seconds"], abs=1e-3)
    assert len(clocks["warmup_ms"]) == 5
    assert clocks["step_ms"]["count"] == 11
    assert len(clocks["epoch_seconds"]) == 2
    assert sum(clocks["epoch_seconds"]) <= clocks["train_seconds"] + 1e-3
    recipe = recipe_from(tiny())
    lengths = prepare(recipe).splits["train"].lengths
    assert clocks["tokens"] == 2 * int(lengths.sum()), "real tokens, padding not counted"
    padded = 0
    for epoch in range(2):
        for rows in epoch_order(lengths, 32, 0, epoch, bucket=True):
            padded += int(lengths[rows].max()) * len(rows)
    assert clocks["padding_share"] == pytest.approx(1 - clocks["tokens"] / padded, abs=1e-4)


def test_building_the_step_is_no_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first AdamW of a process takes a second: the first run must not pay for it."""
    build = loop.make_step

    def slow(*given: Any, **more: Any) -> EagerStep:
        time.sleep(0.2)
        return build(*given, **more)

    monkeypatch.setattr(loop, "make_step", slow)
    clocks = fl.run(progressive(), runs=tmp_path).result["clocks"]
    assert clocks["setup_seconds"] >= 3 * 0.2
    parts = ("train", "validation", "data", "checkpoint")
    assert clocks["total_seconds"] == pytest.approx(
        sum(clocks[f"{part}_seconds"] for part in parts), abs=1e-3
    )
    stages = fl.RunRecord(tmp_path / "run-none-s0").result["stages"]
    assert sum(stage["seconds"] for stage in stages) <= clocks["total_seconds"] + 1e-3
    began = next(e["at"] for e in fl.RunRecord(tmp_path / "run-none-s0").events())
    ended = fl.RunRecord(tmp_path / "run-none-s0").events()[-1]["at"]
    assert clocks["total_seconds"] <= ended - began - 3 * 0.2


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", False), ("mps", True)])
def test_host_work_beside_the_device_is_no_pause_of_training(
    device: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    watch = Stopwatch(torch.device(device))
    watch.start()
    with watch.phase("data", device=True):
        now[0] += 1.0
    for _ in range(10):  # batches are made while a GPU is busy
        with watch.phase("data"):
            now[0] += 0.25
        now[0] += 0.5
    with watch.phase("validation", device=True):
        now[0] += 4.0
    watch.stop()
    assert watch.training_seconds() == 5.0 + 2.5 * overlaps
    found = clocks([], watch.seconds)
    assert found["total_seconds"] == 12.5
    assert found["train_seconds"] == 5.0 + 2.5 * overlaps
    assert found["data_seconds"] == 3.5
    assert found["data_overlapped_seconds"] == 2.5 * overlaps


def test_waiting_for_a_device_knows_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    for name in ("cpu", "mps", "cuda:1"):
        stopwatch.synchronize(torch.device(name))
    assert waited == ["mps", "cuda:1"]
