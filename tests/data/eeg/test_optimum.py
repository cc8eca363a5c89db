"""The best r is what an oracle reaches on long recordings, and what none exceeds."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal

from frostlab.data.eeg.simulate import (
    MEMORY,
    Head,
    draw_rhythm,
    drive,
    drive_spectra,
    frequency_grid,
    head_of,
    least_distortion,
    mean_r,
    noise_power,
    optimum,
    rhythm_power,
    simulate,
)
from frostlab.recipe.data import SimulatedEEG

RATE = 64.0
Array = NDArray[np.float64]


def head(snr: float, responses: str, subject: int = 0) -> Head:
    data = SimulatedEEG(name="eeg-simulated", snr=snr, responses=responses)
    return head_of(data, False, subject)


def decoded(eeg: Array, kernels: Array) -> Array:
    """Apply two-sided kernels (taps, 64), the middle one being no lag."""
    middle = len(kernels) // 2
    full = signal.oaconvolve(eeg, kernels, axes=0).sum(axis=1)
    return full[middle : middle + len(eeg)]


def true_filter(one: Head) -> Array:
    """The Wiener filter of linear responses, written out from the true model."""
    f = frequency_grid(RATE)
    power = rhythm_power("envelope", f, RATE)
    answer = np.fft.rfft(one.response, 2 * len(f) - 2, axis=0)
    noise = noise_power(one, RATE, blinks=True)
    kernels = np.empty_like(answer)
    for i in range(len(f)):
        whole = np.outer(answer[i], answer[i].conj()) * power[i] + noise[i]
        kernels[i] = power[i] * answer[i].conj() @ np.linalg.inv(whole)
    return np.fft.fftshift(np.fft.irfft(kernels, axis=0), axes=0)


def fitted_filter(envelope: Array, eeg: Array, taps: int = 128) -> Array:
    """A two-sided decoder fitted by least squares at each frequency, told nothing."""
    window = np.hanning(taps)

    def pieces(x: Array) -> Array:
        cut = np.lib.stride_tricks.sliding_window_view(x, taps, axis=0)[:: taps // 2]
        return np.fft.rfft(cut * window)

    heard, shown = pieces(envelope), pieces(eeg)  # (pieces, f), (pieces, 64, f)
    shown = np.ascontiguousarray(shown.transpose(2, 0, 1))  # (f, pieces, 64)
    kernels = []
    for i, x in enumerate(shown):
        square = x.conj().T @ x
        ridge = 1e-6 * np.trace(square).real / 64 * np.eye(64)
        kernels.append(np.linalg.solve(square + ridge, x.conj().T @ heard[:, i]))
    return np.fft.fftshift(np.fft.irfft(np.array(kernels), taps, axis=0), axes=0)


def correlation(one: Array, other: Array) -> float:
    return float(np.corrcoef(one, other)[0, 1])


@pytest.mark.parametrize("snr", [pytest.param(-10.0, marks=pytest.mark.slow), -28.0])
def test_an_oracle_reaches_the_best_r_of_linear_responses(snr: float) -> None:
    one = head(snr, "linear")
    known = optimum(one, RATE, "linear")
    envelope, eeg = simulate(one, 64 * 1200, RATE, "linear", np.random.default_rng(1))
    reached = correlation(decoded(eeg, true_filter(one)), envelope)
    assert reached == pytest.approx(known.linear, abs=0.008)
    assert known.linear <= known.best < known.linear + 0.002  # blinks hardly matter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("responses", "least"),
    [("linear", 0.98), ("nonlinear", 0.95)],
)
def test_a_fitted_linear_decoder_comes_close_from_below(responses: str, least: float) -> None:
    one = head(-10.0, responses)
    known = optimum(one, RATE, responses)
    train = simulate(one, 64 * 1800, RATE, responses, np.random.default_rng(2))
    envelope, eeg = simulate(one, 64 * 900, RATE, responses, np.random.default_rng(3))
    reached = correlation(decoded(eeg, fitted_filter(*train)), envelope)
    assert least * known.linear < reached < known.linear + 0.008


def nonlinear_r(responses: str, snr: float) -> tuple[float, float, float]:
    """What random features of the decoded drive reach, and the two known optima."""
    one = head(snr, responses)
    known = optimum(one, RATE, responses)
    samples, before = 64 * 900, round(MEMORY * RATE) + len(one.response) - 1
    random = np.random.default_rng(9)
    mixing, bias = 0.3 * random.standard_normal((17, 300)), random.standard_normal(300)
    kernels: Array | None = None
    features, targets = [], []
    for seed in (4, 5):
        envelope, eeg = simulate(one, samples, RATE, responses, np.random.default_rng(seed))
        whole = draw_rhythm("envelope", (before + samples,), RATE, np.random.default_rng(seed))
        answered = drive(whole, RATE, responses)[before:]
        kernels = fitted_filter(answered, eeg) if kernels is None else kernels
        found = decoded(eeg, kernels)
        lags = np.stack([np.roll(found, lag) for lag in range(-16, 17, 2)], axis=1)
        features.append(np.concatenate([lags, np.tanh(lags @ mixing + bias)], axis=1))
        targets.append(envelope)
    whole_square = features[0].T @ features[0] + 10 * np.eye(317)
    weights = np.linalg.solve(whole_square, features[0].T @ targets[0])
    return correlation(features[1] @ weights, targets[1]), known.linear, known.best


@pytest.mark.slow
def test_a_nonlinear_decoder_beats_every_linear_one_below_the_bound() -> None:
    reached, linear, best = nonlinear_r("nonlinear", -10.0)
    assert linear + 0.02 < reached < best
    reached, linear, _ = nonlinear_r("linear", -10.0)
    assert reached < linear + 0.004


def test_the_bound_of_nonlinear_responses_is_above_the_best_linear_decoder() -> None:
    for snr in (-30.0, -10.0):
        known = optimum(head(snr, "nonlinear"), RATE, "nonlinear")
        assert known.linear + 0.05 < known.best < 1


def test_rate_and_distortion() -> None:
    """A flat band has a closed form; a true decoder never beats the bound."""
    f = np.linspace(0, 32, 2001)
    flat = np.full_like(f, 1 / 32)
    assert least_distortion(flat, 8.0, f) == pytest.approx(np.exp(-8 / 32), rel=1e-6)
    one = head(-15.0, "linear")
    known = optimum(one, RATE, "linear")
    grid = frequency_grid(RATE)
    power, _, _ = drive_spectra(RATE, "linear")
    answer = np.fft.rfft(one.response, 2 * len(grid) - 2, axis=0)
    noise = noise_power(one, RATE, blinks=False)
    ratio = [
        power[i] * (answer[i].conj() @ np.linalg.inv(noise[i]) @ answer[i]).real
        for i in range(len(grid))
    ]
    bound = 1 - least_distortion(power, float(np.trapezoid(np.log1p(ratio), grid)), grid)
    assert known.best < np.sqrt(bound) < known.best + 0.15


def test_the_mean_is_fishers() -> None:
    assert mean_r([0.1, 0.9]) == pytest.approx(np.tanh((np.arctanh(0.1) + np.arctanh(0.9)) / 2))
