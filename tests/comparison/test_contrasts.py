"""Arms that vary in more than the treatment, and the questions that pairs of them answer."""

from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import rules_for
from frostlab.comparison.statistics import holm
from frostlab.comparison.verdict import judge, judge_family
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)
ASKED = [
    {"question": "Do two layers help?", "arm": "two", "against": "one"},
    {"question": "Does freezing hurt with two?", "arm": "two-frozen", "against": "two"},
]
VALUES: dict[str, Any] = {
    "recipe": SMALL,
    "arms": [
        {"name": "one", "set": {}},
        {"name": "two", "set": {"model.layers": 2}},
        {"name": "two-frozen", "treatment": "oelm", "set": {"model.layers": 2}},
    ],
    "vary": "model.layers",
    "contrasts": ASKED,
    "clock": None,
}


def test_what_varies_is_no_confound_and_all_else_still_is() -> None:
    plan = make_plan(VALUES)
    assert not any(plan.confounds().values())
    arms = [*VALUES["arms"], {"name": "hot", "set": {"optim.lr": 1.0}}]
    with pytest.raises(
        fl.BadInput, match=r"hot differs from one in optim.lr 0.003 → 1: a confound"
    ):
        make_plan(VALUES | {"arms": arms})
    with pytest.raises(fl.BadInput, match=r"two differs from one in model.layers 1 → 2"):
        make_plan({key: value for key, value in VALUES.items() if key != "vary"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vary": "model.layer"}, "vary model.layer: no setting is called that; did you mean"),
        ({"vary": ["model", "data"]}, "vary data: arms must see the same data"),
        (
            {"contrasts": [ASKED[0] | {"arm": "twoo"}]},
            "contrasts: twoo is no arm here; did you mean `two`",
        ),
        ({"contrasts": [ASKED[0] | {"arm": "one"}]}, "contrasts: one against itself"),
        ({"contrasts": [ASKED[0] | {"of": "speed"}]}, "contrasts.0.of 'speed'"),
        ({"contrasts": [ASKED[0], ASKED[0]]}, "contrasts: `Do two layers help.` is asked twice"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.BadInput, match=said) as error:
        make_plan(VALUES | given)
    assert "\n" not in str(error.value)


def test_plans_without_questions_keep_their_names() -> None:
    """Folders from before there were any can be gone on with."""
    plan = make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"]})
    assert plan.digest != plan.model_copy(update={"vary": ("model",)}).digest
    kept = plan.model_dump(mode="json", exclude={"seeds", "vary", "contrasts"})
    assert set(kept) == {"name", "recipe", "arms", "rules", "tune", "allow", "rounds", "clock",
                         "quick"}  # fmt: skip


def test_each_pair_is_judged_and_holm_counts_the_family() -> None:
    rules = rules_for("accuracy")
    arms = {
        "a": {s: 0.5 + 0.01 * s for s in range(6)},
        "b": {s: 0.52 + 0.011 * s for s in range(6)},
        "c": {s: 0.52 + 0.0105 * s + (0.004 if s % 2 else 0) for s in range(6)},
    }
    found = judge_family(arms, {"one": ("b", "a"), "two": ("c", "b")}, rules, "questions")
    alone = {"one": judge(_only(arms, "b", "a"), "a", rules)["b"],
             "two": judge(_only(arms, "c", "b"), "b", rules)["c"]}  # fmt: skip
    adjusted = holm({name: verdict.paired.p for name, verdict in alone.items() if verdict.paired})
    for name, verdict in found.items():
        assert verdict.paired == alone[name].paired
        assert verdict.p_adjusted == pytest.approx(adjusted[name])
        assert "after Holm over 2 questions" in verdict.sentence
    assert found["one"].word == "better"
    assert (found["two"].arm, found["two"].baseline) == ("c", "b")


def _only(arms: dict[str, dict[int, float]], *names: str) -> dict[str, dict[int, float]]:
    return {name: arms[name] for name in names}


def test_the_page_answers_the_questions(tmp_path: Path) -> None:
    found = fl.compare(VALUES | {"seeds": 2}, out=tmp_path / "c")
    text = found.page.read_text()
    assert "1. **Do two layers help?** too few seeds to judge two against one" in text
    assert (
        "2. **Does freezing hurt with two?** too few seeds to judge two-frozen against two" in text
    )
    assert "The five questions" not in text
    assert "- What is compared: model.layers." in text
    assert "- two: model.layers 2" in text
    assert not found.evidence["refused_pairs"]  # other weights, as models of other sizes have
    for each in found.evidence["contrasts"]:
        runs = {
            name: [run["metrics"]["accuracy"] for run in found.evidence["arms"][name]["runs"]]
            for name in (each["arm"], each["against"])
        }
        gaps = [a - b for a, b in zip(runs[each["arm"]], runs[each["against"]], strict=True)]
        assert each["paired"]["effect"] == pytest.approx(sum(gaps) / 2)


def test_other_weights_of_one_size_are_still_no_pair(tmp_path: Path) -> None:
    """What varies says nothing of them."""
    arms = [{"name": "one", "set": {}}, {"name": "long", "set": {"train.epochs": 2}}]
    values = VALUES | {"arms": arms, "vary": ["train.epochs"], "contrasts": [], "seeds": 1}
    found = fl.compare(values, out=tmp_path / "c")
    assert not found.evidence["refused_pairs"]
    digests = tmp_path / "c" / "runs" / "long-s0" / "digests.json"
    digests.write_text(digests.read_text().replace('"weights": {', '"weights": {"more": "0",'))
    (tmp_path / "c" / "evidence.json").unlink()
    (refused,) = fl.compare(values, out=tmp_path / "c").evidence["refused_pairs"]
    assert refused["reason"] == "only one has the weights more"
