"""Synthetic answers are those of naive solvers, and no example is in two splits."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe

SIZES = [{}, {"symbols": 8, "length": 9, "examples": 300}, {"symbols": 40, "length": 8}]


def examples(found: Prepared, role: str) -> list[list[int]]:
    tokens = found.splits[role]
    pairs = zip(tokens.starts, tokens.stops, strict=True)
    return [tokens.ids[start:stop].tolist() for start, stop in pairs]


@pytest.fixture(params=SIZES, ids=["default", "small", "wide"])
def drawn(request: pytest.FixtureRequest, cache: Path, recipe: Callable[..., Recipe]) -> Callable:
    def draw(name: str) -> tuple[Prepared, int, int]:
        found = prepare(recipe(name=name, **request.param), cache=cache)
        return found, request.param.get("symbols", 16), request.param.get("length", 32)

    return draw


@pytest.mark.parametrize("name", ["majority", "recall", "induction"])
def test_sizes_and_separation(drawn: Callable, name: str) -> None:
    found, symbols, length = drawn(name)
    held = max(256, len(found.splits["train"]) // 8)
    assert len(found.splits["tune"]) == len(found.splits["report"]) == held
    sets = {role: set(map(tuple, examples(found, role))) for role in found.splits}
    assert not sets["tune"] & sets["report"]
    assert not sets["train"] & (sets["tune"] | sets["report"])
    used = {token for rows in sets.values() for row in rows for token in row}
    assert max(used) < found.pad == found.vocabulary - 1
    assert found.known["chance"] == 1 / symbols
    longest = max(split.lengths.max() for split in found.splits.values())
    assert longest <= length + (found.task == "language")
    assert found.tokenizer is None


def test_the_majority_is_unique(drawn: Callable) -> None:
    found, symbols, _ = drawn("majority")
    for role, tokens in found.splits.items():
        for ids, label in zip(examples(found, role), tokens.labels, strict=True):
            (winner, most), *rest = Counter(ids).most_common()
            assert winner == label
            assert not rest or rest[0][1] < most
    assert set(found.splits["train"].labels) == set(range(symbols))
    assert found.classes == symbols


def test_recall_finds_the_value_of_the_key(drawn: Callable) -> None:
    found, symbols, _ = drawn("recall")
    for role, tokens in found.splits.items():
        for ids, label in zip(examples(found, role), tokens.labels, strict=True):
            keys, values = ids[:-1:2], ids[1::2]
            assert len(set(keys)) == len(keys) == len(values)
            assert max(keys) < symbols <= min(values)
            assert dict(zip(keys, values, strict=True))[ids[-1]] - symbols == label


def test_induction_repeats_what_followed(drawn: Callable) -> None:
    found, _, length = drawn("induction")
    for role, tokens in found.splits.items():
        assert tokens.labels is None
        for ids, first in zip(examples(found, role), tokens.scored_from, strict=True):
            assert len(ids) == length + 1
            assert first < len(ids)
            for at in range(first, len(ids)):
                follows = {ids[n]: ids[n + 1] for n in range(at - 1)}
                assert follows[ids[at - 1]] == ids[at]
            assert ids[first - 1] in ids[: first - 1]  # the first symbol seen again
            assert ids[first - 2] not in ids[: first - 2]


def test_too_few_different_examples_are_refused(cache: Path, recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(BadInput, match=r"data\.symbols 2 and data\.length 8 make too few"):
        prepare(recipe(name="induction", symbols=2, length=8), cache=cache)
