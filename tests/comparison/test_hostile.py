"""Comparisons, and the files in their folders, that somebody else wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from comparing import SMALL
from frostlab.comparison.gather import _correct_predictions
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import alpha_spent
from frostlab.comparison.run import _stored_tuning
from frostlab.comparison.runner import ComparisonFolder, Runner
from frostlab.comparison.tuning import run_trials
from frostlab.recipe.recipe import set_nested


def planned(**changes: Any) -> Any:
    return make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"], "seeds": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arms": [{"name": ["a"], "set": {}}, "oelm"]}, "the arm's name ['a'] should be"),
        ({"arms": [{"name": "../x", "set": {}}, "oelm"]}, "the arm's name '../x' should be"),
        ({"arms": [{"name": "a\x1b[31m", "set": {}}, "oelm"]}, "the arm's name 'a\\x1b[31m'"),
        ({"arms": [{"name": "a" * 10_000, "set": {}}, "oelm"]}, "is longer than 200 bytes"),
        ({"arms": [{"name": "a" * 150, "set": {}}, "oelm"]}, "at most 100 characters"),
        ({"arms": [5, None]}, "arm 5 must be a treatment's name"),
        ({"arms": [{"name": f"a{i}", "set": {}} for i in range(101)]}, "at most 100 items"),
        ({"seeds": 2147483648}, "seeds 2147483648: a comparison has at most 10000 runs"),
        ({"seeds": list(range(6000))}, "12000 runs; 10000 is the most"),
        ({"seeds": [1, 1]}, "a seed is given twice"),
        ({"seeds": [-1]}, "a seed is 0 or more"),
        ({"seeds": [10**30]}, "a seed is less than 4294967296"),
        ({"rounds": 10**9}, "rounds 1000000000: Input should be less than"),
        ({"looks": 10**9}, "looks 1000000000: Input should be less than"),
        ({"tune": {"values": list(range(1, 5000))}}, "runs; 10000 is the most"),
        ({"tune": {"values": [1, 2], "seeds": 2}}, "tune.0.seeds 2: Extra inputs"),
        ({"tune": {"key": "model.config.../../x", "values": [1, 2]}}, "tune.0.key"),
        ({"x" * 10_000: 1}, "is not a key of a comparison"),
        ({"allow_confounds": ["x" * 10_000]}, "no setting has this name"),
        ({"arms": ["baseline", {"name": "b", "set": {"stages.0": 1}}]}, "not an index of a list"),
        ({"arms": ["baseline", {"name": "b", "set": {"stages.²": 1}}]}, "not an index of a list"),
        ({"arms": ["baseline", {"name": "b", "set": {".".join("a" * 9999): 1}}]}, "too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_hostile_comparisons_are_refused_in_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(fl.BadInput) as caught:
        planned(**changes)
    line = str(caught.value)
    assert problem in line
    assert "\n" not in line
    assert len(line) < 400


def test_an_item_of_a_list_can_be_set() -> None:
    values: dict[str, Any] = {"stages": [{"lr": 1}, {"lr": 2}]}
    set_nested(values, "stages.1", {"lr": 3})
    assert values == {"stages": [{"lr": 1}, {"lr": 3}]}


@pytest.mark.parametrize("jobs", [0, -1, 10**9, 1.5, True, "2"])
def test_jobs_are_limited(jobs: Any) -> None:
    with pytest.raises(fl.BadInput, match="should be a whole number from 1 to 256"):
        Runner(None, jobs=jobs)


def test_late_looks_spend_next_to_nothing() -> None:
    assert alpha_spent(0.05, 2000) == 0.0
    assert alpha_spent(0.05, 3, 4) == 0.05 / 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"split": "report", "labels": [1], "classes": "a"}', "classes should be a list"),
        ('{"split": "report", "labels": [1], "classes": [null]}', "classes.0 should be a whole"),
        ('{"split": "report", "labels": [1], "classes": []}', "as many values as labels"),
        ('{"split": "report", "labels": [1]}', "classes is missing"),
    ],
)
def test_predictions_of_any_shape(text: str, problem: str, tmp_path: Path) -> None:
    assert _correct_predictions(fl.RunRecord(tmp_path)) is None
    (tmp_path / "predictions.json").write_text(text)
    with pytest.raises(fl.BadInput) as caught:
        _correct_predictions(fl.RunRecord(tmp_path))
    assert str(tmp_path / "predictions.json") in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"looks": [{"recipe": 2, "at": 1.0}]}, "looks.0.recipe should be a text"),
        ({"looks": [[]]}, "looks.0 should be an object"),
        ({"looks": 5}, "looks should be a list"),
        ({"plan": 5}, "plan should be an object"),
        ({"plan": {}}, "plan.name: Field required"),
        ({"more": 1}, "more is not a key"),
    ],
)
def test_stored_plans_of_any_shape(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder, plan = ComparisonFolder(tmp_path), planned()
    with folder.open(plan):
        assert folder.look(plan, {}).number == 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(fl.BadInput) as caught, folder.open(plan):
        pass
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("values", [5, [5], [{}], {}, [None]])
def test_tuning_of_any_shape(values: Any) -> None:
    with pytest.raises(fl.BadInput, match=r"^tuning\.json: "):
        _stored_tuning(values, planned(tune="lr"), Path("tuning.json"))


def test_runs_are_not_written_through_links(tmp_path: Path) -> None:
    plan, elsewhere = planned(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "runs").symlink_to(elsewhere)
    with pytest.raises(fl.BadInput, match="runs is a link"):
        run_trials(plan, tmp_path / "c", Runner(None), {})
    assert not list(elsewhere.iterdir())
