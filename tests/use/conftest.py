"""Small trained runs on text of their own; each is trained once for all tests of this folder."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from hearing import hearing
from weather import bert_folder, recipe, rows, write_table, write_weather


@pytest.fixture(scope="session")
def weather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weather(tmp_path_factory.mktemp("weather"))


Train = Callable[..., fl.Run]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train a recipe in a new folder."""

    def run(recipe: dict[str, Any]) -> fl.Run:
        return fl.run(recipe, out=tmp_path_factory.mktemp("runs") / "run")

    return run


@pytest.fixture(scope="session")
def classifier(weather: Path, train: Train) -> fl.Run:
    """A classifier with frozen, orthogonal query and key, whose report split is a file."""
    return train(recipe(weather, treatment="oelm"))


@pytest.fixture(scope="session")
def language(weather: Path, train: Train) -> fl.Run:
    """A language model with a BPE tokenizer, and a loss at every layer."""
    changes = {"data__task": "language", "tokenizer": {"kind": "bpe", "size": 300}}
    model = {"kind": "decoder", "width": 16, "layers": 2, "heads": 2}
    return train(recipe(weather, model=model, supervise={"layers": "all"}, **changes))


@pytest.fixture(scope="session")
def listener(train: Train) -> fl.Run:
    """An EEG model that was trained on simulated recordings."""
    return train(hearing())


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, train: Train) -> fl.Run:
    """A pretrained BERT, fine-tuned on pairs of texts; its model and data are deleted."""
    place = tmp_path_factory.mktemp("pairs")
    table = [(text, f"day {number}", label) for number, (text, label) in enumerate(rows(0, 40))]
    path = write_table(place / "pairs.csv", ["first", "second", "answer"], table)
    run = train(
        recipe(
            path,
            data__text=["first", "second"],
            data__label="answer",
            data__length=24,
            tokenizer=None,
            model={"kind": "pretrained", "name": str(bert_folder(place / "bert"))},
        )
    )
    shutil.rmtree(place)
    return run
