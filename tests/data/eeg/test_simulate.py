"""Simulated EEG: spectra, topographies, signal-to-noise ratio, and the best r of any decoder."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal

from cases import slow_unless
from frostlab.data.eeg.simulate import (
    BIOSEMI64,
    MEMORY,
    Head,
    best_correlation,
    channel_names,
    draw_rhythm,
    drive,
    drive_spectra,
    frequency_grid,
    head_of,
    least_distortion,
    mean_r,
    noise_power,
    positions,
    rhythm_power,
    simulate,
    topographies,
)
from frostlab.recipe.data import SimulatedEEG

RATE = 64.0
LONG = 64 * 600


def head(**settings: object) -> Head:
    data = SimulatedEEG.model_validate({"name": "eeg-simulated"} | settings)
    return head_of(data, False, 0)


def silent(one: Head) -> Head:
    """The same head, in which nothing is noise."""
    none = {"background": 0 * one.background, "alpha": 0 * one.alpha, "blinks": 0 * one.blinks}
    return replace(one, **none, sensors=0.0)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_signs_that_a_library_chooses_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = head(), []
    eigh = np.linalg.eigh

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = eigh(matrix)
        return values, vectors * np.where(np.arange(len(values)) % 2, 1.0, -1.0)

    for solver in (eigh, turned):
        monkeypatch.setattr(np.linalg, "eigh", solver)
        found.append(simulate(one, 128, RATE, "linear", random())[1])
    np.testing.assert_array_equal(*found)


def test_the_envelope_has_the_rhythm_of_syllables() -> None:
    envelope = draw_rhythm("envelope", (LONG,), RATE, random())
    f, power = signal.welch(envelope, RATE, nperseg=512)
    assert 3 < f[power.argmax()] < 8
    assert power[(f >= 3) & (f <= 8)].sum() / power.sum() > 0.7
    assert envelope.std() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("responses", ["linear", "nonlinear"])
def test_a_response_follows_what_was_heard(responses: str) -> None:
    """A naive loop over past samples, none later and none older than 400 ms."""
    one = silent(head(responses=responses))
    assert len(one.response) == 26  # 0 … 25 samples of 64 Hz
    heard, eeg = simulate(one, 400, RATE, responses, random())
    before = round(MEMORY * RATE) + 25
    whole = draw_rhythm("envelope", (before + 400,), RATE, random())
    np.testing.assert_array_equal(heard, whole[before:])
    answered = drive(whole, RATE, responses)
    for t in (0, 100, 399):
        past = sum(answered[before + t - lag] * one.response[lag] for lag in range(26))
        np.testing.assert_allclose(eeg[t], past, atol=1e-9)


@pytest.mark.parametrize(
    ("responses", "snr"),
    slow_unless(
        [("linear", 0.0), ("nonlinear", -20.0)],
        [(kind, snr) for kind in ("linear", "nonlinear") for snr in (-20.0, 0.0)],
    ),
)
def test_the_signal_to_noise_ratio_is_the_one_asked_for(responses: str, snr: float) -> None:
    one = head(snr=snr, responses=responses)
    _, answer = simulate(silent(one), LONG, RATE, responses, random())
    _, noise = simulate(replace(one, response=0 * one.response), LONG, RATE, responses, random())
    found = 10 * np.log10(answer.var(axis=0).mean() / noise.var(axis=0).mean())
    assert found == pytest.approx(snr, abs=0.4)


def test_the_noise_has_the_spectra_it_is_judged_by() -> None:
    one = head()
    one = replace(one, response=0 * one.response)
    _, noise = simulate(one, 2 * LONG, RATE, "linear", random())
    f = frequency_grid(RATE)
    powers = noise_power(one, RATE, blinks=True)
    wanted = np.trapezoid(powers, f, axis=0)
    off = np.linalg.norm(np.cov(noise.T) - wanted) / np.linalg.norm(wanted)
    assert off < 0.08
    for channel in ("Fpz", "Cz", "Oz"):
        at = BIOSEMI64.index(channel)
        _, found = signal.welch(noise[:, at], RATE, nperseg=2 * len(f) - 2)
        theory = powers[:, at, at]
        inside = (f > 1) & (f < 31)
        np.testing.assert_allclose(found[inside], theory[inside], rtol=0.5)
        assert np.mean(found[inside] / theory[inside]) == pytest.approx(1, abs=0.06)


def test_noise_is_as_heads_make_it() -> None:
    one = head()
    power = {channel: np.abs(one.blinks[BIOSEMI64.index(channel)]) for channel in ("Fpz", "Oz")}
    assert power["Fpz"] > 5 * power["Oz"]
    alpha = (one.alpha**2).sum(axis=1)
    assert alpha[BIOSEMI64.index("POz")] > 2 * alpha[BIOSEMI64.index("Fz")]
    near, far = (BIOSEMI64.index(name) for name in ("FCz", "Iz"))
    spread = np.corrcoef(one.background)
    assert spread[BIOSEMI64.index("Cz"), near] > 0.5 > spread[BIOSEMI64.index("Cz"), far]


def test_subjects_differ_and_seeds_decide() -> None:
    data = SimulatedEEG(name="eeg-simulated")
    more = data.model_copy(update={"subjects": 30, "recordings": 9})
    np.testing.assert_array_equal(
        head_of(data, False, 1).response, head_of(more, False, 1).response
    )
    others = [
        head_of(data, False, 2),
        head_of(data, True, 1),
        head_of(data.model_copy(update={"seed": 1}), False, 1),
    ]
    for other in others:
        assert np.abs(head_of(data, False, 1).response - other.response).max() > 1e-3


def test_only_nonlinear_subjects_differ_in_their_delay() -> None:
    def spread(responses: str) -> float:
        data = SimulatedEEG(name="eeg-simulated", responses=responses)
        responses_ = [np.abs(head_of(data, False, i).response).sum(axis=1) for i in range(12)]
        centres = [r @ np.arange(26) / r.sum() / RATE for r in responses_]
        return float(np.std(centres))

    assert spread("linear") < 0.012 < 0.02 < spread("nonlinear")


def test_the_drive_of_nonlinear_responses() -> None:
    """It rises with onsets, is skewed, and is weaker after a loud stretch."""
    heard = draw_rhythm("envelope", (LONG,), RATE, random())
    answered = drive(heard, RATE, "nonlinear")[128:]
    assert ((answered - answered.mean()) ** 3).mean() > 0.5
    assert answered.std() == pytest.approx(1, abs=0.05)
    step = np.concatenate([np.zeros(192), np.full(64, 2.0), np.zeros(64)])
    loud = np.concatenate([np.full(128, 1.5), np.zeros(64), np.full(64, 2.0), np.zeros(64)])
    onset, adapted = (drive(x, RATE, "nonlinear")[192] for x in (step, loud))
    assert onset > adapted
    falling = drive(step, RATE, "nonlinear")[256]
    assert falling < drive(step, RATE, "nonlinear")[255]
    np.testing.assert_array_equal(drive(heard, RATE, "linear"), heard)


def test_the_cap_is_that_of_mne() -> None:
    import mne

    montage = mne.channels.make_standard_montage("biosemi64")
    placed = montage.get_positions()["ch_pos"]
    assert tuple(placed) == BIOSEMI64
    for mine, theirs in zip(positions(), placed.values(), strict=True):
        cosine = mine @ theirs / np.linalg.norm(theirs)
        assert np.degrees(np.arccos(min(cosine, 1))) < 0.5
    assert channel_names(128) == tuple(mne.channels.make_standard_montage("biosemi128").ch_names)
    assert channel_names(3) == ("1", "2", "3")


def test_a_dipole_is_strongest_above_itself() -> None:
    shown = topographies(np.array([[0, 0, 0.7], [0, -0.7, 0.1]]), np.array([[0, 0, 1], [0, -1, 0]]))
    assert BIOSEMI64[shown[:, 0].argmax()] == "Cz"
    assert BIOSEMI64[shown[:, 1].argmax()] == "Oz"
    np.testing.assert_allclose(shown.mean(axis=0), 0, atol=1e-12)


Array = NDArray[np.float64]


def head_at(snr: float, responses: str, subject: int = 0) -> Head:
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
    one = head_at(snr, "linear")
    known = best_correlation(one, RATE, "linear")
    envelope, eeg = simulate(one, 64 * 1200, RATE, "linear", np.random.default_rng(1))
    reached = correlation(decoded(eeg, true_filter(one)), envelope)
    assert reached == pytest.approx(known.linear, abs=0.008)
    assert known.linear <= known.overall < known.linear + 0.002  # blinks hardly matter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("responses", "least"),
    [("linear", 0.98), ("nonlinear", 0.95)],
)
def test_a_fitted_linear_decoder_comes_close_from_below(responses: str, least: float) -> None:
    one = head_at(-10.0, responses)
    known = best_correlation(one, RATE, responses)
    train = simulate(one, 64 * 1800, RATE, responses, np.random.default_rng(2))
    envelope, eeg = simulate(one, 64 * 900, RATE, responses, np.random.default_rng(3))
    reached = correlation(decoded(eeg, fitted_filter(*train)), envelope)
    assert least * known.linear < reached < known.linear + 0.008


def nonlinear_r(responses: str, snr: float) -> tuple[float, float, float]:
    """What random features of the decoded drive reach, and the two known optima."""
    one = head_at(snr, responses)
    known = best_correlation(one, RATE, responses)
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
    return correlation(features[1] @ weights, targets[1]), known.linear, known.overall


@pytest.mark.slow
def test_a_nonlinear_decoder_beats_every_linear_one_below_the_bound() -> None:
    reached, linear, best = nonlinear_r("nonlinear", -10.0)
    assert linear + 0.02 < reached < best
    reached, linear, _ = nonlinear_r("linear", -10.0)
    assert reached < linear + 0.004


def test_the_bound_of_nonlinear_responses_is_above_the_best_linear_decoder() -> None:
    for snr in (-30.0, -10.0):
        known = best_correlation(head_at(snr, "nonlinear"), RATE, "nonlinear")
        assert known.linear + 0.05 < known.overall < 1


def test_rate_and_distortion() -> None:
    """A flat band has a closed form; a true decoder never beats the bound."""
    f = np.linspace(0, 32, 2001)
    flat = np.full_like(f, 1 / 32)
    assert least_distortion(flat, 8.0, f) == pytest.approx(np.exp(-8 / 32), rel=1e-6)
    one = head_at(-15.0, "linear")
    known = best_correlation(one, RATE, "linear")
    grid = frequency_grid(RATE)
    power, _, _ = drive_spectra(RATE, "linear")
    answer = np.fft.rfft(one.response, 2 * len(grid) - 2, axis=0)
    noise = noise_power(one, RATE, blinks=False)
    ratio = [
        power[i] * (answer[i].conj() @ np.linalg.inv(noise[i]) @ answer[i]).real
        for i in range(len(grid))
    ]
    bound = 1 - least_distortion(power, float(np.trapezoid(np.log1p(ratio), grid)), grid)
    assert known.overall < np.sqrt(bound) < known.overall + 0.15


def test_the_mean_is_fishers() -> None:
    assert mean_r([0.1, 0.9]) == pytest.approx(np.tanh((np.arctanh(0.1) + np.arctanh(0.9)) / 2))
