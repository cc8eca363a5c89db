"""Comparisons of decoders: subjects as pairs, the ridge decoder beside, steps on the clock."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from frostlab.comparison.evidence import subject_tests
from frostlab.comparison.load import make_plan
from frostlab.comparison.page import show
from frostlab.comparison.run import Comparison, compare
from frostlab.comparison.run import _shortened as shortened
from frostlab.comparison.runner import ComparisonFolder
from frostlab.comparison.timed_arms import time_arms
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput
from frostlab.flow.diagnosis import diagnose
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Watch
from frostlab.records.folder import RunRecord, read_scores
from hearing import hearing

VARY = ["model.residual", "model.head", "model.gradient_scale"]
PLAIN = {"model.residual": "none", "model.head": "linear", "model.gradient_scale": 1.0}


SPEC = {
    "recipe": hearing(
        data__subjects=3,
        data__unseen=2,
        model__layers=3,
        train__epochs=1,
        watch={"every_n_steps": 1},
    ),
    "vary": VARY,
    "arms": [
        {"name": "v1", "set": PLAIN},
        {"name": "v2", "set": {}},
        {"name": "head", "set": PLAIN | {"model.head": "mlp"}},
    ],
    "contrasts": [{"question": "Better?", "arm": "v2", "against": "v1"}],
    "clock": None,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(SPEC, seeds=2, out=tmp_path_factory.mktemp("compared") / "it")


@pytest.mark.parametrize(("split", "people"), [("report", 3), ("unseen", 2)])
def test_subjects_are_pairs(made: Comparison, split: str, people: int) -> None:
    found = made.evidence["subjects"]
    assert set(found) == {"report", "unseen"}
    test, other = (found[split]["subjects"][arm] for arm in ("v2", "head"))
    z = {}
    for arm in ("v1", "v2"):
        scores = [read_scores(made.folder / "runs" / f"{arm}-s{s}")[split] for s in (0, 1)]
        of_seeds = [[np.arctanh(each.r) for each in one["model"].subjects] for one in scores]
        z[arm] = np.mean(of_seeds, axis=0)
    assert (test["n"], test["seeds"]) == (people, 2)
    assert test["r"] == pytest.approx(np.tanh(z["v2"].mean()) - np.tanh(z["v1"].mean()))
    low, high = sorted([test["p"], other["p"]])
    holm = {low: min(1, 2 * low), high: min(1, max(2 * low, high))}
    assert [each["p_adjusted"] for each in (test, other)] == [holm[test["p"]], holm[other["p"]]]
    assert test["better"] == (z["v2"] > z["v1"]).sum()
    assert test["z"]["effect"] == pytest.approx((z["v2"] - z["v1"]).mean())
    assert test["p"] == pytest.approx(stats.ttest_rel(z["v2"], z["v1"]).pvalue)
    apart = np.tanh(z["v2"]) - np.tanh(z["v1"])
    assert test["p_signed"] == pytest.approx(stats.wilcoxon(apart).pvalue)


def test_a_refused_run_is_no_pair(made: Comparison) -> None:
    plan = make_plan(SPEC, seeds=2)
    runs = {
        (arm.name, s): RunRecord(made.folder / "runs" / f"{arm.name}-s{s}")
        for arm in plan.arms
        for s in plan.seeds
    }
    found = subject_tests(plan, runs, [{"arm": "v2", "seed": 0}])["report"]
    assert [found["subjects"][arm]["seeds"] for arm in ("v2", "head")] == [1, 2]
    of_both = [runs[arm, 1].metrics["pearson"] for arm in ("v2", "v1")]
    assert found["subjects"]["v2"]["r"] == pytest.approx(of_both[0] - of_both[1])


def test_every_arm_stands_beside_the_ridge_decoder(made: Comparison) -> None:
    ridge = made.evidence["subjects"]["report"]["ridge"]["v1"]
    runs = [run["metrics"] for run in made.evidence["arms"]["v1"]["runs"]]
    apart = [metrics["pearson"] - metrics["ridge"] for metrics in runs]
    assert ridge["effect"] == pytest.approx(np.mean(apart))
    assert ridge["n"] == 2
    text = made.page.read_text()
    assert "## Subjects" in text
    assert "r − ridge, over seeds" in text


def test_the_terminal_shows_its_own_questions(made: Comparison) -> None:
    said = show(made.evidence, made.page)
    assert "Better? too few seeds" in said
    assert "Is orthogonality needed?" not in said


def test_gradients_of_the_front_stand_beside(made: Comparison) -> None:
    found = made.evidence["flow"]
    for arm in ("v1", "v2"):
        runs = [diagnose(made.folder / "runs" / f"{arm}-s{s}") for s in (0, 1)]
        ratios = [list(run.flows.values())[-1].depth_ratios().front_ratio for run in runs]
        assert found[arm]["front_ratio"]["spread"]["mean"] == pytest.approx(np.mean(ratios))
        updates = []
        for run in runs:
            flow = list(run.flows.values())[-1]
            front = [i for i, part in enumerate(flow.parts) if part.layer in (0, 1)]
            updates.append(
                np.median([np.median([r.ratio(i) for i in front]) for r in flow.reports])
            )
        assert found[arm]["update"]["spread"]["mean"] == pytest.approx(np.mean(updates))
    assert found["v1"]["front_ratio"]["against"] is None
    means = [found[arm]["weight_change"]["spread"] for arm in ("v1", "v2")]
    against = found["v2"]["weight_change"]["against"]
    assert against["n"] == 2
    assert against["effect"] == pytest.approx(means[1]["mean"] / means[0]["mean"], rel=0.2)
    assert "front/output gradient" in made.page.read_text()


def test_pearson_is_better_when_higher(made: Comparison) -> None:
    rules = made.evidence["plan"]["rules"]
    assert (rules["metric"], rules["lower_is_better"], rules["log"]) == ("pearson", False, False)


@pytest.mark.slow
def test_steps_on_windows_are_timed() -> None:
    recipes = {name: recipe_from(hearing(model__layers=n)) for name, n in (("a", 1), ("b", 2))}
    timing = time_arms(
        recipes, prepare(recipes["a"]), baseline="a", device=torch.device("cpu"), seconds=0.5
    )
    assert all(timing.arms[name].ms_median > 0 for name in recipes)
    assert timing.arms["a"].trainable < timing.arms["b"].trainable


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
    plan = make_plan(name, seeds=6)
    models = {arm.name: plan.recipe_of(arm, 0).model.model_dump() for arm in plan.arms}
    switches = ("residual", "head", "gradient_scale")
    assert {arm: tuple(model[key] for key in switches) for arm, model in models.items()} == arms
    assert not any(plan.confounds().values())


def test_a_preset_cannot_hide_in_an_arm() -> None:
    """The recipe's own values would win over it, so that it did nothing."""
    arms = [{"name": "one", "set": {}}, {"name": "two", "set": {"model.preset": "v1"}}]
    with pytest.raises(BadInput, match="arm two: set.model.preset .*; set what it stands for"):
        make_plan({"recipe": hearing(), "vary": VARY, "arms": arms}, seeds=1)


@pytest.mark.parametrize(("steps", "every"), [(11, 1), (60, 3), (900, 20)])
def test_a_quick_look_is_watched_as_often_as_it_needs(
    steps: int, every: int, tmp_path: Path
) -> None:
    folder = ComparisonFolder(tmp_path)
    folder.write("quick.json", {"steps": steps, "of": 1000})
    plan = shortened(make_plan("eeg-ablation", quick=True), folder, None, None)
    assert plan.recipe_of(plan.baseline, 0).watch == Watch(every_n_steps=every)
