"""What of an envelope a simulated brain answers to, and each subject's own head."""

from frostlab.data.eeg.geometry import Array
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.spectra import GRID, SYLLABLES, draw_blinks, draw_rhythm, frequency_grid, rhythm_power
from frostlab.data.eeg.geometry import topographies


SPAN = 0.4  # s, the longest a response lasts
MEMORY = 2.0  # s, after which the adaptation has forgotten
_LATENCIES = (0.06, 0.12, 0.20)  # s, of the three waves
_WIDTHS = (0.018, 0.025, 0.04)  # s
_HEIGHTS = (0.6, -1.0, 0.8)
_DELAY = 0.1  # s, by which non-linear subjects differ at most
_SHARES = {"background": 0.6, "alpha": 0.2, "blinks": 0.15, "sensors": 0.05}  # of noise power
_EXPONENT = 1.2  # loudness = amplitude to this power, amplitude = exp(envelope)
_ADAPTATION = 0.25  # s
_SUSTAINED = 0.5  # of loudness itself, beside its onsets


@dataclass(frozen=True)
class Head:
    """One subject: responses, and the directions noise comes from, at a noise power of 1."""

    response: Array  # (taps, channels), of a drive of variance 1
    background: Array  # (channels, dipoles)
    alpha: Array  # (channels, dipoles)
    blinks: Array  # (channels,)
    sensors: float


def drive(envelope: Array, rate: float, responses: str) -> Array:
    """Return what the brain answers to; the first MEMORY seconds of a non-linear one are not it."""
    if responses == "linear":
        return envelope
    long = _measured(rate)
    return (_adapted(envelope, rate) - long.mean) / long.deviation


def _adapted(envelope: Array, rate: float) -> Array:
    """A power law, then onsets, the weaker the louder it has been just before."""
    from scipy import signal

    loud = np.exp(_EXPONENT * envelope)
    step = np.exp(-1 / (_ADAPTATION * rate))
    before: Array = signal.lfilter([0, 1 - step], [1, -step], loud)
    rise = np.maximum(np.diff(loud, prepend=loud[:1]), 0) * rate / (2 * np.pi * SYLLABLES)
    return rise / (before + 0.5) + _SUSTAINED * loud


@dataclass(frozen=True)
class _Measured:
    """What a long draw tells of non-linear drives, for which there is no formula."""

    mean: float
    deviation: float
    power: Array  # on the grid, of the drive at variance 1
    coherence: Array  # with the envelope


@cache
def _measured(rate: float) -> _Measured:
    from scipy import signal

    heard = draw_rhythm("envelope", (1 << 20,), rate, np.random.default_rng(202))
    answered = _adapted(heard, rate)
    heard, answered = (x[round(MEMORY * rate) :] for x in (heard, answered))
    mean, deviation = float(answered.mean()), float(answered.std())
    answered = (answered - mean) / deviation
    how = {"fs": rate, "nperseg": 2 * (GRID - 1), "detrend": False}
    _, cross = signal.csd(heard, answered, **how)
    (_, one), (_, other) = (signal.welch(x, **how) for x in (heard, answered))
    coherence = np.minimum(np.abs(cross) ** 2 / (one * other), 1)
    power = other / np.trapezoid(other, frequency_grid(rate))
    return _Measured(mean, deviation, power, coherence)


def drive_spectra(rate: float, responses: str) -> tuple[Array, Array, Array]:
    """Return the powers of envelope and drive and their coherence, on the grid."""
    envelope = rhythm_power("envelope", frequency_grid(rate), rate)
    if responses == "linear":
        return envelope, envelope, np.ones_like(envelope)
    measured = _measured(rate)
    return envelope, measured.power, measured.coherence


def draw_head(rate: float, snr: float, responses: str, random: np.random.Generator) -> Head:
    """Draw a subject whose responses stand `snr` dB above the noise, over channels and time."""
    response = _draw_response(rate, responses, random)
    noise = _draw_noise(random)
    _, answered, _ = drive_spectra(rate, responses)
    f = frequency_grid(rate)
    gain = np.abs(np.fft.rfft(response, 2 * (GRID - 1), axis=0)) ** 2
    received = np.trapezoid(gain.mean(axis=1) * answered, f)
    return Head(response * np.sqrt(10 ** (snr / 10) / received), *noise)


def _draw_response(rate: float, responses: str, random: np.random.Generator) -> Array:
    """Three waves from the auditory cortices of both sides."""
    delay = random.uniform(0, _DELAY)
    lag = np.arange(int(SPAN * rate) + 1) / rate
    response = np.zeros((len(lag), 64))
    for latency, width, height in zip(_LATENCIES, _WIDTHS, _HEIGHTS, strict=True):
        for side in (-1, 1):
            place = np.array([side * 0.55, 0.05, 0.1]) + 0.04 * random.standard_normal(3)
            moment = np.array([-side * 0.2, 0.5, 0.85]) + 0.2 * random.standard_normal(3)
            at = latency + 0.006 * random.standard_normal()
            at += delay if responses == "nonlinear" else 0
            size = height * np.exp(0.25 * random.standard_normal())
            wave = size * np.exp(-0.5 * ((lag - at) / width) ** 2)
            response += wave[:, None] * topographies(place[None], moment[None])[:, 0]
    return response * np.cos(np.pi / 2 * (lag / SPAN) ** 8)[:, None]


def _draw_noise(random: np.random.Generator) -> tuple[Array, Array, Array, float]:
    ways = random.standard_normal((256, 3))
    radii = 0.8 * random.random(256) ** (1 / 3)
    places = ways / np.linalg.norm(ways, axis=1, keepdims=True) * radii[:, None]
    background = topographies(places, random.standard_normal((256, 3)))
    places = np.array([0, -0.5, 0.15]) + 0.15 * random.standard_normal((24, 3))
    places *= np.minimum(1, 0.8 / np.linalg.norm(places, axis=1, keepdims=True))
    alpha = topographies(places, random.standard_normal((24, 3)))
    eyes = np.array([[-0.3, 0.75, -0.15], [0.3, 0.75, -0.15]]) + 0.02 * random.standard_normal(3)
    blinks = topographies(eyes, np.array([[0, 1, 0.3], [0, 1, 0.3]])).sum(axis=1)

    def scaled(pattern: Array, share: str) -> Array:
        return pattern * np.sqrt(_SHARES[share] * 64 / (pattern**2).sum())

    return (
        scaled(background, "background"),
        scaled(alpha, "alpha"),
        scaled(blinks, "blinks"),
        float(np.sqrt(_SHARES["sensors"])),
    )
