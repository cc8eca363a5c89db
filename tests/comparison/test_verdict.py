"""Verdicts: every word, its sentence, and how often it is wrong where the truth is known."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from comparing import rules_for
from frostlab.comparison.evidence import ArmVerdict, stored
from frostlab.comparison.judging.statistics import could_have_found, paired
from frostlab.comparison.judging.verdict import (
    DOUBTFUL,
    JUDGED,
    MEANINGS,
    NO_VALUE,
    Scores,
    Statement,
    Verdict,
    Word,
    judge,
)
from frostlab.comparison.plan import Rules
from frostlab.errors import BadInput

BASE = {s: 0.80 + 0.01 * math.sin(s) for s in range(6)}
WOBBLE = (0.001, -0.002, 0.0015, -0.001, 0.002, -0.0015, 0.0012, -0.0008)
ACCURACY = rules_for("accuracy")
RATIO = rules_for("perplexity", margin=1.05)


def shifted(by: float, n: int = 6, wobble: float = 1.0) -> dict[int, float]:
    return {s: 0.80 + 0.01 * math.sin(s) + by + wobble * WOBBLE[s] for s in range(n)}


def one(
    arm: Mapping[int, float] | Scores,
    rules: Rules = ACCURACY,
    base: Mapping[int, float] | Scores = BASE,
    family: int | None = None,
    **known: Any,
) -> Verdict:
    arms = {"base": base, "oelm": arm}
    scores = {n: v if isinstance(v, Scores) else Scores(v) for n, v in arms.items()}
    return judge(scores, {"it": Statement("oelm", "base", **known)}, rules, family)["it"]


def test_better_and_worse_follow_the_metrics_direction() -> None:
    assert one(shifted(0.02)).word == "better"
    assert one(shifted(-0.02)).word == "worse"
    for metric in ("loss", "perplexity"):
        assert one(shifted(0.02), rules_for(metric)).word == "worse"
        assert one(shifted(-0.02), rules_for(metric)).word == "better"


def test_the_sentence_has_the_numbers() -> None:
    verdict = one(shifted(0.02))
    wanted = paired([shifted(0.02)[s] for s in range(6)], [BASE[s] for s in range(6)])
    assert verdict.paired == wanted
    assert verdict.sentence == (
        "oelm is better than base on accuracy (these test examples): "
        f"{wanted.effect:+.4g} (95 %: {wanted.low:+.4g} to {wanted.high:+.4g}), 6 paired seeds."
    )
    assert verdict.notes == ()
    ratio = one(shifted(0.02), rules_for("perplexity"))
    assert "worse than base on perplexity (these test examples): 1.025 × (95 %: 1.0" in (
        ratio.sentence
    )


def test_the_word_is_read_off_the_interval_of_the_family() -> None:
    arm = {s: BASE[s] + d for s, d in enumerate((0.0202, 0.004, 0.009, 0.002, 0.016, 0.003))}
    alone, among = one(arm), one(arm, family=6)
    assert (alone.word, among.word) == ("better", "no difference found")
    assert among.paired is not None
    assert among.paired.alpha == pytest.approx(0.05 / 6)
    assert among.paired.low < 0 < among.paired.high
    assert "(95 % over 6 statements: " in among.sentence
    again = one(arm, rules_for("accuracy", look=2).model_copy(update={"spent": 0.05}))
    assert again.word == "no difference found"
    assert "98.75 %" in again.sentence
    assert "but earlier looks had spent 0.05" in again.notes[0]


def test_no_difference_found_says_what_could_have_been_found() -> None:
    verdict = one(shifted(0.0))
    assert verdict.word == "no difference found"
    assert verdict.paired is not None
    assert verdict.could_have_seen == pytest.approx(could_have_found(6, 0.05) * verdict.paired.std)
    often = "would be found in 8 of 10 such comparisons."
    ending = f"; a true difference of {verdict.could_have_seen:.3g} {often}"
    assert verdict.sentence.endswith(ending)
    ratio = one(shifted(0.0), rules_for("perplexity"))
    percent = 100 * (ratio.could_have_seen or 0)
    assert ratio.sentence.endswith(f"; a true difference of {percent:.3g} % {often}")


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_under_five_pairs_nothing_is_better_or_worse(n: int) -> None:
    verdict = one(shifted(0.5, n), rules_for("accuracy", margin=1.1))
    assert verdict.word == "too few seeds"
    assert "at least 5 are needed" in verdict.sentence
    assert verdict.margin is None or verdict.margin.answer == "not shown"


def test_equal_differences_are_degenerate_not_certain() -> None:
    base = {s: 0.5 + s / 64 for s in range(5)}  # exact in floats
    verdict = one({s: x + 1 / 64 for s, x in base.items()}, base=base)
    assert verdict.word == "unproven"
    assert "all 5 differences are equal (+0.01562); noise is not like that" in verdict.sentence
    same = one(base, base=base)
    assert same.word == "unproven"
    assert "both runs of every pair have the same value" in same.sentence
    assert same.could_have_seen is None


def test_identical_arms_and_arms_at_chance_are_named() -> None:
    identical = one(BASE, identical=True)
    assert identical.word == "identical"
    assert "their difference had no effect" in identical.sentence
    chance = one(shifted(0.0), at_chance=True)
    assert chance.word == "at chance"
    assert "neither is shown to have learned anything" in chance.sentence
    assert one(shifted(0.02), at_chance=True).word == "better"  # a difference shows more


def test_a_confounded_arm_is_never_better() -> None:
    verdict = one(shifted(0.05), rules_for("accuracy", margin=1.1), confounds=("lr", "batch"))
    assert verdict.word == "confounded"
    assert "confounded by lr, batch" in verdict.sentence
    assert verdict.margin is not None
    assert verdict.margin.answer == "not shown"


def test_an_unproven_arm_says_why() -> None:
    verdict = one(shifted(0.05), rules_for("accuracy", margin=1.1), unproven="the clock drifted")
    assert verdict.word == "unproven"
    assert "is unproven (the clock drifted)" in verdict.sentence
    assert verdict.margin is not None
    assert verdict.margin.answer == "not shown"
    both = one(shifted(0.05), confounds=("lr",), unproven="the clock drifted")
    assert both.word == "confounded"
    assert "unproven: the clock drifted" in both.notes


def test_factors_that_differ_together_are_named() -> None:
    verdict = one(shifted(0.05), together=("the treatment", "train.epochs"))
    assert verdict.word == "better"
    assert "the treatment and train.epochs differ together" in verdict.sentence


def test_a_diverged_run_is_a_result() -> None:
    """Five seeds are clearly better, one diverged: the arm may not be called better."""
    arm = shifted(0.02, 8)
    base = {s: 0.80 + 0.01 * math.sin(s) for s in range(8)}
    assert one(arm, base=base).word == "better"
    del arm[3]
    verdict = one(Scores(arm, {3: "diverged"}), base=base)
    assert verdict.word == "no difference found"
    assert (
        "1 of 8 runs of oelm diverged, and each counts as the worst value of all runs"
        in verdict.sentence
    )
    assert verdict.missing == {"oelm": 1}
    assert verdict.paired is not None
    assert verdict.paired.low == -math.inf
    assert "oelm, seed 3: diverged" in verdict.notes
    assert verdict.could_have_seen is None
    assert "true difference" not in verdict.sentence
    worse = {s: x for s, x in shifted(-0.2, 8).items() if s != 3}
    still = one(Scores(worse, {3: "diverged"}), base=base)
    assert still.word == "worse"
    assert "1 of 8 runs of oelm diverged" in still.sentence
    helped = one(shifted(0.2, 8), base=Scores({s: base[s] for s in range(7)}, {7: "diverged"}))
    assert helped.word == "better"
    assert helped.paired is not None
    assert helped.paired.high == math.inf


@pytest.mark.parametrize("side", ["oelm", "base"])
def test_a_failed_run_leaves_the_difference_unknown(side: str) -> None:
    arms = {"oelm": shifted(0.02, 8), "base": {s: 0.80 + 0.01 * math.sin(s) for s in range(8)}}
    scores = {name: Scores(values) for name, values in arms.items()}
    kept = {s: x for s, x in arms[side].items() if s != 3}
    scores[side] = Scores(kept, {3: "failed"})
    verdict = one(scores["oelm"], base=scores["base"])
    assert verdict.word == "unproven"
    assert f"1 of 8 runs of {side} failed, so the values are not known" in verdict.sentence


def test_a_seed_that_both_arms_lost_is_left_out() -> None:
    """It would be a difference of exactly 0, and the worst value would enter the margin."""
    rules = rules_for("accuracy", margin=1.1)
    arm = {s: x for s, x in shifted(-0.01, 8).items() if s != 7}
    base = {s: 0.80 + 0.01 * math.sin(s) for s in range(7)}
    both = one(Scores(arm, {7: "diverged"}), rules, base=Scores(base, {7: "diverged"}))
    alone = one(arm, rules, base=base)
    assert both.paired == alone.paired
    assert both.margin == alone.margin
    assert "seeds that neither arm finished are left out: 7" in both.notes
    lost = one(Scores(arm, {7: "diverged"}), rules, base=base | {7: 0.8})
    assert lost.margin is not None
    assert lost.margin.answer == "not shown"


def test_long_grids_pay_for_their_choice() -> None:
    arm, base = shifted(0.02), BASE
    three, six = (one(Scores(arm, tried=(arm,) * k), base=Scores(base, tried=(base,) * k))
                  for k in (3, 6))  # fmt: skip
    assert three.paired is not None
    assert six.paired is not None
    assert (three.paired.alpha, six.paired.alpha) == (0.05, 0.025)


def test_an_arm_that_mostly_diverges_did_not_finish() -> None:
    verdict = one(Scores({0: 0.9, 1: 0.9}, dict.fromkeys(range(2, 6), "diverged")))
    assert verdict.word == "did not finish"
    assert "only 2 of 6 pairs finished; 4 of 6 runs of oelm diverged" in verdict.sentence
    nothing = one(Scores({}, dict.fromkeys(range(6), "failed")))
    assert nothing.word == "did not finish"
    infinite = one(dict.fromkeys(range(6), math.inf), rules_for("perplexity"))
    assert infinite.word == "did not finish"


def test_seeds_of_one_side_are_left_out_and_named() -> None:
    verdict = one(shifted(0.02, 8))
    assert verdict.paired is not None
    assert verdict.paired.n == 6
    assert "seeds that only oelm has are left out: 6, 7" in verdict.notes


def test_values_are_paired_by_seed_not_by_place() -> None:
    arm = dict(reversed(list(shifted(0.02).items())))
    assert one(arm) == one(shifted(0.02))


def test_an_effect_too_small_to_matter_is_said_to_be() -> None:
    wide = one(shifted(0.02, wobble=8), rules_for("accuracy", minimum_effect=0.025))
    assert (wide.word, "smaller than" in wide.sentence) == ("better", False)
    small = one(shifted(0.02), rules_for("accuracy", minimum_effect=0.05))
    assert small.word == "better"
    assert "smaller than the smallest effect of interest, 0.05" in small.sentence
    large = one(shifted(0.2), rules_for("accuracy", minimum_effect=0.05))
    assert "smaller than" not in large.sentence


def test_an_effect_that_may_have_been_missed_is_said() -> None:
    verdict = one(shifted(0.0), rules_for("accuracy", minimum_effect=0.0001))
    assert verdict.notes == ("an effect of interest, 0.0001, may have been missed",)


def test_no_cost_needs_a_margin_that_the_interval_excludes() -> None:
    near = one(shifted(0.0), RATIO)
    assert near.margin is not None
    assert (near.word, near.margin.answer) == ("no difference found", "yes")
    assert "a cost above 1.05 × is excluded" in near.sentence
    wide = one(shifted(0.0, wobble=60.0), RATIO)
    assert wide.margin is not None
    assert (wide.word, wide.margin.answer) == ("no difference found", "not shown")
    assert f"a cost of up to {wide.margin.largest:.4g} × is not excluded" in wide.sentence
    assert wide.margin.probability_above is not None
    assert 0.01 < wide.margin.probability_above < 0.5
    worse, much = one(shifted(0.02), RATIO), one(shifted(0.2), RATIO)
    assert (worse.word, worse.margin and worse.margin.answer) == ("worse", "yes")
    assert (much.word, much.margin and much.margin.answer) == ("worse", "no")


def test_the_margin_of_an_accuracy_is_one_of_errors() -> None:
    rules = rules_for("accuracy", margin=1.1)  # 20 % errors: 2 points more are allowed
    allowed, too_many = one(shifted(-0.01), rules), one(shifted(-0.04), rules)
    assert allowed.margin is not None
    assert allowed.margin.cost == pytest.approx(0.1 * (1 - np.mean(list(BASE.values()))))
    assert (allowed.word, allowed.margin.answer) == ("worse", "yes")
    assert (too_many.word, too_many.margin and too_many.margin.answer) == ("worse", "no")


def test_other_test_examples_are_never_surer_than_these() -> None:
    verdict = one(shifted(0.02), population=paired(list(shifted(0.02).values()), [0.8] * 6))
    assert verdict.population is not None
    assert verdict.paired is not None
    assert verdict.population.low <= verdict.paired.low
    wide = paired([0.9, 0.8, 0.7], [0.7, 0.8, 0.9])
    note = one(shifted(0.02), population=wide).notes[-1]
    assert note.startswith("for other test examples of the same kind: ")
    assert note.endswith("a difference is not shown for them")


def test_skewed_noise_is_said() -> None:
    """Five runs a little worse and one much better: a long tail on the other side of zero."""
    tail = (-0.0101, -0.0099, -0.0100, -0.0102, -0.0098, -0.0055)
    verdict = one({s: BASE[s] + d for s, d in enumerate(tail)})
    assert verdict.word == "worse"
    assert verdict.skewed is not None
    assert verdict.skewed > 1
    assert "a long tail towards the other side of zero (skewness +1." in verdict.sentence
    assert one(shifted(-0.02)).skewed is None
    other_side = one({s: BASE[s] - d for s, d in enumerate(tail)})
    assert other_side.skewed is not None
    long_tail_away = one({s: BASE[s] - 0.01 - (0.02 if s == 5 else 0) for s in range(6)})
    assert long_tail_away.skewed is None  # the tail does not reach for zero


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: judge({"a": Scores(BASE)}, {"x": Statement("a", "bse")}, ACCURACY),
            "`bse` is not among the arms",
        ),
        (
            lambda: judge({"a": Scores(BASE)}, {"x": Statement("a", "a")}, ACCURACY),
            "`a` is compared with itself",
        ),
        (lambda: one(Scores(BASE, {2: "failed"})), "seed 2 of `oelm` is missing and has a value"),
        (lambda: one({0: 0.0}, rules_for("perplexity")), "seed 0 of `oelm` has perplexity 0"),
    ],
)
def test_bad_input_is_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", [0, 1, 2, 6, 8])
def test_a_verdict_is_plain_json_and_always_the_same(n: int) -> None:
    rules = rules_for("perplexity", margin=1.05, minimum_effect=0.01)
    verdict = one(shifted(0.02, n) | {9: math.nan}, rules)
    kept = stored(ArmVerdict, verdict)
    text = json.dumps(asdict(kept), allow_nan=False)
    assert json.loads(text)["word"] == verdict.word
    assert kept == stored(ArmVerdict, one(shifted(0.02, n) | {9: math.nan}, rules))


def test_numpy_values_are_taken() -> None:
    arm = {s: np.float64(x) for s, x in shifted(0.02).items()}
    assert one(arm) == one(shifted(0.02))


def test_tuned_arms_are_compared_best_against_best() -> None:
    """The other rates of the baseline are as good, so the chosen ones prove less."""
    base, arm = BASE, shifted(0.006)
    assert one(arm, base=base).word == "better"
    rates = tuple({s: x + 0.004 + w * WOBBLE[5 - s] for s, x in base.items()} for w in (2, -3))
    tuned = one(Scores(arm, tried=(arm,)), base=Scores(base, tried=(base, *rates)))
    assert tuned.word == "no difference found"
    assert tuned.paired is not None
    ends = [paired(list(arm.values()), list(other.values())).low for other in (base, *rates)]
    assert tuned.paired.low == pytest.approx(min(ends))


def test_a_bad_setting_of_a_tuned_arm_changes_nothing() -> None:
    """Rates that are far worse, in either direction of the metric, leave the interval as it is."""
    for metric, worse in (("accuracy", -0.5), ("loss", 0.5), ("perplexity", 5.0)):
        rules = rules_for(metric)
        base, arm = BASE, shifted(0.02)
        plain = one(arm, rules, base=base)
        tuned = one(
            Scores(arm, tried=(arm, {s: x + worse for s, x in arm.items()})),
            rules,
            base=Scores(
                base, tried=(base, {s: x + worse * (1 + 0.1 * s) for s, x in base.items()})
            ),
        )
        assert tuned.paired is not None
        assert plain.paired is not None
        assert (tuned.word, tuned.paired.low, tuned.paired.high) == (
            plain.word, pytest.approx(plain.paired.low), pytest.approx(plain.paired.high),
        )  # fmt: skip


TRIALS = 400
SEEDS = 6


def most(rate: float, trials: int = TRIALS) -> float:
    """The count that a true rate exceeds once in a thousand."""
    return float(stats.binom.ppf(0.999, trials, rate))


def verdicts_of(values: np.ndarray, rules: Rules) -> list[list[Verdict]]:
    """Verdicts of a baseline and arms, with all pairs of arms; values are (trials, arms, seeds)."""
    judged = []
    for trial in values.tolist():
        arms = {str(i): Scores(dict(enumerate(each))) for i, each in enumerate(trial)}
        pairs = [(a, b) for i, a in enumerate(arms) for b in list(arms)[:i]]
        statements = {f"{a}-{b}": Statement(a, b) for a, b in pairs}
        judged.append(list(judge(arms, statements, rules).values()))
    return judged


@pytest.mark.parametrize("metric", ["accuracy", "step_ms"])
def test_any_false_word_on_a_page_is_rare(metric: str) -> None:
    """Three equal arms and all three pairs: any of the words, and any of the intervals, counts."""
    values = np.random.default_rng(1).normal(0, 0.05, (TRIALS, 3, SEEDS))
    values = np.exp(values) if metric == "step_ms" else 0.7 + values
    judged = verdicts_of(values, rules_for(metric))
    words = [{verdict.word for verdict in page} for page in judged]
    alarms = sum(bool(page & {"better", "worse"}) for page in words)
    assert TRIALS * 0.01 < alarms <= most(0.05)
    none = 1 if metric == "step_ms" else 0
    for page in judged:
        for verdict in page:
            assert verdict.paired is not None
            holds = verdict.paired.low <= none <= verdict.paired.high
            assert holds == (verdict.word == "no difference found")


@pytest.mark.slow
def test_a_false_yes_to_the_margin_is_rare() -> None:
    """Six arms whose true cost is the margin: any of them is called within it."""
    rng = np.random.default_rng(2)
    rules = rules_for("perplexity", margin=1.05)
    base = rng.normal(3, 0.02, (TRIALS, SEEDS))
    arms = base[:, None] + math.log(1.05) + rng.normal(0, 0.02, (TRIALS, 6, SEEDS))
    wrong = 0
    for own, others in zip(np.exp(base).tolist(), np.exp(arms).tolist(), strict=True):
        scores = {"base": Scores(dict(enumerate(own)))}
        scores |= {str(i): Scores(dict(enumerate(each))) for i, each in enumerate(others)}
        statements = {str(i): Statement(str(i), "base") for i in range(6)}
        judged = judge(scores, statements, rules)
        wrong += any(v.margin is not None and v.margin.answer == "yes" for v in judged.values())
    assert 0 < wrong <= most(0.025)


def test_every_word_has_a_meaning_that_the_document_has() -> None:
    assert tuple(MEANINGS) == get_args(Word)
    assert not set(JUDGED) & set(DOUBTFUL)
    assert set(NO_VALUE) <= set(DOUBTFUL)
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    table = [f"| *{word}* | {meaning} |" for word, meaning in MEANINGS.items()]
    assert "\n".join(table) in text
