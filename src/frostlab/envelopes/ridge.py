"""The linear baseline: a ridge decoder from lagged EEG to the envelope, λ chosen by inner folds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from frostlab.envelopes.correlation import Floats, Recording, by_subject, fisher, pearson
from frostlab.errors import BadInput, nearest


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


LAMBDAS = tuple(10.0**k for k in range(-4, 5))
_WAYS = ("subject", "all")


@dataclass(frozen=True, eq=False)
class Decoder:
    """One fit: weights (lags, channels), and how well each λ did on recordings left out.

    `pattern` is the EEG that goes with the envelope, by lag and channel: unlike weights, which also
    cancel noise, it may be read as a response (Haufe et al. 2014, equation 6).
    """

    weights: Floats
    bias: float
    pattern: Floats
    strength: float  # the λ chosen
    curve: dict[float, float]  # λ → mean r over recordings left out; empty if none was


@dataclass(frozen=True, eq=False)
class Ridge:
    """The decoder of each subject trained on, and one for everybody."""

    rate: float
    lags: Lags
    everybody: Decoder
    own: dict[str, Decoder]

    def decoder_of(self, subject: str) -> Decoder:
        """A subject's own decoder, or everybody's where there is none."""
        return self.own.get(subject, self.everybody)

    def predict(self, recording: Recording) -> Floats:
        """The envelope (samples,) of the whole recording; EEG beyond its end counts as 0."""
        decoder = self.decoder_of(recording.subject)
        if recording.eeg.shape[1] != decoder.weights.shape[1]:
            raise BadInput(
                f"{recording.name} has {recording.eeg.shape[1]} channels, "
                f"and the decoder was trained on {decoder.weights.shape[1]}"
            )
        return self.lags.apply(recording.eeg, decoder.weights[:, :, None])[0] + decoder.bias


def fit_ridge(
    train: Sequence[Recording],
    rate: float,
    lags: tuple[float, float] = (0.0, 0.25),
    lambdas: Sequence[float] = LAMBDAS,
    folds: int = 5,
    *,
    per: Literal["subject", "all"] = "subject",
) -> Ridge:
    """Fit the envelope at t to the EEG of t + lags seconds, with a bias that is not penalised.

    λ is in units of the mean variance of a lagged channel. The one chosen has the highest mean r
    (by Fisher's z) on recordings left out: `folds` groups of each subject's, or one at a time where
    there are no more. A subject with one recording gets everybody's λ. `per` says whether each
    subject gets an own decoder; subjects not trained on always get everybody's.
    """
    taps = _checked(train, rate, lags, lambdas, folds, per)
    subjects = by_subject(train)
    features = len(taps) * train[0].eeg.shape[1]
    shared: dict[int, Moments] = {}
    groups: dict[int, list[Recording]] = {}
    own: dict[str, Decoder] = {}
    left: dict[str, Moments] = {}  # of subjects whose λ has to wait for everybody's
    for place, (subject, recordings) in enumerate(subjects.items()):
        theirs: dict[int, Moments] = {}
        held: dict[int, list[Recording]] = {}
        for rank, recording in enumerate(recordings):
            # Subjects start with different groups: one recording each still makes several groups.
            fold = (place + rank) % folds
            _into(theirs, fold, moments_of(recording, taps))
            held.setdefault(fold, []).append(recording)
            groups.setdefault(fold, []).append(recording)
        if per == "subject" and len(subjects) > 1:
            total = _sum(theirs, features)
            if len(theirs) > 1 or len(lambdas) == 1:
                curve = _curve(theirs, total, held, taps, lambdas)
                own[subject] = _decoder(total, taps, lambdas, curve)
            else:
                left[subject] = total
        for fold, moments in theirs.items():  # last: what is first of its group is not copied
            _into(shared, fold, moments)
    total = _sum(shared, features)
    everybody = _decoder(total, taps, lambdas, _curve(shared, total, groups, taps, lambdas))
    for subject, moments in left.items():
        own[subject] = _decoder(moments, taps, [everybody.strength], {})
    if per == "subject" and len(subjects) == 1:
        own = dict.fromkeys(subjects, everybody)
    return Ridge(rate, taps, everybody, own)


def _into(sums: dict[int, Moments], fold: int, more: Moments) -> None:
    if fold in sums:
        sums[fold].add(more)
    else:
        sums[fold] = more


def _sum(sums: dict[int, Moments], features: int) -> Moments:
    total = Moments.zero(features)
    for each in sums.values():
        total.add(each)
    return total


def _curve(
    sums: dict[int, Moments],
    total: Moments,
    held: dict[int, list[Recording]],
    taps: Lags,
    lambdas: Sequence[float],
) -> dict[float, float]:
    """Mean r on recordings left out, by λ; nothing where there is no choice."""
    if len(lambdas) == 1:
        return {}
    found = []
    for fold, moments in sums.items():
        path = ridge_path(total.without(moments), lambdas)
        weights = path.reshape(len(taps), -1, len(lambdas))
        for recording in held[fold]:
            predicted = taps.apply(recording.eeg, weights)
            found.append(fisher(pearson(predicted, recording.envelope)))
    means = np.tanh(np.mean(found, axis=0))
    return dict(zip(map(float, lambdas), map(float, means), strict=True))


def _decoder(
    moments: Moments, taps: Lags, lambdas: Sequence[float], curve: dict[float, float]
) -> Decoder:
    strength = max(curve, key=lambda each: (curve[each], each)) if curve else float(lambdas[0])
    weights = ridge_path(moments, [strength])[:, 0]
    pattern = moments.covariance()[0] @ weights
    shape = (len(taps), -1)
    return Decoder(
        weights.reshape(shape), moments.bias(weights), pattern.reshape(shape), strength, curve
    )


def _checked(
    train: Sequence[Recording],
    rate: float,
    lags: tuple[float, float],
    lambdas: Sequence[float],
    folds: int,
    per: str,
) -> Lags:
    """The lags in samples, once everything asked for makes sense."""
    if per not in _WAYS:
        raise BadInput(f"per must be subject or all, not {per!r}{nearest(per, _WAYS)}")
    if not len(lambdas) or not all(math.isfinite(each) and each > 0 for each in lambdas):
        raise BadInput(f"λ must be numbers above 0, not {list(lambdas)}; e.g. [0.01, 1, 100]")
    if folds < 2:
        raise BadInput(f"{folds} folds leave nothing to train on; the least is 2")
    if not rate > 0:
        raise BadInput(f"a rate of {rate:g} Hz is none; it must be above 0, e.g. 64")
    taps = Lags(round(lags[0] * rate), round(lags[1] * rate))
    if taps.last < taps.first:
        raise BadInput(f"lags from {lags[0]:g} s to {lags[1]:g} s run backwards; e.g. 0 to 0.25")
    if len(train) == 1 and len(lambdas) > 1:
        raise BadInput(
            f"one recording to train on ({train[0].name}) cannot choose the ridge decoder's λ; "
            "give two or more"
        )
    for each in train:
        _checked_shape(each, train[0], taps)
    return taps


def _checked_shape(recording: Recording, first: Recording, taps: Lags) -> None:
    name, eeg, envelope = recording.name, recording.eeg, recording.envelope
    if eeg.ndim != 2 or envelope.shape != eeg.shape[:1]:
        raise BadInput(f"{name}: EEG {eeg.shape} and envelope {envelope.shape} differ in samples")
    if eeg.shape[1] != first.eeg.shape[1]:
        raise BadInput(
            f"{name} has {eeg.shape[1]} channels, and {first.name} has {first.eeg.shape[1]}"
        )
    reach = max(abs(taps.first), abs(taps.last))
    if len(eeg) <= reach:
        raise BadInput(f"{name} has {len(eeg)} samples, and the lags reach over {reach}")
    if not (np.isfinite(eeg).all() and np.isfinite(envelope).all()):
        raise BadInput(f"{name} has values that are not finite; repair or leave out the channel")
