"""Verdicts: every word, its sentence, and how often the rule is wrong where truth is known."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from scipy import stats

from frostlab.comparison.plan import Rules, rules_for
from frostlab.comparison.statistics import flip_p, holm, paired, seen_by_rule, t_test
from frostlab.comparison.verdict import MEANINGS, Verdict, Word, judge, judge_family
from frostlab.errors import BadInput

BASE = {s: 0.80 + 0.01 * math.sin(s) for s in range(6)}


WOBBLE = (0.001, -0.002, 0.0015, -0.001, 0.002, -0.0015, 0.0012, -0.0008)


ACCURACY = rules_for("accuracy")


def shifted(by: float, n: int = 6, wobble: float = 1.0) -> dict[int, float]:
    return {s: 0.80 + 0.01 * math.sin(s) + by + wobble * WOBBLE[s] for s in range(n)}


def one(arm: dict[int, float], rules: Rules = ACCURACY, **said: object) -> Verdict:
    return judge({"base": BASE, "oelm": arm}, "base", rules, **said)["oelm"]  # type: ignore[arg-type]


def test_better_and_worse_follow_the_metrics_direction() -> None:
    assert one(shifted(0.02)).word == "better"
    assert one(shifted(-0.02)).word == "worse"
    for metric in ("loss", "perplexity"):
        assert one(shifted(0.02), rules_for(metric)).word == "worse"
        assert one(shifted(-0.02), rules_for(metric)).word == "better"


def test_the_sentence_has_the_numbers() -> None:
    found = one(shifted(0.02))
    values = [shifted(0.02)[s] for s in range(6)], [BASE[s] for s in range(6)]
    wanted = paired(*values)
    assert found.paired == wanted
    assert found.p_adjusted == wanted.p
    assert found.sentence == (
        f"oelm is better than base on accuracy: {wanted.effect:+.4g} (95 %: {wanted.low:+.4g} to "
        f"{wanted.high:+.4g}), p < 0.0001, 6 paired seeds."
    )
    assert found.notes == ()
    ratio = one(shifted(0.02), rules_for("perplexity"))
    assert "worse than base on perplexity: 1.025 × (95 %: 1.0" in ratio.sentence


def test_no_difference_found_says_what_could_have_been_seen() -> None:
    found = one(shifted(0.0))
    assert found.word == "no difference found"
    assert found.paired is not None
    assert found.could_have_seen == seen_by_rule(6, 0.05) * found.paired.std
    assert found.could_have_seen > found.paired.smallest_seen
    assert f"could have seen ≥ {found.could_have_seen:.3g}." in found.sentence
    ratio = one(shifted(0.0), rules_for("perplexity"))
    assert f"could have seen ≥ {100 * (ratio.could_have_seen or 0):.3g} %." in ratio.sentence


@pytest.mark.parametrize("n", [0, 1, 4])
def test_under_five_pairs_nothing_is_better_or_worse(n: int) -> None:
    found = one(shifted(0.5, n), rules_for("accuracy", noninferior=1.05))
    assert found.word == "too few seeds"
    assert f"{n} paired seed" in found.sentence
    assert "at least 5 are needed" in found.sentence
    assert found.noninferior is not None
    assert found.noninferior.answer == "not shown"
    assert one(shifted(0.5, 5)).word == "better"


def test_five_pairs_say_that_the_t_test_decided_alone() -> None:
    note = one(shifted(0.5, 5)).notes[-1]
    assert note == "5 pairs are too few for the sign-flip test at 0.05: the t test decided alone"


def test_where_the_tests_disagree_no_difference_is_found() -> None:
    differences = (0.02, 0.021, 0.022, 0.019, 0.02, -0.0001)
    found = one({s: BASE[s] + d for s, d in enumerate(differences)})
    assert found.paired is not None
    assert found.paired.p < 0.05 < 0.0625 == found.paired.p_flip
    assert found.word == "no difference found"
    said = "the t test finds a difference, but the sign-flip test does not (sign-flip p = 0.0625)"
    assert said in found.sentence


def test_flips_alone_decide_nothing() -> None:
    differences = (0.001, 0.001, 0.001, 0.001, 0.001, 0.03)
    found = one({s: BASE[s] + d for s, d in enumerate(differences)})
    assert found.paired is not None
    assert found.paired.p_flip == 0.03125 < 0.05 < found.paired.p
    assert found.word == "no difference found"
    assert "the sign-flip test finds a difference, but the t test does not" in found.sentence


def test_where_holm_alone_decides_no_disagreement_is_claimed() -> None:
    differences = (0.0202, 0.004, 0.009, 0.001, 0.016, 0.002)
    arm = {s: BASE[s] + d for s, d in enumerate(differences)}
    assert one(arm).word == "better"
    found = judge({"base": BASE, "oelm": arm, "other": shifted(0.0)}, "base", ACCURACY)["oelm"]
    assert found.paired is not None
    assert found.paired.p < 0.05 < (found.p_adjusted or 0)
    assert found.word == "no difference found"
    assert "after Holm over 2 arms" in found.sentence
    assert "finds a difference, but" not in found.sentence


def test_every_arm_counts_in_holms_family() -> None:
    arms = {"base": BASE, "oelm": shifted(0.02), "few": shifted(0.02, 1), "mixed": shifted(0.02)}
    found = judge(arms, "base", ACCURACY, confounds={"mixed": ["lr"]})
    assert found["oelm"].paired is not None
    assert found["oelm"].p_adjusted == pytest.approx(3 * found["oelm"].paired.p)
    assert found["few"].p_adjusted is None
    assert list(found) == ["oelm", "few", "mixed"]


def test_a_confounded_arm_is_never_better() -> None:
    rules = rules_for("accuracy", noninferior=1.05)
    found = one(shifted(0.02), rules, confounds={"oelm": ["lr", "batch"]})
    assert found.word == "confounded"
    assert "oelm is confounded by lr, batch on accuracy: +0.02" in found.sentence
    assert "confounded by lr, batch" in found.notes
    assert found.noninferior is not None
    assert found.noninferior.reason == "confounded by lr, batch"
    assert one(shifted(0.02), confounds={"oelm": []}).word == "better"


def test_an_unproven_arm_says_why() -> None:
    why = "the A/A control came out unequal"
    rules = rules_for("step_ms", noninferior=1.05)
    found = one(shifted(0.02), rules, unproven={"oelm": why})
    assert found.word == "unproven"
    assert f"is unproven ({why}): 1.025 ×" in found.sentence
    assert found.noninferior is not None
    assert (found.noninferior.answer, found.noninferior.reason) == ("not shown", f"unproven: {why}")
    both = one(shifted(0.02), rules, unproven={"oelm": why}, confounds={"oelm": ["lr"]})
    assert both.word == "confounded"
    assert f"unproven: {why}" in both.notes
    assert both.noninferior is not None
    assert both.noninferior.reason == f"unproven: {why}; confounded by lr"


def test_failed_seeds_are_named_and_cost_pairs() -> None:
    arm = shifted(0.02)
    del arm[2], arm[4]
    found = one(arm, failed={"oelm": [4, 2]})
    assert found.word == "too few seeds"
    assert found.notes == (
        "failed seeds of oelm: 2, 4; the verdict rests on the runs that finished",
    )
    wild = one(shifted(0.02) | {3: math.inf})
    assert (wild.word, wild.paired and wild.paired.n) == ("better", 5)
    assert "failed seeds of oelm: 3 (inf); the verdict rests on" in wild.notes[0]
    less = {s: x for s, x in BASE.items() if s}
    base = judge({"base": less, "oelm": shifted(0.02)}, "base", ACCURACY, failed={"base": [0]})
    assert base["oelm"].notes[0].startswith("failed seeds of base: 0")


def test_seeds_of_one_side_are_left_out_and_named() -> None:
    found = one(shifted(0.02, 8))
    assert found.paired is not None
    assert found.paired.n == 6
    assert found.notes == ("seeds that only oelm has are left out: 6, 7",)


def test_values_are_paired_by_seed_not_by_place() -> None:
    arm = shifted(0.02)
    assert one(dict(reversed(arm.items()))) == one(arm)


def test_an_effect_too_small_to_matter_is_said_to_be() -> None:
    rules = rules_for("accuracy", minimum_effect=0.05)
    found = one(shifted(0.02), rules)
    assert found.word == "better"
    assert found.sentence.endswith("; smaller than the smallest effect of interest, 0.05.")
    assert "smaller" not in one(shifted(0.06), rules).sentence
    ratio = rules_for("perplexity", minimum_effect=0.05)
    assert one(shifted(-0.02), ratio).sentence.endswith("effect of interest, 5 %.")
    assert "smaller" not in one(shifted(-0.06), ratio).sentence


def test_an_effect_that_may_have_been_missed_is_said() -> None:
    missed = "an effect of interest, 0.001, may have been missed"
    assert one(shifted(0.0), rules_for("accuracy", minimum_effect=0.001)).notes == (missed,)
    assert one(shifted(0.0), rules_for("accuracy", minimum_effect=0.05)).notes == ()


def test_noninferiority_is_answered_beside_the_word() -> None:
    rules = rules_for("perplexity", noninferior=1.05)
    worse = one(shifted(0.02), rules)
    assert (worse.word, worse.noninferior and worse.noninferior.answer) == ("worse", "yes")
    much = one(shifted(0.08), rules)
    assert (much.word, much.noninferior and much.noninferior.answer) == ("worse", "no")


def test_a_later_look_is_stricter_and_says_so() -> None:
    differences = (0.0202, 0.004, 0.009, 0.002, 0.016, 0.003)
    arm = {s: BASE[s] + d for s, d in enumerate(differences)}
    assert one(arm).word == "better"
    again = one(arm, rules_for("accuracy", look=2))
    assert again.word == "no difference found"
    assert "98.75 %" in again.sentence
    assert "the only planned look had spent all of 0.05" in again.notes[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: judge({"base": BASE}, "base", ACCURACY), "`base` is the only arm"),
        (lambda: judge({"base": BASE, "b": BASE}, "bse", ACCURACY), "`bse` .* mean `base`"),
        (lambda: one(BASE, confounds={"oelmm": ["lr"]}), "confounds names `oelmm`.*mean `oelm`"),
        (lambda: one(BASE, unproven={"base": "x"}), "unproven names `base`"),
        (lambda: one(BASE, failed={"oelm": [2]}), "seed 2 of `oelm` failed and has a value"),
        (lambda: one({0: 0.0}, rules_for("perplexity")), "seed 0 of `oelm` has perplexity 0"),
    ],
)
def test_bad_input_is_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", [0, 1, 2, 6, 8])
def test_a_verdict_is_plain_json_and_always_the_same(n: int) -> None:
    rules = rules_for("perplexity", noninferior=1.05, minimum_effect=0.01)
    found = one(shifted(0.02, n) | {9: math.nan}, rules)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text)["word"] == found.word
    assert text == json.dumps(one(shifted(0.02, n) | {9: math.nan}, rules).to_dict())


def test_numpy_values_are_taken() -> None:
    arm = {s: np.float64(x) for s, x in shifted(0.02).items()}
    assert one(arm) == one(shifted(0.02))


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


TRIALS = 2_000


SEEDS = 6


def most(rate: float, trials: int = TRIALS) -> float:
    """The count that a true rate exceeds once in a thousand."""
    return stats.binom.ppf(0.999, trials, rate)


def least(rate: float, trials: int = TRIALS) -> float:
    return stats.binom.ppf(0.001, trials, rate)


def words(values: np.ndarray, rules: Rules) -> list[list[str]]:
    """Verdicts of comparisons of a baseline and arms: values are (trials, arms, seeds)."""
    found = []
    for trial in values.tolist():
        arms = {str(i): dict(enumerate(each)) for i, each in enumerate(trial)}
        found.append([verdict.word for verdict in judge(arms, "0", rules).values()])
    return found


@pytest.mark.parametrize("metric", ["accuracy", "step_ms"])
def test_equal_arms_are_seldom_told_apart(metric: str) -> None:
    values = np.random.default_rng(1).normal(0, 0.05, (TRIALS, 3, SEEDS))
    values = np.exp(values) if metric == "step_ms" else 0.7 + values
    found = words(values, rules_for(metric))
    assert {word for trial in found for word in trial} == {"better", "worse", "no difference found"}
    alarms = sum("better" in trial or "worse" in trial for trial in found)
    assert TRIALS * 0.01 < alarms <= most(0.05)


def test_the_rule_is_both_tests_after_holm() -> None:
    values = np.random.default_rng(2).normal(0, 1, (300, 3, SEEDS))
    values[:, 1] += 1.5
    differences = values[:, 1:] - values[:, :1]
    p = t_test(differences)[2]
    smaller, larger = np.minimum(p[:, :1], p[:, 1:]), np.maximum(p[:, :1], p[:, 1:])
    by_holm = np.where(p == smaller, 2 * p, np.maximum(2 * smaller, larger)) <= 0.05
    decided = by_holm & (flip_p(differences) <= 0.05)
    found = words(values, Rules(metric="m", lower_is_better=False))
    assert [
        [word != "no difference found" for word in trial] for trial in found
    ] == decided.tolist()
    assert 20 < decided.sum() < 580


@pytest.mark.parametrize("n", [5, 6, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, (TRIALS, n))
    zero = np.zeros(n)
    found = [paired(each, zero) for each in differences]
    assert least(0.95) <= sum(each.low <= 0.3 <= each.high for each in found) <= most(0.95)


def test_what_could_have_been_seen_is_seen_in_80_of_100() -> None:
    """The spread is known here; the simulated answer itself is off by about 1 in 100."""
    rng = np.random.default_rng(4)
    effect = seen_by_rule(SEEDS, 0.05)
    values = np.stack([np.zeros((TRIALS, SEEDS)), rng.normal(effect, 1, (TRIALS, SEEDS))], 1)
    found = words(values, Rules(metric="m", lower_is_better=False))
    better = sum(word == "better" for (word,) in found)
    assert least(0.78) <= better <= most(0.82)


def test_every_word_has_a_meaning_that_the_document_has() -> None:
    assert tuple(MEANINGS) == get_args(Word)
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    table = [f"| *{word}* | {meaning} |" for word, meaning in MEANINGS.items()]
    assert "\n".join(table) in text
