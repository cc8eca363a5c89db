"""Paths in a recipe are relative to its file, settings to the working folder."""

import json
from pathlib import Path

import pytest

from frostlab import BadInput
from frostlab.comparison.load import make_plan
from frostlab.recipe.load import load_recipe, recipe_from, shipped_recipes

OWN = "data: {name: own, path: texts/a.csv}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with data and a recipe, and a working folder elsewhere."""
    folder = tmp_path / "project"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.csv").write_text("text,label\na,0\nb,1\n")
    (folder / "mine.yaml").write_text(OWN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_a_path_in_a_file_is_relative_to_the_file(project: Path) -> None:
    there = str(project / "texts" / "a.csv")
    assert load_recipe(str(project / "mine.yaml")).data.path == there
    assert load_recipe("../project/mine.yaml").data.path == there
    child = project / "child" / "child.yaml"
    child.parent.mkdir()
    child.write_text("extends: ../mine.yaml\nseed: 3\n")
    assert load_recipe(str(child)).data.path == there, "relative to the file that says it"


def test_a_setting_is_relative_to_the_working_folder(project: Path) -> None:
    Path("texts").mkdir()
    Path("texts/b.csv").write_text("text,label\n")
    recipe = load_recipe(str(project / "mine.yaml"), {"data.path": "texts/b.csv"})
    assert recipe.data.path == str(Path("texts/b.csv").absolute())
    values = {"data": {"name": "own", "path": "texts/b.csv"}}
    assert recipe_from(values).data.path == str(Path("texts/b.csv").absolute())
    assert values["data"]["path"] == "texts/b.csv", "the caller's values are left alone"


def test_models_and_tokenizers_in_folders(project: Path) -> None:
    (project / "model").mkdir()
    (project / "mine.yaml").write_text(
        OWN + "model: {kind: pretrained, name: model}\n"
        "tokenizer: {kind: pretrained, name: bert-base-uncased}\n"
    )
    recipe = load_recipe(str(project / "mine.yaml"))
    assert recipe.model.name == str(project / "model")
    assert recipe.tokenizer.name == "bert-base-uncased", "no folder here, so a name on the hub"


def test_a_folder_of_eeg_may_be_in_the_data_folder(project: Path) -> None:
    (project / "eeg.yaml").write_text("extends: eeg-conformer-v1\ndata: {path: recordings}\n")
    assert load_recipe(str(project / "eeg.yaml")).data.path == "recordings"
    (project / "recordings").mkdir()
    assert load_recipe(str(project / "eeg.yaml")).data.path == str(project / "recordings")


def test_the_working_folder_is_not_searched_for_a_file(project: Path) -> None:
    (project / "texts" / "a.csv").unlink()
    missing = load_recipe(str(project / "mine.yaml")).data.path
    assert missing == str(project / "texts" / "a.csv"), "the error will name this path"
    Path("texts").mkdir()
    Path("texts/a.csv").write_text("text,label\n")
    with pytest.raises(BadInput) as caught:
        load_recipe(str(project / "mine.yaml"))
    assert str(caught.value) == (
        f"{project / 'mine.yaml'}: data.path 'texts/a.csv' is not in {project}, the recipe's "
        f"folder, but in the working folder; write {Path('texts/a.csv').absolute()}"
    )


def test_a_digest_does_not_depend_on_the_folder(project: Path, tmp_path: Path) -> None:
    first = load_recipe(str(project / "mine.yaml"))
    project.rename(tmp_path / "moved")
    moved = load_recipe(str(tmp_path / "moved" / "mine.yaml"))
    assert moved.data.path != first.data.path
    assert moved.digest == first.digest
    (tmp_path / "moved" / "texts" / "a.csv").rename(tmp_path / "moved" / "texts" / "b.csv")
    (tmp_path / "moved" / "mine.yaml").write_text(OWN.replace("a.csv", "b.csv"))
    assert load_recipe(str(tmp_path / "moved" / "mine.yaml")).digest != first.digest


def test_folders_here_change_no_shipped_digest(project: Path) -> None:
    before = {name: load_recipe(name).digest for name in shipped_recipes()}
    for name in ("eeg_cocktail", "recordings"):
        Path(name).mkdir()
    assert {name: load_recipe(name).digest for name in shipped_recipes()} == before
    again = recipe_from(load_recipe("eeg-cocktail").to_dict())
    assert again.data.path == str(Path("eeg_cocktail").absolute()), "as a run records it"
    assert again.digest == before["eeg-cocktail"]


def test_a_recipe_inside_a_comparison(project: Path, tmp_path: Path) -> None:
    (project / "plan.yaml").write_text(
        "recipe:\n  data: {name: own, path: texts/a.csv}\narms: [baseline, oelm]\nseeds: 3\n"
    )
    plan = make_plan(str(project / "plan.yaml"))
    assert plan.recipe["data"]["path"] == str(project / "texts" / "a.csv")
    project.rename(tmp_path / "moved")
    assert make_plan(str(tmp_path / "moved" / "plan.yaml")).digest == plan.digest


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody/x", ""])
def test_impossible_paths_are_left_for_the_reader_to_refuse(name: str) -> None:
    recipe = recipe_from({"data": {"name": "own", "path": name}})
    assert recipe.data.path == name
    assert json.dumps(recipe.to_dict())
