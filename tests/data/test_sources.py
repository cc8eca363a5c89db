"""Sets are found in folders and through `datasets`; what is missing or misspelt is named."""

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from frostlab.data import sources
from frostlab.data.prepare import prepare
from frostlab.data.sources import PUBLIC_SETS, plan_splits, unreachable
from frostlab.errors import BadInput
from frostlab.recipe.data import Named, names_of
from frostlab.recipe.recipe import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
Draw = Callable[..., list]
WORDS = {"kind": "words"}


def test_every_named_set_is_known() -> None:
    assert set(PUBLIC_SETS) == set(names_of(Named))


ROLES = {
    "sst2": ("train", 0.05, "validation", "validation"),
    "mnli": ("train", 0.05, "validation_matched", "validation_matched"),
    "xnli": ("train", "validation", "test", "validation"),
    "imdb": ("train", 0.05, "test", "test"),
    "ag_news": ("train", 0.05, "test", "test"),
    "tinystories": ("train", 0.05, "validation", "validation"),
    "wikitext2": ("train", "validation", "test", "test"),
    "wikitext2-raw": ("train", "validation", "test", "test"),
    "wikitext103": ("train", "validation", "test", "test"),
    "openwebtext": ("train", 0.05, 0.05, None),
    "tinyshakespeare": ("train", 0.05, 0.05, None),
}


@pytest.mark.parametrize("name", names_of(Named))
def test_roles_of_the_splits(tmp_path: Path, cache: Path, recipe: Make, name: str) -> None:
    task = "classification" if PUBLIC_SETS[name].classes else "language"
    for folder in (name, "mnli", "xnli/en"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for split in ("train", "validation", "validation_matched", "test"):
            (tmp_path / folder / f"{split}.jsonl").write_text("")
    found = plan_splits(recipe(name=name, task=task).data, tmp_path, cache)
    train, tune, report, published = ROLES[name]
    assert [getattr(split, "name", split) for split in (found.train, found.tune, found.report)] == [
        train,
        tune,
        report,
    ]
    if name == "xnli":
        assert found.train.files[0].parent.name == "mnli"
        assert found.report.files[0].parent == tmp_path / "xnli" / "en"
    asked = recipe(name=name, task=task, splits="published").data
    if published is None:
        with pytest.raises(BadInput, match="has no reporting split; set data.splits: honest"):
            plan_splits(asked, tmp_path, cache)
    else:
        assert plan_splits(asked, tmp_path, cache).report.name == published
        assert plan_splits(asked, tmp_path, cache).tune is None


def test_the_hub_gives_what_a_folder_gives(
    tmp_path: Path,
    cache: Path,
    recipe: Make,
    write: Write,
    sentences: Draw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for split, count in (("train", 200), ("validation", 30), ("test", 20)):
        rows = [{"sentence": r["text"], "label": r["label"]} for r in sentences(count, seed=count)]
        write(tmp_path / "sst2" / f"{split}.jsonl", rows)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    hub = replace(PUBLIC_SETS["sst2"], hub=(str(tmp_path / "sst2"), None, None))
    monkeypatch.setitem(sources.PUBLIC_SETS, "sst2", hub)
    local = prepare(recipe(WORDS, name="sst2"), tmp_path, cache)
    empty = tmp_path / "empty"
    empty.mkdir()
    found = prepare(recipe(WORDS, name="sst2"), empty, cache)
    assert found.digest == local.digest
    assert found.origin["report"] == f"{tmp_path / 'sst2'}: validation"
    with pytest.raises(
        BadInput, match="data.report tset is not a split of .*; did you mean `test`"
    ):
        prepare(recipe(WORDS, name="sst2", report="tset"), empty, cache)


def test_lines_of_the_hub_are_one_text(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["", " = Title = \n", "", " Some words here . \n"] * 3
    for split in ("train", "validation", "test"):
        write(tmp_path / "wiki" / f"{split}.jsonl", [{"text": line} for line in lines])
        (tmp_path / "wikitext2").mkdir(exist_ok=True)
        (tmp_path / "wikitext2" / f"{split}.txt").write_text("".join(lines))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    hub = replace(PUBLIC_SETS["wikitext2"], hub=(str(tmp_path / "wiki"), None, None))
    monkeypatch.setitem(sources.PUBLIC_SETS, "wikitext2", hub)
    asked = recipe(WORDS, name="wikitext2", task="language", splits="published")
    local = prepare(asked, tmp_path, cache)
    (tmp_path / "empty").mkdir()
    assert prepare(asked, tmp_path / "empty", cache).digest == local.digest


def test_a_missing_set_says_where_it_looked(
    tmp_path: Path, cache: Path, recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_DATA", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(BadInput) as caught:
        prepare(recipe(name="sst2"), cache=cache)
    message = str(caught.value)
    assert time.monotonic() - begun < 5
    assert "\n" not in message
    for part in (
        f"data.name sst2 was not found: {tmp_path / 'sst2'} has no split file",
        "stanfordnlp/sst2",
        "sst2/SPLIT.{jsonl,csv,tsv,txt,parquet}[.gz]",
        "--data-dir or FROSTLAB_DATA",
        "pip install 'frostlab[data]'",
    ):
        assert part in message


def test_without_a_network_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unreachable() is None  # offline: the libraries answer from their caches

    def lost(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert "mirror.example cannot be found" in str(unreachable())


def make_own(folder: Path, write: Write, sentences: Draw, named: Iterable[str] = ()) -> None:
    """Write train and test, and of the other files those that are named."""
    write(folder / "train.jsonl", sentences(100))
    write(folder / "test.jsonl", sentences(20, seed=2))
    others = {
        "blind": [r | {"label": -1} for r in sentences(20, seed=3)],
        "odd": [*sentences(3, seed=4), {"text": "x", "label": "maybe"}],
        "same": [r | {"label": "good"} for r in sentences(9)],
        "empty": [],
        "half": [{"text": "a \ud800", "label": 0}],
    }
    for name in others.keys() & set(named):
        write(folder / f"{name}.jsonl", others[name])


BAD = [
    ({"report": "tesd"}, "data.report tesd is not a split of {f}; did you mean `test`"),
    ({"train": "trian"}, "data.train trian is not a split of"),
    ({"tune": "test"}, "data.tune and data.report are both test; choose different splits"),
    ({"report": "train"}, "data.train and data.report are both train; choose different splits"),
    ({"report": "blind"}, "{f}/blind.jsonl:1: label -1 means unlabelled; choose a split with"),
    ({"report": "odd"}, "{f}/odd.jsonl:4: label maybe is not one of the classes 0, 1"),
    ({"train": "same"}, "{f}/same.jsonl: every label is good; two classes are needed"),
    ({"report": "empty"}, "{f}/empty.jsonl: split empty holds no text"),
    ({"report": "half"}, "{f}/half.jsonl:1: \\ud800 is half of a surrogate pair"),
    ({"text": ("txet",)}, "{f}/train.jsonl:1: no column txet; did you mean `text`?"),
    ({"label": "labels"}, "{f}/train.jsonl:1: no column labels; did you mean `label`?"),
    ({"text": ("text", "text"), "task": "language"}, "data.text names 2 columns; data.task lang"),
    ({"path": "{f}/train.json"}, "data.path {f}/train.json does not exist; did you mean `train."),
    ({"path": "{f}/../notes.md"}, "notes.md is not one of .jsonl, .csv, .tsv, .txt, .parquet"),
    ({"path": "{f}/train.jsonl", "report": "test"}, "data.report test is not a split of"),
    ({"path": "{f}/train.jsonl", "splits": "published"}, "train.jsonl has no reporting split"),
    ({"path": "{f}/../nothing"}, "nothing has no SPLIT.{{jsonl,csv,tsv,txt,parquet}}[.gz] in it"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_mistakes_are_named(
    tmp_path: Path,
    cache: Path,
    recipe: Make,
    write: Write,
    sentences: Draw,
    change: dict,
    message: str,
) -> None:
    folder = tmp_path / "own"
    make_own(folder, write, sentences, map(str, change.values()))
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "nothing").mkdir()
    data = {"name": "own", "path": str(folder)} | change
    data["path"] = data["path"].format(f=folder)
    with pytest.raises(BadInput) as caught:
        prepare(recipe(WORDS, **data), cache=cache)
    assert message.format(f=folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_places_and_languages_are_named(tmp_path: Path, cache: Path, recipe: Make) -> None:
    with pytest.raises(BadInput, match="data.language ger is not a language of xnli"):
        prepare(recipe(name="xnli", language="ger"), tmp_path, cache)
    with pytest.raises(BadInput, match="the data folder .*nowhere does not exist"):
        prepare(recipe(name="sst2"), tmp_path / "nowhere", cache)


def test_words_as_labels(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw
) -> None:
    names = ["neutral", "bad", "good"]
    rows = [r | {"label": names[r["label"]]} for r in sentences(60, classes=3)]
    write(tmp_path / "own" / "train.jsonl", rows)
    write(tmp_path / "own" / "dev.jsonl", rows[:7])
    own = recipe(WORDS, name="own", path=str(tmp_path / "own"), report="dev", splits="published")
    found = prepare(own, cache=cache)
    assert found.classes == 3
    assert found.splits["train"].labels.tolist() == [sorted(names).index(r["label"]) for r in rows]
    assert found.splits["report"].labels.tolist() == found.splits["train"].labels.tolist()[:7]


def test_numbers_as_labels_keep_their_order(
    tmp_path: Path, cache: Path, recipe: Make, sentences: Draw
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for split in ("train", "test"):
        lines = [f"{row['text']},{(2, 10)[row['label']]}" for row in sentences(30)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    own = recipe(WORDS, name="own", path=str(folder), splits="published")
    labels = [row["label"] for row in sentences(30)]
    assert prepare(own, cache=cache).splits["train"].labels.tolist() == labels
