"""The rhythms of simulated EEG: how much of each frequency, and signals drawn from that.

Every power is one-sided, per Hz, and sums to 1 up to half the rate.
"""

from frostlab.data.eeg.geometry import Array
from functools import cache

import numpy as np
from numpy.typing import NDArray


GRID = 257  # frequencies on which spectra are compared
SYLLABLES = 4.8  # Hz, the middle of the envelope's rhythm; most of it lies between 3 and 8
BLINKS = 0.25  # a second
_BLINK = 0.08  # s, deviation of a blink's bell
_BLINK_SPREAD = 0.2  # of its height


def frequency_grid(rate: float, count: int = GRID) -> Array:
    """Return frequencies from 0 to half the rate."""
    return np.linspace(0, rate / 2, count)


def _envelope(f: Array) -> Array:
    safe = np.maximum(f, 1e-3)
    return np.exp(-0.5 * (np.log(safe / SYLLABLES) / 0.42) ** 2)


def _background(f: Array) -> Array:
    """1/f, with the high pass every amplifier has."""
    return f / (f**2 + 0.5**2)


def _alpha(f: Array) -> Array:
    return 1 / (1 + ((f - 10) / 0.7) ** 2)


def _blinks(f: Array) -> Array:
    return np.exp(-((2 * np.pi * f * _BLINK) ** 2))


SHAPES = {"envelope": _envelope, "background": _background, "alpha": _alpha, "blinks": _blinks}


@cache
def _total(kind: str, rate: float) -> float:
    f = frequency_grid(rate, 16385)
    return float(np.trapezoid(SHAPES[kind](f), f))


def rhythm_power(kind: str, f: Array, rate: float) -> Array:
    """Return the power of one rhythm at some frequencies."""
    return SHAPES[kind](f) / _total(kind, rate)


def draw_rhythm(kind: str, shape: tuple[int, ...], rate: float, random: np.random.Generator) -> Array:
    """Draw Gaussian signals of one rhythm and variance 1, time along the last axis."""
    from scipy import fft

    samples = shape[-1]
    whole = fft.next_fast_len(samples + round(8 * rate), real=True)  # ends do not meet in time
    white = fft.rfft(random.standard_normal((*shape[:-1], whole)))
    gain = np.sqrt(rhythm_power(kind, fft.rfftfreq(whole, 1 / rate), rate) * rate / 2)
    drawn: Array = fft.irfft(white * gain, whole)
    return drawn[..., :samples]


def draw_blinks(samples: int, rate: float, random: np.random.Generator) -> Array:
    """Draw blinks at random moments, of mean 0 and variance 1 over all time."""
    reach = int(np.ceil(4 * _BLINK * rate))
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / rate / _BLINK) ** 2)
    counts = random.poisson(BLINKS / rate, samples + 2 * reach)
    jitter = random.standard_normal(len(counts))
    heights = counts + _BLINK_SPREAD * np.sqrt(counts) * jitter
    mean = BLINKS / rate
    variance = mean * (1 + _BLINK_SPREAD**2) * (bell**2).sum()
    return np.convolve(heights - mean, bell, "valid") / np.sqrt(variance)
