"""What the clocks of a run count, and what they leave out."""

import re
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
from frostlab.records.finding.show import show
from frostlab.records.schema import EvaluationEvent
from frostlab.timing.clock import Stopwatch
from frostlab.training import loop
from frostlab.training import run as run_module
from frostlab.training.batches.batch import epoch_order
from frostlab.training.distributed import World
from frostlab.training.stages import in_epochs
from frostlab.training.step.eager import EagerStep, Outcome
from frostlab.training.step_log import Entry, StepLog
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


def test_the_wall_clock_counts_every_part_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still but in some functions, which take different times."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow(module: Any, name: str, seconds: float) -> None:
        function = getattr(module, name)

        def takes_long(*given: Any, **more: Any) -> Any:
            now[0] += seconds
            return function(*given, **more)

        monkeypatch.setattr(module, name, takes_long)

    slow(run_module, "find_device", 0.5)
    slow(run_module, "prepare_data", 1.0)
    slow(run_module, "build_first_stage", 2.0)
    slow(loop, "make_feed", 4.0)
    slow(loop, "make_step", 8.0)
    slow(EagerStep, "__call__", 16.0)
    slow(loop, "measure", 32.0)
    slow(loop, "_weights_to_save", 64.0)
    slow(loop, "record_stage", 128.0)
    slow(run_module, "state_digest", 256.0)
    recipe = tiny(train__epochs=1)
    record = fl.run(recipe, runs=tmp_path, began=now[0] - 3.0)
    wall = record.result.clocks.wall
    assert wall is not None
    assert asdict(wall) == {
        "total": 3 + 0.5 + 1 + 2 + 4 + 8 + 16 * 8 + 32 + 64 + 128 + 256,
        "starting": 3.0,
        "data": 1.0 + 4.0,
        "building": 0.5 + 2.0,
        "setup": 8.0,
        "first_steps": 16.0,
        "new_shapes": 0.0,
        "steps": 16.0 * 7,
        "validation": 32.0,
        "checkpoints": 64.0,
        "report": 256.0,
        "other": 128.0,
        "turn": 0.0,
    }
    assert record.result.clocks.setup_seconds == wall.setup
    assert re.search(r"wall clock\n.*\n  setup +8\.00 +1 %\n", show(record.folder), re.S)


def test_steps_are_counted_by_kind() -> None:
    watch, step = Stopwatch(torch.device("cpu")), SimpleNamespace(device=torch.device("cpu"))
    step.flow, step.clip = None, None
    log = StepLog(step, watch, World(), None)  # type: ignore[arg-type]
    outcome = Outcome(torch.tensor([1.0, 1.0, -1.0]))
    for number, (seconds, new) in enumerate([(4.0, True), (2.0, True), (1.0, False), (0.5, False)]):
        log.add(Entry(7 + number, outcome, 0.1, 1, 1, 1, (0.0, seconds), "", new))
    log.flush()
    assert watch.steps == {"first_steps": 4.0, "new_shapes": 2.0, "steps": 1.5}


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
