"""What a user says becomes a plan, or one line that says what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import TUNING_SEED
from tiny import tiny

ARMS = ["baseline", "oelm"]


def plan(**given: Any) -> Any:
    recipe = given.pop("recipe", tiny())
    return make_plan({"recipe": recipe, "arms": ARMS, **given})


def test_defaults() -> None:
    made = make_plan("docstrings-gpt", arms="baseline,oelm,oelm-random")
    assert made.name == "docstrings-gpt"
    assert made.seeds == (0, 1, 2, 3, 4, 5)
    assert made.baseline.name == "baseline"
    assert [arm.name for arm in made.others] == ["oelm", "oelm-random"]
    assert (made.rules.metric, made.rules.lower_is_better, made.rules.alpha) == (
        "accuracy",
        False,
        0.05,
    )
    language = make_plan("docstrings-lm", arms=ARMS)
    assert (language.rules.metric, language.rules.log, language.rules.noninferior) == (
        "perplexity", True, 1.05,
    )  # fmt: skip


def test_an_arm_differs_in_its_treatment_alone() -> None:
    made = plan(arms=["baseline", "oelm", {"name": "keys", "treatment": {"freeze": ["key"]}}])
    recipes = [made.recipe_of(arm, 3) for arm in made.arms]
    assert [r.treatment_name for r in recipes] == ["baseline", "oelm", "explicit"]
    values = [r.to_dict() | {"treatment": None} for r in recipes]
    assert values[0] == values[1] == values[2]
    assert all(r.seed == 3 for r in recipes)


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
    assert make_plan(path, seeds=2).seeds == (0, 1), "what is said on the command line counts"


def test_tuning_gets_a_grid_around_the_recipes_value() -> None:
    made = plan(tune="lr")
    assert made.tune[0].values == (0.001, 0.003, 0.009)
    assert made.recipe_of(made.arms[1], 0, {"optim.lr": 0.009}).optim.lr == 0.009


HOT = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 0.01}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": ["baseline"]}, "arms: baseline: a comparison needs two"),
        ({"arms": []}, "a comparison needs two, such as baseline,oelm"),
        ({"arms": ["baseline", "none"]}, "baseline and none are the same treatment"),
        ({"arms": ["oelm", "oelm"]}, "oelm is given twice"),
        ({"arms": ["baseline", "olem"]}, "no arm is called `olem`; did you mean `oelm`?"),
        ({"arms": ["baseline", 3]}, "arm 3 is neither"),
        ({"seeds": 0}, "seeds 0: a comparison needs at least one"),
        ({"seeds": [1, 1]}, "one is given twice"),
        ({"seeds": [TUNING_SEED]}, "are kept for tuning"),
        ({"metric": "perplexity"}, "metric perplexity does not exist for classification"),
        ({"metric": "acuracy"}, "did you mean `accuracy`?"),
        ({"tune": "beta"}, "--tune beta: cannot be tuned"),
        ({"tune": {"values": [3.0, 1.0]}}, "should rise"),
        ({"tune": [{"values": [1.0, 3.0]}] * 2}, "tune: optim.lr is given twice"),
        ({"tune": {"key": "stages.1.lr", "values": [1e-4, 1e-3]}}, "no 1 among 0"),
        ({"alpha": 2.0}, "alpha"),
        ({"seed": 3}, "seed is no key of a comparison; did you mean `seeds`?"),
        (
            {"arms": ["baseline", HOT]},
            "hot differs from baseline in optim.lr 0.003 → 0.01: a confound",
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


@pytest.mark.parametrize("name", ["lr", "optim.lr"])
def test_a_declared_confound_is_listed_with_both_values(name: str) -> None:
    made = plan(arms=["baseline", HOT], allow_confounds=[name])
    (found,) = made.confounds()["hot"]
    assert (found.key, found.baseline, found.arm) == ("optim.lr", 0.003, 0.01)
    assert str(found) == "optim.lr 0.003 → 0.01"


def test_what_is_tuned_for_all_is_no_confound() -> None:
    assert plan(arms=["baseline", HOT], tune="lr").confounds() == {"hot": ()}


def test_a_plan_keeps_its_name_when_seeds_are_added() -> None:
    assert plan(seeds=3).digest == plan(seeds=5).digest
    assert plan(seeds=3).digest != plan(seeds=3, alpha=0.01).digest
