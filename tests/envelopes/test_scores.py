"""Scores of made recordings: what is in them, that they come back whole, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from eeg_made import RATE, Made, people
from frostlab.envelopes.correlation import Null, fisher_mean, fisher_z, pearson
from frostlab.envelopes.ridge import fit_ridge
from frostlab.envelopes.scores import EnvelopeScores, score_recordings, scores_table
from frostlab.errors import BadInput

PEOPLE = people(4, 2, other=True)
RANDOM = np.random.default_rng(0)


def noisy(recordings: list[Made], noise: float) -> dict[str, NDArray[np.float64]]:
    return {
        each.name: each.envelope + noise * RANDOM.standard_normal(len(each.envelope))
        for each in recordings
    }


GOOD, POOR = noisy(PEOPLE, 1.0), noisy(PEOPLE, 8.0)
SCORES, WORSE = (score_recordings(each, PEOPLE, RATE) for each in (GOOD, POOR))


def test_r_of_recordings_subjects_and_all() -> None:
    expected = {each.name: pearson(GOOD[each.name], each.envelope) for each in PEOPLE}
    assert {each.name: each.r for each in SCORES.recordings} == pytest.approx(expected)
    assert SCORES.recordings[0].r_other == pytest.approx(
        pearson(GOOD[PEOPLE[0].name], PEOPLE[0].other)
    )
    by_subject = [fisher_mean([expected[f"s{s}_0"], expected[f"s{s}_1"]]) for s in range(4)]
    assert [each.r for each in SCORES.subjects] == pytest.approx(by_subject)
    summary = SCORES.summary
    assert (summary.subjects, summary.recordings) == (4, 8)
    assert summary.mean == pytest.approx(fisher_mean(by_subject))
    assert summary.median == pytest.approx(np.median(by_subject))
    assert summary.std == pytest.approx(np.std(by_subject, ddof=1))
    z = stats.ttest_1samp(fisher_z(by_subject), 0).confidence_interval(0.95)
    assert (summary.low, summary.high) == pytest.approx((np.tanh(z.low), np.tanh(z.high)))


def test_what_follows_speech_is_above_chance_and_what_does_not_is_not() -> None:
    assert {each.null.p for each in SCORES.subjects} == {1 / 101}
    assert SCORES.null.p == 1 / 101
    assert SCORES.null.high < 0.1 < SCORES.summary.mean
    assert SCORES.summary.above == 4
    blind = {each.name: RANDOM.standard_normal(len(each.envelope)) for each in PEOPLE}
    found = score_recordings(blind, PEOPLE, RATE)
    assert found.null.p > 0.05
    assert found.null.low < found.summary.mean < found.null.high
    assert found.null.high < min(each.null.high for each in found.subjects)


def test_a_subjects_chance_is_the_mean_over_recordings() -> None:
    """Under another name a recording draws other shifts, so that two of it vary less than one."""
    alone, twice = PEOPLE[:1], [PEOPLE[0], replace(PEOPLE[0], name="again")]
    said = {each.name: GOOD[PEOPLE[0].name] for each in twice}
    one = score_recordings({PEOPLE[0].name: said["again"]}, alone, RATE).subjects[0]
    two = score_recordings(said, twice, RATE).subjects[0]
    assert two.r == pytest.approx(one.r)
    assert two.null.high - two.null.low < 0.9 * (one.null.high - one.null.low)


def test_shifts_depend_on_the_seed_and_the_name_alone() -> None:
    part = score_recordings({k: GOOD[k] for k in ("s1_0", "s1_1")}, PEOPLE[2:4], RATE)
    assert part.recordings == SCORES.recordings[2:4]
    other = score_recordings(GOOD, PEOPLE, RATE, seed=1)
    assert other.recordings[0].null != SCORES.recordings[0].null
    assert [each.r for each in other.recordings] == [each.r for each in SCORES.recordings]
    assert other.digest != SCORES.digest


def test_matching_and_attention_add_up_over_recordings() -> None:
    summary = SCORES.summary
    assert summary.match.decisions == sum(each.match.decisions for each in SCORES.recordings) > 50
    assert summary.match.accuracy is not None
    assert summary.match.accuracy > 0.95
    assert summary.attended is not None
    assert summary.attended.windows == 8 * (1280 // (5 * 32))
    longer = score_recordings(GOOD, PEOPLE, RATE, window=10, gap=2)
    assert longer.recordings[0].match.windows == 1280 // 320
    assert longer.recordings[0].match.decisions == 4  # 10 s and 2 s more: two have one after


def test_a_constant_prediction_scores_nothing() -> None:
    flat = {each.name: np.full(len(each.envelope), 0.1, np.float32) for each in PEOPLE}
    found = score_recordings(flat, PEOPLE, RATE)
    assert {each.r for each in found.recordings} == {0.0}
    assert found.null == Null(0.0, 0.0, 0.0, 1.0)
    assert found.summary.match.accuracy == 0.5


def test_scores_come_back_from_a_file_whole() -> None:
    text = json.dumps(SCORES.to_dict())
    back = EnvelopeScores.from_dict(json.loads(text))
    assert back == SCORES
    assert back.digest == SCORES.digest
    assert json.dumps(back.to_dict()) == text
    single = score_recordings({"s0_0": GOOD["s0_0"]}, [replace(PEOPLE[0], other=None)], RATE)
    assert single.summary.low is single.summary.std is single.summary.attended is None
    assert EnvelopeScores.from_dict(json.loads(json.dumps(single.to_dict()))) == single


@pytest.mark.parametrize("place", [
    ("recordings", 3, "r"), ("recordings", 0, "null", "p"), ("subjects", 1, "null", "p"),
    ("null", "p"), ("settings", "null_shifts"), ("subjects", 2, "r"), ("summary", "mean"),
    ("recordings", 0, "match", "right"), ("recordings", 0, "segments", 0),
    ("subjects", 1, "segments", "mean"),
])  # fmt: skip
def test_an_edited_score_is_refused_in_one_line(place: tuple[str | int, ...]) -> None:
    said = json.loads(json.dumps(SCORES.to_dict()))
    inner = said
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] += 0.001
    with pytest.raises(BadInput, match="^these (scores were edited|are not envelope scores): .*$"):
        EnvelopeScores.from_dict(said)


def test_an_edit_with_a_new_digest_still_shows_where_sums_do_not_fit() -> None:
    first = replace(SCORES.recordings[0], r=0.99)
    forged = replace(SCORES, recordings=(first, *SCORES.recordings[1:]))
    said = json.loads(json.dumps(forged.to_dict()))
    with pytest.raises(BadInput, match="^these scores were edited: r of s0 is not the mean"):
        EnvelopeScores.from_dict(said)
    first = replace(SCORES.recordings[0], segments=(0.99,))
    forged = replace(SCORES, recordings=(first, *SCORES.recordings[1:]))
    said = json.loads(json.dumps(forged.to_dict()))
    with pytest.raises(BadInput, match="^these scores were edited: the segments of s0 are not"):
        EnvelopeScores.from_dict(said)
    with pytest.raises(BadInput, match="^these are not envelope scores: settings is missing$"):
        EnvelopeScores.from_dict({})


def test_the_table_shows_model_baseline_chance_and_best() -> None:
    train = people(4, 2, samples=400)
    ridge = fit_ridge(train, RATE)
    linear = {each.name: ridge.predict(each) for each in PEOPLE}
    table = scores_table(
        {"model": SCORES, "ridge": score_recordings(linear, PEOPLE, RATE)}, best=0.8
    )
    head, model, baseline, best, note = table.splitlines()
    assert head.split("  ")[-1] == "of best"
    assert model.startswith(f"model  {SCORES.summary.mean:.3f} [{SCORES.summary.low:.3f}, ")
    assert model.endswith(f"{SCORES.summary.mean / 0.8:.1%}")
    assert "≤ 0.0099" in model
    assert f"{SCORES.null.high:.3f}" in model
    assert "4 of 4" in model
    assert baseline.startswith("ridge  0.")
    assert best.startswith("best: 0.800, an upper bound on the r of any decoder; of best: ")
    assert note.startswith("4 subjects, 8 recordings; ")
    plain = replace(PEOPLE[0], other=None)
    alone = scores_table({"model": score_recordings({"s0_0": GOOD["s0_0"]}, [plain], RATE)})
    assert alone.splitlines()[-1].startswith("1 subject, 1 recording; ")
    assert "attended" in head
    assert note.endswith("; attended: right choices between both speakers")
    assert "attended" not in alone
    assert "best" not in alone


ONE = PEOPLE[0]
FLAT = replace(ONE, envelope=np.ones_like(ONE.envelope))
SHORT = replace(ONE, eeg=ONE.eeg[:200], envelope=ONE.envelope[:200], other=None)


@pytest.mark.parametrize(
    ("recording", "prediction", "settings", "said"),
    [
        (ONE, {}, {}, "no prediction for recording s0_0"),
        (ONE, {"s0_O": 1}, {}, "no prediction for recording s0_0"),
        (ONE, {"s0_0": 1, "s0_1": 1}, {}, "there is a prediction for s0_1, but no such recording"),
        (ONE, {"s0_0": np.ones(9)}, {}, "s0_0: the prediction has shape (9,), and the envelope"),
        (ONE, {"s0_0": np.full(1280, np.nan)}, {}, "s0_0: the prediction has values that"),
        (FLAT, {"s0_0": GOOD["s0_0"]}, {}, "s0_0: the envelope is flat; nothing"),
        (SHORT, {"s0_0": GOOD["s0_0"][:200]}, {},
         "s0_0 is 6.25 s long and has 73 shifts of at least 2 s; 100 are needed"),
        (ONE, GOOD, {"null_shifts": 10}, "10 shifts cannot give a p of 0.05; the least is 19"),
        (ONE, {"s0_0": GOOD["s0_0"]}, {"window": 0.01}, "a window of 0.01 s rounds to no sample"),
        (ONE, GOOD, {"gap": -1}, "the gap is -1 s; the least is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(
    recording: Made, prediction: dict[str, object], settings: dict[str, float], said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        score_recordings(prediction, [recording], RATE, **settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
