"""Paired statistics against scipy, closed forms and loops over every flip."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from frostlab.comparison.statistics import (
    flip_p,
    flips_can_decide,
    holm,
    mcnemar,
    noninferior,
    paired,
    seen_by_rule,
    seen_by_t,
    signs,
    smallest_flip_p,
    spread,
    t_test,
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
    assert ours.smallest_seen == seen_by_t(n, alpha) * ours.std
    assert (ours.n, ours.alpha, ours.log) == (n, alpha, False)


def test_the_log_scale_is_a_ratio_of_geometric_means() -> None:
    arm, base = drawn(7)
    ours, theirs = paired(arm, base, log=True), stats.ttest_rel(np.log(arm), np.log(base))
    low, high = theirs.confidence_interval(0.95)
    assert ours.effect == pytest.approx(stats.gmean(arm) / stats.gmean(base))
    assert (ours.low, ours.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert ours.p == pytest.approx(theirs.pvalue)
    plain = paired(np.log(arm), np.log(base))
    assert ours.smallest_seen == pytest.approx(math.expm1(plain.smallest_seen))


def test_students_sleep_data() -> None:
    found = paired(SLEEP_2, SLEEP_1)
    assert found.effect == pytest.approx(1.58)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)


@pytest.mark.parametrize("n", [6, 7, 10])
@pytest.mark.parametrize("shift", [0.0, 0.8])
def test_flips_are_scipys_and_a_loops(n: int, shift: float) -> None:
    arm, base = np.round(drawn(n, seed=n, shift=shift), 1)  # rounded: sums tie
    found = paired(arm, base).p_flip
    theirs = stats.permutation_test(
        (arm - base,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    tenths = [round(10 * d) for d in arm - base]
    sums = [
        abs(sum(s * d for s, d in zip(way, tenths, strict=True)))
        for way in itertools.product((1, -1), repeat=n)
    ]
    assert found == sum(x >= abs(sum(tenths)) for x in sums) / 2**n
    assert found == pytest.approx(theirs.pvalue)


def test_flips_wait_for_six_pairs() -> None:
    arm, base = drawn(6, shift=50)
    assert paired(arm[:5], base[:5]).p_flip is None
    assert paired(arm, base).p_flip == 2 / 2**6 == smallest_flip_p(6)
    assert not flips_can_decide(5, 0.05)
    assert flips_can_decide(6, 0.05)
    assert not flips_can_decide(6, 0.025)


def test_beyond_16_pairs_flips_are_sampled_with_the_same_result_each_time() -> None:
    arm, base = drawn(20, shift=0.4)
    first, again = paired(arm, base).p_flip, paired(arm, base).p_flip
    assert first == again
    exact = stats.permutation_test(
        (arm - base,), np.mean, permutation_type="samples", n_resamples=200_000, rng=1
    ).pvalue
    assert first == pytest.approx(exact, abs=0.01)
    assert paired(arm + 99, base).p_flip == smallest_flip_p(20) > 0


def test_many_rows_of_flips_are_each_their_own() -> None:
    rows = np.random.default_rng(0).normal(0.3, 1, (3, 5_000, 8))
    together = flip_p(rows)
    assert together.shape == (3, 5_000)
    assert together[2, 4_321] == flip_p(rows[2, 4_321])
    assert len({tuple(way) for way in signs(8)}) == 2**7


def test_equal_values_differ_by_nothing_and_constants_by_all() -> None:
    base = [0.1, 0.2, 0.3, 0.4, 0.7, 0.9]
    same = paired(base, base)
    assert (same.effect, same.low, same.high, same.p, same.p_flip) == (0, 0, 0, 1.0, 1.0)
    assert (same.std, same.smallest_seen) == (0, 0)
    more = paired([x + 0.1 for x in base], base)  # in floats, six different differences
    assert more.effect == more.low == more.high == pytest.approx(0.1)
    assert (more.p, more.p_flip, more.std) == (0.0, 2 / 2**6, 0.0)
    rounded = paired([0.1 + 0.2] * 6, [0.3] * 6)
    assert (rounded.effect, rounded.p, rounded.p_flip) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("log", [False, True])
def test_one_pair_and_none_have_no_p(log: bool) -> None:
    one, none = paired([3.0], [2.0], log=log), paired([], [], log=log)
    assert one.effect == pytest.approx(1.5 if log else 1)
    assert math.isnan(none.effect)
    for found in (one, none):
        assert found.p_flip is None
        assert all(
            math.isnan(x) for x in (found.p, found.low, found.high, found.std, found.smallest_seen)
        )


def test_far_apart_on_log_scale_is_no_overflow() -> None:
    found = paired([1e300, 1.0], [1e-300, 1e300], log=True)
    assert found.high == math.inf
    assert found.low == 0.0


@pytest.mark.parametrize(
    ("arm", "base", "log", "said"),
    [
        ([1.0], [1.0, 2.0], False, "the same number of values, not 1 and 2"),
        ([1.0, math.nan], [1.0, 2.0], False, "arm must be a list of finite numbers"),
        ([[1.0]], [[1.0]], False, "arm must be a list of finite numbers"),
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
    assert (one.p, one.p_flip, one.std) == (other.p, other.p_flip, other.std)
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
    assert other.p_flip == one.p_flip


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


def test_noninferiority_is_yes_no_or_not_shown() -> None:
    base = [10.0, 11.0, 12.0, 10.5, 11.5, 12.5]

    def answer(factor: float, noise: float = 0.002, *, lower: bool = True) -> str:
        arm = [x * factor * (1 + noise * (-1) ** i) for i, x in enumerate(base)]
        return noninferior(arm, base, 1.05, lower_is_better=lower).answer

    assert [answer(f) for f in (0.9, 1.0, 1.04, 1.06)] == ["yes", "yes", "yes", "no"]
    assert [answer(f, lower=False) for f in (1.1, 1.0, 0.96, 0.94)] == ["yes", "yes", "yes", "no"]
    assert answer(1.04, 0.05) == answer(1.06, 0.05) == "not shown"
    assert answer(0.96, 0.05, lower=False) == "not shown"


def test_noninferiority_carries_its_interval_and_reasons() -> None:
    arm, base = drawn(6)
    found, interval = noninferior(arm, base, 1.2, lower_is_better=True), paired(arm, base, log=True)
    assert (found.ratio, found.low, found.high) == (interval.effect, interval.low, interval.high)
    assert found.reason is None
    zero = noninferior([0.0, 1.0], [1.0, 1.0], 1.05, lower_is_better=False)
    assert (zero.answer, zero.n) == ("not shown", 2)
    assert zero.reason == "a ratio needs values above 0, but one value is 0"
    single = noninferior([1.0], [2.0], 1.05, lower_is_better=True)
    assert (single.answer, single.ratio) == ("not shown", 0.5)
    assert single.reason == "an interval needs at least 2 paired seeds, not 1"
    with pytest.raises(BadInput, match="limit 0.95 of non-inferiority must be 1 or more"):
        noninferior(arm, base, 0.95, lower_is_better=True)


@pytest.mark.parametrize(("n", "alpha"), [(2, 0.05), (5, 0.05), (6, 0.025), (30, 0.05)])
def test_the_t_test_sees_what_it_is_said_to(n: int, alpha: float) -> None:
    rng = np.random.default_rng(n)
    _, _, p = t_test(rng.normal(seen_by_t(n, alpha), 1, (20_000, n)))
    assert np.mean(p <= alpha) == pytest.approx(0.8, abs=0.012)  # 4 standard errors


def test_the_rule_needs_more_than_the_t_test_where_flips_are_few() -> None:
    assert seen_by_rule(6, 0.05) > 1.2 * seen_by_t(6, 0.05)
    assert seen_by_rule(5, 0.05) == seen_by_t(5, 0.05)
    assert seen_by_rule(5, 0.05, 2) == seen_by_t(5, 0.025)
    rng = np.random.default_rng(6)
    differences = rng.normal(seen_by_rule(6, 0.05, 2), 1, (20_000, 6))
    found = (t_test(differences)[2] <= 0.025) & (flip_p(differences) <= 0.05)
    assert found.mean() == pytest.approx(0.8, abs=0.03)
