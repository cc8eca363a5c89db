"""Docstrings are cleaned, masked and unique; synthetic tasks have the answers of plain solvers."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data import builtin as docstrings
from frostlab.data.builtin import (
    SPLIT_SHARES,
    Docstring,
    clean_docstring,
    docstring_files,
    near_duplicate_key,
    split_of_module,
)
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe

NAMES = re.compile(r"\b(numpy|np|scipy|torch|pytorch|transformers|huggingface|hugging face)\b")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of this file share: extracting takes seconds."""
    return tmp_path_factory.mktemp("docstrings")


def rows_of(shared: Path, *, pairs: bool) -> dict[str, list[dict]]:
    files = docstring_files(60, pairs=pairs, cache=shared)
    return {
        split: [json.loads(line) for line in path.read_text().splitlines()]
        for split, path in files.items()
    }


def test_classes_are_balanced_and_masked(shared: Path) -> None:
    rows = rows_of(shared, pairs=False)
    assert set(rows) == set(SPLIT_SHARES)
    for split, values in rows.items():
        counts = Counter(row["label"] for row in values)
        assert set(counts) == {0, 1, 2, 3}
        assert len(set(counts.values())) == 1
        assert counts[0] == round(SPLIT_SHARES[split] * 60)
        for row in values:
            assert len(row["text"].split()) >= docstrings.FEWEST_WORDS
            assert not NAMES.search(row["text"].lower()), row["text"]
            assert ">>>" not in row["text"]
    labelled = [
        (row["label"], near_duplicate_key(row["text"])) for found in rows.values() for row in found
    ]
    assert len(set(labelled)) == len(labelled)  # no near copy, whichever split it is in


def test_pairs_are_balanced_and_half_true(shared: Path) -> None:
    for values in rows_of(shared, pairs=True).values():
        assert Counter(row["label"] for row in values)[0] * 2 == len(values)
        bodies = [row["body"] for row in values]
        assert len(set(bodies)) == len(bodies)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_no_mismatched_pair_is_a_summary_with_its_own_body(count: int) -> None:
    docs = [Docstring(f"summary {n}", f"body {n}") for n in range(count)]
    rows = docstrings._pairs(docs, [], 2)
    assert len(rows) == count // 2 * 2
    own = {doc.summary: doc.body for doc in docs}
    for row in rows:
        assert (own[row["summary"]] == row["body"]) == row["label"]


def test_prepared_for_every_task(shared: Path, recipe: Callable[..., Recipe]) -> None:
    small = {"per_package": 60, "length": 32}
    words = {"kind": "words"}
    single = prepare(recipe(words, name="docstrings", **small), cache=shared)
    assert (single.classes, single.known) == (4, {"chance": 0.25})
    assert {role: len(split) for role, split in single.splits.items()} == {
        "train": 192,
        "tune": 24,
        "report": 24,
    }
    pairs = prepare(recipe(words, name="docstrings-pairs", **small), cache=shared)
    assert (pairs.classes, pairs.known) == (2, {"chance": 0.5})
    assert pairs.splits["report"].second is not None
    language = prepare(recipe(words, name="docstrings", task="language", **small), cache=shared)
    assert (language.classes, language.known) == (0, {})
    assert language.splits["train"].labels is None


def test_equal_in_another_process(shared: Path, tmp_path: Path) -> None:
    here = {k: p.read_bytes() for k, p in docstring_files(60, pairs=False, cache=shared).items()}
    program = (
        "import sys; from pathlib import Path; from frostlab.data.builtin import *;"
        "docstring_files(60, pairs=False, cache=Path(sys.argv[1]));"
        "assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment)
    there = {k: p.read_bytes() for k, p in docstring_files(60, pairs=False, cache=tmp_path).items()}
    assert there == here


def test_modules_of_one_group_share_a_split() -> None:
    for package in docstrings.PACKAGES:
        groups = [f"part{number}/inner" for number in range(300)]
        places = [split_of_module(package, f"{group}/a.py") for group in groups]
        assert places == [split_of_module(package, f"{group}/deep/b.py") for group in groups]
        counts = Counter(places)
        assert 0.7 < counts["train"] / 300 < 0.9
        assert min(counts["validation"], counts["test"]) > 10


def test_cleaning_leaves_running_text() -> None:
    text = """Return the sum of :func:`numpy.add` over a NumPy array.

    Parameters
    ----------
    x : np.ndarray
        What to add up, for torch.Tensor too.

    .. math::
        \\sum_i x_i

    Use it like this::

        total(1)

    Afterwards.

    >>> total([1, 2])
    3

    ```python
    total(3)
    ```
    The end with Hugging Face.
    """
    assert clean_docstring(text) == (
        "Return the sum of package.add over a package array.",
        "Parameters x : package.ndarray What to add up, for package.Tensor too. "
        "Use it like this:: Afterwards. The end with package.",
    )


def test_near_copies_share_a_key() -> None:
    one = near_duplicate_key("Construct a BertThing of 12 layers. Called BERT_base here.")
    two = near_duplicate_key("Construct a GPTThing of 24 layers. Called GPT here.")
    other = near_duplicate_key("Destroy a GPTThing of 24 layers. Called GPT here.")
    assert one == two != other


def test_fewer_packages_are_enough_but_not_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def without(*hidden: str) -> Callable:
        return lambda name, package=None: None if name in hidden else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without("torch", "transformers"))
    files = docstring_files(20, pairs=False, cache=tmp_path)
    labels = {json.loads(line)["label"] for line in files["train"].read_text().splitlines()}
    assert labels == {0, 1}
    monkeypatch.setattr(importlib.util, "find_spec", without("torch", "transformers", "scipy"))
    with pytest.raises(BadInput, match="needs 2 of numpy, scipy, torch, transformers; installed"):
        docstring_files(20, pairs=False, cache=tmp_path)
    with pytest.raises(BadInput, match="data.name docstrings-pairs needs 2 of numpy"):
        docstring_files(20, pairs=True, cache=tmp_path)


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
