"""What a decoder reached, raw for each recording, with a digest that an edited file betrays."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
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
    attended,
    by_subject,
    centred,
    draw_shifts,
    fisher,
    fisher_mean,
    match_mismatch,
    null_of,
    pearson,
    shifted_pearson,
    to_samples,
)
from frostlab.errors import BadInput, nearest
from frostlab.storage import derive_seed


@dataclass(frozen=True)
class Settings:
    """How scores were made: times in seconds, the rate in Hz."""

    rate: float
    null_shifts: int
    away: float  # how far a mismatched envelope is at least
    window: float  # what is matched, and told from the other speaker
    gap: float  # between a window and the wrong one
    seed: int


@dataclass(frozen=True)
class RecordingScore:
    """One recording: r with what was heard, and with the other speaker where there is one."""

    name: str
    subject: str
    samples: int
    r: float
    r_other: float | None
    null: Null
    match: Tally
    attended: Tally | None


@dataclass(frozen=True)
class SubjectScore:
    """One subject: the mean over recordings by Fisher's z, each recording counting as one."""

    subject: str
    recordings: int
    r: float
    r_other: float | None
    null: Null


@dataclass(frozen=True)
class Summary:
    """All subjects, each counting as one.

    `mean` is by Fisher's z, `low` and `high` its 95 % t interval over subjects (none for a single
    one), `std` and the quartiles are of the subjects' r, `above` counts subjects with p ≤ 0.05.
    """

    subjects: int
    recordings: int
    mean: float
    low: float | None
    high: float | None
    median: float
    std: float | None
    quartiles: tuple[float, float]
    mean_other: float | None
    above: int
    null: Null
    match: Tally
    attended: Tally | None


@dataclass(frozen=True)
class EnvelopeScores:
    """Scores of one decoder on one split; the digest is over all that was measured."""

    settings: Settings
    recordings: tuple[RecordingScore, ...]
    subjects: tuple[SubjectScore, ...]
    null: Null  # of the mean over subjects

    @cached_property
    def digest(self) -> str:
        """The same for the same scores, whatever else a file says."""
        return _digest(self._measured())

    @cached_property
    def summary(self) -> Summary:
        """What all subjects come to."""
        r = np.array([each.r for each in self.subjects])
        low, high = _interval(r)
        quarter, half, most = (float(x) for x in np.quantile(r, (0.25, 0.5, 0.75)))
        others = [each.r_other for each in self.subjects if each.r_other is not None]
        told = [each.attended for each in self.recordings if each.attended is not None]
        return Summary(
            subjects=len(r),
            recordings=len(self.recordings),
            mean=float(fisher_mean(r)),
            low=low,
            high=high,
            median=half,
            std=float(r.std(ddof=1)) if len(r) > 1 else None,
            quartiles=(quarter, most),
            mean_other=float(fisher_mean(others)) if others else None,
            above=sum(each.null.p <= 0.05 for each in self.subjects),
            null=self.null,
            match=sum((each.match for each in self.recordings), Tally(0.0, 0, 0)),
            attended=sum(told, Tally(0.0, 0, 0)) if told else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            **self._measured(),
            "summary": _plain(asdict(self.summary)),
            "digest": self.digest,
        }

    @staticmethod
    def from_dict(said: dict[str, Any]) -> "EnvelopeScores":
        """Scores as they were written; an edited one is refused."""
        try:
            found = EnvelopeScores(
                Settings(**said["settings"]),
                tuple(_recording(each) for each in said["recordings"]),
                tuple(_subject(each) for each in said["subjects"]),
                Null(**said["null"]),
            )
            digest, summary = said["digest"], said["summary"]
        except (KeyError, TypeError) as error:
            raise BadInput(f"these are no envelope scores: {error}") from None
        if digest != found.digest:
            raise BadInput(
                f"these scores were edited: their digest is {found.digest}, and they say {digest}; "
                "score the predictions again"
            )
        for each in found.subjects:
            theirs = [one.r for one in found.recordings if one.subject == each.subject]
            if not theirs or abs(float(fisher_mean(theirs)) - each.r) > 1e-9:
                raise BadInput(f"these scores were edited: r of {each.subject} is not its mean")
        if not _alike(summary, _plain(asdict(found.summary))):
            raise BadInput("these scores were edited: the summary is not that of the recordings")
        return found

    def _measured(self) -> dict[str, Any]:
        whole = asdict(self)
        return _plain(
            {name: whole[name] for name in ("settings", "recordings", "subjects", "null")}
        )


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(values: Any) -> Any:
    """As a JSON file gives it back: lists for tuples."""
    return json.loads(json.dumps(values))


def _alike(said: Any, found: Any) -> bool:
    """Equal but for rounding, which differs between machines."""
    if isinstance(said, dict) and isinstance(found, dict):
        return said.keys() == found.keys() and all(_alike(said[k], found[k]) for k in said)
    if isinstance(said, list) and isinstance(found, list):
        return len(said) == len(found) and all(map(_alike, said, found))
    if isinstance(said, float) and isinstance(found, float):
        return math.isclose(said, found, rel_tol=1e-9, abs_tol=1e-9)
    return bool(said == found)


def _recording(said: dict[str, Any]) -> RecordingScore:
    told = said["attended"]
    parts = {
        "null": Null(**said["null"]),
        "match": Tally(**said["match"]),
        "attended": None if told is None else Tally(**told),
    }
    return RecordingScore(**{**said, **parts})


def _subject(said: dict[str, Any]) -> SubjectScore:
    return SubjectScore(**{**said, "null": Null(**said["null"])})


def _interval(r: np.ndarray) -> tuple[float | None, float | None]:
    """The 95 % t interval of the mean over z, as r."""
    if len(r) < 2:
        return None, None
    z = fisher(r)
    reach = float(special.stdtrit(len(z) - 1, 0.975)) * float(z.std(ddof=1)) / np.sqrt(len(z))
    return float(np.tanh(z.mean() - reach)), float(np.tanh(z.mean() + reach))


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
    return np.random.default_rng(derive_seed(settings.seed, name))


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


def scores_table(decoders: Mapping[str, EnvelopeScores], best: float | None = None) -> str:
    """One line for each decoder, with what chance gives, and the best achievable r if known."""
    head = ["", "r [95 %]", "median", "std", "chance ≤", "p", "p ≤ 0.05"]
    told = any(scores.summary.attended is not None for scores in decoders.values())
    head += [f"match {_seconds(decoders)}"] + ["r other", "attended"] * told
    head += ["of best"] * (best is not None)
    rows = [
        _row(name, scores.summary, told, best, scores.settings.null_shifts)
        for name, scores in decoders.items()
    ]
    lines = _aligned([head, *rows])
    if best is not None:
        lines.append(f"best achievable r: {best:.3f}")
    some = next(iter(decoders.values())).summary
    lines.append(
        f"{some.subjects} subject{'s' * (some.subjects != 1)}, {some.recordings} recordings; "
        "r: mean by Fisher's z over subjects, with its t interval; chance: 95 of 100 means with "
        "mismatched envelopes are below"
    )
    return "\n".join(lines)


def _row(name: str, found: Summary, told: bool, best: float | None, shifts: int) -> list[str]:
    least = 1 / (1 + shifts)
    cells = [
        name,
        f"{found.mean:.3f}{_between(found.low, found.high)}",
        f"{found.median:.3f}",
        "–" if found.std is None else f"{found.std:.3f}",
        f"{found.null.high:.3f}",
        f"{'≤ ' * (found.null.p <= least)}{found.null.p:.2g}",
        f"{found.above} of {found.subjects}",
        _share(found.match),
    ]
    if told:
        other = "–" if found.mean_other is None else f"{found.mean_other:.3f}"
        cells += [other, "–" if found.attended is None else _share(found.attended)]
    return cells + ([] if best is None else [f"{found.mean / best:.1%}" if best else "–"])


def _seconds(decoders: Mapping[str, EnvelopeScores]) -> str:
    lengths = sorted({scores.settings.window for scores in decoders.values()})
    return ", ".join(f"{each:g} s" for each in lengths)


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _share(tally: Tally) -> str:
    accuracy, interval = tally.accuracy, tally.interval()
    if accuracy is None or interval is None:
        return "–"
    return f"{accuracy:.1%} [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
