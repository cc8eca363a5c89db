"""Plans: rules and what each look spends, arms, confounds, digests."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

import frostlab as fl
from comparing import GROWN, HOT, LAYERS, plan, rules_for
from frostlab.comparison.judging.statistics import bounds
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import Rules, alpha_spent
from frostlab.errors import BadInput


@pytest.mark.parametrize(
    ("metric", "lower", "log"),
    [
        ("accuracy", False, False),
        ("macro_f1", False, False),
        ("loss", True, False),
        ("perplexity", True, True),
        ("train_seconds", True, True),
        ("step_ms", True, True),
        ("peak_bytes", True, True),
    ],
)
def test_a_known_metric_brings_its_direction_and_scale(metric: str, lower: bool, log: bool) -> None:
    rules = rules_for(metric)
    assert (rules.lower_is_better, rules.log) == (lower, log)
    assert (rules.alpha, rules.level, rules.history()) == (0.05, 0.05, None)


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="`acuracy` has no known .*did you mean `accuracy`"):
        rules_for("acuracy")


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"alpha": 0.5},
        {"minimum_effect": 0.0},
        {"margin": 0.0},
        {"look": 0},
        {"looks": 0},
        {"seeds": 6},
        {"metric": ""},
        {"log": "yes"},
    ],
)
def test_bad_rules_are_refused(wrong: dict[str, object]) -> None:
    good = {"metric": "loss", "lower_is_better": True}
    with pytest.raises(ValidationError):
        Rules.model_validate(good | wrong)


def test_rules_never_change() -> None:
    with pytest.raises(ValidationError):
        rules_for("loss").alpha = 0.1  # type: ignore[misc]


def test_what_each_look_spends() -> None:
    assert alpha_spent(0.05, 1) == 0.05
    assert [alpha_spent(0.05, k, 3) for k in (1, 2, 3)] == [0.025, 0.0125, 0.00625]
    assert [alpha_spent(0.05, k, 1) for k in (2, 3)] == [0.0125, 0.00625]
    assert sum(alpha_spent(0.05, k, 2) for k in range(1, 60)) <= 0.05
    assert sum(alpha_spent(0.05, k, 1) for k in range(1, 60)) <= 0.075


def test_the_history_says_when_alpha_was_spent_before() -> None:
    planned = rules_for("loss", looks=2, look=2).model_copy(update={"spent": 0.025})
    assert planned.history() == (
        "look 2 at this question: it spends 0.0125 of alpha, and all looks together spend at most "
        "0.05"
    )
    assert rules_for("loss", looks=2).history() == (
        "look 1 of 2 planned: it spends 0.025 of alpha = 0.05"
    )
    extended = rules_for("loss", look=2).model_copy(update={"spent": 0.05})
    assert extended.risk == pytest.approx(0.0625)
    assert "but earlier looks had spent 0.05" in (extended.history() or "")
    assert "up to 6.25%" in (extended.history() or "")
    declared_late = rules_for("loss", looks=2, look=2).model_copy(update={"spent": 0.05})
    assert "up to 6.25%" in (declared_late.history() or "")


def test_looks_together_raise_no_more_false_alarms_than_alpha() -> None:
    """Seeds added twice, 6 then 9 then 12, without an effect; any look may call it one."""
    trials = 100_000
    data = np.random.default_rng(0).standard_normal((trials, 12))
    p = [bounds(data[:, :n], np.zeros(n), 0.0).p for n in (6, 9, 12)]

    def alarms(levels: list[float]) -> int:
        return int(np.any([x <= level for x, level in zip(p, levels, strict=True)], 0).sum())

    most = stats.binom.ppf(0.999, trials, 0.05)
    assert alarms([alpha_spent(0.05, k, 3) for k in (1, 2, 3)]) <= most
    assert alarms([0.05] * 3) > most  # looking again without paying for it
    extended = alarms([alpha_spent(0.05, k, 1) for k in (1, 2, 3)])
    assert most < extended <= stats.binom.ppf(0.999, trials, 0.06875)


def test_an_arm_differs_in_its_treatment_alone() -> None:
    made = plan(arms=["baseline", "oelm", {"name": "keys", "treatment": {"freeze": ["key"]}}])
    recipes = [made.recipe_of(arm, 3) for arm in made.arms]
    assert [r.treatment_name for r in recipes] == ["baseline", "oelm", "explicit"]
    values = [r.to_dict() | {"treatment": None} for r in recipes]
    assert values[0] == values[1] == values[2]
    assert all(r.seed == 3 for r in recipes)


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


def test_what_varies_is_no_confound_and_all_else_still_is() -> None:
    plan = make_plan(LAYERS)
    assert not any(plan.confounds().values())
    arms = [*LAYERS["arms"], {"name": "hot", "set": {"optim.lr": 1.0}}]
    with pytest.raises(
        fl.BadInput, match=r"hot differs from one in optim.lr 0.003 → 1, which is a confound"
    ):
        make_plan(LAYERS | {"arms": arms})
    with pytest.raises(fl.BadInput, match=r"two differs from one in model.layers 1 → 2"):
        make_plan({key: value for key, value in LAYERS.items() if key != "vary"})


def test_what_varies_and_is_asked_changes_the_digest() -> None:
    whole = make_plan(LAYERS)
    assert whole.digest != whole.model_copy(update={"vary": ("model",)}).digest
    assert whole.digest != whole.model_copy(update={"contrasts": whole.contrasts[:1]}).digest


def test_time_takes_a_part_of_alpha() -> None:
    timed, untimed = plan(), plan(clock=None)
    assert (timed.rules.timed, untimed.rules.timed) == (True, False)
    assert timed.rules.level + timed.rules.time_level == pytest.approx(0.05)
    assert untimed.rules.level == 0.05


def test_a_margin_is_in_the_metrics_unit() -> None:
    accuracy, perplexity = rules_for("accuracy", margin=1.1), rules_for("perplexity", margin=1.05)
    pearson = rules_for("pearson", margin=0.01)
    assert accuracy.margin_as_cost(0.9) == pytest.approx(0.01)
    assert (perplexity.margin_as_cost(30.0), pearson.margin_as_cost(0.3)) == (1.05, 0.01)
    texts = [rules.margin_text() for rules in (accuracy, perplexity, pearson)]
    assert texts == ["1.1 × the errors", "1.05 ×", "0.01"]


def test_what_differs_together_is_known() -> None:
    made = make_plan(LAYERS)
    one, two, frozen = made.arms
    assert made.together(one, two) == made.together(two, frozen) == ()
    assert made.together(one, frozen) == ("the treatment", "model.layers")


def test_an_assay_needs_runs_without_stages() -> None:
    assert plan(assay=True).assay
    with pytest.raises(fl.BadInput, match="which is not possible with stages"):
        make_plan(GROWN | {"assay": True})


def test_a_recipe_is_made_once_for_each_plan() -> None:
    first, second = make_plan(LAYERS), make_plan(LAYERS)
    baseline, arm = first.baseline, first.others[0]
    recipe = first.recipe_of(arm, 0)
    assert first.recipe_of(arm.model_copy(), 0) is recipe
    assert first.recipe_of(arm, 1).seed == 1
    assert first.recipe_of(arm, 0, {"optim.lr": 0.25}).optim.lr == 0.25
    assert first.recipe_of(baseline, 0) != recipe
    assert (first, first.digest, repr(first)) == (second, second.digest, repr(second))
    values = {**first.recipe, "optim": {"lr": 0.125}}
    copied = first.model_copy(update={"recipe": values})
    assert copied.recipe_of(baseline, 0).optim.lr == 0.125
    assert first.recipe_of(arm, 0) is recipe
