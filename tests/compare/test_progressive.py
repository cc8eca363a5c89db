"""The comparison of growing that ships: fair arms, and a control of as many FLOPs."""

import pytest

import frostlab as fl
from frostlab.anatomy.savings import savings
from frostlab.compare.planning import make_plan
from frostlab.models.decoder import Decoder, DecoderConfig

WORDS = 28914  # of the first 10,000 sequences of WikiText-2
PER_EPOCH = 157


def test_arms_differ_in_what_is_compared_alone() -> None:
    plan = make_plan("progressive")
    assert not any(plan.confounds().values())
    assert plan.baseline.name == "standard-scratch"
    assert len(plan.arms) == 9
    assert {contrast.of for contrast in plan.contrasts} == {"value", "gain"}
    for arm in plan.arms:
        recipe = plan.recipe_of(arm, 0, tuned=0.002)
        deep = arm.name.startswith("deep")
        assert recipe.supervise.layers == ("all" if deep else "last")
        assert recipe.optim.lr == 0.002
        assert all(stage.lr is None for stage in recipe.stages)  # what is tuned holds for all
        assert recipe.model.layers == (4 if "scratch" in arm.name else 3)


def test_as_many_steps_and_as_many_flops() -> None:
    plan = make_plan("progressive")
    recipes = {arm.name: plan.recipe_of(arm, 0) for arm in plan.arms}
    for name, recipe in recipes.items():
        epochs = sum(stage.epochs or 0 for stage in recipe.stages) or recipe.train.epochs
        if name != "standard-scratch-flops":
            assert epochs == 10, name
    first, second = recipes["standard-grown"].stages
    assert second.train == ("layers[3]", "head")
    whole, three, grown = (
        flops(4), flops(3), flops(4, "embedding", "layers[0:3]")
    )  # fmt: skip
    assert first.epochs == second.epochs == 5
    equal = PER_EPOCH * (first.epochs * three + second.epochs * grown) / whole
    assert recipes["standard-scratch-flops"].train.steps == round(equal)
    assert equal < 10 * PER_EPOCH


def flops(layers: int, *frozen: str) -> float:
    """Of training on a token in a sequence of 32."""
    model = Decoder(DecoderConfig(vocabulary=WORDS, layers=layers))
    if frozen:
        fl.freeze(model, *frozen)
    return savings(fl.anatomy(model), 32).flops


def test_a_comparison_is_no_recipe() -> None:
    with pytest.raises(fl.BadInput, match=r"it is a comparison: `frostlab compare progressive`"):
        fl.load_recipe("progressive")
