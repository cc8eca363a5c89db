"""Plans of matrices: every combination once, in order, checked; files that are wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.matrix.plan import matrix_from, matrix_plan, merged, tasks_of
from frostlab.matrix.store import MatrixFolder
from frostlab.recipe.load import load_recipe
from tiny import tiny


def write(folder: Path, **keys: Any) -> str:
    """Write a matrix's file next to a tiny recipe."""
    (folder / "small.yaml").write_text(yaml.safe_dump(tiny()))
    values = {"recipes": ["small.yaml"], **keys}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "mine.yaml")


def test_every_combination_is_a_run_with_its_own_settings(tmp_path: Path) -> None:
    grid = {"optim.lr": [1e-3, 3e-3], "train.batch": [16, 32]}
    source = write(tmp_path, treatments=["oelm", "baseline"], settings=grid, seeds=[4, 7])
    plan = matrix_plan(source)
    tasks = tasks_of(plan, tmp_path / "runs")
    assert len({task.path for task in tasks}) == len(tasks) == 2 * 2 * 2 * 2
    seen = {
        (t.recipe.treatment_name, t.recipe.optim.lr, t.recipe.train.batch, t.recipe.seed)
        for t in tasks
    }
    assert len(seen) == 16
    first = tasks[0]
    assert first.path.name == "small@lr=0.001@batch=16-baseline-s4"
    own = load_recipe(
        str(tmp_path / "small.yaml"),
        {"optim.lr": 1e-3, "train.batch": 16, "treatment": "baseline"},
        4,
    )
    assert first.recipe.digest == own.digest  # `frostlab run` would train the same


def test_settings_that_belong_together(tmp_path: Path) -> None:
    pairs = [{"optim.lr": 1e-3, "train.batch": 16}, {"optim.lr": 3e-3, "train.batch": 32}]
    plan = matrix_plan(write(tmp_path, settings=pairs, set={"train.epochs": 1}))
    tasks = tasks_of(plan, tmp_path)
    assert [(t.recipe.optim.lr, t.recipe.train.batch) for t in tasks] == [(1e-3, 16), (3e-3, 32)]
    assert {task.recipe.train.epochs for task in tasks} == {1}


def test_a_group_runs_required_and_baselines_first_within_a_data_set() -> None:
    plan = matrix_plan("phase3", settings={"scale": "tiny"}, seeds=[0, 1])
    assert plan.name == "phase3-tiny"
    ids = list(dict.fromkeys(run.id for run in plan.runs))
    assert ids == [
        "gpt-01", "gpt-02", "gpt-03", "gpt-04", "gpt-05", "openwebtext-random", "gpt-06", "gpt-07",
        "wikitext103-random",
    ]  # fmt: skip
    runs = {run.name: run for run in plan.runs}
    assert len(runs) == 18
    assert runs["gpt-02-tiny-oelm-s1"].baseline == "gpt-01-tiny-baseline-s1"
    assert runs["wikitext103-random-tiny-oelm-random-s0"].optional
    assert runs["gpt-01-tiny-baseline-s0"].baseline is None
    only = matrix_plan("phase3", only=["gpt-02", "gpt-07"])
    assert [run.id for run in only.runs] == ["gpt-02", "gpt-07"]


def test_runs_that_lack_data_are_named_and_not_run(tmp_path: Path) -> None:
    lacking = tiny(data={"name": "own", "path": str(tmp_path / "nowhere"), "length": 8})
    (tmp_path / "lacking.yaml").write_text(
        yaml.safe_dump({**lacking, "tokenizer": {"kind": "words"}})
    )
    source = write(tmp_path, recipes=["small.yaml", "lacking.yaml"])
    plan = matrix_plan(source)
    missing = {run.id: run.missing for run in plan.runs}
    assert missing["small"] is None
    assert "nowhere" in str(missing["lacking"])
    assert [task.name for task in tasks_of(plan, tmp_path)] == ["small"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"recipe": ["x"]}, "recipe is not a key of a matrix; did you mean `recipes`"),
        ({"recipes": []}, "recipes [] should be a list of 1 to 1,000 names or files of recipes"),
        ({"recipes": [3]}, "recipes [3] should be a list of 1 to"),
        ({"recipes": ["docstring-gpt"]}, "did you mean `docstrings-gpt`"),
        ({"treatments": ["olm"]}, "no treatment is called 'olm'; did you mean `oelm`"),
        (
            {"seeds": 0},
            "seeds 0 should be a number from 1 to 10,000, or a list of 1 to 10,000 whole",
        ),
        ({"seeds": "two"}, "seeds 'two' should be a number from 1"),
        ({"seeds": []}, "seeds [] should be a number from 1"),
        ({"seeds": [-1]}, "seeds [-1] should be a number from 1"),
        ({"seeds": [2, 1, 1]}, "mine.yaml: seeds: 1 is listed twice"),
        ({"treatments": ["oelm", "oelm"]}, "treatments: 'oelm' is listed twice"),
        ({"set": 3}, "set 3 should be at most 1,000 settings, each `key: value`"),
        (
            {"settings": 3},
            "settings 3 should be at most 1,000 settings, each `key: [value, value]`",
        ),
        ({"settings": {"optim.lr": []}}, "settings.optim.lr [] should be a list of one or more"),
        (
            {"settings": {"optim.lr": 0.001}},
            "settings.optim.lr 0.001 should be a list of one or more values, such as [0.001]",
        ),
        ({"settings": {"optim.lr": [1, 2, 1]}}, "settings.optim.lr: 1 is listed twice"),
        (
            {"settings": {f"optim.{key}": list(range(50)) for key in ("lr", "warmup", "beta")}},
            "settings have 125,000 combinations; a matrix can have 100,000 runs at most",
        ),
        ({"settings": {"optim.lrr": [1]}}, "optim.lrr is not a key; did you mean `lr`"),
        ({"settings": {"seed": [1]}}, "settings.seed cannot be set; use seeds"),
        ({"set": {"treatment": "oelm"}}, "set.treatment cannot be set; use treatments"),
        ({"set": {"train.device": "cuda:3"}}, "train.device cuda:3 names one device"),
        ({"recipes": ["small.yaml", "small.yaml"]}, "recipes: 'small.yaml' is listed twice"),
        ({"recipes": ["small.yaml", "./small.yaml"]}, "two recipes would have the folder"),
        (
            {"settings": {"optim.lr": [1e-4, 1.0000001e-4]}},
            "two recipes would have the folder small@lr=0.0001-none-s0; rename one, or choose",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(fl.BadInput) as refused:
        matrix_plan(write(tmp_path, **keys))
    assert message in str(refused.value)
    assert not re.search(r"\n|tuple|constrained|valid", str(refused.value))


def test_an_unknown_key_is_named_before_a_missing_one() -> None:
    with pytest.raises(fl.BadInput, match="recipe is not a key of a matrix; did you mean `recipe"):
        matrix_from({"recipe": ["docstrings-gpt"]}, "mine.yaml")


def test_seeds_and_treatments_of_a_file_are_not_set_otherwise(tmp_path: Path) -> None:
    source = write(tmp_path, treatments=["none", "oelm"])
    with pytest.raises(fl.BadInput, match="--set seed cannot be set for a matrix; use --seeds"):
        matrix_plan(source, settings={"seed": 7})
    for key, value in (("treatment", "oelm"), ("treatment.freeze", ["key"])):
        with pytest.raises(fl.BadInput, match="--set treatment: .*mine.yaml lists treatments"):
            matrix_plan(source, settings={key: value})
    plan = matrix_plan(write(tmp_path, treatments=[]), settings={"treatment": "oelm"})
    assert {run.method for run in plan.runs} == {"oelm"}
    with pytest.raises(fl.BadInput, match="--set seed and --seeds exclude each other"):
        matrix_plan("phase3", settings={"scale": "tiny", "seed": 7}, seeds=[0])
    runs = matrix_plan("phase3", settings={"scale": "tiny", "seed": 7}).runs
    assert {run.seed for run in runs} == {7}


def test_too_many_runs_are_refused_before_their_recipes_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostlab.matrix.plan.load_recipe", lambda *_: pytest.fail("loaded"))
    source = write(
        tmp_path, treatments=["none", "oelm"], seeds=1000,
        settings={"optim.lr": [n / 1e4 for n in range(1, 101)]},
    )  # fmt: skip
    with pytest.raises(fl.BadInput, match="200,000 runs; a matrix can have 100,000 at most"):
        matrix_plan(source)


def test_a_plan_that_could_not_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [n / 1e4 for n in range(1, 9)]
    plan = matrix_plan(write(tmp_path, settings={"optim.lr": rates}))
    folder = MatrixFolder(tmp_path, "mine")
    folder.write_plan(plan)
    text = folder.plan_path.read_text()
    counted = text.count(",") + 2 * text.count(":")
    for limit, fits in ((int(1.1 * counted), True), (counted - 1, False)):
        for module in ("matrix.plan", "storage"):
            monkeypatch.setattr(f"frostlab.{module}.MOST_VALUES", limit)
        assert fits == (not refused(folder.plan))
        assert fits == (not refused(lambda: matrix_plan(str(tmp_path / "mine.yaml"))))


def refused(work: Callable[[], Any]) -> bool:
    try:
        work()
    except fl.BadInput as error:
        return "too large" in str(error)
    return False


def test_runs_of_a_recipe_share_it_in_a_plan_that_grows(tmp_path: Path) -> None:
    plan = matrix_plan(write(tmp_path, seeds=1))
    for seeds in (2, 3, 4):
        plan, _ = merged(plan, matrix_plan(write(tmp_path, seeds=seeds)))
    assert len(plan.runs) == 4
    assert len(plan.recipes) == 1


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(fl.BadInput, match="no group is called 'phase33'; did you mean `phase3`"):
        matrix_plan("phase33")
    with pytest.raises(fl.BadInput, match="--only gpt-08 is not in phase3; did you mean `gpt-0"):
        matrix_plan("phase3", only=["gpt-08"])
    with pytest.raises(fl.BadInput, match="nowhere.yaml cannot be read"):
        matrix_plan("nowhere.yaml")


def test_a_plan_grows_by_runs_and_refuses_changed_ones(tmp_path: Path) -> None:
    old = matrix_plan(write(tmp_path, seeds=1))
    new = matrix_plan(write(tmp_path, seeds=2, treatments=["none", "oelm"]))
    both, added = merged(old, new)
    assert [run.name for run in added] == ["small-none-s1", "small-oelm-s0", "small-oelm-s1"]
    assert [task.recipe.seed for task in tasks_of(both, tmp_path)] == [0, 1, 0, 1]
    assert tasks_of(both, tmp_path)[2].recipe.treatment_name == "oelm"
    changed = matrix_plan(write(tmp_path, seeds=1, set={"optim.lr": 0.5}))
    with pytest.raises(fl.BadInput, match="small-none-s0 would have another recipe"):
        merged(old, changed)
