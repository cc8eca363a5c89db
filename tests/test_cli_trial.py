"""`frostlab run --stage trial`: short, watched, and judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from frostlab.cli.main import app
from frostlab.errors import BadInput
from hearing import hearing
from tiny import tiny


def trial(folder: Path, recipe: dict[str, Any], *more: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    asked = ["run", str(path), "--stage", "trial", "--out", str(folder / "run"), *more]
    return CliRunner().invoke(app, asked)


def test_a_trial_is_watched_for_fifty_epochs_and_judged(tmp_path: Path) -> None:
    recipe = hearing(data__seconds=9, data__unseen=0, data__length=128, train__epochs=1)
    done = trial(tmp_path, recipe)
    kept = json.loads((tmp_path / "run" / "trial.json").read_text())
    assert done.exit_code == (0 if kept["passed"] else 1), done.output
    used = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (used["train"]["epochs"], used["watch"]["every_n_steps"]) == (50, 10)
    assert [t["name"] for t in kept["targets"]] == ["front_ratio", "weight_change", "pearson"]
    assert all(t["value"] is not None for t in kept["targets"])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["targets"][2]["value"] == result["best"]["value"]
    assert kept["passed"] == all(t["value"] > t["wanted"] for t in kept["targets"])
    assert f"targets: {'pass' if kept['passed'] else 'fail'}" in done.output


@pytest.mark.slow
def test_what_the_user_sets_comes_on_top_and_a_failed_trial_exits_with_1(tmp_path: Path) -> None:
    done = trial(tmp_path, hearing(optim__lr=1e-6), "--set", "train.epochs=1")
    assert done.exit_code == 1
    assert "validation pearson" in done.output
    assert "wanted > 0.3  " in done.output


@pytest.mark.parametrize(
    ("recipe", "stage", "said"),
    [
        (hearing(), "trail", "--stage trail is none; did you mean `trial`?; there is trial"),
        (tiny(), "trial", "--stage trial is judged by pearson; this recipe has accuracy"),
        (hearing(stages=[{"epochs": 3}]), "trial", "stages.0 says itself how long it trains"),
    ],
)
def test_trials_that_cannot_be_are_refused(
    recipe: dict[str, Any], stage: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = CliRunner().invoke(app, ["run", str(path), "--stage", stage])
    assert isinstance(done.exception, BadInput)
    assert said in str(done.exception)


def test_a_trial_that_nobody_watches_is_refused_before_it_begins(tmp_path: Path) -> None:
    done = trial(tmp_path, hearing(), "--set", "watch=null")
    assert isinstance(done.exception, BadInput)
    assert "--stage trial is judged by what watch measures" in str(done.exception)
    assert not (tmp_path / "run").exists()
