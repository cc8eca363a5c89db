"""kill -9 at any moment, then resume: the same weights and metrics, bit for bit."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from forked import attempt, attempt_for, outcome
from frostlab.records.manifest import verify
from tiny import tiny

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 256, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
    "treatment": "oelm",
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "epochs": 3, "threads": 1, "checkpoint": 3},
    "evaluate": {"every": 7},
}
MOMENTS = [
    ("update", 21), ("report", 1), ("clean-up", 5), ("half a file", 1), ("half an event", 9),
    ("sealed", 1), ("frozen", 1),
    *(pytest.param(moment, count, marks=pytest.mark.slow) for moment, count in (
        ("step", 2), ("step", 24), ("update", 1), ("evaluation", 1), ("rename", 3), ("clean-up", 1),
        ("half a file", 2), ("half a file", 12), ("half an event", 2), ("frozen", 2),
        ("rename", 1), ("rename", 18), ("half a file", 7), ("step", 17), ("evaluation", 30),
        ("result", 1),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert attempt(RECIPE, folder) == 0
    found = outcome(folder)
    assert found["steps"] == 24
    assert len(found["losses"]) == 24
    assert len(set(found["losses"])) > 20
    assert len(found["frozen"]) == 1
    return found


@pytest.mark.parametrize(("moment", "count"), MOMENTS)
def test_killed_at_a_chosen_moment(
    moment: str, count: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    assert attempt(RECIPE, folder, moment, count) == -9
    assert not (folder / "result.json").exists()
    assert attempt(RECIPE, folder) == 0
    assert outcome(folder) == uninterrupted
    assert verify(folder) == (1, [])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_killed_again_and_again_at_random(
    seed: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    folder, draw, kills = tmp_path / "run", random.Random(seed), 0
    while not (folder / "result.json").exists() and kills < 3:
        kills += attempt_for(RECIPE, folder, draw.uniform(0.02, 0.6)) == -9
    if not (folder / "result.json").exists():
        assert attempt(RECIPE, folder) == 0
    assert outcome(folder) == uninterrupted


def test_other_seeds_give_other_runs(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    assert attempt({**RECIPE, "seed": 1}, tmp_path / "run") == 0
    other = outcome(tmp_path / "run")
    for key in ("weights_digest", "order_digest", "losses"):
        assert other[key] != uninterrupted[key]


def test_a_resumed_run_removes_checkpoints_that_a_kill_left(tmp_path: Path) -> None:
    """A kill between saving a checkpoint and removing the older ones leaves one too many."""
    recipe, folder = tiny(train__checkpoint=2), tmp_path / "run"
    fl.run(recipe, out=folder)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    newest = max((folder / "checkpoints").iterdir())
    shutil.copytree(newest, folder / "checkpoints" / "step-000000001")
    (folder / "result.json").unlink()
    fl.run(recipe, out=folder, resume=True)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == left
