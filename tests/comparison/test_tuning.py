"""Tuning: the same grid for every arm, and values that stay."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from comparing import STAGES, compare
from frostlab.comparison import runner
from frostlab.records.folder import RunRecord
from frostlab.training.run import RunFailed
from stages import progressive


def test_each_arm_is_tuned_on_the_same_grid_with_seeds_of_its_own(tmp_path: Path) -> None:
    found = compare(tmp_path / "c", seeds=1, tune={"values": [1e-6, 1e-5], "seeds": 1})
    (tuning,) = found.evidence.tuning
    assert tuning.extended
    assert tuning.values == (1e-06, 1e-05, 0.0001) or tuning.values[0] == 1e-07
    assert tuning.curves.keys() == {"baseline", "oelm"}
    for name, curve in tuning.curves.items():
        assert tuple(point.value for point in curve) == tuning.values
        best = max(curve, key=lambda point: point.mean)
        assert best.mean == next(p.mean for p in curve if p.value == tuning.best[name])
        (run,) = found.evidence.arms[name].runs
        record = RunRecord(tmp_path / "c" / run.folder)
        recipe = yaml.safe_load((record.folder / "recipe.yaml").read_text())
        assert recipe["optim"]["lr"] == tuning.best[name]
        assert record.result.seed == 0
    seeds = {p.name.rpartition("-s")[2] for p in (tmp_path / "c" / "tuning").iterdir()}
    assert seeds == {"900000"}
    assert "extended once" in found.page.read_text()


def test_what_tuning_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning run fails once; when seeds are added it would succeed, and choose otherwise."""
    run = runner.run

    def failing(recipe: Any, **options: Any) -> Any:
        if options["out"].name.startswith("baseline-0.01-"):
            raise RunFailed("out of memory")
        return run(recipe, **options)

    grid = {"values": [1e-5, 1e-4, 1e-2, 1e-1], "seeds": 1}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", failing)
        first = compare(tmp_path / "c", tune=grid, metric="loss", seeds=1)
    again = compare(tmp_path / "c", tune=grid, metric="loss", seeds=2)
    assert again.evidence.tuning == first.evidence.tuning
    folders = [tmp_path / "c" / run.folder for run in again.evidence.arms["baseline"].runs]
    recipes = [yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in folders]
    assert len({recipe["optim"]["lr"] for recipe in recipes}) == 1 < len(folders)
    assert "was tuned for each arm" in again.page.read_text()


@pytest.mark.slow
def test_a_stages_rate_is_tuned_at_the_best_of_the_run(tmp_path: Path) -> None:
    grids = {"optim.lr": [1e-4, 1e-2], "stages.1.lr": [1e-4, 1e-2]}
    found = fl.compare(
        {
            "recipe": progressive(stages=[]),
            "vary": ["stages", "supervise"],
            "arms": [
                {"name": "standard", "set": {"stages": STAGES}},
                {"name": "deep", "set": {"stages": STAGES, "supervise.layers": "all"}},
            ],
            "seeds": 1,
            "tune": [{"key": key, "values": values, "seeds": 1} for key, values in grids.items()],
        },
        out=tmp_path / "c",
    )
    first, second = found.evidence.tuning
    assert (first.key, second.key) == ("optim.lr", "stages.1.lr")
    for arm in ("standard", "deep"):
        for value in second.values:
            run = tmp_path / "c" / "tuning" / f"{arm}-stages.1.lr-{value:g}-s900000"
            recipe = yaml.safe_load((run / "recipe.yaml").read_text())
            assert recipe["optim"]["lr"] == first.best[arm]
            assert recipe["stages"][1]["lr"] == value
        last = yaml.safe_load((tmp_path / "c" / "runs" / f"{arm}-s0" / "recipe.yaml").read_text())
        assert (last["optim"]["lr"], last["stages"][1]["lr"]) == (
            first.best[arm], second.best[arm]
        )  # fmt: skip
    text = found.page.read_text()
    assert text.count("← best") == 4
    assert "- stages.1.lr was tuned for each arm on an equal budget" in text
