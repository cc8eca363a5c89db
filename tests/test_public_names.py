"""Calls of the public names that several rooms serve: `fl.run`'s settings, and the loaders."""

import json
from pathlib import Path

import pytest
import yaml

import frostlab as fl
from flowing import adamw, tiny_gpt, watched
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from frostlab.training.run import _resolve
from tiny import tiny


def test_run_takes_settings_and_a_seed(tmp_path: Path) -> None:
    settings = {"optim.lr": 1e-4, "train.steps": 3, "treatment": {"freeze": ["query"]}}
    record = fl.run(tiny(), settings, seed=3, runs=tmp_path)
    assert record.folder == tmp_path / "run-explicit-s3"
    used = yaml.safe_load((record.folder / "recipe.yaml").read_text())
    assert (used["optim"]["lr"], used["seed"], used["model"]["width"]) == (1e-4, 3, 16)
    assert (used["train"]["steps"], used["train"]["epochs"]) == (3, None)
    assert used["treatment"]["freeze"] == ["query"]


def test_every_kind_of_recipe_takes_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny()))
    for recipe in (
        tiny(),
        recipe_from(tiny()),
        tmp_path / "mine.yaml",
        str(tmp_path / "mine.yaml"),
    ):
        changed, name = _resolve(recipe, {"optim.lr": 0.5, "watch.every_n_steps": 7}, 4, None)
        assert (changed.optim.lr, changed.seed) == (0.5, 4)
        assert changed.watch is not None
        assert changed.watch.every_n_steps == 7
        assert name == ("mine" if isinstance(recipe, str | Path) else "run")
        same, _ = _resolve(recipe, {}, None, None)
        assert same == recipe_from(tiny())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim.lt": 1}, "did you mean `lr`?"),
        ({"optim.lr": "fast"}, "optim.lr"),
        ({"optim.lr": Path()}, "a value does not fit JSON"),
        ({"": 1}, "is not a key"),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, object], message: str) -> None:
    for recipe in ("docstrings-gpt", tiny(), recipe_from(tiny())):
        with pytest.raises(fl.BadInput) as error:
            _resolve(recipe, settings, None, None)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_bad_seed_is_refused() -> None:
    for recipe in ("docstrings-gpt", tiny(), recipe_from(tiny())):
        with pytest.raises(fl.BadInput, match="seed"):
            _resolve(recipe, {}, -1, None)


def test_load_run(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    assert fl.load_run(str(record.folder)) == record
    assert fl.load_run(record.folder).metrics == record.metrics
    with pytest.raises(fl.BadInput, match="does not hold a run: it has no events.jsonl"):
        fl.load_run(tmp_path)
    with pytest.raises(fl.BadInput, match="nowhere does not hold a run: it is not a folder"):
        fl.load_run(tmp_path / "nowhere")


def test_load_comparison(tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="a finished comparison: it has no evidence.json"):
        fl.load_comparison(tmp_path)
    with pytest.raises(fl.BadInput, match="a finished comparison: it is not a folder"):
        fl.load_comparison(tmp_path / "nowhere")
    (tmp_path / "evidence.json").write_text(json.dumps({"schema": 1, "name": "mine"}))
    with pytest.raises(fl.BadInput, match="has schema 1, and this frostlab reads 6"):
        fl.load_comparison(str(tmp_path))
    (tmp_path / "evidence.json").write_text("{")
    with pytest.raises(fl.BadInput, match="is not valid JSON"):
        fl.load_comparison(tmp_path)


def test_a_repr_is_one_short_line(tmp_path: Path) -> None:
    model = tiny_gpt()
    anatomy = fl.freeze(model, "layers[0].query")
    assert repr(anatomy) == (
        "Anatomy(GPT: 3 layers, 53 parts, 7,200 of 7,472 parameters trainable)"
    )
    assert repr(fl.audit(model)) == "Audit(GPT: 2 frozen and 51 trainable tensors)"
    flow = watched(model, adamw(model))
    assert repr(flow).startswith(
        "LiveFlow(GPT, AdamW, 5 reports: all 24 parts that should learn do"
    )
    assert repr(fl.grow(model, 2)) == "Growth(layers 3, 4 are new)"
    recipe = fl.load_recipe("docstrings-gpt")
    assert repr(recipe) == str(recipe)
    assert repr(recipe) == (
        f"Recipe(data docstrings, model gpt, treatment none, seed 0; digest {recipe.digest})"
    )
    record = fl.run(tiny(), runs=tmp_path)
    accuracy = f"accuracy {record.metrics['accuracy']:.4g}"
    assert repr(record).startswith(f"Run({record.folder}: finished, {accuracy}, ")
    assert repr(RunRecord(tmp_path)) == f"RunRecord({tmp_path}: not finished)"
    assert repr(fl.Comparison(tmp_path)) == f"Comparison({tmp_path}: no verdicts yet)"
    for value in (anatomy, flow, recipe, record):
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)
