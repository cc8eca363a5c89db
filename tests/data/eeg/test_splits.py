"""Splits of recordings: whole recordings and whole subjects are held out."""

import pytest

from frostlab.data.eeg.splits import Heading, HoldOut, divide
from frostlab.errors import BadInput


def headings(subjects: int, stories: int, role: str | None = None) -> list[Heading]:
    return [
        Heading(f"{role or 'x'}_s{s}_{n}", f"s{s}", f"{s}_{n}", role)
        for s in range(1, subjects + 1)
        for n in range(1, stories + 1)
    ]


def told() -> list[Heading]:
    return [one for role in ("train", "tune", "report") for one in headings(3, 2, role)]


def test_the_last_recordings_of_each_subject_are_held_out() -> None:
    found, caution = divide(headings(2, 5), HoldOut(tune=1, report=2), "here")
    assert found == {
        "train": ["x_s1_1", "x_s1_2", "x_s2_1", "x_s2_2"],
        "tune": ["x_s1_3", "x_s2_3"],
        "report": ["x_s1_4", "x_s1_5", "x_s2_4", "x_s2_5"],
    }
    assert caution is None


@pytest.mark.parametrize(
    ("held_out", "tune", "report", "train"),
    [(1, 2, 1, {3, 4, 5}), (3, 4, 3, {1, 2, 5}), (5, 1, 5, {2, 3, 4})],
)
def test_leave_one_out(held_out: int, tune: int, report: int, train: set[int]) -> None:
    found, _ = divide(headings(1, 5), HoldOut(held_out=held_out), "here")
    assert found["report"] == [f"x_s1_{report}"]
    assert found["tune"] == [f"x_s1_{tune}"]
    assert set(found["train"]) == {f"x_s1_{n}" for n in train}


def test_unseen_subjects_are_nowhere_else() -> None:
    found, _ = divide(headings(4, 3), HoldOut(unseen=("s2",)), "here")
    assert found["unseen"] == ["x_s2_1", "x_s2_2", "x_s2_3"]
    assert not [
        name for role in ("train", "tune", "report") for name in found[role] if "s2" in name
    ]
    found, _ = divide(headings(10, 3), HoldOut(unseen=0.3), "here")
    drawn = {name.split("_")[1] for name in found["unseen"]}
    assert len(drawn) == 3
    assert drawn != {"s1", "s10", "s2"}, "by lot, not the first"
    assert (
        divide(headings(10, 3)[::-1], HoldOut(unseen=0.3), "here")[0]["unseen"][::-1]
        == (found["unseen"])
    )
    found, _ = divide(headings(4, 3), HoldOut(seen=("s1",), unseen=("s3",)), "here")
    assert {name.split("_")[1] for name in found["train"]} == {"s1"}
    assert not [name for names in found.values() for name in names if "s2" in name]


def test_files_with_a_role_keep_it() -> None:
    found, caution = divide(told(), HoldOut(unseen=("s3",)), "here")
    assert set(found["train"]) == {f"train_s{s}_{n}" for s in (1, 2) for n in (1, 2)}
    assert set(found["tune"]) == {f"tune_s{s}_{n}" for s in (1, 2) for n in (1, 2)}
    assert found["unseen"] == ["report_s3_1", "report_s3_2"]
    assert caution is None


def test_speech_heard_in_training_by_others_is_told() -> None:
    shared = [Heading(f"s{s}_{n}", f"s{s}", f"story{n + s % 2}") for s in (1, 2) for n in (1, 2, 3)]
    found, caution = divide(shared, HoldOut(), "here")
    assert found["train"] == ["s1_1", "s2_1"]  # stories 2 and 1; s2 tunes on 2
    assert caution == "speech of 1 of 2 tune recordings was also heard in training"


@pytest.mark.parametrize(
    ("there", "rule", "said"),
    [
        (headings(1, 1), HoldOut(), "s1 has 1 recording; at least 3 are needed"),
        (headings(1, 2), HoldOut(), "s1 has 2 recordings; at least 3"),
        (headings(1, 5), HoldOut(held_out=6), "data.held_out 6, but s1 has 5 recordings"),
        (headings(2, 3), HoldOut(unseen=("s5",)), "data.unseen s5 is not a subject of here"),
        (headings(2, 3), HoldOut(seen=("s1",), unseen=("s1",)), "s1 is both in data.seen and in"),
        (headings(2, 3), HoldOut(unseen=("s1", "s2")), "leaves none of the 2 subjects of here"),
        (headings(1, 3) * 2, HoldOut(), "2 recordings are called x_s1_1"),
        (told(), HoldOut(tune=1), "data.tune 1 is given, but here has train, val and test files"),
        (told()[:-6], HoldOut(), "here has no file named test_-_"),
        ([h for h in told() if h.role != "tune"], HoldOut(tune=1), "here has no file named val_-_"),
        (headings(4, 3), HoldOut(("s1", "s2", "s3"), 0.5), "is 2 of the 4 .* data.seen leaves 1"),
        ([*told(), Heading("n", "s9", "n", "tune")], HoldOut(), "s9 has no file named train_-_"),
        (
            [*told(), Heading("n", "s9", "n", "tune")],
            HoldOut(unseen=("s9",)),
            "s9 of data.unseen",
        ),
    ],
)
def test_what_cannot_be_divided(there: list[Heading], rule: HoldOut, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        divide(there, rule, "here")
    assert "\n" not in str(caught.value)
