"""Plans of groups: as published, each arm is the sources' experiment; fair ones are tuned."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from frostlab import BadInput
from frostlab.comparison.plan import Plan
from frostlab.experiments.plans import arm_name, group_plans, is_group_source
from frostlab.recipe.groups import group_names, load_group
from tiny_group import GROUP, write_group


def settings_of(plan: Plan, arm: int) -> dict[str, Any]:
    recipe = plan.recipe_of(plan.arms[arm], 0).to_dict()
    recipe["evaluate"].pop("metric")  # a plan names the metric that the recipe has by default
    return {key: value for key, value in recipe.items() if key != "about"}


@pytest.mark.parametrize("name", [name for name in group_names() if load_group(name).published])
def test_as_published_every_arm_has_the_recipe_of_its_experiment(name: str) -> None:
    group = load_group(name)
    plans = group_plans(group, as_published=True)
    assert plans.keys() == group.published.keys()
    for comparison, plan in plans.items():
        ids = group.arms(comparison)
        assert [arm.name for arm in plan.arms] == [arm_name(experiment) for experiment in ids]
        assert plan.baseline.name == arm_name(ids[0])
        for index, experiment in enumerate(ids):
            expected = group.recipe(experiment).to_dict()
            expected["evaluate"].pop("metric")
            del expected["about"]
            assert settings_of(plan, index) == expected
        assert not plan.tune
        assert "as published" in plan.about


@pytest.mark.parametrize("name", [name for name in group_names() if load_group(name).fair])
def test_a_fair_comparison_has_no_confounds(name: str) -> None:
    group = load_group(name)
    plans = group_plans(group)
    assert plans.keys() == group.fair.keys()
    for plan in plans.values():
        assert not any(plan.confounds().values())
        assert "fair: the arms" in plan.about


def test_phase_3_is_confounded_by_the_learning_rate_and_tuned_if_it_is_fair() -> None:
    group = load_group("phase3")
    plan = group_plans(group, as_published=True)["tinystories"]
    confounds = {arm: list(map(str, found)) for arm, found in plan.confounds().items()}
    rate = ["optim.lr 0.0003 → 0.001"]
    assert confounds == {"gpt-02": rate, "gpt-03": rate}
    assert plan.name == "phase3-as-published-tinystories"
    fair = group_plans(group, only=["tinystories"])
    assert list(fair) == ["tinystories"]
    assert [tune.key for tune in fair["tinystories"].tune] == ["optim.lr"]


def test_options_apply_to_every_comparison(group_file: Path) -> None:
    group = load_group(str(group_file))
    for as_published in (True, False):
        plans = group_plans(
            group, as_published=as_published, changes={"seeds": 3, "rounds": 2},
            settings={"train.steps": 7}, quick=True,
        )  # fmt: skip
        for plan in plans.values():
            assert (len(plan.seeds), plan.rounds, plan.quick) == (3, 2, True)
            assert all(plan.recipe_of(arm, 0).train.steps == 7 for arm in plan.arms)


def test_a_changed_setting_is_not_called_published(group_file: Path) -> None:
    group = load_group(str(group_file))
    settings = {"train.steps": 7, "train.device": "cpu"}
    plan = group_plans(group, as_published=True, settings=settings)["rates"]
    assert plan.about.endswith("Not as published: train.steps 7.")
    same = group_plans(group, as_published=True, settings={"train.device": "cpu"})["rates"]
    assert "Not as published" not in same.about
    fair = group_plans(group, settings=settings)["rates"]
    assert fair.about.endswith("in what is compared. Not as in the group: train.steps 7.")
    assert plan.digest == plan.model_copy(update={"about": "another text"}).digest


def test_what_is_a_group(group_file: Path) -> None:
    assert is_group_source("phase3")
    assert is_group_source(group_file)
    for other in ("docstrings-gpt", "eeg-ablation", str(group_file.parent / "plain.yaml"),
                  {"recipe": "docstrings-gpt"}):  # fmt: skip
        assert not is_group_source(other)
    with pytest.raises(BadInput, match="nowhere.yaml cannot be read"):
        is_group_source("nowhere.yaml")


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"only": ["rate"]}, "--only rate is not a comparison of mine; did you mean `rates`?"),
    ({}, {"changes": {"seeds": 0}}, "mine, rates: seeds 0: a comparison needs at least one seed"),
    ({}, {"settings": {"optim.lt": 1}}, "mine, rates: settings: optim.lt is not a key; did you"),
    ({}, {"settings": {"treatment": "oelm"}}, "treatment cannot be set for all runs; use arms"),
    ({"fair": {}}, {}, "mine has no fair comparisons; compare it with --as-published"),
    ({"published": {}}, {"as_published": True}, "mine has no published comparisons; compare it"),
    ({"fair": {"a": {"recipe": "plain.yaml", "arm": []}}}, {}, "mine, a: comparison: arm is not a"),
    ({"fair": {"a": {"recipe": "no.yaml", "arms": ["none", "oelm"]}}}, {}, "no.yaml cannot be"),
    ({"published": {"a": {"arms": ["plain.yaml", "oelm.yaml"], "metric": "bleu"}}},
     {"as_published": True}, "mine, a: metric bleu does not exist for classification"),
    ({"fair": {"../a": {"recipe": "plain.yaml", "arms": ["none", "oelm"]}}}, {},
     "mine: the comparison's name '../a' should be a plain file name"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "message"), WRONG, ids=lambda value: str(value)[:40]
)
def test_bad_input_is_one_line(
    group_file: Path, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    write_group(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GROUP | changes))
    group = load_group(str(tmp_path / "mine.yaml"))
    with pytest.raises(BadInput) as error:
        group_plans(group, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
