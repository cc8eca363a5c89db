"""The linear baseline: a ridge decoder from lagged EEG to the envelope, λ chosen by inner folds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from frostlab.errors import BadInput, nearest
from frostlab.scoring.correlation import fisher, pearson
from frostlab.scoring.moments import Lags, Moments, moments_of, ridge_path
from frostlab.scoring.recording import Floats, Recording, by_subject

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
