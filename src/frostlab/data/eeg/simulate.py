"""Simulated EEG, with a known upper bound on the correlation r of decoded and true envelopes.

An envelope (the loudness of speech over time) is simulated as a Gaussian signal with a speech-like
rhythm. The brain of a subject (a `Head`) responds to a drive: the envelope itself, or a non-linear
function of it. The response consists of three waves from both auditory cortices; noise comes from
brain, eyes and sensors. `best_correlation` computes the bound from the true responses and spectra.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.preprocess import standardize
from frostlab.data.eeg.recordings import Recording, Store
from frostlab.recipe.data import SimulatedEEG
from frostlab.text import counted

Array = NDArray[np.float64]
SPAN = 0.4  # s, duration of a response
MEMORY = 2.0  # s; after this time the adaptation to loudness (`_adapt`) has forgotten its start
_LATENCIES = (0.06, 0.12, 0.20)  # s, latencies of the three waves
_WIDTHS = (0.018, 0.025, 0.04)  # s, widths of the three waves
_HEIGHTS = (0.6, -1.0, 0.8)  # median amplitudes of the three waves
_DELAY = 0.1  # s, maximum extra latency of a subject with non-linear responses
_SHARES = {"background": 0.6, "alpha": 0.2, "blinks": 0.15, "sensors": 0.05}  # of the noise power
_EXPONENT = 1.2  # the loudness in the non-linear drive is exp(envelope) to this power
_ADAPTATION = 0.25  # s, time constant of the adaptation to loudness
_SUSTAINED = 0.5  # weight of the loudness in the non-linear drive; its onsets have weight 1
GRID = 257  # number of frequencies at which spectra are computed
SYLLABLES = 4.8  # Hz, centre of the envelope's spectrum; most power is between 3 and 8 Hz
BLINKS = 0.25  # mean number per second
_BLINK = 0.08  # s, standard deviation of the Gaussian shape of a blink
_BLINK_SPREAD = 0.2  # standard deviation of a blink's height; the mean is 1
_HEAD, _RECORDING = 0, 1  # parts of seeds, so that subjects and recordings have different seeds
BOUND = (
    "with nonlinear responses, best_r is an upper bound from rate-distortion theory, which perhaps "
    "no decoder can reach"
)

# BioSemi's 64-channel cap: inclination from the top and azimuth from the right ear, in degrees.
_CAP = """
Fp1 92 108 AF7 92 126 AF3 74 115 F1 50 112 F3 60 129 F5 75 139 F7 92 144 FT7 92 162
FC5 72 159 FC3 50 152 FC1 32 135 C1 23 180 C3 46 180 C5 69 180 T7 92 180 TP7 92 -162
CP5 72 -159 CP3 50 -152 CP1 32 -135 P1 50 -112 P3 60 -129 P5 75 -139 P7 92 -144 P9 115 -144
PO7 92 -126 PO3 74 -115 O1 92 -108 Iz 115 -90 Oz 92 -90 POz 69 -90 Pz 46 -90 CPz 23 -90
Fpz 92 90 Fp2 92 72 AF8 92 54 AF4 74 65 AFz 69 90 Fz 46 90 F2 50 68 F4 60 51
F6 75 41 F8 92 36 FT8 92 18 FC6 72 21 FC4 50 28 FC2 32 45 FCz 23 90 Cz 0 0
C2 23 0 C4 46 0 C6 69 0 T8 92 0 TP8 92 -18 CP6 72 -21 CP4 50 -28 CP2 32 -45
P2 50 -68 P4 60 -51 P6 75 -41 P8 92 -36 P10 115 -36 PO8 92 -54 PO4 74 -65 O2 92 -72
""".split()  # noqa: SIM905 (a table is easier to read)
BIOSEMI64: tuple[str, ...] = tuple(_CAP[::3])
BIOSEMI128: tuple[str, ...] = tuple(f"{bank}{n}" for bank in "ABCD" for n in range(1, 33))


@dataclass(frozen=True)
class Head:
    """One subject: the response to a drive, and the sources of noise.

    All noise together has a power of 1, averaged over channels. A topography (a column of
    `background` or `alpha`, or `blinks`) holds the potential of a source at each channel.
    """

    response: Array  # (taps, channels), impulse response; the drive has variance 1
    background: Array  # (channels, dipoles)
    alpha: Array  # (channels, dipoles)
    blinks: Array  # (channels,)
    sensors: float  # standard deviation of the sensor noise


def write_simulated(data: SimulatedEEG, folder: Path) -> None:
    """Draw all subjects and recordings, and store them with the bounds on r."""
    store = Store(folder)
    samples = round(data.seconds * data.rate)
    roles = ["train"] * (data.recordings - data.tune - data.report)
    roles += ["tune"] * data.tune + ["report"] * data.report
    reference_scores: dict[str, float] = {}
    groups = (("", False, data.subjects, roles), ("_unseen", True, data.unseen, ["unseen"]))
    for suffix, unseen, count, group_roles in groups:
        bests = []
        for subject in range(count):
            head = head_of(data, unseen, subject)
            bests.append(best_correlation(head, data.rate, data.responses))
            for number, role in enumerate(group_roles * (data.report if unseen else 1)):
                key = [data.seed, _RECORDING, unseen, subject, number]
                envelope, eeg = simulate(
                    head, samples, data.rate, data.responses, np.random.default_rng(key)
                )
                name = f"sub-{subject + 1 + unseen * data.subjects:03d}"
                title = f"{name}_-_story{number + 1}"
                store.add(role, Recording(title, name, standardize(eeg), standardize(envelope)))
        if bests:
            reference_scores[f"best_r{suffix}"] = mean_r(best.overall for best in bests)
            reference_scores[f"best_linear_r{suffix}"] = mean_r(best.linear for best in bests)
    about = f"simulated, {data.responses} responses, {data.snr:g} dB, seed {data.seed}"
    origin = {
        role: f"{about}; {counted(roles.count(role), 'recordings')} of each training subject"
        for role in roles
    }
    if data.unseen:
        origin["unseen"] = f"{about}; {counted(data.report, 'recordings')} of each other subject"
    caution = BOUND if data.responses == "nonlinear" else None
    store.finish(data.rate, BIOSEMI64, origin, reference_scores, caution)


def simulate(
    head: Head, samples: int, rate: float, responses: str, random: np.random.Generator
) -> tuple[Array, Array]:
    """Draw an envelope (samples,) and a head's EEG (samples, 64) in response to it."""
    from scipy import signal

    # the EEG also depends on speech before the recording: this many samples of it
    lead = round(MEMORY * rate) + len(head.response) - 1
    envelope = draw_rhythm("envelope", (lead + samples,), rate, random)
    driven = drive(envelope, rate, responses)[round(MEMORY * rate) :]
    eeg: Array = signal.oaconvolve(driven[:, None], head.response, "valid", axes=0)
    eeg += head.blinks * draw_blinks(samples, rate, random)[:, None]
    for kind, pattern in (("background", head.background), ("alpha", head.alpha)):
        # Noise from one signal per eigenvector of the channel covariance has the same distribution
        # as noise from one signal per dipole, and never needs more signals.
        values, vectors = np.linalg.eigh(pattern @ pattern.T)
        largest = np.abs(vectors).argmax(0)  # made positive below: eigh may return either sign
        vectors = vectors * np.sign(vectors[largest, np.arange(len(values))])
        nonzero = values > 1e-12 * values[-1]
        spread = vectors[:, nonzero] * np.sqrt(values[nonzero])  # (64, rank)
        signals = draw_rhythm(kind, (spread.shape[1], samples), rate, random)
        eeg += (spread @ signals).T
    eeg += head.sensors * random.standard_normal((samples, 64))
    return envelope[lead:], eeg


def head_of(data: SimulatedEEG, unseen: bool, subject: int) -> Head:
    """Draw one subject; the draw does not depend on the number of subjects."""
    random = np.random.default_rng([data.seed, _HEAD, unseen, subject])
    return draw_head(data.rate, data.snr, data.responses, random)


def draw_head(rate: float, snr: float, responses: str, random: np.random.Generator) -> Head:
    """Draw a subject whose signal-to-noise ratio, averaged over channels and time, is `snr` dB."""
    response = _draw_response(rate, responses, random)
    noise = _draw_noise(random)
    _, drive_power, _ = drive_spectra(rate, responses)
    f = frequency_grid(rate)
    gain = np.abs(np.fft.rfft(response, 2 * (GRID - 1), axis=0)) ** 2
    power = np.trapezoid(gain.mean(axis=1) * drive_power, f)
    return Head(response * np.sqrt(10 ** (snr / 10) / power), *noise)


def _draw_response(rate: float, responses: str, random: np.random.Generator) -> Array:
    """Draw a response (taps, 64): three waves, each from one dipole in each auditory cortex.

    Positions are in head radii, with the axes of `positions`.
    """
    delay = random.uniform(0, _DELAY)
    lag = np.arange(int(SPAN * rate) + 1) / rate
    response = np.zeros((len(lag), 64))
    for latency, width, height in zip(_LATENCIES, _WIDTHS, _HEIGHTS, strict=True):
        for side in (-1, 1):
            place = np.array([side * 0.55, 0.05, 0.1]) + 0.04 * random.standard_normal(3)
            moment = np.array([-side * 0.2, 0.5, 0.85]) + 0.2 * random.standard_normal(3)
            peak = latency + 0.006 * random.standard_normal()
            peak += delay if responses == "nonlinear" else 0
            size = height * np.exp(0.25 * random.standard_normal())
            wave = size * np.exp(-0.5 * ((lag - peak) / width) ** 2)
            response += wave[:, None] * topographies(place[None], moment[None])[:, 0]
    return response * np.cos(np.pi / 2 * (lag / SPAN) ** 8)[:, None]  # fades to 0 at SPAN


def _draw_noise(random: np.random.Generator) -> tuple[Array, Array, Array, float]:
    """Draw the topographies of background, alpha and blinks, and the sensor noise's deviation."""
    # Background: 256 dipoles, uniformly in a ball of 0.8 head radii.
    directions = random.standard_normal((256, 3))
    radii = 0.8 * random.random(256) ** (1 / 3)
    places = directions / np.linalg.norm(directions, axis=1, keepdims=True) * radii[:, None]
    background = topographies(places, random.standard_normal((256, 3)))
    # Alpha: 24 dipoles in the back of the head.
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


def drive(envelope: Array, rate: float, responses: str) -> Array:
    """Return the signal that the brain responds to, with mean 0 and variance 1.

    The first MEMORY seconds of a non-linear drive are not valid.
    """
    if responses == "linear":
        return envelope
    moments = _measure_drive(rate)
    return (_adapt(envelope, rate) - moments.mean) / moments.deviation


def _adapt(envelope: Array, rate: float) -> Array:
    """Return the onsets of loudness, reduced by recent loudness, plus the loudness itself."""
    from scipy import signal

    loud = np.exp(_EXPONENT * envelope)
    decay = np.exp(-1 / (_ADAPTATION * rate))
    recent: Array = signal.lfilter([0, 1 - decay], [1, -decay], loud)
    rise = np.maximum(np.diff(loud, prepend=loud[:1]), 0) * rate / (2 * np.pi * SYLLABLES)
    return rise / (recent + 0.5) + _SUSTAINED * loud


@dataclass(frozen=True)
class _DriveMoments:
    """Statistics of the non-linear drive, estimated from a long draw, as no formula is known."""

    mean: float
    deviation: float
    power: Array  # power spectrum of the drive at variance 1, at the frequencies `frequency_grid`
    coherence: Array  # coherence with the envelope, at the same frequencies


@cache
def _measure_drive(rate: float) -> _DriveMoments:
    from scipy import signal

    envelope = draw_rhythm("envelope", (1 << 20,), rate, np.random.default_rng(202))
    driven = _adapt(envelope, rate)
    envelope, driven = (x[round(MEMORY * rate) :] for x in (envelope, driven))
    mean, deviation = float(driven.mean()), float(driven.std())
    driven = (driven - mean) / deviation
    options = {"fs": rate, "nperseg": 2 * (GRID - 1), "detrend": False}
    _, cross = signal.csd(envelope, driven, **options)
    (_, envelope_power), (_, power) = (signal.welch(x, **options) for x in (envelope, driven))
    coherence = np.minimum(np.abs(cross) ** 2 / (envelope_power * power), 1)
    return _DriveMoments(
        mean, deviation, power / np.trapezoid(power, frequency_grid(rate)), coherence
    )


def drive_spectra(rate: float, responses: str) -> tuple[Array, Array, Array]:
    """Return the power of envelope and drive, and their coherence, at `frequency_grid`."""
    envelope = rhythm_power("envelope", frequency_grid(rate), rate)
    if responses == "linear":
        return envelope, envelope, np.ones_like(envelope)
    moments = _measure_drive(rate)
    return envelope, moments.power, moments.coherence


def channel_names(count: int) -> tuple[str, ...]:
    """Return the channel names of BioSemi's cap with 64 or 128 channels, else numbers from 1."""
    caps = {64: BIOSEMI64, 128: BIOSEMI128}
    return caps.get(count, tuple(str(n) for n in range(1, count + 1)))


@cache
def positions() -> Array:
    """Return 64 electrode positions on the unit sphere: x to the right ear, y to the nose, z up."""
    tilt = np.radians(np.array(_CAP[1::3], dtype=float))
    turn = np.radians(np.array(_CAP[2::3], dtype=float))
    xyz = (np.sin(tilt) * np.cos(turn), np.sin(tilt) * np.sin(turn), np.cos(tilt))
    return np.stack(xyz, axis=1)  # (64, 3)


def topographies(places: Array, moments: Array) -> Array:
    """Return the potentials of dipoles at the electrodes, average-referenced: (64, dipoles)."""
    offsets = positions()[:, None, :] - places[None]  # (64, dipoles, 3)
    distance = np.linalg.norm(offsets, axis=2)
    potentials: Array = (offsets * moments[None]).sum(axis=2) / distance**3
    return potentials - potentials.mean(axis=0)


def frequency_grid(rate: float, count: int = GRID) -> Array:
    """Return `count` frequencies from 0 to half the rate."""
    return np.linspace(0, rate / 2, count)


def _envelope(f: Array) -> Array:
    """Return a peak at the rate of syllables, Gaussian in the logarithm of the frequency."""
    safe = np.maximum(f, 1e-3)
    return np.exp(-0.5 * (np.log(safe / SYLLABLES) / 0.42) ** 2)


def _background(f: Array) -> Array:
    """Return a 1/f spectrum after an amplifier's high-pass filter."""
    return f / (f**2 + 0.5**2)


def _alpha(f: Array) -> Array:
    """Return a Lorentzian peak at 10 Hz."""
    return 1 / (1 + ((f - 10) / 0.7) ** 2)


def _blinks(f: Array) -> Array:
    """Return the power spectrum of a Gaussian pulse."""
    return np.exp(-((2 * np.pi * f * _BLINK) ** 2))


# Power spectra of the signals, not normalized.
SHAPES = {"envelope": _envelope, "background": _background, "alpha": _alpha, "blinks": _blinks}


@cache
def _total(kind: str, rate: float) -> float:
    """Return the integral of a spectrum up to half the rate."""
    f = frequency_grid(rate, 16385)
    return float(np.trapezoid(SHAPES[kind](f), f))


def rhythm_power(kind: str, f: Array, rate: float) -> Array:
    """Return the power density of a signal in SHAPES at frequencies f; its integral is 1."""
    return SHAPES[kind](f) / _total(kind, rate)


def draw_rhythm(
    kind: str, shape: tuple[int, ...], rate: float, random: np.random.Generator
) -> Array:
    """Draw Gaussian signals of a kind in SHAPES, with variance 1; the last axis is time."""
    from scipy import fft

    samples = shape[-1]
    # The FFT makes periodic signals; dropping at least 8 s makes both ends independent.
    padded = fft.next_fast_len(samples + round(8 * rate), real=True)
    white = fft.rfft(random.standard_normal((*shape[:-1], padded)))
    gain = np.sqrt(rhythm_power(kind, fft.rfftfreq(padded, 1 / rate), rate) * rate / 2)
    signals: Array = fft.irfft(white * gain, padded)
    return signals[..., :samples]


def draw_blinks(samples: int, rate: float, random: np.random.Generator) -> Array:
    """Draw blinks at random times, with mean 0 and variance 1."""
    reach = int(np.ceil(4 * _BLINK * rate))
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / rate / _BLINK) ** 2)
    counts = random.poisson(BLINKS / rate, samples + 2 * reach)
    jitter = random.standard_normal(len(counts))
    heights = counts + _BLINK_SPREAD * np.sqrt(counts) * jitter
    mean = BLINKS / rate
    variance = mean * (1 + _BLINK_SPREAD**2) * (bell**2).sum()
    return np.convolve(heights - mean, bell, "valid") / np.sqrt(variance)


@dataclass(frozen=True)
class BestCorrelation:
    """Best expected r for one subject, over long recordings."""

    overall: float  # upper bound for all decoders
    linear: float  # r of the best linear decoder


def best_correlation(head: Head, rate: float, responses: str) -> BestCorrelation:
    """Return the best r for one subject: the bound for all decoders, and the best linear decoder's.

    The best linear decoder is a Wiener filter. For non-linear responses, the bound follows from
    rate-distortion theory: the EEG carries a limited number of nats per second, and any decoder
    with this much information about the envelope makes at least a certain squared error.
    """
    f = frequency_grid(rate)
    envelope, drive_power, coherence = drive_spectra(rate, responses)
    ratio = signal_to_noise(head, rate, blinks=True) * drive_power
    linear_r2 = np.trapezoid(envelope * coherence * ratio / (1 + ratio), f)
    # Blinks are not Gaussian, so the bound assumes a decoder that can remove them completely.
    clean = signal_to_noise(head, rate, blinks=False) * drive_power
    if responses == "linear":
        best_r2 = float(np.trapezoid(envelope * clean / (1 + clean), f))
    else:
        best_r2 = 1 - least_distortion(envelope, float(np.trapezoid(np.log1p(clean), f)), f)
    return BestCorrelation(best_r2**0.5, float(linear_r2) ** 0.5)


def noise_power(head: Head, rate: float, blinks: bool) -> Array:
    """Return the noise's cross-spectral density between channels: (frequencies, 64, 64)."""
    f = frequency_grid(rate)
    parts = {"background": head.background, "alpha": head.alpha}
    parts |= {"blinks": head.blinks[:, None]} if blinks else {}
    noise = np.broadcast_to(head.sensors**2 * np.eye(64) * 2 / rate, (len(f), 64, 64)).copy()
    for kind, pattern in parts.items():
        noise += rhythm_power(kind, f, rate)[:, None, None] * (pattern @ pattern.T)
    return noise


def signal_to_noise(head: Head, rate: float, blinks: bool) -> Array:
    """Return the best spatial filter's signal-to-noise ratio at each frequency.

    The ratio is for a drive with a power of 1 per Hz.
    """
    response = np.fft.rfft(head.response, 2 * (GRID - 1), axis=0)  # (frequencies, 64)
    # The noise density is real, so real and imaginary parts can be solved separately.
    parts = np.stack([response.real, response.imag], axis=2)
    filters = np.linalg.solve(noise_power(head, rate, blinks), parts)
    ratio: Array = (parts * filters).sum(axis=(1, 2))
    return ratio


def least_distortion(power: Array, nats: float, f: Array) -> float:
    """Return the minimum squared error of a Gaussian signal that is coded at `nats` per second.

    The method is reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3).
    """
    low, high = -700.0, float(np.log(power.max()))  # bounds of the log water level
    logs = np.log(np.maximum(power, 1e-300))
    for _ in range(100):
        level = (low + high) / 2
        if np.trapezoid(np.maximum(logs - level, 0), f) > nats:
            low = level
        else:
            high = level
    return float(np.trapezoid(np.minimum(power, np.exp(high)), f))


def mean_r(values: Iterable[float]) -> float:
    """Return the mean of correlations, averaged as Fisher's z."""
    return float(np.tanh(np.mean(np.arctanh(list(values)))))
