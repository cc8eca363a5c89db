"""Means of effects over several comparisons."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from comparing import compare
from frostlab.comparison.evidence import Effect, Evidence
from frostlab.experiments.means import _combined, _mean_effect, means_of, task_of


def effect(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", log: bool = False) -> Effect:
    """The effect of paired differences, or of log ratios."""
    on_scale = math.exp if log else float
    mean, std = float(values.mean()), float(values.std(ddof=1))
    return Effect(len(values), log, 0.05, on_scale(mean), None, None, None, std)


@pytest.mark.parametrize("log", [False, True])
def test_the_difference_of_two_means_is_welchs(log: bool) -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.3, 0.1, 6), rng.normal(0.1, 0.4, 9)
    expected = stats.ttest_ind(one, other, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    combined = _combined([(effect(one, log), 1.0), (effect(other, log), -1.0)])
    back = math.exp if log else float
    assert combined.effect == pytest.approx(back(one.mean() - other.mean()))
    assert (combined.low, combined.high) == pytest.approx((back(low), back(high)))
    assert combined.p == pytest.approx(expected.pvalue)


def test_intervals_of_means_cover_the_truth() -> None:
    rng = np.random.default_rng(1)
    truths = np.array([0.2, -0.1, 0.4])
    covered = 0
    for _ in range(2000):
        effects = [effect(rng.normal(truth, scale, 6))
                   for truth, scale in zip(truths, (0.1, 0.3, 1.0), strict=True)]  # fmt: skip
        mean = _mean_effect(effects)
        assert mean.low is not None
        assert mean.high is not None
        covered += mean.low <= truths.mean() <= mean.high
    assert 0.935 <= covered / 2000 <= 0.985


def test_without_a_spread_there_is_no_interval() -> None:
    known = Effect(5, False, 0.05, 0.1, 0.0, 0.2, 0.1, 0.05)
    mean = _mean_effect([known, replace(known, n=1, std=None, effect=0.3)])
    assert (mean.effect, mean.low, mean.high, mean.n) == (pytest.approx(0.2), None, None, 2)
    assert _mean_effect([known]) is known
    zero = replace(known, log=True, effect=0.0)
    assert _combined([(zero, 0.5), (zero, 0.5)]).effect is None


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return compare(tmp_path_factory.mktemp("means") / "one", seeds=1).evidence


def with_effect(evidence: Evidence, mean: float, model: str = "gpt") -> Evidence:
    verdict = evidence.verdicts["oelm"]
    paired = Effect(6, False, 0.05, mean, mean - 0.1, mean + 0.1, 0.5, 0.05)
    verdicts = {"oelm": replace(verdict, paired=paired, word="no difference found")}
    recipe = evidence.plan.recipe | (
        {
            "model": {"kind": "pretrained", "name": "bert-base-uncased"},
            "data": {"name": "docstrings"},
        }
        if model == "bert"
        else {}
    )
    plan = evidence.plan.model_copy(update={"recipe": recipe})
    return replace(evidence, verdicts=verdicts, plan=plan)


def test_confounded_effects_have_a_mean_of_their_own(evidence: Evidence) -> None:
    assert task_of(evidence) == "classification"
    confounded = replace(with_effect(evidence, 0.9), confounds={"oelm": ("optim.lr 1 → 2",)})
    means = means_of({
        "a": with_effect(evidence, 0.1), "b": with_effect(evidence, 0.3, "bert"),
        "c": with_effect(evidence, 0.2), "d": confounded, "e": confounded,
    })  # fmt: skip
    overall = {mean.shortcomings: mean for mean in means.means if mean.by == "all"}
    assert overall[()].effect.effect == pytest.approx(0.2)
    assert overall[()].comparisons == ("a", "b", "c")
    assert overall[()].verdicts == {"no difference found": 3}
    assert overall[("confounded",)].effect.effect == pytest.approx(0.9)
    models = {(mean.value, mean.shortcomings): mean for mean in means.means if mean.by == "model"}
    assert models["BERT", ()].effect.effect == pytest.approx(0.3)
    assert models["GPT", ()].effect.effect == pytest.approx(0.15)
    (contrast,) = means.contrasts
    assert contrast.models == ("BERT", "GPT")
    assert contrast.effect.effect == pytest.approx(0.15)


def test_an_arm_without_an_effect_is_left_out(evidence: Evidence, tmp_path: Path) -> None:
    verdict = replace(evidence.verdicts["oelm"], paired=None)
    missing = replace(evidence, verdicts={"oelm": verdict})
    assert means_of({"a": missing, "b": with_effect(evidence, 0.1)}).means[0].by == "model"
