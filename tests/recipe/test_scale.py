"""Scales: what a scaled recipe keeps, what becomes smaller, and what a user's setting decides."""

from pathlib import Path
from typing import Any

import pytest

from cases import TYPICAL, slow_unless
from frostlab.comparison.load import make_plan
from frostlab.errors import BadInput
from frostlab.recipe.load import load_recipe, recipe_from, shipped_recipes
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.scale import SIZES, scaled_values
from frostlab.recipe.settings import Evaluate

RECIPES = list(shipped_recipes())
KEPT = ("about", "treatment", "supervise", "loss", "seed")


def numbers_of(values: Any, path: str = "") -> dict[str, float]:
    """Every number among nested values, by its path."""
    if isinstance(values, bool) or values is None:
        return {}
    if isinstance(values, int | float):
        return {path: values}
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {k: v for key, value in items for k, v in numbers_of(value, f"{path}.{key}").items()}
    return {}


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize("name", slow_unless(TYPICAL, RECIPES))
def test_every_recipe_becomes_smaller_and_stays_itself(name: str, scale: str) -> None:
    full, scaled = load_recipe(name), load_recipe(name, {"scale": scale})
    assert (full.scale, scaled.scale) == ("full", scale)
    assert full.digest != scaled.digest
    assert scaled.caution == f"scale {scale}"
    for key in KEPT:
        assert getattr(scaled, key) == getattr(full, key)
    assert scaled.data.name == full.data.name
    assert scaled.optim.lr == full.optim.lr
    assert [stage.model_copy(update=dict.fromkeys(("epochs", "steps", "patience")))
            for stage in scaled.stages] == [
        stage.model_copy(update=dict.fromkeys(("epochs", "steps", "patience")))
        for stage in full.stages
    ]  # fmt: skip
    before, after = (numbers_of(recipe.to_dict()) for recipe in (full, scaled))
    assert not {key for key in after if key in before and after[key] > before[key]}
    sizes = SIZES[scale]
    assert scaled.train.batch <= sizes.batch
    assert (scaled.train.steps or scaled.train.epochs or 0) <= max(sizes.steps, sizes.epochs)
    if hasattr(scaled.model, "width"):
        assert scaled.model.width % (2 * scaled.model.heads) == 0
        assert scaled.model.layers == full.model.layers
    # scaled again, or read from the record of a run, it is the same
    assert recipe_from(scaled.to_dict()) == scaled
    assert recipe_from(scaled.to_dict(), settings={"scale": scale}) == scaled


def test_a_full_recipe_is_left_alone() -> None:
    assert scaled_values(Recipe()) == Recipe().to_dict()


def test_a_users_settings_win() -> None:
    settings = {"train.steps": 50, "data.limit": None, "model.width": 64, "model.heads": 2}
    recipe = load_recipe("gpt-02", {**settings, "scale": "tiny"})
    assert (recipe.train.steps, recipe.data.limit) == (50, None)  # type: ignore[union-attr]
    assert (recipe.model.width, recipe.model.heads) == (64, 2)  # type: ignore[union-attr]
    assert recipe.train.batch == SIZES["tiny"].batch
    assert recipe.evaluate.every == 25, "at least once in the 50 steps"
    assert recipe_from(recipe.to_dict()) == recipe, "the record of the run is not scaled again"
    many_heads = load_recipe("gpt-02", {"scale": "tiny", "model.heads": 16})
    assert many_heads.model.width == 64  # type: ignore[union-attr]


def test_a_file_scales_its_parents_but_not_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: gpt-02\nscale: tiny\ntrain: {steps: 20}\n")
    mine, tiny = load_recipe(str(path)), load_recipe("gpt-02", {"scale": "tiny"})
    assert (mine.train.steps, tiny.train.steps) == (20, 8)
    assert mine.model == tiny.model
    child = tmp_path / "child.yaml"
    child.write_text("extends: mine.yaml\ntrain: {batch: 12}\n")
    assert load_recipe(str(child)).train.batch == 12


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train": {"steps": 10_000}, "evaluate": {"every": 1000}}, 4),
        ({"train": {"steps": 10_000}, "evaluate": {"every": "epoch"}}, "epoch"),  # 8 steps
        ({"train": {"steps": 10_000}, "evaluate": {"every": "3 epochs"}}, 4),
        ({"train": {"epochs": 50}, "evaluate": {"every": 500}}, 8),
        ({"train": {"epochs": 50}, "evaluate": {"every": "10 epochs"}}, "2 epochs"),
        ({"train": {"steps": 2}, "evaluate": {"every": "epoch"}}, 1),
        ({"stages": [{"steps": 3}, {"epochs": 9}], "evaluate": {"every": 100}}, 1),
    ],
)
def test_evaluations_still_take_place(given: dict[str, Any], expected: int | str) -> None:
    recipe = recipe_from(given, settings={"scale": "tiny"})
    assert recipe.evaluate.every == expected
    assert recipe_from(recipe.to_dict(), settings={"scale": "tiny"}) == recipe


def test_other_intervals_and_lengths_fit() -> None:
    recipe = recipe_from(
        {
            "data": {"task": "language", "length": 512, "stride": 520},
            "model": {"kind": "gpt", "width": 512, "hidden": 1000},
            "optim": {"warmup": 1000.0},
            "train": {"steps": 4000, "batch": 64, "accumulate": 8},
            "evaluate": {"patience": 30},
            "watch": {"every_n_steps": 100},
        },
        settings={"scale": "tiny"},
    )
    assert (recipe.data.length, recipe.data.stride) == (64, 72)  # type: ignore[union-attr]
    assert recipe.model.hidden == 62  # type: ignore[union-attr]
    assert recipe.optim.warmup == 0.25
    assert recipe.train.batch == 8
    assert recipe.evaluate == Evaluate(every="epoch", patience=2)
    assert recipe.watch is not None
    assert recipe.watch.every_n_steps == 2
    recorded = recipe_from(
        {"data": {"name": "eeg-challenge", "path": "x"}, "model": {"kind": "conformer"},
         "train": {"epochs": 1000}}, settings={"scale": "tiny"},
    )  # fmt: skip
    assert recorded.train.steps == 8, "recordings have no setting that limits an epoch"


def test_a_scaled_recipe_cannot_be_enlarged() -> None:
    tiny = load_recipe("gpt-02", {"scale": "tiny"}).to_dict()
    with pytest.raises(BadInput, match="scale full, but recipe has scale tiny; a scaled recipe"):
        recipe_from(tiny, settings={"scale": "full"})
    with pytest.raises(BadInput, match="scale = 'huge' should be one of tiny, small, full"):
        load_recipe("gpt-02", {"scale": "huge"})


def test_arms_are_scaled_after_their_settings() -> None:
    keys = {
        "recipe": "docstrings-decoder",
        "vary": ["stages", "model.layers"],
        "set": {"watch.every_n_steps": 500},
        "arms": [
            {"name": "whole", "set": {"stages": [{"epochs": 40}]}},
            {"name": "grown", "set": {"model.layers": 3, "stages": [
                {"epochs": 9}, {"steps": 700, "add": {}, "train": ["layers[3]", "head"]}]}},
        ],
    }  # fmt: skip
    settings = {"scale": "tiny", "train.batch": 16, "model.layers": 5}
    plan = make_plan(keys, {"seeds": 2, "clock": False}, settings=settings)
    whole, grown = (plan.recipe_of(arm, 1) for arm in plan.arms)
    assert [recipe.scale for recipe in (whole, grown)] == ["tiny", "tiny"]
    assert [recipe.train.batch for recipe in (whole, grown)] == [16, 16]
    assert [recipe.model.layers for recipe in (whole, grown)] == [5, 3]  # type: ignore[union-attr]
    assert [(stage.epochs, stage.steps) for stage in whole.stages] == [(2, None)]
    assert [(stage.epochs, stage.steps) for stage in grown.stages] == [(2, None), (None, 8)]
    assert whole.watch is not None
    assert whole.watch.every_n_steps < 5
    again = make_plan({**keys, "recipe": whole.to_dict()}, {"seeds": 2, "clock": False},
                      settings=settings)  # fmt: skip
    assert again.recipe_of(again.arms[1], 1) == grown, "as a group passes scaled recipes on"


def test_an_arm_cannot_have_a_scale_of_its_own() -> None:
    arms = ["baseline", {"name": "x", "set": {"scale": "tiny"}}]
    with pytest.raises(BadInput, match="arm x: an arm cannot set scale"):
        make_plan("docstrings-gpt", {"arms": arms})


def test_steps_are_timed_for_a_shorter_time() -> None:
    arms = {"arms": "baseline,oelm"}
    plan = make_plan("docstrings-gpt", arms, settings={"scale": "tiny"})
    assert plan.clock is not None
    assert plan.clock.seconds == SIZES["tiny"].timing
    asked = make_plan(
        "docstrings-gpt", {**arms, "clock": {"seconds": 7.0}}, settings={"scale": "tiny"}
    )
    assert asked.clock is not None
    assert asked.clock.seconds == 7
