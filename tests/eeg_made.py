"""Small recordings with a known answer: EEG that follows the envelope after 30 to 60 ms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RATE = 32.0


@dataclass(frozen=True)
class Made:
    name: str
    subject: str
    eeg: NDArray[np.float32]
    envelope: NDArray[np.float32]
    other: NDArray[np.float32] | None = None


def speech(samples: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Noise that is smooth over some samples, with mean 0 and spread 1."""
    smooth = np.convolve(random.standard_normal(samples + 4), np.ones(5), "valid")
    return (smooth - smooth.mean()) / smooth.std()


def made(
    name: str,
    subject: str,
    *,
    seed: int,
    samples: int = 1280,
    channels: int = 4,
    noise: float = 2.0,
    other: bool = False,
    response: Sequence[float] = (1.0, -0.5, 0.8, 0.3),
) -> Made:
    random = np.random.default_rng(seed)
    envelope = speech(samples, random)
    ignored = speech(samples, random)
    eeg = noise * np.stack([speech(samples, random) for _ in range(channels)], 1)
    for lag in (1, 2):
        eeg[lag:] += envelope[:-lag, None] * np.resize(np.asarray(response), channels) / lag
    eeg = (eeg - eeg.mean(0)) / eeg.std(0)
    return Made(
        name,
        subject,
        eeg.astype(np.float32),
        envelope.astype(np.float32),
        ignored.astype(np.float32) if other else None,
    )


def people(subjects: int = 2, recordings: int = 3, **settings: object) -> list[Made]:
    return [
        made(f"s{s}_{r}", f"s{s}", seed=100 * s + r, **settings)  # type: ignore[arg-type]
        for s in range(subjects)
        for r in range(recordings)
    ]
