"""A source becomes a checked plan, or one line that names what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from comparing import ARMS, ASKED, GROWN, HOT, LAYERS, SMALL, VARY, plan
from frostlab.comparison.load import make_plan
from frostlab.errors import BadInput
from hearing import hearing
from tiny import tiny


def test_defaults() -> None:
    made = make_plan("docstrings-gpt", {"arms": "baseline,oelm,oelm-random"})
    assert made.name == "docstrings-gpt"
    assert made.seeds == (0, 1, 2, 3, 4, 5)
    assert made.baseline.name == "baseline"
    assert [arm.name for arm in made.others] == ["oelm", "oelm-random"]
    assert (made.rules.metric, made.rules.lower_is_better, made.rules.alpha) == (
        "accuracy",
        False,
        0.05,
    )
    language = make_plan("docstrings-lm", {"arms": ARMS})
    assert (language.rules.metric, language.rules.log, language.rules.margin) == (
        "perplexity", True, 1.05,
    )  # fmt: skip


def test_a_comparison_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny()))
    path = tmp_path / "comparison.yaml"
    path.write_text(yaml.safe_dump({
        "recipe": "mine.yaml", "set": {"train.epochs": 1}, "arms": ARMS, "seeds": [4, 7],
        "metric": "macro_f1", "alpha": 0.1, "tune": {"values": [0.001, 0.003]},
    }))  # fmt: skip
    made = make_plan(path)
    assert made.seeds == (4, 7)
    assert made.recipe["train"]["epochs"] == 1
    assert made.rules.metric == made.recipe["evaluate"]["metric"] == "macro_f1"
    assert [tune.key for tune in made.tune] == ["optim.lr"]
    assert make_plan(path, {"seeds": 2}).seeds == (0, 1), "the command line counts"


def test_tuning_gets_a_grid_around_the_recipes_value() -> None:
    made = plan(tune="lr")
    assert made.tune[0].values == (0.001, 0.003, 0.009)
    assert made.recipe_of(made.arms[1], 0, {"optim.lr": 0.009}).optim.lr == 0.009


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": ["baseline"]}, "arms: baseline: a comparison needs two"),
        ({"arms": []}, "a comparison needs two, such as baseline,oelm"),
        ({"arms": ["baseline", "none"]}, "baseline and none train in the same way"),
        ({"arms": ["oelm", "oelm"]}, "oelm is given twice"),
        ({"arms": ["baseline", "olem"]}, "no treatment is called `olem`; did you mean `oelm`?"),
        ({"arms": ["baseline", 3]}, "arm 3 must be a treatment's name"),
        ({"seeds": 0}, "seeds 0: a comparison needs at least one seed"),
        ({"seeds": [1, 1]}, "a seed is given twice"),
        ({"metric": "perplexity"}, "metric perplexity does not exist for classification"),
        ({"metric": "acuracy"}, "did you mean `accuracy`?"),
        ({"tune": "beta"}, "--tune beta has no default grid"),
        ({"tune": {"values": [3.0, 1.0]}}, "should be in ascending order"),
        ({"tune": [{"values": [1.0, 3.0]}] * 2}, "tune: optim.lr is given twice"),
        ({"tune": {"key": "stages.1.lr", "values": [1e-4, 1e-3]}}, "1 is not an index of"),
        ({"alpha": 2.0}, "alpha"),
        ({"seed": 3}, "seed is not a key of a comparison; did you mean `seeds`?"),
        (
            {"arms": ["baseline", HOT]},
            "hot differs from baseline in optim.lr 0.003 → 0.01, which is a confound",
        ),
        ({"arms": ["baseline", HOT], "allow_confounds": ["rl"]}, "did you mean `lr`?"),
        (
            {
                "arms": ["baseline", {**HOT, "set": {"data.length": 8}}],
                "allow_confounds": ["length"],
            },
            "data.length 12 → 8: arms must see the same data",
        ),
        ({"arms": ["baseline", {**HOT, "set": {"optim.rl": 1}}]}, "arm hot: optim.rl"),
    ],
)
def test_what_cannot_be_compared_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.BadInput) as refused:
        plan(**given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def arm(**changes: Any) -> list[Any]:
    return ["baseline", {"name": "other", "treatment": "oelm", "set": changes}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": arm(seed=3)}, "arm other: an arm cannot set seed under `set`"),
        ({"arms": arm(treatment="bitfit")}, "an arm cannot set treatment under `set`"),
        ({"arms": arm(**{"optim.lr.x": 1})}, "lr has no settings below it"),
        ({"arms": ["baseline", {"name": "same", "treatment": "none", "set": {"optim.lr": 3e-3}}]},
         "train in the same way"),
        ({"arms": ["baseline", "oelm", {"name": "oelm-freeze", "treatment": "frozen-qk"}]},
         "its name is taken in comparison.json"),
        ({"arms": ["baseline", {"name": "dataset", "treatment": "frozen-qk"}]}, "is taken"),
        ({"arms": 5}, "arms"),
        ({"arms": {"baseline": None, "oelm": None}}, "arms"),
        ({"seeds": 5.5}, "seeds"),
        ({"seeds": True}, "seeds"),
        ({"seeds": [-1, 2]}, "a seed is 0 or more"),
        ({"seeds": {1: 2}}, "seeds"),
        ({"tune": ["lr"]}, "tune"),
        ({"tune": 5}, "tune"),
        ({"set": "train.epochs=1"}, "set"),
        ({"metric": ["accuracy"]}, "metric"),
        ({"allow_confounds": 5}, "allow_confounds"),
        ({1: 2}, "1 is not a key of a comparison"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given: dict[Any, Any], said: str) -> None:
    with pytest.raises(fl.BadInput) as refused:
        make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"], **given})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_change_a_recipe_that_is_spelled_out_and_the_clock_can_be_left_out() -> None:
    values = {"recipe": SMALL, "arms": ARMS}
    for clock in (None, False):
        plan = make_plan(values, {"clock": clock}, settings={"train.batch": 8})
        assert plan.recipe["train"]["batch"] == 8
        assert plan.clock is None
    assert make_plan(values).clock is not None
    assert make_plan(values, settings={"train.batch": 8}).recipe["train"]["batch"] == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vary": "model.layer"}, "vary model.layer: no setting has this name; did you mean"),
        ({"vary": "layers"}, "vary layers: no setting has this name; did you mean `model.layers`?"),
        ({"vary": ["model", "data"]}, "vary data: arms must see the same data"),
        (
            {"contrasts": [ASKED[0] | {"arm": "twoo"}]},
            "contrasts: twoo is not an arm; did you mean `two`",
        ),
        ({"contrasts": [ASKED[0] | {"arm": "one"}]}, "contrasts: one is compared with itself"),
        ({"contrasts": [ASKED[0] | {"of": "speed"}]}, "contrasts.0.of 'speed'"),
        ({"contrasts": [ASKED[0], ASKED[0]]}, "contrasts: `Do two layers help.` is asked twice"),
    ],
)
def test_bad_contrasts_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.BadInput, match=said) as error:
        make_plan(LAYERS | given)
    assert "\n" not in str(error.value)


def test_a_preset_cannot_hide_in_an_arm() -> None:
    """The recipe's own values would win over it, so that it did nothing."""
    arms = [{"name": "one", "set": {}}, {"name": "two", "set": {"model.preset": "v1"}}]
    with pytest.raises(BadInput, match="arm two: set.model.preset .*; set model.residual"):
        make_plan({"recipe": hearing(), "vary": VARY, "arms": arms})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"contrasts": [GROWN["contrasts"][1] | {"against": "scratch"}]},
            "contrasts: a gain needs two stages, but scratch has only one",
        ),
        (
            {
                "arms": [*GROWN["arms"][:1], {"name": "own", "set": {
                    "stages": [{}, {"lr": 1e-4, "train": ["head"]}]}}],
                "contrasts": [],
                "tune": "lr",
            },
            "arm own: a stage sets its own lr, which tuning optim.lr does not change",
        ),
    ],
)  # fmt: skip
def test_what_stages_cannot_be_asked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.BadInput, match=said):
        make_plan(GROWN | given)


def test_a_quick_look_at_arms_that_cannot_be_cut_short_is_refused() -> None:
    with pytest.raises(fl.BadInput, match="--quick: arm standard-scratch has stages"):
        make_plan("growth", quick=True)
    with pytest.raises(fl.BadInput, match=r"--quick: arm scratch .* \(set.train.epochs\)"):
        make_plan(GROWN, quick=True)


@pytest.mark.parametrize(("key", "instead"), [("treatment", "arms"), ("seed", "seeds")])
def test_what_each_arm_has_of_its_own_cannot_be_set(key: str, instead: str) -> None:
    with pytest.raises(BadInput, match=f"{key} cannot be set for all runs; use {instead}"):
        make_plan({"recipe": SMALL, "arms": ARMS}, settings={key: "oelm"})
    with pytest.raises(BadInput, match=f"{key} cannot be set for all runs; use {instead}"):
        make_plan({"recipe": SMALL, "arms": ARMS, "set": {f"{key}.x": 1}})
