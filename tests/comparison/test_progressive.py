"""The comparison of growing that ships: fair arms, and a control of as many FLOPs."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.timing.flops import savings
from stages import progressive

WORDS = 28914  # of the first 10,000 sequences of WikiText-2
PER_EPOCH = 157


def test_arms_differ_in_what_is_compared_alone() -> None:
    plan = make_plan("progressive")
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
    plan = make_plan("progressive")
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
    with pytest.raises(fl.BadInput, match=r"it is a comparison: `frostlab compare progressive`"):
        fl.load_recipe("progressive")


STAGES = [{"name": "one layer"}, {"name": "grown", "add": {}, "train": ["layers[1]", "head"]}]
ALL = [{"name": "one layer"}, {"name": "grown", "add": {}}]
GROWN: dict[str, Any] = {
    "recipe": progressive(stages=[]),
    "vary": ["model.layers", "stages", "supervise", "train.epochs"],
    "arms": [
        {"name": "scratch", "set": {"model.layers": 2, "train.epochs": 4}},
        {"name": "grown", "set": {"stages": STAGES}},
        {"name": "deep", "set": {"stages": ALL, "supervise.layers": "all"}},
    ],
    "contrasts": [
        {"question": "Is it better?", "arm": "grown", "against": "scratch"},
        {"question": "Is it easier?", "arm": "deep", "against": "grown", "of": "gain"},
    ],
    "seeds": 2,
}


def test_stages_are_compared(tmp_path: Path) -> None:
    lines: list[str] = []
    found = fl.compare(GROWN, out=tmp_path / "c", say=lines.append)
    evidence, text = found.evidence, found.page.read_text()
    assert evidence["refused_pairs"] == []  # the same examples in the same order
    assert evidence["timing"] is None
    assert "steps are not timed against each other: those of every stage are others" in lines
    asked = {each["question"]: each for each in evidence["contrasts"]}
    gains = {
        name: [
            math.log(run["stages"][1]["best"]["value"] / run["stages"][0]["best"]["value"])
            for run in evidence["arms"][name]["runs"]
        ]
        for name in ("deep", "grown")
    }
    gap = [a - b for a, b in zip(gains["deep"], gains["grown"], strict=True)]
    assert abs(sum(gap)) > 1e-4
    assert asked["Is it easier?"]["paired"]["effect"] == pytest.approx(math.exp(sum(gap) / 2))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    place = next(i for i, row in enumerate(rows) if row[:2] == ["grown", "one layer"])
    first, second = rows[place], rows[place + 1]
    runs = evidence["arms"]["grown"]["runs"]
    bests = [sum(run["stages"][i]["best"]["value"] for run in runs) / len(runs) for i in range(2)]
    assert (first[-1], second[-1]) == ("", f"{1 - bests[1] / bests[0]:+.2%}")
    assert second[:2] == ["", "grown"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"contrasts": [GROWN["contrasts"][1] | {"against": "scratch"}]},
            "contrasts: a gain is asked of scratch, which has one stage",
        ),
        (
            {
                "arms": [*GROWN["arms"][:1], {"name": "own", "set": {
                    "stages": [{}, {"lr": 1e-4, "train": ["head"]}]}}],
                "contrasts": [],
                "tune": "lr",
            },
            "arm own: a stage has an lr of its own, which tuning optim.lr would not reach",
        ),
    ],
)  # fmt: skip
def test_what_stages_cannot_be_asked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.BadInput, match=said):
        make_plan(GROWN | given)


def test_a_quick_look_at_arms_that_cannot_be_cut_short_is_refused() -> None:
    with pytest.raises(
        fl.BadInput, match=r"--quick: arm standard-scratch says itself .* \(its stages"
    ):
        make_plan("progressive", quick=True)
    with pytest.raises(fl.BadInput, match=r"--quick: arm scratch .* \(set.train.epochs\)"):
        make_plan(GROWN, quick=True)


def test_it_is_called_what_it_ships_as() -> None:
    assert make_plan("progressive").name == "progressive"


@pytest.mark.slow
def test_a_stages_rate_is_tuned_at_the_best_of_the_run(tmp_path: Path) -> None:
    grids = {"optim.lr": [1e-4, 1e-2], "stages.1.lr": [1e-4, 1e-2]}
    found = fl.compare(
        {
            "recipe": progressive(stages=[]),
            "vary": ["stages", "supervise"],
            "arms": [
                {"name": "standard", "set": {"stages": STAGES}},
                {"name": "deep", "set": {"stages": STAGES, "supervise.layers": "all"}},
            ],
            "seeds": 1,
            "tune": [{"key": key, "values": values, "seeds": 1} for key, values in grids.items()],
        },
        out=tmp_path / "c",
    )
    first, second = found.evidence["tuning"]
    assert (first["key"], second["key"]) == ("optim.lr", "stages.1.lr")
    for arm in ("standard", "deep"):
        for value in second["values"]:
            run = tmp_path / "c" / "tuning" / f"{arm}-stages.1.lr-{value:g}-s900000"
            recipe = yaml.safe_load((run / "recipe.yaml").read_text())
            assert recipe["optim"]["lr"] == first["best"][arm]
            assert recipe["stages"][1]["lr"] == value
        last = yaml.safe_load((tmp_path / "c" / "runs" / f"{arm}-s0" / "recipe.yaml").read_text())
        assert (last["optim"]["lr"], last["stages"][1]["lr"]) == (
            first["best"][arm], second["best"][arm]
        )  # fmt: skip
    text = found.page.read_text()
    assert text.count("← best") == 4
    assert "- stages.1.lr was tuned for each on an equal budget" in text
