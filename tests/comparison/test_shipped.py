"""The comparisons that ship: fair arms, and a control of as many FLOPs."""

from typing import Any

import pytest

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.timing.flops import savings

WORDS = 28914  # of the first 10,000 sequences of WikiText-2


PER_EPOCH = 157


def test_arms_differ_in_what_is_compared_alone() -> None:
    plan = make_plan("growth")
    assert not any(plan.confounds().values())
    assert plan.baseline.name == "standard-scratch"
    assert len(plan.arms) == 9
    assert {contrast.of for contrast in plan.contrasts} == {"value", "gain"}
    for arm in plan.arms:
        recipe = plan.recipe_of(arm, 0, {"optim.lr": 0.002, "stages.1.lr": 0.0005})
        deep = arm.name.startswith("deep")
        assert recipe.supervise.layers == ("all" if deep else "last")
        assert recipe.optim.lr == 0.002
        assert [stage.lr for stage in recipe.stages] == [None, 0.0005]  # tuned for all alike
        assert recipe.model.layers == (4 if "scratch" in arm.name else 3)


def test_as_many_steps_and_as_many_flops() -> None:
    plan = make_plan("growth")
    recipes = {arm.name: plan.recipe_of(arm, 0) for arm in plan.arms}
    short = recipes.pop("standard-scratch-flops")
    for name, recipe in recipes.items():
        assert [stage.epochs for stage in recipe.stages] == [5, 5], name
    first, second = recipes["standard-grown"].stages
    assert second.train == ("layers[3]", "head")
    whole, three, grown = (
        flops(4), flops(3), flops(4, "embedding", "layers[0:3]")
    )  # fmt: skip
    equal = PER_EPOCH * (first.epochs * three + second.epochs * grown) / whole
    assert short.stages[0].epochs == 5
    assert 5 * PER_EPOCH + short.stages[1].steps == round(equal)
    assert equal < 10 * PER_EPOCH


def flops(layers: int, *frozen: str) -> float:
    """Of training on a token in a sequence of 32."""
    model = Decoder(DecoderConfig(vocabulary=WORDS, layers=layers))
    if frozen:
        fl.freeze(model, *frozen)
    return savings(fl.anatomy(model), 32).flops


def test_a_comparison_is_no_recipe() -> None:
    with pytest.raises(fl.BadInput, match=r"it is a comparison: `frostlab compare growth`"):
        fl.load_recipe("growth")


def test_it_is_called_what_it_ships_as() -> None:
    assert make_plan("growth").name == "growth"


ABLATION = {
    "v1": ("none", "linear", 1.0),
    "v2": ("gated", "mlp", 2.0),
    "gate": ("gated", "linear", 1.0),
    "mlp-head": ("none", "mlp", 1.0),
    "gradient-scale": ("none", "linear", 2.0),
    "v2-unscaled": ("gated", "mlp", 1.0),
}


SCALES = {f"scale-{scale:g}": ("gated", "mlp", scale) for scale in (1.0, 1.5, 2.0, 3.0)}


@pytest.mark.parametrize(("name", "arms"), [("eeg-ablation", ABLATION), ("eeg-scales", SCALES)])
def test_the_shipped_ones_vary_what_they_say(name: str, arms: dict[str, Any]) -> None:
    plan = make_plan(name)
    models = {arm.name: plan.recipe_of(arm, 0).model.model_dump() for arm in plan.arms}
    switches = ("residual", "head", "gradient_scale")
    assert {arm: tuple(model[key] for key in switches) for arm, model in models.items()} == arms
    assert not any(plan.confounds().values())
