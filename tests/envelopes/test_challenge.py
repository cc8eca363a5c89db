"""The challenge's score against its published leaderboard, and r of segments against scipy's."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import pearsonr

from eeg_made import RATE, people
from frostlab.envelopes.challenge import (
    challenge_score,
    challenge_scores,
    segments_table,
    subjects_table,
)
from frostlab.envelopes.correlation import segment_pearson
from frostlab.envelopes.scores import score_recordings
from frostlab.errors import BadInput

# means over subjects seen and unseen, and the total, of three entries of the challenge's
# leaderboard (task 2, 2023)
LEADERBOARD = (
    (0.1741406503035184, 0.10516286007120423, 0.1511480535594137),
    (0.10540436711604272, 0.09601645030622467, 0.10227506151277),
    (0.11473504072264694, 0.061209029179369365, 0.09689303687488773),
)
RANDOM = np.random.default_rng(1)
SEEN, UNSEEN = people(3, 2), [replace(r, subject=f"n{r.subject}") for r in people(2, 2)]
DECODED = {
    recording.name: recording.envelope + RANDOM.standard_normal(len(recording.envelope))
    for recording in SEEN
}
SCORES = {
    "report": {"model": score_recordings(DECODED, SEEN, RATE, segment=15.0)},
    "unseen": {
        "model": score_recordings({r.name: DECODED[r.name] for r in UNSEEN}, UNSEEN, RATE,
                                  segment=15.0)
    },
}  # fmt: skip


@pytest.mark.parametrize(("seen", "unseen", "total"), LEADERBOARD)
def test_the_score_is_the_leaderboards(seen: float, unseen: float, total: float) -> None:
    assert challenge_score(seen, unseen) == pytest.approx(total, abs=1e-12)


def test_segments_lie_side_by_side_and_the_rest_is_left_out() -> None:
    a, b = RANDOM.standard_normal((2, 25))
    wanted = [pearsonr(a[i : i + 10], b[i : i + 10])[0] for i in (0, 10)]
    assert segment_pearson(a, b, 10) == pytest.approx(wanted)
    assert segment_pearson(a, b, 26) == pytest.approx([pearsonr(a, b)[0]])
    assert segment_pearson(a, np.ones(25), 10).tolist() == [0.0, 0.0]


def test_a_subject_counts_once_with_the_mean_of_its_segments() -> None:
    length = int(15 * RATE)
    means = []
    for subject in ("s0", "s1", "s2"):
        r = [
            pearsonr(DECODED[x.name][at : at + length], x.envelope[at : at + length])[0]
            for x in SEEN
            if x.subject == subject
            for at in range(0, len(x.envelope) - length + 1, length)
        ]
        assert len(r) == 4, "two in each recording of 40 s"
        (score,) = (s for s in SCORES["report"]["model"].subjects if s.subject == subject)
        assert score.segments.count == 4
        assert score.segments.mean == pytest.approx(np.mean(r))
        assert score.segments.std == pytest.approx(np.std(r, ddof=1))
        means.append(np.mean(r))
    seen = SCORES["report"]["model"].segments
    assert (seen.count, seen.mean) == (3, pytest.approx(np.mean(means)))
    assert seen.std == pytest.approx(np.std(means, ddof=1))
    found = challenge_scores(SCORES)["model"]
    assert found.seen == seen
    assert found.unseen == SCORES["unseen"]["model"].segments
    assert found.unseen is not None
    assert found.score == pytest.approx(2 / 3 * seen.mean + found.unseen.mean / 3)


def test_without_unseen_subjects_there_is_no_score() -> None:
    alone = {"report": SCORES["report"]}
    assert challenge_scores(alone)["model"].score is None
    assert challenge_scores(alone)["model"].unseen is None
    assert segments_table(alone).splitlines()[1].split()[-1] == "–"
    with pytest.raises(
        BadInput, match="needs scores of the split `report` or of the split `unseen`"
    ):
        segments_table({"train": SCORES["report"]})


def test_the_tables_show_every_group_and_subject() -> None:
    found = challenge_scores(SCORES)["model"]
    head, row, note = segments_table(SCORES).splitlines()
    assert "subjects trained on" in head
    assert "subjects not trained on" in head
    assert row.split() == ["model", *str(found.seen).split(), "(3)", *str(found.unseen).split(),
                           "(2)", f"{found.score:.3f}"]  # fmt: skip
    assert "segments of 15 s" in note
    lines = subjects_table(SCORES).splitlines()
    assert [line.split()[0] for line in lines] == ["subject", "s0", "s1", "s2", "ns0", "ns1"]
    assert "subjects not trained on" in lines[-1]
    assert str(SCORES["unseen"]["model"].subjects[1].segments) in lines[-1]
    short = subjects_table(SCORES, most=2).splitlines()
    assert [line.split() for line in short[:3]] == [line.split() for line in lines[:3]]
    assert short[3].startswith("and 3 more; ")
