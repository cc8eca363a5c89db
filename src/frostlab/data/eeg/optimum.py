"""How well an envelope can be decoded from simulated EEG, from the true responses and spectra.

With linear responses and Gaussian envelopes and noise, the two-sided Wiener filter is the best
decoder of all, and its r is known. With non-linear ones no closed form is: there the bound is
that of rate and distortion, above every decoder, which need not be reachable.
"""

from frostlab.data.eeg.geometry import Array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.spectra import GRID, SYLLABLES, draw_blinks, draw_rhythm, frequency_grid, rhythm_power
from frostlab.data.eeg.responses import Head, drive_spectra



@dataclass(frozen=True)
class Optimum:
    """What decoders of one subject can reach, in expectation over long recordings."""

    best: float  # no decoder exceeds it
    linear: float  # what the best linear one reaches


def optimum(head: Head, rate: float, responses: str) -> Optimum:
    """Return the best r with one head, over all decoders and over linear ones."""
    f = frequency_grid(rate)
    envelope, answered, coherence = drive_spectra(rate, responses)
    ratio = signal_to_noise(head, rate, blinks=True) * answered
    linear = np.trapezoid(envelope * coherence * ratio / (1 + ratio), f)
    clean = signal_to_noise(head, rate, blinks=False) * answered  # as if blinks could be seen
    if responses == "linear":
        best = float(np.trapezoid(envelope * clean / (1 + clean), f))
    else:
        best = 1 - least_distortion(envelope, float(np.trapezoid(np.log1p(clean), f)), f)
    return Optimum(best**0.5, float(linear) ** 0.5)


def noise_power(head: Head, rate: float, blinks: bool) -> Array:
    """Return the noise's cross power between channels: (frequencies, 64, 64)."""
    f = frequency_grid(rate)
    parts = {"background": head.background, "alpha": head.alpha}
    parts |= {"blinks": head.blinks[:, None]} if blinks else {}
    noise = np.broadcast_to(head.sensors**2 * np.eye(64) * 2 / rate, (len(f), 64, 64)).copy()
    for kind, pattern in parts.items():
        noise += rhythm_power(kind, f, rate)[:, None, None] * (pattern @ pattern.T)
    return noise


def signal_to_noise(head: Head, rate: float, blinks: bool) -> Array:
    """Return, for a drive of power 1 per Hz, the ratio at the output of the best spatial filter."""
    heard = np.fft.rfft(head.response, 2 * (GRID - 1), axis=0)  # (frequencies, 64)
    parts = np.stack([heard.real, heard.imag], axis=2)  # the noise's cross power is real
    filters = np.linalg.solve(noise_power(head, rate, blinks), parts)
    ratio: Array = (parts * filters).sum(axis=(1, 2))
    return ratio


def least_distortion(power: Array, nats: float, f: Array) -> float:
    """Return the least squared error at which so many nats a second tell a Gaussian signal.

    Reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3).
    """
    low, high = -700.0, float(np.log(power.max()))  # of the logarithm of the water level
    logs = np.log(np.maximum(power, 1e-300))
    for _ in range(100):
        level = (low + high) / 2
        if np.trapezoid(np.maximum(logs - level, 0), f) > nats:
            low = level
        else:
            high = level
    return float(np.trapezoid(np.minimum(power, np.exp(high)), f))


def mean_r(values: Iterable[float]) -> float:
    """Return the mean by Fisher's z, as scores over subjects are averaged."""
    return float(np.tanh(np.mean(np.arctanh(list(values)))))
