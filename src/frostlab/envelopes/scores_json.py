"""scores.json, the file of a run's scores: written, read and shown.

It holds the scores of every decoder on each reported split of EEG recordings. The main score is r,
the correlation of the decoded envelope with the envelope of the heard speech.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frostlab.envelopes.challenge import (
    ChallengeScore,
    challenge_scores,
    segments_table,
    subjects_table,
)
from frostlab.envelopes.scores import EnvelopeScores, StoredScores, close, scores_table
from frostlab.errors import BadInput
from frostlab.storage import read_json
from frostlab.typed import check_schema, read

SCORES = "scores.json"
SPLITS = {  # the reported splits of EEG recordings
    "report": "held-out EEG of training subjects",
    "unseen": "subjects not trained on",
}
REPORTED = tuple(SPLITS)
_SCHEMA = 2  # version of scores.json
# split → key of the upper bound on r in `reference_scores`, which only simulated data have
_BEST = {"report": "best_r", "unseen": "best_r_unseen"}

Scores = dict[str, dict[str, EnvelopeScores]]  # split → decoder → its scores
# `scores` of a run's result.json: split → decoder → an object with the `digest` of its scores
Reported = Mapping[str, Mapping[str, Any]] | None


def scores_file(
    scores: Mapping[str, Mapping[str, Any]],
    reference_scores: Mapping[str, float],
    caution: str | None = None,
) -> Any:
    """Return the content of scores.json: scores by split, bounds on r, and challenge scores.

    `reference_scores` holds numbers that are known about the data, such as the bounds on r. A
    challenge score is defined as in the Auditory EEG Challenge (see the module `challenge`).
    """
    return {
        "schema": _SCHEMA,
        "caution": caution,
        "best": {
            split: reference_scores[key] for split, key in _BEST.items() if key in reference_scores
        },
        "splits": {
            split: {name: score.to_dict() for name, score in decoders.items()}
            for split, decoders in scores.items()
        },
        "challenge": {name: asdict(score) for name, score in challenge_scores(scores).items()},
    }


@dataclass(frozen=True)
class ScoresFile:
    """The contents of scores.json."""

    schema: int  # `_SCHEMA` when it was written
    best: dict[str, float]  # split → an upper bound on the correlation r of any decoder
    splits: dict[str, dict[str, Any]]  # split → decoder → its scores
    challenge: dict[str, Any]  # decoder → its `ChallengeScore`
    caution: str | None = None  # a warning about the scores


def read_scores(folder: Path, reported: Reported) -> tuple[Scores, dict[str, float]]:
    """Return a run's scores by split and decoder, and by split an upper bound on any decoder's r.

    The scores are checked against their digests in scores.json, and against the digests in
    `reported`, the value of the key `scores` in result.json.
    """
    path = folder / SCORES
    try:
        file = read(ScoresFile, check_schema(read_json(path), _SCHEMA, path), path)
    except FileNotFoundError:
        raise BadInput(f"{path} cannot be read (No such file or directory)") from None
    for name, values in file.challenge.items():
        read(ChallengeScore, values, f"{path}: challenge {name!a:.40}")
    for split, decoders in file.splits.items():
        for name, values in decoders.items():
            read(StoredScores, values, f"{path}: {split!a:.40} {name!a:.40}")
    try:
        scores = {
            split: {name: EnvelopeScores.from_dict(values) for name, values in decoders.items()}
            for split, decoders in file.splits.items()
        }
        if _digests(reported or {}) != _digests(scores):
            raise BadInput("these scores were edited: they do not match result.json")
        challenge = {name: asdict(score) for name, score in challenge_scores(scores).items()}
        if not close(file.challenge, challenge):
            raise BadInput("these scores were edited: `challenge` does not fit the segments")
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    return scores, file.best


def _digests(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    return {
        split: {name: score.digest for name, score in decoders.items()}
        for split, decoders in scores.items()
    }


def scores_lines(folder: Path, reported: Reported) -> list[str]:
    """Return a table for each split of a run's scores, or the reason why they cannot be read.

    `reported` is as for `read_scores`.
    """
    try:
        scores, best = read_scores(folder, reported)
        tables = [
            (SPLITS.get(split, split), scores_table(decoders, best.get(split)))
            for split, decoders in scores.items()
        ]
        tables.append(("segments", segments_table(scores)))
        tables.append(("segments by subject", subjects_table(scores)))
    except BadInput as error:
        return [str(error)]
    return [line for title, table in tables for line in (f"{title}:", *table.splitlines(), "")][:-1]
