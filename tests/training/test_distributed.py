"""Two processes: the same losses as one, one writer, checkpoints that load in one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked import run_command
from frostlab.flow.measurements import Flow, load_flow
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent, ResumeEvent, StartEvent, StepEvent
from frostlab.training.run import run
from stages import progressive

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 210, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2, "dropout": 0.0},
    "treatment": "oelm",
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "accumulate": 2, "epochs": 3, "threads": 1},
    "watch": {"every_n_steps": 5, "distance": True, "gradient_cosine": True},
}
SHARDED = pytest.param("fsdp", marks=pytest.mark.slow)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(recipe: dict[str, Any], folder: Path, port: int) -> list[str]:
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--master_addr=127.0.0.1", f"--master_port={port}",
        "-m", "frostlab", "run", str(path), "--out", str(folder),
    ]  # fmt: skip


def in_two(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    given = ("--out", str(folder))
    return run_command(folder.parent, recipe, *given, processes=2, port=port).wait()


def by_torchrun(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    return subprocess.run(
        launch(recipe, folder, port), capture_output=True, text=True, timeout=200, env=ENVIRONMENT
    )


def losses(folder: Path) -> list[float]:
    return [x for e in RunRecord(folder).events(StepEvent) for x in e.loss]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(RECIPE, out=tmp_path_factory.mktemp("alone") / "run").folder


@pytest.mark.parametrize("way", ["ddp", SHARDED])
def test_two_processes_train_as_one(way: str, alone: Path, tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "parallel": way, "processes": 2}}
    done = by_torchrun(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = RunRecord(alone), RunRecord(tmp_path / "run")
    assert len(losses(alone)) == 21, "the last batch of an epoch has 18 examples, not 32"
    assert losses(two.folder) == pytest.approx(losses(alone), rel=1e-4, abs=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-4)
    assert [e.processes for e in two.events(StartEvent)] == [2]
    assert two.result.parameters == one.result.parameters
    assert two.digests == one.digests, "the same weights, data and frozen tensors"
    assert two.result.order_digest == one.result.order_digest
    assert two.result.clocks.tokens == one.result.clocks.tokens
    checked = [e.frozen_verified for e in two.events(EvaluationEvent)]
    assert checked == [8, 8, 8, 8], "at every evaluation, and before the report"
    measured_alike(load_flow(two.folder), load_flow(alone))


def measured_alike(found: Flow, wanted: Flow) -> None:
    """Gradients are the reduced ones, and norms those of whole tensors."""
    assert found.parts == wanted.parts
    assert [r.step for r in found.reports] == [1, 6, 11, 16, 21]
    assert found.verified
    for mine, theirs in zip(found.reports, wanted.reports, strict=True):
        for name, values in theirs.values.items():
            loose = name == "gradient_cosine"  # between gradients that are nearly nothing
            assert mine.values[name] == pytest.approx(
                values, rel=5e-3, abs=0.02 if loose else 1e-5, nan_ok=True
            ), (mine.step, name)
        assert mine.largest == pytest.approx(theirs.largest, rel=5e-3)
        assert mine.ranges == pytest.approx(theirs.ranges, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_run_of_two_stops_and_goes_on_in_one(way: str, tmp_path: Path, free_port: int) -> None:
    """Ctrl-C reaches both; what two processes saved, one loads and finishes."""
    train = {**RECIPE["train"], "parallel": way, "epochs": 60, "accumulate": 1}
    recipe = {**RECIPE, "optim": {"lr": 1e-4}, "train": train}  # steps that do not amplify rounding
    folder = tmp_path / "run"
    process = subprocess.Popen(
        launch(recipe, folder, free_port), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    for _ in range(1000):
        time.sleep(0.05)
        if (folder / "checkpoints").exists():
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "frostlab: stopped; `--resume` goes on" in errors
    stopped = RunRecord(folder)
    assert stopped.status == "stopped"
    step = stopped.result.steps
    assert 0 < step < 420
    assert run(recipe, out=folder, resume=True).status == "finished"
    resumed = RunRecord(folder)
    assert resumed.start.processes == 2
    assert [e.processes for e in resumed.events(ResumeEvent)] == [1]
    whole = run(recipe, out=tmp_path / "whole").folder
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.slow
def test_packed_and_cached_in_two_processes(tmp_path: Path, free_port: int) -> None:
    """Texts of different lengths: the processes' rows are not equally wide."""
    for split, word in (("train", "word"), ("test", "other")):
        rows = [f"{f'{word}{i} ' * (1 + i % 9)}end,{'ab'[i % 2]}" for i in range(70)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    train = {**RECIPE["train"], "batching": "packed", "cache_prefix": "disk", "epochs": 2}
    recipe = {
        **RECIPE, "train": train, "data": {"name": "own", "path": str(tmp_path), "length": 24},
        "tokenizer": {"kind": "words", "size": 50},
        "treatment": {"freeze": ["embedding", "position", "layers[0]"]},
    }  # fmt: skip
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert two.result.clocks.padding_share == alone.result.clocks.padding_share == 0.0


@pytest.mark.slow
def test_epochs_that_end_without_an_evaluation(tmp_path: Path, free_port: int) -> None:
    """A language model, evaluated by steps: every process reads its losses at the same moments."""
    recipe = {
        **RECIPE,
        "data": {"name": "induction", "examples": 70, "length": 16, "symbols": 16},
        "train": {"batch": 16, "accumulate": 2, "epochs": 3, "threads": 1},
        "evaluate": {"every_n_steps": 4},
    }
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert RunRecord(tmp_path / "run").metrics == pytest.approx(alone.metrics, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_supervised_layers_in_two_processes(way: str, tmp_path: Path, free_port: int) -> None:
    """With DDP the first layer and what is below it are frozen: its loss is left out."""
    frozen = ["embedding", "layers[0]"] if way == "ddp" else ["query"]
    recipe = {
        **RECIPE,
        "data": {"name": "induction", "examples": 70, "length": 16, "symbols": 16},
        "model": {"kind": "decoder", "width": 16, "layers": 3, "heads": 2},
        "treatment": {"freeze": frozen},
        "supervise": {"layers": "all", "weights": [9.0, 0.5, 2.0]},
        "train": {"batch": 16, "accumulate": 2, "steps": 6, "threads": 1, "parallel": way},
    }
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert list(two.layers) == ([2, 3] if way == "ddp" else [1, 2, 3])
    for number, metrics in alone.layers.items():
        assert two.layers[number] == pytest.approx(metrics, rel=1e-3)


@pytest.mark.parametrize("way", ["ddp", SHARDED])
def test_two_processes_go_through_stages_as_one(way: str, tmp_path: Path, free_port: int) -> None:
    """Layers are added, frozen and thawed: the model is shared anew at each boundary."""
    alone = run(progressive(), out=tmp_path / "alone")
    train = {**progressive()["train"], "parallel": way, "processes": 2}
    done = in_two(progressive(train=train), tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4)
    for one, other in zip(alone.result.stages, two.result.stages, strict=True):
        for key in ("name", "steps", "trainable", "total"):
            assert getattr(one, key) == getattr(other, key)


def test_another_number_of_processes_is_refused(tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "processes": 4, "batch": 64}}
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode != 0
    assert "train.processes asks for 4, and 2 run" in done.stderr
    assert not (tmp_path / "run").exists()
