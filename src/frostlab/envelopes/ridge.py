"""The ridge decoder: ridge regression from lagged EEG to the envelope.

Cross-validation selects λ, the strength of the penalty on the weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from frostlab.envelopes.correlation import Floats, Recording, by_subject, fisher_z, pearson
from frostlab.errors import BadInput, nearest

LAMBDAS = tuple(10.0**k for k in range(-4, 5))
_PER = ("subject", "all")  # values of the argument `per`


@dataclass(frozen=True)
class Lags:
    """The least and the greatest delay of the EEG after the envelope, in samples."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def pad(self, eeg: NDArray[np.generic]) -> Floats:
        """Pad EEG (samples, channels) with zeros, so that lagged EEG is a slice of the result."""
        front, back = max(0, -self.first), max(0, self.last)
        padded = np.zeros((front + len(eeg) + back, eeg.shape[1]))
        padded[front : front + len(eeg)] = eeg
        return padded

    def apply(self, eeg: NDArray[np.generic], weights: Floats) -> Floats:
        """Apply n decoders with weights (lags, channels, n) to EEG; return (n, samples)."""
        padded, base = self.pad(eeg), max(0, self.first)
        count, channels, n = weights.shape
        products = weights.transpose(0, 2, 1).reshape(-1, channels) @ padded.T
        by_lag = products.reshape(count, n, -1)  # (lags, n, padded samples)
        total = np.zeros((n, len(eeg)))
        for i, product in enumerate(by_lag):
            total += product[:, base + i : base + i + len(eeg)]
        return total


@dataclass(frozen=True, eq=False)
class Decoder:
    """One fitted decoder.

    `pattern` is the covariance of EEG and decoded envelope. Weights also cancel noise, but the
    pattern can be interpreted as the brain's response (Haufe et al. 2014, equation 6).
    """

    weights: Floats  # (lags, channels)
    bias: float
    pattern: Floats  # (lags, channels)
    strength: float  # the selected λ
    curve: dict[float, float]  # λ → mean r on held-out recordings; empty without cross-validation


@dataclass(frozen=True, eq=False)
class Ridge:
    """A shared decoder, fitted to all subjects, and optionally one for each training subject."""

    rate: float  # Hz
    lags: Lags
    everybody: Decoder  # the shared decoder
    own: dict[str, Decoder]  # subject → decoder; empty if all use the shared one

    def decoder_of(self, subject: str) -> Decoder:
        """Return the subject's own decoder if there is one, else the shared decoder."""
        return self.own.get(subject, self.everybody)

    def predict(self, recording: Recording) -> Floats:
        """Decode the envelope (samples,); EEG before and after the recording counts as 0."""
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
    """Fit decoders that predict the envelope at time t from the EEG at t + lags, in seconds.

    λ is in units of the mean variance of a lagged channel, and does not penalise the bias.
    Cross-validation selects the λ with the highest mean r, averaged as Fisher's z, on held-out
    recordings. The recordings of a subject form `folds` groups; if there are fewer recordings than
    that, each of them is a group. A subject with one recording uses the λ of the shared decoder.
    With `per` "all", every subject uses the shared decoder; subjects without training recordings
    always do.
    """
    taps = _check_arguments(train, rate, lags, lambdas, folds, per)
    subjects = by_subject(train)
    features = len(taps) * train[0].eeg.shape[1]
    shared: dict[int, Moments] = {}  # fold → moments (sums over samples) of all subjects
    groups: dict[int, list[Recording]] = {}  # fold → recordings of all subjects
    own: dict[str, Decoder] = {}
    waiting: dict[str, Moments] = {}  # subject that uses the shared decoder's λ → moments
    for index, (subject, recordings) in enumerate(subjects.items()):
        sums: dict[int, Moments] = {}
        held_out: dict[int, list[Recording]] = {}
        for rank, recording in enumerate(recordings):
            # Subjects start at different folds; else all first recordings would be in fold 0.
            fold = (index + rank) % folds
            _accumulate(sums, fold, recording_moments(recording, taps))
            held_out.setdefault(fold, []).append(recording)
            groups.setdefault(fold, []).append(recording)
        if per == "subject" and len(subjects) > 1:
            total = _sum(sums, features)
            if len(sums) > 1 or len(lambdas) == 1:
                curve = _curve(sums, total, held_out, taps, lambdas)
                own[subject] = _decoder(total, taps, lambdas, curve)
            else:
                waiting[subject] = total
        # _accumulate stores these moments without a copy and later adds to them; `sums` is not used
        # again.
        for fold, moments in sums.items():
            _accumulate(shared, fold, moments)
    total = _sum(shared, features)
    everybody = _decoder(total, taps, lambdas, _curve(shared, total, groups, taps, lambdas))
    for subject, moments in waiting.items():
        own[subject] = _decoder(moments, taps, [everybody.strength], {})
    if per == "subject" and len(subjects) == 1:
        own = dict.fromkeys(subjects, everybody)
    return Ridge(rate, taps, everybody, own)


def _check_arguments(
    train: Sequence[Recording],
    rate: float,
    lags: tuple[float, float],
    lambdas: Sequence[float],
    folds: int,
    per: str,
) -> Lags:
    """Return the lags in samples; refuse invalid arguments."""
    if per not in _PER:
        raise BadInput(f"per must be subject or all, not {per!r}{nearest(per, _PER)}")
    if not len(lambdas) or not all(math.isfinite(value) and value > 0 for value in lambdas):
        raise BadInput(f"λ must be numbers above 0, not {list(lambdas)}; e.g. [0.01, 1, 100]")
    if folds < 2:
        raise BadInput(f"{folds} folds leave nothing to train on; the least is 2")
    if not rate > 0:
        raise BadInput(f"the rate is {rate:g} Hz; it must be above 0, e.g. 64")
    taps = Lags(round(lags[0] * rate), round(lags[1] * rate))
    if taps.last < taps.first:
        raise BadInput(f"lags from {lags[0]:g} s to {lags[1]:g} s run backwards; e.g. 0 to 0.25")
    if len(train) == 1 and len(lambdas) > 1:
        raise BadInput(
            f"one recording to train on ({train[0].name}) cannot choose the ridge decoder's λ; "
            "give two or more recordings"
        )
    for recording in train:
        _check_recording(recording, train[0], taps)
    return taps


def _check_recording(recording: Recording, first: Recording, taps: Lags) -> None:
    name, eeg, envelope = recording.name, recording.eeg, recording.envelope
    if eeg.ndim != 2 or envelope.shape != eeg.shape[:1]:
        raise BadInput(
            f"{name}: EEG {eeg.shape} and envelope {envelope.shape} should be (samples, channels) "
            "and (samples,)"
        )
    if eeg.shape[1] != first.eeg.shape[1]:
        raise BadInput(
            f"{name} has {eeg.shape[1]} channels, and {first.name} has {first.eeg.shape[1]}"
        )
    reach = max(abs(taps.first), abs(taps.last))
    if len(eeg) <= reach:
        raise BadInput(
            f"{name} has {len(eeg)} samples; it needs more than {reach}, the longest lag"
        )
    if not (np.isfinite(eeg).all() and np.isfinite(envelope).all()):
        raise BadInput(f"{name} has values that are not finite; repair or leave out the channel")


@dataclass
class Moments:
    """Sums over the samples of lagged EEG x and envelope y.

    A feature of x is one channel at one lag.
    """

    xx: Floats  # sum of products of features, (features, features)
    xy: Floats  # sum of products of features and envelope, (features,)
    x: Floats  # (features,)
    y: float
    samples: int

    @staticmethod
    def zero(features: int) -> "Moments":
        return Moments(
            np.zeros((features, features)), np.zeros(features), np.zeros(features), 0.0, 0
        )

    def add(self, other: "Moments") -> None:
        """Add the sums over other samples, in place."""
        self.xx += other.xx
        self.xy += other.xy
        self.x += other.x
        self.y += other.y
        self.samples += other.samples

    def without(self, other: "Moments") -> "Moments":
        """Return the sums without the samples of `other`."""
        return Moments(
            self.xx - other.xx,
            self.xy - other.xy,
            self.x - other.x,
            self.y - other.y,
            self.samples - other.samples,
        )

    def covariance(self) -> tuple[Floats, Floats]:
        """Return cov(x, x) and cov(x, y); as means are subtracted, λ does not penalise the bias."""
        mean = self.x / self.samples
        xx = self.xx / self.samples
        xx -= np.outer(mean, mean)
        return xx, self.xy / self.samples - mean * (self.y / self.samples)

    def bias(self, weights: Floats) -> float:
        """Return the bias that gives predictions the same mean as the envelope."""
        return float((self.y - self.x @ weights) / self.samples)


def recording_moments(recording: Recording, lags: Lags) -> Moments:
    """Return the moments of one recording.

    The sum of products at lags i + 1 and j + 1 has the same terms as the sum at lags i and j,
    except for one term at each end. So only products with the first lag are summed over the whole
    recording, and the other sums are computed from these. With n lags, this takes about 1 / n of
    the work.
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
    targets = np.stack([envelope, np.ones(samples)])
    xy, x = np.concatenate([targets @ view for view in views], axis=1)
    return Moments(xx.reshape(features, features), xy, x, float(envelope.sum()), samples)


def _accumulate(sums: dict[int, Moments], fold: int, moments: Moments) -> None:
    if fold in sums:
        sums[fold].add(moments)
    else:
        sums[fold] = moments


def _sum(sums: dict[int, Moments], features: int) -> Moments:
    total = Moments.zero(features)
    for moments in sums.values():
        total.add(moments)
    return total


def _curve(
    sums: dict[int, Moments],
    total: Moments,
    held_out: dict[int, list[Recording]],
    taps: Lags,
    lambdas: Sequence[float],
) -> dict[float, float]:
    """Return the mean r on held-out recordings for each λ; empty if there is only one λ."""
    if len(lambdas) == 1:
        return {}
    scores = []
    for fold, moments in sums.items():
        path = ridge_path(total.without(moments), lambdas)
        weights = path.reshape(len(taps), -1, len(lambdas))
        for recording in held_out[fold]:
            predicted = taps.apply(recording.eeg, weights)
            scores.append(fisher_z(pearson(predicted, recording.envelope)))
    means = np.tanh(np.mean(scores, axis=0))
    return dict(zip(map(float, lambdas), map(float, means), strict=True))


def _decoder(
    moments: Moments, taps: Lags, lambdas: Sequence[float], curve: dict[float, float]
) -> Decoder:
    # If two λ have the same r, select the larger one.
    strength = max(curve, key=lambda k: (curve[k], k)) if curve else float(lambdas[0])
    weights = ridge_path(moments, [strength])[:, 0]
    pattern = moments.covariance()[0] @ weights
    shape = (len(taps), -1)
    return Decoder(
        weights.reshape(shape), moments.bias(weights), pattern.reshape(shape), strength, curve
    )


def ridge_path(moments: Moments, lambdas: Sequence[float]) -> Floats:
    """Return ridge weights (features, lambdas); λ is in units of the mean variance of a feature.

    The covariance is reduced to tridiagonal form once; solving for each λ then takes linear time.
    The reduction takes less than half the time of an eigendecomposition.
    """
    xx, xy = moments.covariance()
    mean_variance = float(np.trace(xx)) / len(xx)
    if not mean_variance > 0:
        raise BadInput("the EEG is constant; there is nothing to fit a linear decoder to")
    if len(xx) == 1:
        return xy[:, None] / (xx + mean_variance * np.asarray(lambdas))
    workspace = int(lapack.dsytrd_lwork(len(xx), lower=1)[0])
    reduced, diagonal, off_diagonal, tau, _ = lapack.dsytrd(
        xx.T, lower=1, lwork=workspace, overwrite_a=1
    )
    rotated = _rotate(reduced, tau, xy[:, None], "T")[:, 0]
    weights = np.empty((len(xx), len(lambdas)))
    for k, strength in enumerate(lambdas):
        shifted = diagonal + strength * mean_variance
        *_, solved, failed = lapack.dptsv(shifted, off_diagonal, rotated)
        if failed:
            raise BadInput(
                f"λ {strength:g} is too small to solve for this EEG; take {10 * strength:g}"
            )
        weights[:, k] = solved.ravel()
    return _rotate(reduced, tau, weights, "N")


def _rotate(reduced: Floats, tau: Floats, values: Floats, transpose: str) -> Floats:
    """Rotate into the basis of the tridiagonal form ("T") or back ("N")."""
    reflectors, below = np.asfortranarray(reduced[1:, :-1]), np.asfortranarray(values[1:])
    workspace = int(lapack.dormqr("L", transpose, reflectors, tau, below, -1)[1][0])
    rotated = lapack.dormqr("L", transpose, reflectors, tau, below, workspace)[0]
    return np.concatenate([values[:1], rotated])
