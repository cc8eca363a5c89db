"""Predicted envelopes set against what was heard: r, chance, and matching."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostlab.errors import BadInput, nearest
from frostlab.scoring.correlation import (
    centred,
    draw_shifts,
    fisher_mean,
    null_of,
    pearson,
    shifted_pearson,
)
from frostlab.scoring.matching import attended, match_mismatch
from frostlab.scoring.recording import Floats, Recording, by_subject, to_samples
from frostlab.scoring.scores import EnvelopeScores, RecordingScore, Settings, SubjectScore

FEWEST = 19  # shifts: with fewer no p can be 0.05


def score_recordings(
    predictions: Mapping[str, ArrayLike],
    recordings: Sequence[Recording],
    rate: float,
    null_shifts: int = 100,
    seed: int = 0,
    *,
    away: float = 2.0,
    window: float = 5.0,
    gap: float = 1.0,
) -> EnvelopeScores:
    """Score one prediction (samples,) for each recording, by name.

    Chance is the same prediction against the recording's own envelope moved round by `null_shifts`
    different shifts, at least `away` seconds off; the k-th shifts of all recordings make the k-th
    mean by chance of a subject, and of all. The shifts depend on the seed and the recording's name
    alone, so that every decoder meets the same. Matching uses windows of `window` seconds, and a
    wrong stretch `gap` seconds beyond.
    """
    settings = Settings(float(rate), null_shifts, away, window, gap, seed)
    _check(settings)
    subjects = by_subject(recordings)
    _check_names(predictions, recordings)
    scored: list[RecordingScore] = []
    people: list[SubjectScore] = []
    everyone: list[Floats] = []
    for subject, theirs in subjects.items():
        drawn = []
        own = []
        for recording in theirs:
            score, chance = _score(recording, np.asarray(predictions[recording.name]), settings)
            own.append(score)
            drawn.append(chance)
        r = float(fisher_mean([each.r for each in own]))
        others = [each.r_other for each in own if each.r_other is not None]
        other = float(fisher_mean(others)) if others else None
        chance = fisher_mean(drawn)
        people.append(SubjectScore(subject, len(own), r, other, null_of(r, chance)))
        everyone.append(chance)
        scored += own
    mean = float(fisher_mean([each.r for each in people]))
    null = null_of(mean, fisher_mean(everyone))
    return EnvelopeScores(settings, tuple(scored), tuple(people), null)


def _score(
    recording: Recording, prediction: NDArray[Any], settings: Settings
) -> tuple[RecordingScore, Floats]:
    """One recording's score, and its r with each mismatched envelope."""
    envelope = np.asarray(recording.envelope, np.float64)
    _check_signals(recording, prediction, settings)
    rate, samples = settings.rate, len(envelope)
    away = to_samples(settings.away, rate, "a shift")
    window, gap = to_samples(settings.window, rate, "a window"), round(settings.gap * rate)
    shifts = draw_shifts(samples, away, settings.null_shifts, _random(settings, recording.name))
    every = shifted_pearson(prediction, envelope)
    r, chance = float(pearson(prediction, envelope)), every[shifts]
    other = recording.other
    score = RecordingScore(
        name=recording.name,
        subject=recording.subject,
        samples=samples,
        r=r,
        r_other=None if other is None else float(pearson(prediction, other)),
        null=null_of(r, chance),
        match=match_mismatch(prediction, envelope, window, gap),
        attended=None if other is None else attended(prediction, envelope, other, window),
    )
    return score, chance


def _random(settings: Settings, name: str) -> np.random.Generator:
    text = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(text[:8], "big"))


def _check(settings: Settings) -> None:
    if not (math.isfinite(settings.rate) and settings.rate > 0):
        raise BadInput(f"a rate of {settings.rate:g} Hz is none; it must be above 0, e.g. 64")
    if settings.null_shifts < FEWEST:
        raise BadInput(
            f"{settings.null_shifts} shifts cannot give a p of 0.05; the least is {FEWEST}"
        )
    if settings.gap < 0:
        raise BadInput(f"a gap of {settings.gap:g} s is none; the least is 0")


def _check_names(predictions: Mapping[str, ArrayLike], recordings: Sequence[Recording]) -> None:
    names = [recording.name for recording in recordings]
    for name in names:
        if name not in predictions:
            raise BadInput(f"no prediction for recording {name}{nearest(name, predictions)}")
    for name in predictions:
        if name not in names:
            raise BadInput(f"a prediction for {name}, which is no recording{nearest(name, names)}")


def _check_signals(recording: Recording, prediction: NDArray[Any], settings: Settings) -> None:
    name, envelope = recording.name, recording.envelope
    for what, values in (("prediction", prediction), ("other envelope", recording.other)):
        if values is None:
            continue
        if values.shape != envelope.shape:
            raise BadInput(
                f"{name}: the {what} is {values.shape}, and the envelope {envelope.shape}"
            )
        if not np.isfinite(values).all():
            raise BadInput(f"{name}: the {what} has values that are not finite")
    if not np.isfinite(envelope).all():
        raise BadInput(f"{name}: the envelope has values that are not finite")
    if not centred(envelope).any():
        raise BadInput(f"{name}: the envelope is flat, so that nothing correlates with it")
    away = to_samples(settings.away, settings.rate, "a shift")
    there = max(0, len(envelope) - 2 * away + 1)
    if there < settings.null_shifts:
        raise BadInput(
            f"{name} is {len(envelope) / settings.rate:.3g} s long and has {there} shifts at least "
            f"{settings.away:g} s away, and {settings.null_shifts} are asked for"
        )
