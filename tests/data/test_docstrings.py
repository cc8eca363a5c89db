"""Docstrings: cleaned, masked, without copies across splits, the same in every process."""

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
from frostlab.data.builtin import SHARES, clean, docstring_files, near_key, split_of
from frostlab.data.prepare import prepare
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
    assert set(rows) == set(SHARES)
    for split, values in rows.items():
        counts = Counter(row["label"] for row in values)
        assert set(counts) == {0, 1, 2, 3}
        assert len(set(counts.values())) == 1
        assert counts[0] == round(SHARES[split] * 60)
        for row in values:
            assert len(row["text"].split()) >= docstrings.WORDS
            assert not NAMES.search(row["text"].lower()), row["text"]
            assert ">>>" not in row["text"]
    labelled = [(row["label"], near_key(row["text"])) for found in rows.values() for row in found]
    assert len(set(labelled)) == len(labelled)  # no near copy, whichever split it is in


def test_pairs_are_balanced_and_half_true(shared: Path) -> None:
    for values in rows_of(shared, pairs=True).values():
        assert Counter(row["label"] for row in values)[0] * 2 == len(values)
        bodies = [row["body"] for row in values]
        assert len(set(bodies)) == len(bodies)


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
        places = [split_of(package, f"{group}/a.py") for group in groups]
        assert places == [split_of(package, f"{group}/deep/b.py") for group in groups]
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
    assert clean(text) == (
        "Return the sum of package.add over a package array.",
        "Parameters x : package.ndarray What to add up, for package.Tensor too. "
        "Use it like this:: Afterwards. The end with package.",
    )


def test_near_copies_share_a_key() -> None:
    one = near_key("Construct a BertThing of 12 layers. Called BERT_base here.")
    two = near_key("Construct a GPTThing of 24 layers. Called GPT here.")
    other = near_key("Destroy a GPTThing of 24 layers. Called GPT here.")
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
    with pytest.raises(BadInput, match="needs two of numpy, scipy, torch, transformers; installed"):
        docstring_files(20, pairs=False, cache=tmp_path)
