"""Simulated EEG: speech-like envelopes, each subject's own responses, and a head's noise."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.preprocess import normalised
from frostlab.data.eeg.recordings import Recording, Store
from frostlab.recipe.data import SimulatedEEG

Array = NDArray[np.float64]

# Inclination from the top and azimuth from the right ear, in degrees: BioSemi's cap of 64.
_CAP = """
Fp1 92 108 AF7 92 126 AF3 74 115 F1 50 112 F3 60 129 F5 75 139 F7 92 144 FT7 92 162
FC5 72 159 FC3 50 152 FC1 32 135 C1 23 180 C3 46 180 C5 69 180 T7 92 180 TP7 92 -162
CP5 72 -159 CP3 50 -152 CP1 32 -135 P1 50 -112 P3 60 -129 P5 75 -139 P7 92 -144 P9 115 -144
PO7 92 -126 PO3 74 -115 O1 92 -108 Iz 115 -90 Oz 92 -90 POz 69 -90 Pz 46 -90 CPz 23 -90
Fpz 92 90 Fp2 92 72 AF8 92 54 AF4 74 65 AFz 69 90 Fz 46 90 F2 50 68 F4 60 51
F6 75 41 F8 92 36 FT8 92 18 FC6 72 21 FC4 50 28 FC2 32 45 FCz 23 90 Cz 0 0
C2 23 0 C4 46 0 C6 69 0 T8 92 0 TP8 92 -18 CP6 72 -21 CP4 50 -28 CP2 32 -45
P2 50 -68 P4 60 -51 P6 75 -41 P8 92 -36 P10 115 -36 PO8 92 -54 PO4 74 -65 O2 92 -72
""".split()  # noqa: SIM905 (a table reads better)

BIOSEMI64: tuple[str, ...] = tuple(_CAP[::3])
BIOSEMI128: tuple[str, ...] = tuple(f"{bank}{n}" for bank in "ABCD" for n in range(1, 33))


def channel_names(count: int) -> tuple[str, ...]:
    """Return the cap's names where the number of channels says which cap, else numbers."""
    known = {64: BIOSEMI64, 128: BIOSEMI128}
    return known.get(count, tuple(str(n) for n in range(1, count + 1)))


@cache
def positions() -> Array:
    """Return the 64 electrodes on the unit sphere: x to the right ear, y to the nose, z up."""
    tilt = np.radians(np.array(_CAP[1::3], dtype=float))
    turn = np.radians(np.array(_CAP[2::3], dtype=float))
    sides = (np.sin(tilt) * np.cos(turn), np.sin(tilt) * np.sin(turn), np.cos(tilt))
    return np.stack(sides, axis=1)  # (64, 3)


def topographies(places: Array, moments: Array) -> Array:
    """Return what dipoles show at the electrodes, average-referenced: (64, dipoles)."""
    apart = positions()[:, None, :] - places[None]  # (64, dipoles, 3)
    distance = np.linalg.norm(apart, axis=2)
    shown: Array = (apart * moments[None]).sum(axis=2) / distance**3
    return shown - shown.mean(axis=0)


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


_HEAD, _RECORDING = 0, 1  # what a stream of random numbers is for

BOUND = "with nonlinear responses best_r is a bound (rate and distortion), perhaps out of reach"


def head_of(data: SimulatedEEG, unseen: bool, subject: int) -> Head:
    """Draw a subject; the others, and how many there are, play no part."""
    random = np.random.default_rng([data.seed, _HEAD, unseen, subject])
    return draw_head(data.rate, data.snr, data.responses, random)


def simulate(
    head: Head, samples: int, rate: float, responses: str, random: np.random.Generator
) -> tuple[Array, Array]:
    """Draw an envelope (samples,) and the EEG (samples, 64) of a head that hears it."""
    from scipy import signal

    before = round(MEMORY * rate) + len(head.response) - 1
    heard = draw_rhythm("envelope", (before + samples,), rate, random)
    answered = drive(heard, rate, responses)[round(MEMORY * rate) :]
    eeg: Array = signal.oaconvolve(answered[:, None], head.response, "valid", axes=0)
    eeg += head.blinks * draw_blinks(samples, rate, random)[:, None]
    for kind, pattern in (("background", head.background), ("alpha", head.alpha)):
        # Fewer signals than dipoles have the same spread: that of the channels' covariance.
        values, vectors = np.linalg.eigh(pattern @ pattern.T)
        largest = np.abs(vectors).argmax(0)  # signs are the library's choice, and must not matter
        vectors = vectors * np.sign(vectors[largest, np.arange(len(values))])
        kept = values > 1e-12 * values[-1]
        spread = vectors[:, kept] * np.sqrt(values[kept])  # (64, rank)
        drawn = draw_rhythm(kind, (spread.shape[1], samples), rate, random)
        eeg += (spread @ drawn).T
    eeg += head.sensors * random.standard_normal((samples, 64))
    return heard[before:], eeg


def write_simulated(data: SimulatedEEG, folder: Path) -> None:
    """Draw all subjects and recordings, and what can be known of them."""
    store = Store(folder)
    samples = round(data.seconds * data.rate)
    roles = ["train"] * (data.recordings - data.tune - data.report)
    roles += ["tune"] * data.tune + ["report"] * data.report
    known: dict[str, float] = {}
    groups = (("", False, data.subjects, roles), ("_unseen", True, data.unseen, ["unseen"]))
    for suffix, unseen, count, parts in groups:
        found = []
        for subject in range(count):
            head = head_of(data, unseen, subject)
            found.append(optimum(head, data.rate, data.responses))
            for number, role in enumerate(parts * (data.report if unseen else 1)):
                key = [data.seed, _RECORDING, unseen, subject, number]
                envelope, eeg = simulate(
                    head, samples, data.rate, data.responses, np.random.default_rng(key)
                )
                name = f"sub-{subject + 1 + unseen * data.subjects:03d}"
                title = f"{name}_-_story{number + 1}"
                store.add(role, Recording(title, name, normalised(eeg), normalised(envelope)))
        if found:
            known[f"best_r{suffix}"] = mean_r(one.best for one in found)
            known[f"best_linear_r{suffix}"] = mean_r(one.linear for one in found)
    about = f"simulated, {data.responses} responses, {data.snr:g} dB, seed {data.seed}"
    origin = {role: f"{about}; {roles.count(role)} of each of {data.subjects}" for role in roles}
    if data.unseen:
        origin["unseen"] = f"{about}; {data.report} of each of {data.unseen} others"
    caution = BOUND if data.responses == "nonlinear" else None
    store.finish(data.rate, BIOSEMI64, origin, known, caution)


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


def draw_rhythm(
    kind: str, shape: tuple[int, ...], rate: float, random: np.random.Generator
) -> Array:
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
