"""torchrun with two processes: the same losses as one, one writer, checkpoints that load in one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from frostlab.records.record import RunRecord
from frostlab.training.running import run

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 210, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2, "dropout": 0.0},
    "treatment": "oelm",
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "accumulate": 2, "epochs": 3, "threads": 1},
}


def torchrun(recipe: dict[str, Any], folder: Path, port: int, *more: str) -> Any:
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
            "--master_addr=127.0.0.1", f"--master_port={port}",
            "-m", "frostlab", "run", str(path), "--out", str(folder), *more,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [x for e in RunRecord(folder).events() if e["kind"] == "step" for x in e["loss"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(RECIPE, out=tmp_path_factory.mktemp("alone") / "run").folder


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_as_one(way: str, alone: Path, tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "parallel": way, "processes": 2}}
    done = torchrun(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = RunRecord(alone), RunRecord(tmp_path / "run")
    assert len(losses(alone)) == 21, "the last batch of an epoch has 18 examples, not 32"
    assert losses(two.folder) == pytest.approx(losses(alone), rel=1e-4, abs=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-4)
    start = two.events()[0]
    assert start["processes"] == 2
    assert [e["kind"] for e in two.events()].count("start") == 1
    assert two.result["parameters"] == one.result["parameters"]
    assert two.digests == one.digests, "the same weights, data and frozen tensors"
    assert two.result["order_digest"] == one.result["order_digest"]
    assert two.result["clocks"]["tokens"] == one.result["clocks"]["tokens"]
    checked = [e["frozen_verified"] for e in two.events() if "frozen_verified" in e]
    assert checked == [8, 8, 8]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_run_of_two_goes_on_in_one(way: str, tmp_path: Path, free_port: int) -> None:
    """Checkpoints are whole: what two processes saved, one loads and finishes."""
    from frostlab.models.building import build_model
    from frostlab.recipe.loading import recipe_from
    from frostlab.records.checkpoints import checkpoints_in
    from frostlab.training.treating import treat
    from frostlab.training.work import load_weights

    recipe = {**RECIPE, "train": {**RECIPE["train"], "parallel": way}}
    folder = tmp_path / "run"
    done = torchrun(recipe, folder, free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    made = recipe_from(recipe)
    model = build_model(made, 5, 4, 4)
    treat(model, made)
    (kept, *_) = checkpoints_in(folder)
    shapes = {name: tuple(t.shape) for name, t in kept.model().items()}
    assert shapes == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    load_weights(model, kept)
    (folder / "result.json").unlink()
    assert run(recipe, out=folder, resume=True).metrics == pytest.approx(
        json.loads(json.dumps(_last_report(folder))), rel=1e-3
    )


def _last_report(folder: Path) -> dict[str, float]:
    return next(e["metrics"] for e in RunRecord(folder).events() if e.get("split") == "report")


def test_another_number_of_processes_is_refused(tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "processes": 4, "batch": 64}}
    done = torchrun(recipe, tmp_path / "run", free_port)
    assert done.returncode != 0
    assert "train.processes asks for 4, and 2 run" in done.stderr
    assert not (tmp_path / "run").exists()
