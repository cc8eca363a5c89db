"""Paired statistics against scipy, closed forms and simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from frostlab.comparison.judging.statistics import (
    Pool,
    anytime_critical,
    bounds,
    could_have_found,
    effect_found,
    holm,
    mcnemar,
    over_examples,
    paired,
    power_of_t,
    probability_above,
    probability_of_improvement,
    skew_limit,
    skewness,
    spread,
    t_critical,
)
from frostlab.errors import BadInput

# Student's sleep data (Biometrika 1908): t = 4.0621, p = 0.002833, interval 0.7001 to 2.4599
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]

metrics = st.integers(1, 10_000).map(lambda x: x / 100)
pairs = st.lists(st.tuples(metrics, metrics), min_size=2, max_size=9)


def drawn(n: int, seed: int = 0, shift: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = rng.uniform(5, 9, n)
    return base + shift + rng.normal(0, 1, n), base


@pytest.mark.parametrize("n", [2, 3, 5, 6, 12, 40])
@pytest.mark.parametrize("alpha", [0.05, 0.0125])
def test_the_t_test_is_scipys(n: int, alpha: float) -> None:
    arm, base = drawn(n)
    ours, theirs = paired(arm, base, alpha=alpha), stats.ttest_rel(arm, base)
    low, high = theirs.confidence_interval(1 - alpha)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-10)
    assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-10)
    assert ours.effect == pytest.approx(np.mean(arm - base))
    assert ours.std == pytest.approx(np.std(arm - base, ddof=1))
    assert (ours.n, ours.alpha, ours.log) == (n, alpha, False)


def test_the_log_scale_is_a_ratio_of_geometric_means() -> None:
    arm, base = drawn(7)
    ours, theirs = paired(arm, base, log=True), stats.ttest_rel(np.log(arm), np.log(base))
    low, high = theirs.confidence_interval(0.95)
    assert ours.effect == pytest.approx(stats.gmean(arm) / stats.gmean(base))
    assert (ours.low, ours.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert ours.p == pytest.approx(theirs.pvalue)


def test_students_sleep_data() -> None:
    found = paired(SLEEP_2, SLEEP_1)
    assert found.effect == pytest.approx(1.58)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)


def test_equal_values_differ_by_nothing_and_constants_by_all() -> None:
    base = [0.1, 0.2, 0.3, 0.4, 0.7, 0.9]
    same = paired(base, base)
    assert (same.effect, same.low, same.high, same.p, same.std) == (0, 0, 0, 1.0, 0)
    more = paired([x + 0.1 for x in base], base)  # in floats, six different differences
    assert more.effect == more.low == more.high == pytest.approx(0.1)
    assert (more.p, more.std) == (0.0, 0.0)
    rounded = paired([0.1 + 0.2] * 6, [0.3] * 6)
    assert (rounded.effect, rounded.p) == (0.0, 1.0)


@pytest.mark.parametrize("log", [False, True])
def test_one_pair_and_none_have_no_p(log: bool) -> None:
    one, none = paired([3.0], [2.0], log=log), paired([], [], log=log)
    assert one.effect == pytest.approx(1.5 if log else 1)
    assert math.isnan(none.effect)
    for found in (one, none):
        assert all(math.isnan(x) for x in (found.p, found.low, found.high, found.std))


def test_far_apart_on_log_scale_is_no_overflow() -> None:
    found = paired([1e300, 1.0], [1e-300, 1e300], log=True)
    assert found.high == math.inf
    assert found.low == 0.0


@pytest.mark.parametrize(
    ("arm", "base", "log", "said"),
    [
        ([1.0], [1.0, 2.0], False, "the same number of values, not 1 and 2"),
        ([1.0, math.nan], [1.0, 2.0], False, "values must be a list of finite numbers"),
        ([[1.0]], [[1.0]], False, "values must be a list of finite numbers"),
        ([1.0, 0.0], [1.0, 2.0], True, "above 0, but one value is 0"),
    ],
)
def test_bad_values_are_one_line(arm: list, base: list, log: bool, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        paired(arm, base, log=log)
    assert "\n" not in str(caught.value)


@given(pairs)
def test_swapping_arm_and_base_flips_the_signs(values: list[tuple[float, float]]) -> None:
    arm, base = (list(side) for side in zip(*values, strict=True))
    one, other = paired(arm, base), paired(base, arm)
    assert (one.effect, one.low, one.high) == pytest.approx(
        (-other.effect, -other.high, -other.low)
    )
    assert (one.p, one.std) == pytest.approx((other.p, other.std))
    ratio, inverse = paired(arm, base, log=True), paired(base, arm, log=True)
    assert ratio.effect == pytest.approx(1 / inverse.effect)
    assert ratio.p == pytest.approx(inverse.p)


@given(pairs, st.integers(-100, 100))
def test_a_constant_added_to_both_changes_nothing(
    values: list[tuple[float, float]], constant: int
) -> None:
    arm, base = (np.array(side) for side in zip(*values, strict=True))
    one, other = paired(arm, base), paired(arm + constant, base + constant)
    assert (other.effect, other.p, other.std) == pytest.approx(
        (one.effect, one.p, one.std), rel=1e-6, abs=1e-9
    )


@given(pairs, st.floats(0.01, 100))
def test_scaling_changes_no_ratio(values: list[tuple[float, float]], scale: float) -> None:
    arm, base = (np.array(side) for side in zip(*values, strict=True))
    one, other = (paired(arm * x, base * x, log=True) for x in (1.0, scale))
    assert (other.effect, other.low, other.p) == pytest.approx(
        (one.effect, one.low, one.p), rel=1e-6, abs=1e-9
    )


def test_holm_is_its_closed_form() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.6, "b": 0.5}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.02}) == {"a": 0.02}
    assert holm({}) == {}


def test_an_arm_without_p_still_counts_in_the_family() -> None:
    found = holm({"none": math.nan, "a": 0.02})
    assert found["a"] == 0.04
    assert math.isnan(found["none"])
    assert list(found) == ["none", "a"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.001, 0.2))
def test_holm_rejects_what_its_steps_reject(p: list[float], alpha: float) -> None:
    found = holm({str(i): x for i, x in enumerate(p)})
    rejected = set()
    for step, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[i] * (len(p) - step) > alpha:
            break
        rejected.add(str(i))
    assert {name for name, x in found.items() if x <= alpha} == rejected


def test_spread() -> None:
    found = spread([2.0, 4.0, 6.0])
    assert (found.n, found.mean, found.std, found.cv, found.low, found.high) == (3, 4, 2, 0.5, 2, 6)
    assert spread([-1.0, -3.0]).cv == pytest.approx(math.sqrt(2) / 2)
    assert math.isnan(spread([5.0]).std)
    assert math.isnan(spread([1.0, -1.0]).cv)
    assert spread([]).n == 0


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (40, 61)])
def test_mcnemar_is_the_binomial_test(mine: int, theirs: int) -> None:
    arm = [True] * mine + [False] * theirs + [True] * 4 + [False] * 2
    base = [False] * mine + [True] * theirs + [True] * 4 + [False] * 2
    found = mcnemar(arm, base)
    wanted = stats.binomtest(mine, mine + theirs).pvalue if mine + theirs else 1.0
    assert found.p == pytest.approx(wanted)
    assert (found.both, found.arm_only, found.base_only, found.neither) == (4, mine, theirs, 2)
    with pytest.raises(BadInput, match="predict the same examples"):
        mcnemar(arm, [*base[1:], True, True])


def naive_best(arm: np.ndarray, base: np.ndarray, critical: float) -> tuple[float, float]:
    """The interval of best against best by its definition, from (settings, seeds) of scores."""

    def chosen(table: np.ndarray) -> np.ndarray:
        values = []
        for seed in range(table.shape[1]):
            others = [k for k in range(table.shape[1]) if k != seed]
            best = max(range(len(table)), key=lambda r: table[r, others].mean())
            values.append(table[best, seed])
        return np.array(values)

    def end(differences: np.ndarray, sign: int) -> float:
        half = critical * differences.std(ddof=1) / math.sqrt(len(differences))
        return differences.mean() + sign * half

    own, other = chosen(arm), chosen(base)
    low = min([end(own - other, -1), *(end(own - row, -1) for row in base)])
    high = max([end(own - other, 1), *(end(row - other, 1) for row in arm)])
    return low, high


def tuned(table: np.ndarray) -> np.ndarray:
    """The value of each seed, of the setting that the other seeds choose."""
    others = table.sum(-1, keepdims=True) - table
    return np.take_along_axis(table, others.argmax(-2)[..., None, :], -2)[..., 0, :]


def test_best_against_best_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        arm, base = rng.normal(0, 1, (2, 3, 6))
        found = paired(tuned(arm), tuned(base), arm_tried=list(arm), base_tried=list(base))
        wanted = naive_best(arm, base, stats.t.ppf(0.975, 5))
        assert (found.low, found.high) == pytest.approx(wanted)
        at_p = paired(tuned(arm), tuned(base), arm_tried=list(arm), base_tried=list(base),
                      alpha=found.p)  # fmt: skip
        mirrored = paired(
            -tuned(arm), -tuned(base), arm_tried=list(-arm), base_tried=list(-base),
            lower_is_better=True,
        )  # fmt: skip
        assert (-mirrored.high, -mirrored.low, mirrored.p) == pytest.approx((*wanted, found.p))
        if found.p < 1:  # p is the largest alpha with zero in the interval
            assert min(abs(at_p.low), abs(at_p.high)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("n", [6, 20])
@pytest.mark.parametrize("fall", [0.5, 1.0, 2.0])
def test_the_choice_of_a_setting_is_no_effect(n: int, fall: float) -> None:
    """Two equal arms, each tuned over three rates, whose outer rates are worse by `fall`."""
    trials = 4_000
    rng = np.random.default_rng([n, int(10 * fall)])
    means = -np.array([fall, 0.0, fall])[:, None]
    arm, base = means + rng.normal(0, 1, (2, trials, 3, n))
    found = bounds(
        tuned(arm), tuned(base), t_critical(n, 0.05),
        [arm[:, r] for r in range(3)], [base[:, r] for r in range(3)],
    )  # fmt: skip
    alarms = (found.low > 0) | (found.high < 0)
    assert alarms.sum() <= stats.binom.ppf(0.999, trials, 0.05)
    assert np.array_equal(alarms, found.p < 0.05)
    if fall == 0.5:  # the same arms, with one rate for all seeds, chosen by two other seeds
        once = [(means + rng.normal(0, 1, (trials, 3, 2))).mean(-1).argmax(-1) for _ in range(2)]
        naive = (
            np.take_along_axis(arm, once[0][:, None, None], 1)
            - np.take_along_axis(base, once[1][:, None, None], 1)
        )[:, 0]
        t = np.abs(naive.mean(-1)) / (naive.std(-1, ddof=1) / math.sqrt(n))
        assert (t > t_critical(n, 0.05)).mean() > 0.06


@pytest.mark.parametrize(("n", "alpha"), [(2, 0.05), (5, 0.05), (6, 0.025), (30, 0.05)])
def test_the_power_of_the_t_test_is_the_simulated_one(n: int, alpha: float) -> None:
    rng = np.random.default_rng(n)
    effect = effect_found(n, alpha, 0.8)
    assert float(power_of_t(effect, n, t_critical(n, alpha))) == pytest.approx(0.8)
    p = stats.ttest_1samp(rng.normal(effect, 1, (20_000, n)), 0, axis=1).pvalue
    assert np.mean(p <= alpha) == pytest.approx(0.8, abs=0.012)  # 4 standard errors


@pytest.mark.parametrize("n", [5, 6, 8, 12, 20])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 6])
def test_what_could_have_been_found_is_found(n: int, alpha: float) -> None:
    """The effect is in estimated standard deviations, and few pairs estimate them badly."""
    std = np.random.default_rng(n).normal(0, 1, (4_000, n)).std(-1, ddof=1)
    power = power_of_t(could_have_found(n, alpha) * std, n, t_critical(n, alpha))
    assert power.mean() > 0.78
    assert (power < 0.5).mean() < 0.05


def test_a_comparison_of_more_seeds_finds_more() -> None:
    power = [float(power_of_t(1.5, n, t_critical(n, 0.05))) for n in range(5, 13)]
    assert power == sorted(power)
    assert power[6 - 5] == pytest.approx(0.83, abs=0.01)  # as plan.DEFAULT_SEEDS says


def test_anytime_intervals_hold_at_every_look() -> None:
    """Look after each seed from 5 to 40: any exclusion of the truth counts."""
    trials = 4_000
    noise = np.random.default_rng(0).normal(0, 1, (trials, 40))
    excluded, usual = np.zeros((2, trials), bool)
    for n in range(5, 41):
        part = noise[:, :n]
        t = np.abs(part.mean(-1)) / (part.std(-1, ddof=1) / math.sqrt(n))
        excluded |= t > anytime_critical(n, 0.05)
        usual |= t > t_critical(n, 0.05)
    assert excluded.sum() <= stats.binom.ppf(0.999, trials, 0.05)
    assert usual.mean() > 0.15  # looking each time with the usual interval
    assert anytime_critical(5, 0.05 / 3) == math.inf
    assert all(anytime_critical(n, 0.05) > t_critical(n, 0.05) for n in range(2, 100))


def test_skewness_is_scipys_and_its_limit_a_quantile() -> None:
    values = np.random.default_rng(0).exponential(1, (5, 8))
    assert skewness(values) == pytest.approx(stats.skew(values, axis=1))
    assert skewness(np.ones(6)) == 0
    pool = Pool("base", tuple(values))
    assert pool.skewness == pytest.approx(stats.skew(values, axis=1).mean())
    normal = np.random.default_rng(1).normal(0, 1, (20_000, 6))
    assert (skewness(normal) > skew_limit(6, 1, 0.2)).mean() == pytest.approx(0.2, abs=0.01)


def test_other_examples_and_other_seeds_are_both_counted() -> None:
    """Equal arms in the population, but examples that one of them happens to know."""
    rng = np.random.default_rng(0)
    seeds, examples, trials = 12, 600, 400
    missed_here = missed = 0
    for _ in range(trials):
        tilt = rng.normal(0, 0.15, examples)  # how much better the arm is on each example
        arm = rng.random((seeds, examples)) < 0.8 + tilt
        base = rng.random((seeds, examples)) < 0.8 - tilt
        population = over_examples(arm, base, 0.05)
        here = paired(arm.mean(1), base.mean(1))
        assert population.effect == pytest.approx(here.effect)
        missed += not population.low <= 0 <= population.high
        missed_here += not here.low <= 0 <= here.high
    assert missed <= stats.binom.ppf(0.999, trials, 0.05)
    assert missed_here > 0.2 * trials
    with pytest.raises(BadInput, match="at least 2 seeds"):
        over_examples([[True]], [[True]], 0.05)
    same = over_examples([[1, 0]] * 3, [[1, 0]] * 3, 0.05)
    assert (same.effect, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_variances_are_pooled_over_arms_that_are_alike() -> None:
    quiet = np.array([1.0, -1.0, 0.5, -0.5, 0.2, -0.2])
    like, wild = 1.5 * quiet, 30 * quiet
    variance, freedom = Pool("base", (quiet, like, wild)).variance(quiet)
    assert (variance, freedom) == (pytest.approx((quiet.var(ddof=1) + like.var(ddof=1)) / 2), 10)
    assert Pool("base", (quiet, like, wild)).variance(wild)[1] == 5


def test_probabilities() -> None:
    assert probability_of_improvement([1.0, 2.0], [0.0, 2.0], lower_is_better=False) == 0.625
    assert probability_of_improvement([1.0, 2.0], [0.0, 2.0], lower_is_better=True) == 0.375
    assert probability_above(0.5, 0.3, 0.2, 7) == pytest.approx(stats.t.sf(0.5, 7, 0.3, 0.2))
    assert (probability_above(0.5, 0.6, 0.0, 7), probability_above(0.5, 0.5, 0.0, 7)) == (1, 0)
