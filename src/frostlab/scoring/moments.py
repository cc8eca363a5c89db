"""Sums over lagged EEG, without ever building the lagged EEG, and ridge solutions from them.

At time t a decoder sees the EEG of t + lag for each lag; what lies beyond the ends of a recording
is 0, the mean of normalised EEG.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from frostlab.errors import BadInput
from frostlab.scoring.recording import Floats, Recording


@dataclass(frozen=True)
class Lags:
    """The first and the last lag in samples, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def pad(self, eeg: NDArray[np.generic]) -> Floats:
        """EEG with zeros around it, so that every lag is a slice of it."""
        front, back = max(0, -self.first), max(0, self.last)
        padded = np.zeros((front + len(eeg) + back, eeg.shape[1]))
        padded[front : front + len(eeg)] = eeg
        return padded

    def apply(self, eeg: NDArray[np.generic], weights: Floats) -> Floats:
        """Lagged EEG times weights (lags, channels, n): (n, samples)."""
        padded, base = self.pad(eeg), max(0, self.first)
        count, channels, n = weights.shape
        every = weights.transpose(0, 2, 1).reshape(-1, channels) @ padded.T
        parts = every.reshape(count, n, -1)  # (lags, n, padded samples)
        found = np.zeros((n, len(eeg)))
        for i, part in enumerate(parts):
            found += part[:, base + i : base + i + len(eeg)]
        return found


@dataclass
class Moments:
    """Sums over samples of lagged EEG x and envelope y; the features are (lag, channel)."""

    xx: Floats
    xy: Floats
    x: Floats
    y: float
    samples: int

    @staticmethod
    def zero(features: int) -> "Moments":
        return Moments(
            np.zeros((features, features)), np.zeros(features), np.zeros(features), 0.0, 0
        )

    def add(self, more: "Moments") -> None:
        self.xx += more.xx
        self.xy += more.xy
        self.x += more.x
        self.y += more.y
        self.samples += more.samples

    def without(self, less: "Moments") -> "Moments":
        return Moments(
            self.xx - less.xx,
            self.xy - less.xy,
            self.x - less.x,
            self.y - less.y,
            self.samples - less.samples,
        )

    def covariance(self) -> tuple[Floats, Floats]:
        """Of x with x, and of x with y: about their means, so that a bias needs no penalty."""
        mean = self.x / self.samples
        xx = self.xx / self.samples
        xx -= np.outer(mean, mean)
        return xx, self.xy / self.samples - mean * (self.y / self.samples)

    def bias(self, weights: Floats) -> float:
        """What a decoder with these weights adds so that its mean is the envelope's."""
        return float((self.y - self.x @ weights) / self.samples)


def moments_of(recording: Recording, lags: Lags) -> Moments:
    """A recording's sums.

    Moving both lags on by a sample drops one sample from a sum and takes one in, so that only the
    first lag's products with the others run over the recording: 1 / lags of the work.
    """
    padded = lags.pad(recording.eeg)
    envelope = np.asarray(recording.envelope, np.float64)
    samples, (count, channels) = len(envelope), (len(lags), padded.shape[1])
    base = max(0, lags.first)
    views = [padded[base + i : base + i + samples] for i in range(count)]
    xx = np.empty((count, channels, count, channels))
    for j in range(count):
        xx[0, :, j] = views[0].T @ views[j]
    for i in range(count - 1):
        before, after = padded[base + i :], padded[base + i + samples :]
        width = count - 1 - i
        moved = xx[i + 1, :, i + 1 :]
        np.subtract(xx[i, :, i:-1], before[0][:, None, None] * before[None, :width], out=moved)
        moved += after[0][:, None, None] * after[None, :width]
    for i in range(1, count):
        for j in range(i):
            xx[i, :, j] = xx[j, :, i].T
    features = count * channels
    both = np.stack([envelope, np.ones(samples)])
    xy, x = np.concatenate([both @ view for view in views], axis=1)
    return Moments(xx.reshape(features, features), xy, x, float(envelope.sum()), samples)


def ridge_path(moments: Moments, lambdas: Sequence[float]) -> Floats:
    """Ridge weights (features, lambdas), λ in units of the mean variance of a feature.

    One orthogonal reduction to tridiagonal form serves every λ, which then costs no more than a
    pass over the diagonals; it takes less than half the time of an eigendecomposition.
    """
    xx, xy = moments.covariance()
    size = float(np.trace(xx)) / len(xx)
    if not size > 0:
        raise BadInput("the EEG is constant; there is nothing to fit a linear decoder to")
    if len(xx) == 1:
        return xy[:, None] / (xx + size * np.asarray(lambdas))
    room = int(lapack.dsytrd_lwork(len(xx), lower=1)[0])
    reduced, diagonal, beside, tau, _ = lapack.dsytrd(xx.T, lower=1, lwork=room, overwrite_a=1)
    turned = _turn(reduced, tau, xy[:, None], "T")[:, 0]
    found = np.empty((len(xx), len(lambdas)))
    for k, strength in enumerate(lambdas):
        *_, solved, failed = lapack.dptsv(diagonal + strength * size, beside, turned)
        if failed:
            raise BadInput(
                f"λ {strength:g} is too small to solve for this EEG; take {10 * strength:g}"
            )
        found[:, k] = solved.ravel()
    return _turn(reduced, tau, found, "N")


def _turn(reduced: Floats, tau: Floats, values: Floats, way: str) -> Floats:
    """Into the tridiagonal system ("T") or back out of it ("N")."""
    reflectors, below = np.asfortranarray(reduced[1:, :-1]), np.asfortranarray(values[1:])
    room = int(lapack.dormqr("L", way, reflectors, tau, below, -1)[1][0])
    turned = lapack.dormqr("L", way, reflectors, tau, below, room)[0]
    return np.concatenate([values[:1], turned])
