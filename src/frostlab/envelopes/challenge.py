"""The score of the Auditory EEG Challenge of 2023 (regression), and tables of segments.

A segment is a stretch of a recording, by default of 60 s; its r is the correlation of the decoded
and the true envelope. The value of a subject is the mean r of its segments, and the value of a
group of subjects is the mean over the subjects. The subjects that the decoder was trained on have a
weight of two thirds in the score, the others one third; docs/eeg.md cites the definition.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frostlab.envelopes.scores import EnvelopeScores, Spread
from frostlab.errors import BadInput
from frostlab.text import NONE, columns, plain

SEEN, UNSEEN = "report", "unseen"  # splits: held-out EEG of subjects trained on; other subjects
TITLES = {SEEN: "subjects trained on", UNSEEN: "subjects not trained on"}
SEEN_WEIGHT = 2 / 3
_MOST_LINES = 20  # subjects that a short table shows

ScoresBySplit = Mapping[str, Mapping[str, EnvelopeScores]]  # split → decoder → scores


@dataclass(frozen=True)
class ChallengeScore:
    """The score of one decoder; for each group, mean and spread of the subjects' mean r."""

    seen: Spread | None  # subjects trained on; None if none of them was scored
    unseen: Spread | None  # subjects not trained on; None if none of them was scored
    score: float | None  # None unless both groups were scored


def challenge_score(seen: float, unseen: float) -> float:
    """Weigh the mean r of both groups of subjects: two thirds and one third."""
    return SEEN_WEIGHT * seen + (1 - SEEN_WEIGHT) * unseen


def challenge_scores(scores: ScoresBySplit) -> dict[str, ChallengeScore]:
    """Return the score of every decoder."""
    decoders = dict.fromkeys(name for by_decoder in scores.values() for name in by_decoder)
    by_name = {}
    for name in decoders:
        groups = [
            scores[split][name].segments if name in scores.get(split, {}) else None
            for split in (SEEN, UNSEEN)
        ]
        seen, unseen = groups
        score = None
        if seen is not None and unseen is not None:
            score = challenge_score(seen.mean, unseen.mean)
        by_name[name] = ChallengeScore(seen, unseen, score)
    return by_name


def segments_table(scores: ScoresBySplit) -> str:
    """Return a table of r on segments by decoder (mean ± std over subjects), and of the score."""
    splits = [split for split in (SEEN, UNSEEN) if split in scores]
    if not splits:
        raise BadInput(
            f"a table of segments needs scores of the split `{SEEN}` or of the split `{UNSEEN}`"
        )
    rows = []
    for name, decoder in challenge_scores(scores).items():
        groups = {SEEN: decoder.seen, UNSEEN: decoder.unseen}
        score = NONE if decoder.score is None else f"{decoder.score:.3f}"
        rows.append([plain(name), *(_group(groups[split]) for split in splits), score])
    head = ["", *(TITLES[split] for split in splits), "score"]
    first = next(iter(scores[splits[0]].values()))
    note = (
        f"r of segments of {first.settings.segment:g} s (a shorter recording is one segment): mean "
        "± standard deviation over the subjects' means (number of subjects); score: as in the "
        "Auditory EEG Challenge of 2023, 2/3 of the mean of subjects trained on + 1/3 of the mean "
        "of the others"
    )
    return "\n".join([*columns([head, *rows]), note])


def _group(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread} ({spread.count})"


def subjects_table(scores: ScoresBySplit, most: int | None = _MOST_LINES) -> str:
    """Return a table of r on each subject's segments by decoder, as mean ± standard deviation.

    With `most`, only that many subjects are shown, and a last line counts the others.
    """
    decoders = list(dict.fromkeys(name for by_decoder in scores.values() for name in by_decoder))
    rows: list[list[str]] = []
    for split, by_decoder in scores.items():
        by_subject: dict[str, dict[str, Any]] = {}
        for name, decoder in by_decoder.items():
            for score in decoder.subjects:
                by_subject.setdefault(score.subject, {})[name] = score.segments
        for subject, spreads in by_subject.items():
            count = next(iter(spreads.values())).count
            cells = [str(spreads.get(name, NONE)) for name in decoders]
            rows.append([plain(subject), TITLES.get(split, plain(split)), str(count), *cells])
    head = ["subject", "group", "segments", *map(plain, decoders)]
    shown = rows if most is None else rows[:most]
    lines = columns([head, *shown], right={2})
    if len(shown) < len(rows):
        lines.append(
            f"and {len(rows) - len(shown)} more; `frostlab envelopes RUN` writes a page with all"
        )
    return "\n".join(lines)
