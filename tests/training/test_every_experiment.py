"""The whole catalogue trains: every experiment of every group, at the scale tiny on stand-ins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.models.stand_in import with_stand_ins
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.load import load_recipe, shipped_experiments
from offline import cut_off

GROUPS = {name: load_group(name) for name in group_names()}
EXPERIMENTS = list(dict.fromkeys(id for group in GROUPS.values() for id in group.experiments))
FAIR = [(group, name) for group in GROUPS for name in GROUPS[group].fair]


@pytest.fixture(autouse=True)
def _nothing_at_hand() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cut_off(patch)
        yield


def test_the_groups_hold_every_experiment() -> None:
    assert set(shipped_experiments()) <= set(EXPERIMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_trains(name: str, tmp_path: Path) -> None:
    full = load_recipe(name)
    run = fl.run(name, scale="tiny", stand_in=True, out=tmp_path / "run")
    assert run.status == "finished"
    assert run.recipe.metric in run.metrics
    assert run.recipe.treatment == full.treatment
    assert len(run.result.stages) == max(1, len(full.stages))
    assert (run.result.caution or "").startswith("scale tiny")
    assert ("stand-in" in str(run.result.caution)) == (full.data.form == "text")
    frozen = run.result.parameters.total - run.result.parameters.trainable
    last = full.stages[-1].train if full.stages else None
    assert bool(frozen) == bool(full.surgery.freeze or last)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), FAIR)
def test_every_fair_comparison_can_be_planned(group: str, name: str) -> None:
    keys = GROUPS[group].fair[name]
    plan = make_plan(keys, {"seeds": 2}, settings={"scale": "tiny"}, stand_in=with_stand_ins)
    recipes = [plan.recipe_of(arm, 0) for arm in plan.arms]
    assert {recipe.scale for recipe in recipes} == {"tiny"}
    assert {bool(recipe.stand_ins) for recipe in recipes} == {recipes[0].data.form == "text"}
    assert {arm.name for arm in plan.arms} == {
        arm.name for arm in make_plan(keys, {"seeds": 2}).arms
    }
