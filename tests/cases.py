"""The cases of a test: some are tried by default, the others in the slow tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

# Recipes that are shipped: one of each kind of model, data and stages.
TYPICAL = {
    "docstrings-decoder", "docstrings-gpt", "docstrings-pairs", "docstrings-progressive",
    "eeg-cocktail", "eeg-conformer-v1-published", "imdb-oelm", "induction-decoder", "majority-gpt",
    "mnli-bert", "progressive-deep", "progressive-standard-published", "sst2-bert-published",
    "tinystories-gpt", "wikitext2-decoder", "xnli-gpt-oelm",
}  # fmt: skip


def slow_unless(default: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test, of which those outside `default` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in default else pytest.mark.slow,
        )
        for case in cases
    ]
