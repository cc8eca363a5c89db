"""Scores of a decoder: r and its chance level by recording, subject and split, and a table of them.

r is Pearson's correlation between a decoded envelope and the envelope of the heard speech. Scores
are stored with a digest, so that edited scores are refused.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from frostlab.envelopes.correlation import (
    Floats,
    Null,
    Recording,
    Tally,
    by_subject,
    draw_shifts,
    fisher_mean,
    fisher_z,
    match_attended,
    match_mismatch,
    null_distribution,
    pearson,
    segment_pearson,
    shifted_pearson,
    to_samples,
    unit_norm,
)
from frostlab.errors import BadInput, first_line, nearest
from frostlab.storage import derive_seed
from frostlab.text import NONE, columns, counted, plain
from frostlab.typed import read

_LARGEST = 2**63  # no stored number is larger
SEGMENT = 60.0  # s; length of a segment in the Auditory EEG Challenge of 2023
FEWEST_SHIFTS = 19  # shifted envelopes; p is at least 1 / (1 + their number), here 0.05


@dataclass(frozen=True)
class Settings:
    """Settings of the scores: times in seconds, the rate in Hz."""

    rate: float  # Hz, of the envelopes
    null_shifts: int  # number of shifted envelopes per recording that give the chance level
    away: float  # s, minimum shift of an envelope
    window: float  # s, length of a window in which a prediction chooses between two envelopes
    gap: float  # s, from a window to the mismatched envelopes before and after it
    segment: float  # s, length of a segment
    seed: int  # of the random shifts of the envelopes


@dataclass(frozen=True)
class RecordingScore:
    """Score of one recording."""

    name: str  # name of the recording
    subject: str  # name of its subject
    samples: int  # number of samples of the envelope
    r: float  # correlation of the decoded and the attended envelope
    r_other: float | None  # r with the envelope of the ignored speaker; None with one speaker
    segments: tuple[float, ...]  # r of every segment; a short recording is one segment
    null: Null  # r with shifted envelopes
    match: Tally  # decisions between the envelope of a window and a mismatched envelope
    attended: Tally | None  # decisions between the attended and the ignored speaker


@dataclass(frozen=True)
class Spread:
    """Arithmetic mean and standard deviation of several r; `std` is None for a single r."""

    count: int  # number of values
    mean: float  # arithmetic mean
    std: float | None  # standard deviation; None for a single value

    @classmethod
    def of(cls, r: Sequence[float]) -> "Spread":
        """Summarize at least one r; the standard deviation has n − 1 in its denominator."""
        return cls(len(r), float(np.mean(r)), float(np.std(r, ddof=1)) if len(r) > 1 else None)

    def __str__(self) -> str:
        """Return mean ± standard deviation."""
        return f"{self.mean:.3f}" + ("" if self.std is None else f" ± {self.std:.3f}")


@dataclass(frozen=True)
class SubjectScore:
    """Score of one subject; `r` and `r_other` are means over recordings, averaged as Fisher's z."""

    subject: str  # name of the subject
    recordings: int  # number of recordings
    r: float  # mean r
    r_other: float | None  # mean r with the ignored speaker; None with one speaker
    segments: Spread  # r of the segments of all recordings
    null: Null  # mean r with shifted envelopes


@dataclass(frozen=True)
class Summary:
    """Summary of all subjects, with equal weights; `match` and `attended` are sums over recordings.

    `mean` is averaged as Fisher's z; `low` and `high` bound its 95 % t interval over subjects.
    `median`, `std` and `quartiles` describe the subjects' r. `low`, `high` and `std` are None for a
    single subject. `above` counts the subjects with p ≤ 0.05.
    """

    subjects: int  # number of subjects
    recordings: int  # number of recordings
    mean: float  # mean r
    low: float | None  # lower end of the interval
    high: float | None  # upper end of the interval
    median: float  # median r
    std: float | None  # standard deviation of r
    quartiles: tuple[float, float]  # 25th and 75th percentile of r
    mean_other: float | None  # mean r with the ignored speaker
    above: int  # number of subjects above chance
    null: Null  # mean r with shifted envelopes
    match: Tally  # decisions between a window's own and a mismatched envelope
    attended: Tally | None  # decisions between both speakers; None with one speaker


@dataclass(frozen=True)
class EnvelopeScores:
    """Scores of one decoder on one split."""

    settings: Settings
    recordings: tuple[RecordingScore, ...]
    subjects: tuple[SubjectScore, ...]
    null: Null  # null distribution of the mean over subjects

    @cached_property
    def digest(self) -> str:
        """Digest of all measured values, without the summary, which is computed from them."""
        return _digest(self._measured())

    @cached_property
    def summary(self) -> Summary:
        """Means, spread and chance over all subjects."""
        r = np.array([subject.r for subject in self.subjects])
        low, high = _interval(r)
        quarter, median, three_quarters = (float(x) for x in np.quantile(r, (0.25, 0.5, 0.75)))
        others = [subject.r_other for subject in self.subjects if subject.r_other is not None]
        attended = [score.attended for score in self.recordings if score.attended is not None]
        return Summary(
            subjects=len(r),
            recordings=len(self.recordings),
            mean=float(fisher_mean(r)),
            low=low,
            high=high,
            median=median,
            std=float(r.std(ddof=1)) if len(r) > 1 else None,
            quartiles=(quarter, three_quarters),
            mean_other=float(fisher_mean(others)) if others else None,
            above=sum(subject.null.p <= 0.05 for subject in self.subjects),
            null=self.null,
            match=sum((score.match for score in self.recordings), Tally(0.0, 0, 0)),
            attended=sum(attended, Tally(0.0, 0, 0)) if attended else None,
        )

    @property
    def segments(self) -> Spread:
        """Mean and standard deviation, over subjects, of the mean r of a subject's segments."""
        return Spread.of([subject.segments.mean for subject in self.subjects])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            **self._measured(),
            "summary": _plain(asdict(self.summary)),
            "digest": self.digest,
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "EnvelopeScores":
        """Read stored scores; refuse edited scores."""
        stored = read(StoredScores, values, "these are not envelope scores")
        scores = EnvelopeScores(stored.settings, stored.recordings, stored.subjects, stored.null)
        digest, summary = stored.digest, stored.summary
        correlations = [score.r for score in scores.recordings]
        correlations += [score.r for score in scores.subjects]
        correlations += [r for score in scores.recordings for r in score.segments]
        if not scores.subjects or not all(-1 <= r <= 1 for r in correlations):
            raise BadInput(
                "these are not envelope scores: there is no subject, or an r is not from -1 to 1"
            )
        if digest != scores.digest:
            raise BadInput(
                f"these scores were edited: their values have the digest {scores.digest}, not "
                f"the stored {plain(digest[:80])}; score the predictions again"
            )
        _check_stored(scores)
        for subject in scores.subjects:
            own = [score for score in scores.recordings if score.subject == subject.subject]
            r, segments = [score.r for score in own], [r for score in own for r in score.segments]
            if not r or abs(float(fisher_mean(r)) - subject.r) > 1e-9:
                raise BadInput(
                    f"these scores were edited: r of {plain(subject.subject[:80])} is not the mean "
                    "of its recordings"
                )
            if not close(asdict(Spread.of(segments)), asdict(subject.segments)):
                raise BadInput(
                    f"these scores were edited: the segments of {plain(subject.subject[:80])} are "
                    "not those of its recordings"
                )
        if not close(_plain(asdict(summary)), _plain(asdict(scores.summary))):
            raise BadInput("these scores were edited: the summary does not fit the recordings")
        return scores

    def _measured(self) -> dict[str, Any]:
        values = asdict(self)
        return _plain(
            {name: values[name] for name in ("settings", "recordings", "subjects", "null")}
        )


@dataclass(frozen=True)
class StoredScores:
    """The types of the values that `EnvelopeScores.to_dict` returns, to check a stored file."""

    settings: Settings  # how the scores were made
    recordings: tuple[RecordingScore, ...]  # one per recording
    subjects: tuple[SubjectScore, ...]  # one per subject
    null: Null  # mean r of the subjects with shifted envelopes
    summary: Summary  # over all subjects
    digest: str  # digest of the other values


def _check_stored(scores: EnvelopeScores) -> None:
    """Refuse stored scores that cannot have been measured."""
    if not scores.recordings or not scores.subjects:
        raise BadInput("these are not envelope scores: there is no recording or no subject")
    for path, value in _numbers(asdict(scores), ""):
        if not -_LARGEST <= value <= _LARGEST:  # NaN too
            raise BadInput(f"these are not envelope scores: {path} is not a possible number")
    if not all(score.segments for score in scores.recordings):
        raise BadInput("these are not envelope scores: a recording has no segment")
    tallies = [t for score in scores.recordings for t in (score.match, score.attended) if t]
    if any(not 0 <= tally.right <= tally.decisions or tally.windows < 0 for tally in tallies):
        raise BadInput("these are not envelope scores: impossible counts of decisions or windows")


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield each number in nested values, with its keys."""
    if isinstance(value, int | float):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))


def _digest(values: dict[str, Any]) -> str:
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise BadInput(f"these are not envelope scores: {first_line(error)}") from None
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(values: Any) -> Any:
    """Return values as JSON stores them, with lists instead of tuples."""
    return json.loads(json.dumps(values))


def close(a: Any, b: Any) -> bool:
    """Return whether values are equal up to rounding, which differs between machines."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return bool(a == b)


def _interval(r: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 95 % t interval of the mean, computed as Fisher's z and converted back to r."""
    if len(r) < 2:
        return None, None
    z = fisher_z(r)
    half = float(special.stdtrit(len(z) - 1, 0.975)) * float(z.std(ddof=1)) / np.sqrt(len(z))
    return float(np.tanh(z.mean() - half)), float(np.tanh(z.mean() + half))


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
    segment: float = SEGMENT,
) -> EnvelopeScores:
    """Score the decoded envelopes in `predictions`: an array (samples,) for each recording's name.

    The chance level is r between the prediction and the recording's envelope after a circular
    shift, for `null_shifts` different shifts of at least `away` seconds. For the chance level of a
    mean, the recordings' r after their first shift are averaged, then their r after the second, and
    so on. The shifts do not depend on the predictions, so they are the same for every decoder.

    In each window of `window` seconds, r with the window's own envelope is compared with r with up
    to two mismatched envelopes, which lie `gap` seconds before and after the window. Segments of
    `segment` seconds, which do not overlap, get an r each.
    """
    settings = Settings(float(rate), null_shifts, away, window, gap, segment, seed)
    _check_settings(settings)
    subjects = by_subject(recordings)
    _check_names(predictions, recordings)
    recording_scores: list[RecordingScore] = []
    subject_scores: list[SubjectScore] = []
    chance_of_subjects: list[Floats] = []
    for subject, subject_recordings in subjects.items():
        scores, mismatched = [], []
        for recording in subject_recordings:
            score, chance = _score(recording, np.asarray(predictions[recording.name]), settings)
            scores.append(score)
            mismatched.append(chance)
        r = float(fisher_mean([score.r for score in scores]))
        others = [score.r_other for score in scores if score.r_other is not None]
        other = float(fisher_mean(others)) if others else None
        chance = fisher_mean(mismatched)
        null = null_distribution(r, chance)
        segments = Spread.of([r for score in scores for r in score.segments])
        subject_scores.append(SubjectScore(subject, len(scores), r, other, segments, null))
        chance_of_subjects.append(chance)
        recording_scores += scores
    mean = float(fisher_mean([score.r for score in subject_scores]))
    null = null_distribution(mean, fisher_mean(chance_of_subjects))
    return EnvelopeScores(settings, tuple(recording_scores), tuple(subject_scores), null)


def _score(
    recording: Recording, prediction: NDArray[Any], settings: Settings
) -> tuple[RecordingScore, Floats]:
    """Return a recording's score, and r between its prediction and each shifted envelope."""
    envelope = np.asarray(recording.envelope, np.float64)
    _check_signals(recording, prediction, settings)
    rate, samples = settings.rate, len(envelope)
    away = to_samples(settings.away, rate, "a shift")
    window, gap = to_samples(settings.window, rate, "a window"), round(settings.gap * rate)
    segment = to_samples(settings.segment, rate, "a segment")
    shifts = draw_shifts(samples, away, settings.null_shifts, _random(settings, recording.name))
    r = float(pearson(prediction, envelope))
    chance = shifted_pearson(prediction, envelope)[shifts]
    other = recording.other
    score = RecordingScore(
        name=recording.name,
        subject=recording.subject,
        samples=samples,
        r=r,
        r_other=None if other is None else float(pearson(prediction, other)),
        segments=tuple(segment_pearson(prediction, envelope, segment).tolist()),
        null=null_distribution(r, chance),
        match=match_mismatch(prediction, envelope, window, gap),
        attended=None if other is None else match_attended(prediction, envelope, other, window),
    )
    return score, chance


def _random(settings: Settings, name: str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(settings.seed, name))


def _check_settings(settings: Settings) -> None:
    if not (math.isfinite(settings.rate) and settings.rate > 0):
        raise BadInput(f"the rate is {settings.rate:g} Hz; it must be above 0, e.g. 64")
    if settings.null_shifts < FEWEST_SHIFTS:
        raise BadInput(
            f"{settings.null_shifts} shifts cannot give a p of 0.05; the least is {FEWEST_SHIFTS}"
        )
    if settings.gap < 0:
        raise BadInput(f"the gap is {settings.gap:g} s; the least is 0")


def _check_names(predictions: Mapping[str, ArrayLike], recordings: Sequence[Recording]) -> None:
    names = [recording.name for recording in recordings]
    for name in names:
        if name not in predictions:
            raise BadInput(f"no prediction for recording {name}{nearest(name, predictions)}")
    for name in predictions:
        if name not in names:
            raise BadInput(
                f"there is a prediction for {name}, but no such recording{nearest(name, names)}"
            )


def _check_signals(recording: Recording, prediction: NDArray[Any], settings: Settings) -> None:
    name, envelope = recording.name, recording.envelope
    for what, values in (("prediction", prediction), ("other envelope", recording.other)):
        if values is None:
            continue
        if values.shape != envelope.shape:
            raise BadInput(
                f"{name}: the {what} has shape {values.shape}, and the envelope {envelope.shape}"
            )
        if not np.isfinite(values).all():
            raise BadInput(f"{name}: the {what} has values that are not finite")
    if not np.isfinite(envelope).all():
        raise BadInput(f"{name}: the envelope has values that are not finite")
    if not unit_norm(envelope).any():
        raise BadInput(f"{name}: the envelope is flat; nothing correlates with it")
    away = to_samples(settings.away, settings.rate, "a shift")
    available = max(0, len(envelope) - 2 * away + 1)
    if available < settings.null_shifts:
        raise BadInput(
            f"{name} is {len(envelope) / settings.rate:.3g} s long and has {available} shifts of "
            f"at least {settings.away:g} s; {settings.null_shifts} are needed"
        )


def scores_table(decoders: Mapping[str, EnvelopeScores], best: float | None = None) -> str:
    """Return a table with one line per decoder; `best` is an upper bound on r, if it is known."""
    head = ["", "r [95 %]", "median", "std", "chance ≤", "p", "p ≤ 0.05"]
    two_speakers = any(scores.summary.attended is not None for scores in decoders.values())
    head += [f"match {_seconds(decoders)}"] + ["r other", "attended"] * two_speakers
    head += ["of best"] * (best is not None)
    rows = [
        _row(name, scores.summary, two_speakers, best, scores.settings.null_shifts)
        for name, scores in decoders.items()
    ]
    lines = columns([head, *rows])
    if best is not None:
        lines.append(
            f"best: {best:.3f}, an upper bound on the r of any decoder; of best: r as a share of it"
        )
    first = next(iter(decoders.values())).summary
    lines.append(
        f"{counted(first.subjects, 'subjects')}, {counted(first.recordings, 'recordings')}; "
        "r: mean by Fisher's z over subjects, with its t interval; chance ≤: 95 of 100 means with "
        "mismatched envelopes are below this value; p: how probable so large a mean is by chance; "
        "p ≤ 0.05: number of subjects with such a p; "
        "match: right choices between the envelope of a window and one from before or after it"
        + "; r other: r with the ignored speaker; attended: right choices between both speakers"
        * two_speakers
    )
    return "\n".join(lines)


def _row(
    name: str, summary: Summary, two_speakers: bool, best: float | None, shifts: int
) -> list[str]:
    least = 1 / (1 + shifts)  # the lowest possible p
    cells = [
        name,
        f"{summary.mean:.3f}{_between(summary.low, summary.high)}",
        f"{summary.median:.3f}",
        NONE if summary.std is None else f"{summary.std:.3f}",
        f"{summary.null.high:.3f}",
        f"{'≤ ' * (summary.null.p <= least)}{summary.null.p:.2g}",
        f"{summary.above} of {summary.subjects}",
        _accuracy(summary.match),
    ]
    if two_speakers:
        other = NONE if summary.mean_other is None else f"{summary.mean_other:.3f}"
        cells += [other, NONE if summary.attended is None else _accuracy(summary.attended)]
    return cells + ([] if best is None else [f"{summary.mean / best:.1%}" if best else NONE])


def _seconds(decoders: Mapping[str, EnvelopeScores]) -> str:
    lengths = sorted({scores.settings.window for scores in decoders.values()})
    return ", ".join(f"{length:g} s" for length in lengths)


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _accuracy(tally: Tally) -> str:
    accuracy, interval = tally.accuracy, tally.interval()
    if accuracy is None or interval is None:
        return NONE
    return f"{accuracy:.1%} [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"
