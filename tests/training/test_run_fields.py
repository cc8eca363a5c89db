"""Every field of a recipe changes something."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import frostlab as fl
from frostlab.recipe import data as data_settings
from frostlab.recipe import settings
from frostlab.recipe.model import GPTModel
from frostlab.recipe.recipe import Recipe
from tiny import tiny

# One other value for every field; the tiny run must come out differently.
OTHER: dict[str, Any] = {
    "data.name": {"data": {"name": "recall", "examples": 256, "length": 12, "symbols": 4}},
    "data.examples": 128,
    "data.length": 10,
    "data.symbols": 3,
    "model.kind": {
        "data": {"name": "induction", "examples": 64, "length": 16, "symbols": 16},
        "model": {"kind": "decoder", "width": 16, "layers": 1, "heads": 2},
    },
    "model.width": 32,
    "model.layers": 1,
    "model.heads": 4,
    "model.hidden": 24,
    "model.dropout": 0.2,
    "model.bias": False,
    "model.pooling": "last",
    "model.causal": True,
    "model.qk_norm": True,
    "model.positions": 20,
    "treatment": "frozen-qk",
    "optim.lr": 1e-3,
    "optim.decay": 0.3,
    "optim.betas": [0.8, 0.99],
    "optim.eps": 1e-3,
    "optim.clip": None,
    "optim.warmup": 4,
    "optim.schedule": "constant",
    "train.batch": 16,
    "train.accumulate": 2,
    "train.epochs": 3,
    "train.steps": {"train": {"batch": 32, "steps": 5, "threads": 1}},
    "train.batching": "padded",
    "train.precision": "bf16",
    "train.checkpoint": 3,
    "evaluate.every": 5,
    "evaluate.metric": "loss",
    "evaluate.patience": {"evaluate": {"every": 1, "patience": 1}},
    "evaluate.target": 0.1,
    "evaluate.batch": 3,
    "seed": 5,
}
# Fields whose effect other tests show: where.
ELSEWHERE = {
    "about": "tests/recipe: the digest leaves it out; `frostlab recipes` prints it",
    "tokenizer": "tests/data/test_vocabulary.py",
    "stages": "test_stages.py",
    "scale": "tests/recipe/test_scale.py",
    "loss": "test_eeg_report.py",
    "train.step": "step/test_captured.py, step/test_step.py",
    "train.checkpoint_what": "tests/records/test_checkpoint.py, test_stages_boundary.py",
    "train.cache_prefix": "batches/test_prefix.py",
    "train.cache_gb": "batches/test_prefix.py",
    "train.device": "test_run.py",
    "train.drop_last": "test_stages.py",
    "train.threads": "test_run.py",
    "train.processes": "test_distributed.py",
    "train.parallel": "test_distributed.py",
    "supervise.layers": "test_exits.py, step/test_objective.py",
    "supervise.weights": "test_exits.py, step/test_objective.py",
    "supervise.frozen": "test_exits.py, step/test_objective.py",
    "watch.every_n_steps": "test_run_flow.py",
    "watch.distance": "test_run_flow.py",
    "watch.gradient_cosine": "test_run_flow.py",
    "watch.dead_units": "test_run_flow.py",
    "watch.attention_entropy": "test_run_flow.py",
}


def fields(kind: type[BaseModel], prefix: str) -> set[str]:
    return {f"{prefix}{name}" for name in kind.model_fields}


def test_every_field_has_its_test() -> None:
    sections = {
        "data.": data_settings.Synthetic, "model.": GPTModel, "optim.": settings.Optim,
        "train.": settings.Train, "evaluate.": settings.Evaluate, "supervise.": settings.Supervise,
        "watch.": settings.Watch,
    }  # fmt: skip
    known = {f for prefix, kind in sections.items() for f in fields(kind, prefix)}
    known |= set(Recipe.model_fields) - {prefix.strip(".") for prefix in sections}
    assert set(OTHER) | set(ELSEWHERE) == known


def print_of(record: fl.RunRecord) -> dict[str, Any]:
    """What a field can change: every event but its times."""
    times = ("at", "ms", "seconds", "total_seconds")
    events = [{k: v for k, v in asdict(e).items() if k not in (*times, "name", "recipe_digest")}
              for e in record.events()]  # fmt: skip
    return {"events": events, "target": record.result.target and record.result.target.step}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return print_of(fl.run(tiny(), runs=tmp_path_factory.mktemp("usual")))


@pytest.mark.parametrize("field", OTHER)
def test_each_field_changes_something(field: str, tmp_path: Path, usual: dict[str, Any]) -> None:
    value = OTHER[field]
    recipe = tiny(**value) if isinstance(value, dict) else tiny(**{field.replace(".", "__"): value})
    assert print_of(fl.run(recipe, runs=tmp_path)) != usual


def test_two_equal_runs_have_equal_prints(tmp_path: Path, usual: dict[str, Any]) -> None:
    """Without this the test above could not fail."""
    assert print_of(fl.run(tiny(), runs=tmp_path)) == usual
