"""Simulated EEG: speech-like envelopes, each subject's own responses, and a head's noise."""

from frostlab.data.eeg.geometry import Array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.spectra import GRID, SYLLABLES, draw_blinks, draw_rhythm, frequency_grid, rhythm_power
from frostlab.data.eeg.geometry import BIOSEMI64
from frostlab.data.eeg.optimum import mean_r, optimum
from frostlab.data.eeg.recordings import Recording, Store
from frostlab.data.eeg.responses import MEMORY, Head, draw_head, drive
from frostlab.data.eeg.signals import normalised
from frostlab.recipe.eeg import SimulatedEEG

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
