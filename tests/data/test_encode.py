"""Text that a run does not know: its columns, and the file that has a role."""

from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data.encode import columns_of, given_split, recipe_split
from frostlab.data.sources import plan_splits
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe


def test_columns_are_those_of_the_training(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe], write: Callable[..., Path]
) -> None:
    for name, split in (
        ("sst2", "train"), ("sst2", "validation"), ("mnli", "train"), ("wikitext2", "train"),
        ("mnli", "validation_matched"), ("wikitext2", "validation"), ("wikitext2", "test"),
        ("own", "train"),
    ):  # fmt: skip
        write(tmp_path / name / f"{split}.jsonl", [{"text": "a"}])
    for made in (
        recipe(name="sst2"),
        recipe(name="mnli"),
        recipe(name="wikitext2", task="language"),
        recipe(name="own", path=str(tmp_path / "own"), text=["a", "b"], label="c"),
        recipe(name="own", path=str(tmp_path / "own"), task="language"),
        recipe(name="docstrings", per_package=5),
        recipe(name="docstrings-pairs", per_package=5),
    ):
        data = made.data
        assert columns_of(data) == plan_splits(data, tmp_path, cache).columns  # type: ignore[arg-type]


def test_the_file_of_a_folder_with_a_role(tmp_path: Path) -> None:
    for name in ("train", "validation", "dev", "notes"):
        (tmp_path / f"{name}.csv").write_text("text\n")

    def chosen(role: str, named: str | None = None) -> str:
        return given_split(tmp_path, role, "--data", named).files[0].stem

    assert chosen("report") == chosen("tune") == "validation"
    assert chosen("train") == "train"
    assert chosen("report", "dev") == "dev", "the recipe's name of the split comes first"
    (tmp_path / "test.csv").write_text("text\n")
    assert chosen("report") == "test"
    (tmp_path / "validation.csv").unlink()
    with pytest.raises(BadInput, match="no file for tune; it has dev.csv, notes.csv, test.csv"):
        chosen("tune")


def test_published_splits_have_no_tune(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe], write: Callable[..., Path]
) -> None:
    write(tmp_path / "xnli" / "de" / "validation.jsonl", [{"premise": "a", "hypothesis": "b"}])
    data = recipe(name="xnli", splits="published").data
    assert recipe_split(data, "report", "de", tmp_path, cache).name == "validation"  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="--split tune: a run with data.splits published has no"):
        recipe_split(data, "tune", "de", tmp_path, cache)  # type: ignore[arg-type]


def test_xnli_is_trained_on_mnli(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe], write: Callable[..., Path]
) -> None:
    names = ("mnli/train", "xnli/de/train", "xnli/de/validation", "xnli/de/test")
    for name in names:
        write(tmp_path / f"{name}.jsonl", [{"premise": "a", "hypothesis": "b", "label": 0}])
    data = recipe(name="xnli", language="de").data
    plan = plan_splits(data, tmp_path, cache)  # type: ignore[arg-type]
    for role in ("train", "tune", "report"):
        split = recipe_split(data, role, None, tmp_path, cache)  # type: ignore[arg-type]
        assert split == getattr(plan, role)
    assert plan.train.files == (tmp_path / "mnli" / "train.jsonl",)
    with pytest.raises(BadInput, match="data.language de: models of xnli train on English MNLI"):
        recipe_split(data, "train", "de", tmp_path, cache)  # type: ignore[arg-type]
