"""Splits of text: fixed by the texts, stratified, without texts shared between roles."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from frostlab.data.prepare import prepare
from frostlab.data.sources import Columns, Split, SplitPlan
from frostlab.data.splits import (
    class_numbers,
    classes_of,
    divide,
    limit_rows,
    stratified_share,
    survey,
)
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe

LABELLED = Columns(("text",), "label")


def test_carving_keeps_proportions_and_copies_together() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(2**63, size=5000).astype(np.uint64)
    keys[1000:1400] = keys[:400]  # copies
    numbers = random.choice(3, size=5000, p=[0.7, 0.2, 0.1])
    numbers[1000:1400] = numbers[:400]
    taken = stratified_share(keys, numbers, np.ones(5000, dtype=bool), 0.05, "tune")
    assert not set(keys[taken]) & set(keys[~taken])
    for number in range(3):
        share = taken[numbers == number].mean()
        assert abs(share - 0.05) < 0.01
    order = random.permutation(5000)  # the order of the file plays no part
    again = stratified_share(keys[order], numbers[order], np.ones(5000, dtype=bool), 0.05, "tune")
    assert set(keys[order][again]) == set(keys[taken])
    other = stratified_share(keys, numbers, np.ones(5000, dtype=bool), 0.05, "report")
    assert set(keys[other]) != set(keys[taken])


def test_a_class_of_one_text_stays_in_training() -> None:
    keys, numbers = np.arange(10, dtype=np.uint64), np.array([0] * 9 + [1])
    taken = stratified_share(keys, numbers, np.ones(10, dtype=bool), 0.05, "tune")
    assert taken.sum() == 1
    assert not taken[9]


def texts_of(portion: object, columns: Columns) -> list[tuple[str, ...]]:
    rows = list(portion.split.rows(columns))  # type: ignore[attr-defined]
    return [row.texts for row, taken in zip(rows, portion.taken, strict=True) if taken]  # type: ignore[attr-defined]


def test_no_text_is_in_two_splits(
    tmp_path: Path, cache: Path, write: Callable[..., Path], sentences: Callable[..., list]
) -> None:
    rows = sentences(400) + sentences(40)  # forty copies
    report = sentences(60, seed=1) + rows[:10]
    train = write(tmp_path / "train.jsonl", rows)
    test = write(tmp_path / "test.jsonl", report)
    parts = {"train": Split("train", "train", (train,)), "report": Split("test", "t", (test,))}
    surveys = {role: survey(part, LABELLED, cache) for role, part in parts.items()}
    names = classes_of(parts["train"], surveys["train"], None)
    numbers = class_numbers(parts["train"], surveys["train"], names)
    plan = SplitPlan(parts["train"], 0.1, parts["report"], LABELLED, None)
    found = {
        role: texts_of(portion, LABELLED)
        for role, portion in divide(plan, surveys, numbers).items()
    }
    assert len(found["report"]) == 70
    sets = {role: set(texts) for role, texts in found.items()}
    assert not sets["train"] & sets["tune"]
    assert not (sets["train"] | sets["tune"]) & sets["report"]
    assert len(found["train"]) + len(found["tune"]) == 440 - 20  # ten texts, twice each
    assert sets["train"] | sets["tune"] | sets["report"] == {
        (row["text"],) for row in rows + report
    }


def test_the_count_of_dropped_texts_is_recorded(
    tmp_path: Path,
    cache: Path,
    recipe: Callable[..., Recipe],
    write: Callable[..., Path],
    sentences: Callable[..., list],
) -> None:
    rows = sentences(300)
    write(tmp_path / "imdb" / "train.jsonl.gz", rows)
    write(tmp_path / "imdb" / "test.jsonl.gz", sentences(50, seed=2) + rows[5:12])
    words = {"kind": "words"}
    honest = prepare(recipe(words, name="imdb"), tmp_path, cache)
    assert len(honest.splits["train"]) + len(honest.splits["tune"]) == 293
    dropped = honest.origin["train"] + honest.origin["tune"]
    assert "whose text is also in report" in dropped
    published = prepare(recipe(words, name="imdb", splits="published"), tmp_path, cache)
    assert {role: len(split) for role, split in published.splits.items()} == {
        "train": 300,
        "report": 57,
    }
    assert published.caution == "checkpoint selected on the reporting split"
    assert honest.caution is None


def test_a_published_report_can_be_a_share_of_train(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe], write: Callable[..., Path]
) -> None:
    """As in text that comes without a split to report on: the last documents are held out."""
    write(tmp_path / "openwebtext" / "train.jsonl", [{"text": f"word{i} " * 9} for i in range(200)])
    settings = {"name": "openwebtext", "task": "language", "length": 4, "splits": "published"}
    words = {"kind": "words"}
    found = prepare(recipe(words, **settings, report=0.01), tmp_path, cache)
    assert found.caution == "checkpoint selected on the reporting split"
    assert {role: split.carved_from for role, split in found.described.items()} == {
        "train": None, "report": "train",
    }  # fmt: skip
    assert found.described["train"].carved == {"report": 2}
    with pytest.raises(
        BadInput, match="no reporting split; set data.splits: honest, or set data.report to"
    ):
        prepare(recipe(words, **settings), tmp_path, cache)


def test_a_limit_keeps_the_proportions(
    tmp_path: Path, cache: Path, write: Callable[..., Path], sentences: Callable[..., list]
) -> None:
    rows = [row | {"label": int(number % 4 == 0)} for number, row in enumerate(sentences(400))]
    part = Split("train", "t", (write(tmp_path / "train.jsonl", rows),))
    found = survey(part, LABELLED, cache)
    numbers = class_numbers(part, found, (0, 1))
    plan = SplitPlan(part, None, part, LABELLED, None)
    portion = divide(plan, {"train": found, "report": found}, numbers)["train"]
    chosen = limit_rows(portion, numbers, 100)
    assert len(chosen) == 100
    assert numbers[chosen].sum() == 25
    assert set(limit_rows(portion, numbers, 50)) < set(chosen)
    assert list(chosen) == sorted(chosen)
    assert not np.array_equal(chosen, np.arange(100))
    assert len(limit_rows(portion, numbers, 1000)) == 400


def test_documents_are_carved_from_the_end(
    tmp_path: Path, cache: Path, write: Callable[..., Path]
) -> None:
    rows = [{"text": f"document {number}"} for number in range(100)]
    rows[3] = rows[97]  # a copy of what reports
    part = Split("train", "t", (write(tmp_path / "a.jsonl", rows),))
    columns = Columns(("text",), None)
    plan = SplitPlan(part, 0.05, 0.05, columns, None)
    found = divide(plan, {"train": survey(part, columns, cache)}, None)
    texts = {role: [t for t, _ in portion.pieces(columns)] for role, portion in found.items()}
    assert texts["report"] == [row["text"] for row in rows[95:]]
    assert texts["tune"] == [row["text"] for row in rows[90:95]]
    assert texts["train"] == [row["text"] for row in rows[:90] if row is not rows[97]]
    assert "without 1 row whose text is also in report or tune" in found["train"].note


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_one_text_is_carved_between_words(tmp_path: Path, cache: Path, share: float) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"w{number}" for number in range(1000)))
    part, columns = Split("train", "t", (path,)), Columns(("text",), None)
    found = divide(
        SplitPlan(part, share, 0.05, columns, None), {"train": survey(part, columns, cache)}, None
    )
    texts = {role: "".join(t for t, _ in p.pieces(columns)) for role, p in found.items()}
    assert texts["train"] + texts["tune"] + texts["report"] == path.read_text()
    assert all(text[0] == " " for role, text in texts.items() if role != "train")
    assert abs(len(texts["tune"]) / len(path.read_text()) - share) < 0.01


def test_too_few_rows_are_refused(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe], write: Callable[..., Path]
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    with pytest.raises(BadInput, match="nothing is left for .*: 2 rows of .*a.jsonl are too few"):
        prepare(recipe(name="own", path=str(path)), cache=cache)
