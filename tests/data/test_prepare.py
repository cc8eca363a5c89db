"""Whole preparations: the published counts, and roles given by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data.prepare import prepare
from frostlab.recipe.recipe import Recipe

WORDS = {"kind": "words"}


@pytest.mark.parametrize(
    ("name", "head", "row", "train", "report", "count"),
    [
        ("sst2", "sentence\tlabel", "s{}\t{}", 67_349, "validation", 872),
        pytest.param(
            "mnli",
            "premise\thypothesis\tlabel",
            "p\th{}\t{}",
            392_702,
            "validation_matched",
            9_815,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_published_splits_are_whole(
    tmp_path: Path,
    cache: Path,
    recipe: Callable[..., Recipe],
    name: str,
    head: str,
    row: str,
    train: int,
    report: str,
    count: int,
) -> None:
    (tmp_path / name).mkdir()
    for split, rows in (("train", train), (report, count)):
        lines = [row.format(number % 1000, number % 2) for number in range(rows)]
        (tmp_path / name / f"{split}.tsv").write_text("\n".join([head, *lines]))
    found = prepare(recipe(WORDS, name=name, splits="published"), tmp_path, cache)
    assert {role: len(split) for role, split in found.splits.items()} == {
        "train": train,
        "report": count,
    }
    assert found.caution == "selected on the reporting split"
    assert found.classes == {"sst2": 2, "mnli": 3}[name]


def test_splits_and_shares_given_by_hand(
    tmp_path: Path,
    cache: Path,
    recipe: Callable[..., Recipe],
    write: Callable[..., Path],
    sentences: Callable[..., list],
) -> None:
    for split, count in (("big", 400), ("validation", 50), ("test", 30)):
        rows = [{"sentence": r["text"], "label": r["label"]} for r in sentences(count, seed=count)]
        write(tmp_path / "sst2" / f"{split}.jsonl", rows)

    def sizes(**data: object) -> dict[str, int]:
        found = prepare(recipe(WORDS, name="sst2", train="big", **data), tmp_path, cache)
        return {role: len(split) for role, split in found.splits.items()}

    assert sizes() == {"train": 380, "tune": 20, "report": 50}
    assert sizes(tune=0.25) == {"train": 300, "tune": 100, "report": 50}
    assert sizes(tune="validation", report="test") == {"train": 400, "tune": 50, "report": 30}
    assert sizes(limit=64, evaluation_limit=16) == {"train": 64, "tune": 16, "report": 16}


def test_the_seed_of_the_run_plays_no_part(
    tmp_path: Path,
    cache: Path,
    write: Callable[..., Path],
    sentences: Callable[..., list],
) -> None:
    path = write(tmp_path / "a.jsonl", sentences(100))
    made = [
        Recipe.model_validate(
            {"data": {"name": "own", "path": str(path)}, "tokenizer": WORDS, "seed": seed}
        )
        for seed in (0, 7)
    ]
    assert len({prepare(one, cache=cache).digest for one in made}) == 1


def test_a_large_vocabulary_takes_wider_numbers(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"w{number}" for number in range(80_000)))
    found = prepare(recipe(WORDS, name="own", path=str(path), task="language"), cache=cache)
    assert found.vocabulary > 65_536
    assert found.splits["train"].ids.dtype == "int32"
    assert found.splits["train"].ids.max() == found.vocabulary - 1
