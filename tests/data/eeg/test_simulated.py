"""Simulated EEG has the rhythm, the topography and the noise it claims."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import signal

from frostlab.data.eeg.simulate import (
    BIOSEMI64,
    MEMORY,
    Head,
    draw_rhythm,
    drive,
    frequency_grid,
    head_of,
    noise_power,
    simulate,
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


@pytest.mark.parametrize("responses", ["linear", "nonlinear"])
@pytest.mark.parametrize("snr", [-20.0, 0.0])
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
