"""The summary of a group: its questions, interactions and tables."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import frostlab as fl
from comparing import rules_for
from frostlab.comparison.evidence import Effect, Evidence
from frostlab.comparison.judging.statistics import paired
from frostlab.experiments.show import show_summary
from frostlab.experiments.summary import (
    Answered,
    ArmSummary,
    ComparisonSummary,
    GroupSummary,
    _interaction,
    _questions,
    read_summary,
    retained_share,
)
from frostlab.recipe.groups import Interaction


def with_values(
    evidence: Evidence,
    oelm: Sequence[float],
    baseline: Sequence[float],
    metric: str = "accuracy",
    word: str = "no difference found",
) -> Evidence:
    """Return evidence of which each arm has a run for every value, and a verdict."""
    arms = {}
    for name, values in (("oelm", oelm), ("baseline", baseline)):
        run = evidence.arms[name].runs[0]
        runs = tuple(
            replace(run, seed=seed, metrics={metric: value}) for seed, value in enumerate(values)
        )
        arms[name] = replace(evidence.arms[name], runs=runs)
    effect = paired(oelm, baseline, log=metric == "perplexity")
    verdict = replace(
        evidence.verdicts["oelm"], word=word, metric=metric, paired=Effect(**asdict(effect))
    )  # type: ignore[arg-type]
    plan = evidence.plan.model_copy(update={"rules": rules_for(metric)})
    return replace(evidence, arms=arms, verdicts={"oelm": verdict}, plan=plan)


ASKED = Interaction(question="?", arm="oelm", comparison="causal", against="both")
BASE = [0.50, 0.51, 0.49, 0.52, 0.50]
BETTER = [0.60, 0.62, 0.59, 0.61, 0.61]
SAME = [0.51, 0.50, 0.50, 0.51, 0.51]


def test_an_interaction_is_the_paired_difference_of_two_effects(fair: fl.GroupResult) -> None:
    evidence = fair.comparisons["rates"].evidence
    causal, both = with_values(evidence, BETTER, BASE), with_values(evidence, SAME, BASE)
    differences = [x - y for x, y in zip(BETTER, SAME, strict=True)]
    expected = paired(differences, [0.0] * 5, alpha=0.05)
    text = _interaction(ASKED, {"causal": causal, "both": both}, 1)
    assert text.startswith(
        f"the effect of oelm differs between causal and both: {expected.effect:+.4g} "
        f"[{expected.low:+.3g}, {expected.high:+.3g}] (95 %), over 5 seeds; causal +0.102"
    )
    text = _interaction(ASKED, {"causal": both, "both": with_values(evidence, BASE, SAME)}, 1)
    assert text.startswith("the effect of oelm is not shown to differ between causal and both: +")


def test_an_interaction_of_ratios_is_a_ratio(fair: fl.GroupResult) -> None:
    evidence = fair.comparisons["rates"].evidence
    base = [100.0, 110.0, 95.0, 105.0, 100.0]
    doubled = [2 * value for value in base]
    doubled[0] *= 1.01
    causal = with_values(evidence, doubled, base, "perplexity")
    both = with_values(evidence, [value * 1.1 for value in base], base, "perplexity")
    text = _interaction(ASKED, {"causal": causal, "both": both}, 1)
    ratio = math.exp(math.log(1.01) / 5) * 2 / 1.1
    assert f"{ratio:.4g} × [" in text


def test_an_interaction_that_cannot_be_known_says_why(fair: fl.GroupResult) -> None:
    evidence = fair.comparisons["rates"].evidence
    whole = with_values(evidence, BETTER, BASE)
    assert _interaction(ASKED, {"both": whole}, 1) == "not finished: causal."
    few = with_values(evidence, BETTER[:3], BASE[:3])
    text = _interaction(ASKED, {"causal": few, "both": whole}, 1)
    assert text == "too few seeds: both comparisons have 3 in common; at least 5 are needed."
    lost = with_values(evidence, BETTER, BASE, word="did not finish")
    text = _interaction(ASKED, {"causal": lost, "both": whole}, 1)
    assert text == 'not shown: the verdict in causal is "did not finish".'
    other = with_values(evidence, BETTER, BASE, "perplexity")
    text = _interaction(ASKED, {"causal": other, "both": whole}, 1)
    assert text.startswith(
        "the effects cannot be compared, because the metrics are perplexity and accuracy; "
        "causal 1.202 × ["
    )
    absent = ASKED.model_copy(update={"arm": "hot"})
    text = _interaction(absent, {"causal": whole, "both": whole}, 1)
    assert text == "not known: no verdict on hot in causal and both."


def test_the_share_retained_is_larger_if_the_arm_is_better(fair: fl.GroupResult) -> None:
    evidence = fair.comparisons["rates"].evidence
    halved = with_values(evidence, [50.0] * 5, [100.0] * 5, "perplexity")
    arms = halved.arms
    assert retained_share(halved, "oelm", arms["oelm"], arms["baseline"]) == pytest.approx(2.0)


def answered(name: str, model: str, word: str, effect: float = 0.01) -> ComparisonSummary:
    gap = Effect(6, False, 0.05, effect, effect - 0.001, effect + 0.001, 0.01, 0.002)
    arm = ArmSummary("oelm", "freezes", 6, 0.8, 0.01, gap, word, "", 1.0, (), None, None, {})  # type: ignore[arg-type]
    from frostlab.comparison.oelm_json import QUESTIONS

    questions = tuple(Answered(question, "yes.") for question in QUESTIONS)
    return ComparisonSummary(
        name, "finished", metric="accuracy", model=model, oelm="oelm", arms=(arm,),
        questions=questions,
    )  # fmt: skip


def transfer(*words: str) -> str:
    """Answer the last question for BERT in a group beside this one, and GPT in this one."""
    bert = GroupSummary(1, "paper", "", False, (answered("sst2", "BERT", words[0]),), (), (), ())
    found = _questions([answered("imdb", "GPT", words[1])], {"paper": bert})
    return found[-1].answer


def test_whether_it_carries_over_is_read_from_the_groups_of_both_models() -> None:
    agree = transfer("better", "better")
    assert agree == (
        "Yes, these verdicts agree: BERT: paper/sst2 +0.01 [+0.009, +0.011] (better). "
        "GPT: imdb +0.01 [+0.009, +0.011] (better)."
    )
    assert transfer("worse", "better").startswith("Not in every comparison: BERT: paper/sst2")
    assert transfer("confounded", "better").startswith("Not shown: BERT: paper/sst2")
    alone = _questions([answered("imdb", "GPT", "better")], {})[-1].answer
    assert alone.startswith("Not known: BERT: no effect measured. GPT: imdb ")


def test_a_group_without_oelm_has_no_five_questions() -> None:
    other = replace(answered("imdb", "GPT", "better"), oelm=None)
    assert _questions([other], {}) == ()


def test_a_scale_is_said(fair: fl.GroupResult) -> None:
    from frostlab.experiments.summary import reduced_by

    evidence = fair.comparisons["rates"].evidence
    assert reduced_by(evidence) == ()
    small = {**evidence.plan.recipe, "scale": "tiny"}
    plan = evidence.plan.model_copy(update={"recipe": small, "quick": True})
    reasons = ("scale tiny", "quick: shortened runs")
    assert reduced_by(replace(evidence, plan=plan)) == reasons
    (entry,) = fair.summary.comparisons
    reduced = replace(fair.summary, comparisons=(replace(entry, reduced=reasons),))
    text = show_summary(reduced, fair.page)
    assert "Not the whole experiment: scale tiny." in text
    told = replace(reduced.comparisons[0], caution="scale tiny; selected on the reporting split")
    text = show_summary(replace(reduced, comparisons=(told,)), fair.page)
    assert "Not the whole experiment: scale tiny." not in text, "the caution says it"
    assert "Not the whole experiment: quick: shortened runs." in text


def test_the_summary_fits_a_terminal(published: fl.GroupResult, fair: fl.GroupResult) -> None:
    (entry,) = fair.summary.comparisons
    long = replace(entry.arms[1], arm="eeg-conformer-conservative-published")
    wide = replace(
        fair.summary,
        comparisons=(replace(entry, arms=(*entry.arms, long)),),
        further=tuple(
            replace(result, arms={**result.arms, "oelm-random-matched": result.arms["oelm"]})
            for result in fair.summary.further
        ),
    )
    for summary in (published.summary, fair.summary, wide):
        *lines, _, page = show_summary(summary, fair.page).splitlines()
        assert page == f"page: {fair.page}"
        assert max(map(len, lines)) <= 80


def test_a_damaged_summary_is_refused_in_one_line(fair: fl.GroupResult, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"schema": 2}', "has schema 2, and this frostlab reads 1"),
        (json.dumps(fair.summary.to_dict() | {"group": 3}), "group should be a text"),
    ):
        path.write_text(text)
        with pytest.raises(fl.BadInput, match=message) as error:
            read_summary(tmp_path)
        assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(fl.BadInput, match=r"has no summary.json yet"):
        read_summary(tmp_path)
