"""Preprocessing: rate, band, reference, and signals that are refused."""

import numpy as np
import pytest
from numpy.typing import NDArray

from frostlab.data.eeg.preprocess import bandpass, preprocess, rereference, resample, standardize
from frostlab.errors import BadInput

Array = NDArray[np.float64]


def tone(hertz: float, rate: float, seconds: float = 20) -> Array:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def test_resampling_keeps_time_and_drops_what_does_not_fit() -> None:
    mixed = tone(5, 128) + tone(50, 128)
    found = resample(mixed, 128, 64, "x")
    np.testing.assert_allclose(found[64:-64], tone(5, 64)[64:-64], atol=0.02)
    found = resample(tone(5, 100), 100, 64, "x")
    np.testing.assert_allclose(found[64:-64], tone(5, 64)[64:-64], atol=0.02)


def test_a_band_keeps_time() -> None:
    mixed = tone(0.2, 64) + tone(5, 64) + tone(20, 64)
    found = bandpass(np.stack([mixed, 2 * mixed], axis=1), 64, (1, 9), "x")
    np.testing.assert_allclose(found[256:-256, 0], tone(5, 64)[256:-256], atol=0.05)
    np.testing.assert_allclose(found[:, 1], 2 * found[:, 0], atol=1e-9)


def test_normalising_and_referring() -> None:
    eeg = np.random.default_rng(0).normal([1, 2, 3], [1, 5, 9], (500, 3))
    eeg = np.concatenate([eeg, np.full((500, 1), 7.0)], axis=1)
    found = standardize(eeg)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=0), [1, 1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(rereference(eeg, eeg).mean(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(rereference(eeg, eeg[:, 3:]), eeg - 7)
    assert rereference(eeg, None) is eeg


def recorded(rate: float = 64, rates: tuple[float, float] = (64, 64), **changed: Array) -> object:
    random = np.random.default_rng(0)
    signals = {"eeg": random.normal(size=(640, 2)), "envelope": random.normal(size=640)} | changed
    speakers = [signals[name] for name in ("envelope", "other") if name in signals]
    return preprocess(
        "one", "s", signals["eeg"], speakers, channels=("Fz", "Cz"), rates=rates, rate=rate,
        band=None,
    )  # fmt: skip


@pytest.mark.parametrize("measured", [64.0, 128.0])
def test_a_flat_channel_is_0_after_a_band_too(measured: float) -> None:
    random = np.random.default_rng(0)
    eeg = random.normal(size=(1280, 3))
    eeg[:, 1], eeg[:, 2] = 5.3, 3.7e-6
    rates = (measured, measured)
    found = preprocess(
        "one", "s", eeg, [random.random(1280)], channels=("Fz", "Cz", "Oz"), rates=rates, rate=64.0,
        band=(1.0, 9.0),
    )  # fmt: skip
    assert found.eeg[:, 0].std() == pytest.approx(1)
    assert not found.eeg[:, 1:].any()


def with_nan(shape: tuple[int, ...], at: tuple[int, ...]) -> Array:
    array = np.random.default_rng(0).normal(size=shape)
    array[at] = np.nan
    return array


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"envelope": np.arange(639.0)}, "640 samples at 64 Hz and the envelope 639 at 64 Hz"),
        ({"eeg": with_nan((640, 2), (5, 1))}, "one: NaN or infinity in channel Cz"),
        ({"envelope": with_nan((640,), (5,))}, "one: NaN or infinity in the envelope"),
        ({"envelope": np.full(640, 0.1)}, "one: the envelope is flat, 0.1 throughout"),
        ({"other": np.zeros(640)}, "one: the envelope is flat, 0 throughout"),
        ({"eeg": np.ones((640, 2))}, "every channel of the EEG is flat"),
        ({"eeg": np.ones((640, 3))}, "one has 3 channels and 2 channel names"),
        ({"eeg": np.ones(640)}, "not \\(samples, channels\\)"),
        ({"eeg": np.ones((0, 2)), "envelope": np.ones(0)}, "shape \\(0, 2\\)"),
    ],
)
def test_bad_signals(changed: dict[str, Array], said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        recorded(**changed)
    assert "\n" not in str(caught.value)


def test_rates() -> None:
    with pytest.raises(BadInput, match="one is at 64 Hz and data.rate is 128 Hz"):
        recorded(rate=128)
    found = recorded(rate=32, rates=(64, 128), envelope=np.random.default_rng(0).normal(size=1280))
    assert len(found) == 320  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="640 at 128 Hz, 10.00 s and 5.00 s"):
        recorded(rates=(64, 128))
    with pytest.raises(BadInput, match="too short for a band from 0.01 Hz"):
        bandpass(np.ones(640), 64, (0.01, 9), "one")
