"""Tuning: every value of one grid is trained with every seed, and other seeds choose."""

import itertools
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

import frostlab as fl
from comparing import STAGES, compare, plan
from frostlab.comparison import runner, tuning
from frostlab.comparison.judging.pairing import Runs
from frostlab.comparison.tuning import run_trials
from frostlab.records.folder import RunRecord
from frostlab.training import loop
from stages import progressive

GRID = [1e-3, 3e-3, 1e-2]


def tried_values(comparison: fl.Comparison) -> list[list[dict[int, float]]]:
    """By arm: the values of every setting that is compared as a possible best one."""
    plan, folder = comparison.evidence.plan, comparison.folder
    grids = {setting.key: setting.values for setting in comparison.evidence.tuning}
    runs = Runs.read(plan, run_trials(plan, folder, runner.Finished(), grids), folder)
    metric = plan.rules.metric
    return [list(runs.scores(arm.name, lambda run: run.metrics.get(metric)).tried)
            for arm in plan.arms]  # fmt: skip


def rate_of(folder: Path) -> float:
    return float(yaml.safe_load((folder / "recipe.yaml").read_text())["optim"]["lr"])


def test_other_seeds_choose_each_seeds_value(tmp_path: Path) -> None:
    tuned = compare(tmp_path / "c", seeds=3, tune={"values": GRID}, metric="loss")
    (setting,) = tuned.evidence.tuning
    assert setting.curves.keys() == {"baseline", "oelm"}
    folders = list((tmp_path / "c" / "runs").iterdir())
    assert len(folders) == 2 * 3 * len(setting.values)
    for arm, curve in setting.curves.items():
        assert tuple(point.value for point in curve) == setting.values
        for index, run in enumerate(tuned.evidence.arms[arm].runs):
            assert run.seed == index
            means = {
                point.value: fmean(x for i, x in enumerate(point.scores) if i != index)
                for point in curve
            }
            chosen = min(means, key=lambda value: means[value])
            assert rate_of(tmp_path / "c" / run.folder) == chosen
        assert sum(point.chosen for point in curve) == 3
        for point in curve:
            records = [
                RunRecord(tmp_path / "c" / "runs" / f"{arm}@lr={point.value:g}-s{seed}")
                for seed in range(3)
            ]
            assert point.results == tuple(record.metrics["loss"] for record in records)
            assert point.scores == tuple(record.result.best.value for record in records)
            assert point.mean == pytest.approx(fmean(point.scores))
            assert point.low < point.mean < point.high
    assert "was tuned for each arm with the same grid and seeds" in tuned.page.read_text()
    again = compare(tmp_path / "c", seeds=3, tune={"values": GRID}, metric="loss")
    assert again.evidence.tuning == tuned.evidence.tuning


@pytest.mark.slow
def test_a_best_value_at_the_end_of_an_extended_grid_proves_nothing(tmp_path: Path) -> None:
    tuned = compare(tmp_path / "c", seeds=5, tune={"values": [1e-6, 1e-5]}, metric="loss")
    (setting,) = tuned.evidence.tuning
    assert setting.extended
    assert setting.values == (1e-06, 1e-05, 0.0001)
    assert setting.on_edge == {"baseline": True, "oelm": True}
    verdict = tuned.verdicts["oelm"]
    assert verdict.word == "unproven"
    assert "the best optim.lr of oelm, 0.0001, is at an end of the grid" in verdict.sentence
    text = tuned.page.read_text()
    assert "the grid was extended once" in text
    assert "baseline 0.0001 (at an end of the grid)" in text


def test_an_end_beyond_which_nothing_is_allowed_is_no_edge(tmp_path: Path) -> None:
    values = [0.0, 1e-3]
    tuned = compare(tmp_path / "c", seeds=1, tune={"key": "optim.decay", "values": values})
    (setting,) = tuned.evidence.tuning
    assert setting.values[0] == 0.0
    assert not any(setting.on_edge[arm] for arm, value in setting.best.items() if value == 0.0)


def test_trials_that_fail_are_never_the_best_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = loop.measure

    def failing(context: Any, *given: Any) -> Any:
        if context.recipe.optim.lr == 3e-3:
            raise ZeroDivisionError("a bug of its own")
        return measure(context, *given)

    given = {"tune": {"values": GRID}, "metric": "loss", "seeds": 1}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", failing)
        failed = compare(tmp_path / "c", **given)
    (setting,) = failed.evidence.tuning
    assert {arm: curve[1].mean for arm, curve in setting.curves.items()} == {
        "baseline": None, "oelm": None,
    }  # fmt: skip
    assert 3e-3 not in setting.best.values()
    assert max(map(len, tried_values(failed))) == len(setting.values) - 1
    again = compare(tmp_path / "c", **given)
    assert max(map(len, tried_values(again))) == len(setting.values)
    assert all(curve[1].mean is not None for curve in again.evidence.tuning[0].curves.values())


def test_an_arm_without_a_whole_trial_is_unproven(tmp_path: Path) -> None:
    hot = {"tune": {"values": [1e30, 1e31]}, "seeds": 5, "metric": "loss"}
    tuned = compare(tmp_path / "c", set={"optim.clip": None}, **hot)
    assert tuned.verdicts["oelm"].word == "unproven"
    assert "at every optim.lr tried, a run of " in tuned.verdicts["oelm"].sentence


@pytest.mark.slow
def test_two_settings_are_tuned_in_all_combinations(tmp_path: Path) -> None:
    grids = {"optim.lr": [1e-4, 1e-2], "stages.1.lr": [1e-4, 1e-2]}
    tuned = fl.compare(
        {
            "recipe": progressive(stages=[]),
            "vary": ["stages", "supervise"],
            "arms": [
                {"name": "standard", "set": {"stages": STAGES}},
                {"name": "deep", "set": {"stages": STAGES, "supervise.layers": "all"}},
            ],
            "seeds": 1,
            "tune": [{"key": key, "values": values} for key, values in grids.items()],
        },
        out=tmp_path / "c",
    )
    first, second = tuned.evidence.tuning
    assert (first.key, second.key) == ("optim.lr", "stages.1.lr")
    for arm in ("standard", "deep"):
        for rate, value in itertools.product(first.values, second.values):
            label = f"@optim.lr={rate:g}@stages.1.lr={value:g}"
            run = tmp_path / "c" / "runs" / f"{arm}{label}-s0"
            recipe = yaml.safe_load((run / "recipe.yaml").read_text())
            assert (recipe["optim"]["lr"], recipe["stages"][1]["lr"]) == (rate, value)
        best = {(a.value, b.value): (a.mean, b.mean)
                for a in first.curves[arm] for b in second.curves[arm]}  # fmt: skip
        assert (
            best[first.best[arm], second.best[arm]][0] == best[first.best[arm], second.best[arm]][1]
        )  # both curves go through the best combination
    text = tuned.page.read_text()
    assert text.count("← best") == 4
    assert "- stages.1.lr was tuned for each arm with the same grid and seeds" in text


def test_a_seed_has_no_say_in_its_own_choice() -> None:
    """Over all seeds the high rate is best, but only because of what seed 0 reached with it."""
    made = plan(seeds=3, tune={"values": [1e-3, 1e-2]}, metric="accuracy")
    search = tuning._Search(made, Path("nowhere"), runner.Finished())
    low, high = search.trials = ((("optim.lr", 1e-3),), (("optim.lr", 1e-2),))
    reached = {low: (0.5, 0.6, 0.6), high: (0.9, 0.5, 0.5)}
    search.scores = {
        ("oelm", trial, seed): scores[seed]
        for trial, scores in reached.items()
        for seed in range(3)
    }
    assert search.best("oelm") == high
    assert [search.best("oelm", left_out=seed) for seed in range(3)] == [low, high, high]
    search.scores["oelm", high, 1] = None
    assert search.best("oelm") == low  # a run that failed is worse than any score
