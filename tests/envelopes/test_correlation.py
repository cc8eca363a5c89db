"""r, its mean, chance, windows and matching, against plain loops."""

import numpy as np
import pytest
from scipy import stats

from eeg_made import speech
from frostlab.envelopes.correlation import (
    Tally,
    draw_shifts,
    fisher_mean,
    match_attended,
    match_mismatch,
    null_distribution,
    pearson,
    shifted_pearson,
    stitch,
    window_starts,
)
from frostlab.errors import BadInput

RANDOM = np.random.default_rng(0)


def test_pearson_is_scipys() -> None:
    a, b = RANDOM.standard_normal((2, 3, 200)) + 5
    expected = [stats.pearsonr(x, y).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(pearson(a, b), expected, atol=1e-12)
    np.testing.assert_allclose(pearson(1e-12 * a, b), expected, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
def test_a_constant_says_nothing(value: float) -> None:
    flat = np.full(333, value, np.float32)
    assert pearson(flat, RANDOM.standard_normal(333)) == 0
    assert not shifted_pearson(flat, RANDOM.standard_normal(333)).any()


def test_rounding_is_not_a_signal() -> None:
    one = np.float32(0.1)
    near = np.where(np.arange(300) % 2, one, np.nextafter(one, np.float32(1)))
    assert pearson(near, np.arange(300) % 2) == 0
    assert pearson(1000 * near - 100, np.arange(300) % 2) == pytest.approx(-1)


def test_the_mean_is_over_z() -> None:
    assert fisher_mean([0.9, 0.1]) == pytest.approx(
        np.tanh((np.arctanh(0.9) + np.arctanh(0.1)) / 2)
    )
    assert np.isfinite(fisher_mean([1.0, 0.0]))


@pytest.mark.parametrize("samples", [100, 101])
def test_every_shift_at_once_is_the_loop_over_them(samples: int) -> None:
    a, b = RANDOM.standard_normal((2, samples)) + 3
    expected = [pearson(a, np.roll(b, shift)) for shift in range(samples)]
    np.testing.assert_allclose(shifted_pearson(a, b), expected, atol=1e-12)


def test_shifts_differ_and_stay_away_both_ways_round() -> None:
    shifts = draw_shifts(100, 20, 61, np.random.default_rng(0))
    assert sorted(shifts) == list(range(20, 81))


def test_p_counts_what_reaches_r() -> None:
    drawn = np.array([0.1, 0.2, 0.3, 0.4])
    assert null_distribution(0.3, drawn).p == 3 / 5
    assert null_distribution(0.5, drawn).p == 1 / 5
    assert null_distribution(0.0, drawn).p == 1
    null = null_distribution(0.3, drawn)
    assert null.low < null.median < null.high


def test_p_is_uniform_where_there_is_nothing() -> None:
    found = []
    for seed in range(200):
        random = np.random.default_rng(seed)
        a, b = speech(400, random), speech(400, random)
        every = shifted_pearson(a, b)
        found.append(null_distribution(float(every[0]), every[draw_shifts(400, 20, 99, random)]).p)
    assert stats.kstest(found, "uniform").pvalue > 0.01


@pytest.mark.parametrize(("samples", "length", "hop"), [(100, 30, 10), (97, 30, 30), (30, 30, 7)])
def test_windows_cut_from_a_signal_give_it_back(samples: int, length: int, hop: int) -> None:
    signal = RANDOM.standard_normal(samples)
    starts = window_starts(samples, length, hop)
    windows = np.stack([signal[start : start + length] for start in starts])
    np.testing.assert_allclose(stitch(windows, starts, samples), signal, rtol=1e-12, atol=1e-12)


def test_where_windows_disagree_their_middles_count_more() -> None:
    found = stitch([[0.0] * 10, [1.0] * 10], [0, 5], 15)
    assert not found[:5].any()
    assert (found[10:] == 1).all()
    assert (np.diff(found[4:11]) > 0).all()
    assert found[7] == pytest.approx(0.5)


def test_windows_that_leave_a_gap_or_run_out_are_refused() -> None:
    with pytest.raises(BadInput, match="^no window covers sample 4 of 10$"):
        stitch(np.ones((2, 4)), [0, 6], 10)
    with pytest.raises(BadInput, match="^a window of 4 samples from 7 is not within 10 samples$"):
        stitch(np.ones((2, 4)), [0, 7], 10)
    with pytest.raises(BadInput, match="one start each"):
        stitch(np.ones((2, 4)), [0], 10)
    with pytest.raises(BadInput, match="^a recording of 3 samples is shorter than a window of 4$"):
        window_starts(3, 4, 2)
    with pytest.raises(BadInput, match="must start every 1 to 4 samples, not 5"):
        window_starts(10, 4, 5)


def test_matching_asks_in_both_orders() -> None:
    x, y = RANDOM.standard_normal((2, 103))
    window, gap, right, asked = 10, 5, 0, 0
    for start in range(0, 94, window):
        own = np.corrcoef(x[start : start + window], y[start : start + window])[0, 1]
        for wrong in (start + window + gap, start - window - gap):
            if 0 <= wrong <= 93:
                asked += 1
                other = np.corrcoef(x[start : start + window], y[wrong : wrong + window])[0, 1]
                right += own > other
    assert match_mismatch(x, y, window, gap) == Tally(right, asked, 10)
    assert match_mismatch(y, y, window, gap).accuracy == 1
    assert match_mismatch(np.zeros(103), y, window, gap).accuracy == 0.5
    assert match_mismatch(x, y, 60, 5) == Tally(0.0, 0, 0)
    assert Tally(0.0, 0, 0).accuracy is Tally(0.0, 0, 0).interval() is None


def test_the_attended_speaker_is_told_from_the_other() -> None:
    x, y = RANDOM.standard_normal((2, 105))
    assert match_attended(x, x, y, 10) == Tally(10.0, 10, 10)
    assert match_attended(y, x, y, 10) == Tally(0.0, 10, 10)


def test_the_interval_is_wilsons_over_windows() -> None:
    expected = stats.binomtest(15, 20).proportion_ci(method="wilson")
    assert Tally(30.0, 40, 20).interval() == pytest.approx((expected.low, expected.high))
    assert Tally(1.0, 2, 3) + Tally(2.0, 3, 4) == Tally(3.0, 5, 7)
