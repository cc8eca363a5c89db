"""What the clocks of a run count, and what they leave out."""

import time
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
from frostlab.records.schema import EvaluationEvent
from frostlab.training import loop
from frostlab.training.batches.batch import epoch_order
from frostlab.training.stages import in_epochs
from frostlab.training.step.eager import EagerStep
from stages import progressive
from tiny import tiny


def test_clocks_add_up(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    clocks = record.result.clocks
    parts = ("train", "validation", "data", "checkpoint")
    total = sum(getattr(clocks, f"{part}_seconds") for part in parts)
    assert total == pytest.approx(clocks.total_seconds, abs=1e-3)
    assert len(clocks.warmup_ms) == 5
    assert clocks.step_ms.count == 11
    assert len(clocks.epoch_seconds) == 2
    assert sum(clocks.epoch_seconds) <= clocks.train_seconds + 1e-3
    recipe = recipe_from(tiny())
    lengths = prepare(recipe).splits["train"].lengths
    assert clocks.tokens == 2 * int(lengths.sum()), "real tokens, padding not counted"
    padded = 0
    for epoch in range(2):
        for rows in epoch_order(lengths, 32, 0, epoch, bucket=True):
            padded += int(lengths[rows].max()) * len(rows)
    assert clocks.padding_share == pytest.approx(1 - clocks.tokens / padded, abs=1e-4)


def test_every_evaluation_has_its_own_seconds(tmp_path: Path) -> None:
    record = fl.run(progressive(), runs=tmp_path)
    clocks, (*selecting, report) = record.result.clocks, record.events(EvaluationEvent)
    assert clocks.evaluation_seconds == [event.seconds for event in selecting]
    assert sum(clocks.evaluation_seconds) == pytest.approx(clocks.validation_seconds, abs=1e-3)
    assert report.seconds > 0
    totals = [event.total_seconds for event in (*selecting, report)]
    assert totals == sorted(totals)
    assert report.total_seconds == clocks.total_seconds
    epochs = sum(stage.epochs for stage in record.result.stages)
    assert selecting[-1].epoch == report.epoch == epochs > record.result.stages[-1].epochs


def test_epochs_of_a_run_far_shorter_than_one() -> None:
    assert in_epochs(3, 10_000_000) == 3e-7
    assert in_epochs(20, 10) == 2.0


def test_building_the_step_is_no_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first AdamW of a process takes a second: the first run must not pay for it."""
    build = loop.make_step

    def slow(*given: Any, **more: Any) -> EagerStep:
        time.sleep(0.2)
        return build(*given, **more)

    monkeypatch.setattr(loop, "make_step", slow)
    clocks = fl.run(progressive(), runs=tmp_path).result.clocks
    assert clocks.setup_seconds >= 3 * 0.2
    parts = ("train", "validation", "data", "checkpoint")
    assert clocks.total_seconds == pytest.approx(
        sum(getattr(clocks, f"{part}_seconds") for part in parts), abs=1e-3
    )
    stages = fl.RunRecord(tmp_path / "run-none-s0").result.stages
    assert sum(stage.seconds for stage in stages) <= clocks.total_seconds + 1e-3
    began = fl.RunRecord(tmp_path / "run-none-s0").start.at
    ended = fl.RunRecord(tmp_path / "run-none-s0").events()[-1].at
    assert clocks.total_seconds <= ended - began - 3 * 0.2
