"""What a decoder reached, raw for each recording, with a digest that an edited file betrays."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from frostlab.errors import BadInput
from frostlab.scoring.correlation import Null, fisher, fisher_mean
from frostlab.scoring.matching import Tally


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
