"""Stand-ins: what replaces missing data, tokenizers and models, and that nothing else is."""

import json
from pathlib import Path

import pytest
from transformers import BertTokenizer

from frostlab.data.builtin import docstring_files
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput, Unavailable
from frostlab.models.build import build_for
from frostlab.models.stand_in import suggesting_stand_in, with_stand_ins
from frostlab.recipe.load import load_recipe, recipe_from
from frostlab.recipe.recipe import Recipe
from offline import cut_off

TINY = {"scale": "tiny"}


@pytest.fixture(autouse=True)
def _nothing_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(monkeypatch)


def missing(name: str) -> Recipe:
    return load_recipe(name, TINY)


@pytest.mark.parametrize(
    ("name", "data", "classes"),
    [
        ("sst2-bert", "docstrings", 2),
        ("mnli-bert", "docstrings-pairs", 3),
        ("xnli-bert", "docstrings-pairs", 3),
        ("imdb-gpt", "docstrings", 2),
        ("ag_news-gpt", "docstrings", 4),
        ("tinystories-gpt", "docstrings", None),
        ("wikitext2-decoder", "docstrings", None),
    ],
)
def test_a_stand_in_has_the_shape_of_what_is_missing(
    name: str, data: str, classes: int | None
) -> None:
    full, recipe = missing(name), with_stand_ins(missing(name))
    assert (recipe.data.name, recipe.data.stands_for) == (data, full.data.name)  # type: ignore[union-attr]
    assert recipe.data.classes == classes  # type: ignore[union-attr]
    for key in ("task", "length", "splits", "limit", "evaluation_limit"):
        assert getattr(recipe.data, key) == getattr(full.data, key)
    for key in ("optim", "train", "evaluate", "treatment", "stages", "scale"):
        assert getattr(recipe, key) == getattr(full, key)
    assert with_stand_ins(recipe) == recipe, "nothing is missing now"
    assert recipe_from(recipe.to_dict()) == recipe
    assert recipe.digest != full.digest
    assert f"{data} for {full.data.name}" in (recipe.caution or "")


def test_bert_and_its_tokenizer() -> None:
    recipe = with_stand_ins(missing("mnli-bert"))
    assert recipe.model.stands_for == "bert-base-uncased"  # type: ignore[union-attr]
    assert recipe.tokenizer is not None
    assert (recipe.tokenizer.kind, recipe.tokenizer.stands_for) == ("bpe", "bert-base-uncased")  # type: ignore[union-attr]
    prepared = prepare(recipe)
    assert prepared.caution == recipe.caution
    model = build_for(recipe, prepared)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert (model.config.num_hidden_layers, model.config.num_labels) == (12, 3)  # type: ignore[union-attr]
    assert (model.config.hidden_size, model.config.intermediate_size) == (48, 192)  # type: ignore[union-attr]
    full = with_stand_ins(load_recipe("sst2-bert"))
    assert full.model.config == {}, "at the full scale, BERT-base"  # type: ignore[union-attr]


def test_recorded_eeg() -> None:
    recipe = with_stand_ins(load_recipe("eeg-cocktail", TINY))
    assert (recipe.data.name, recipe.data.stands_for) == ("eeg-simulated", "eeg-matlab")  # type: ignore[union-attr]
    assert recipe.data.length == missing("eeg-cocktail").data.length
    assert recipe.data.subjects == 3, "the scale limits what the recipe did not set"  # type: ignore[union-attr]


def test_only_what_is_missing_is_replaced(tmp_path: Path) -> None:
    full = missing("gpt-02")
    stories = tmp_path / "tinystories"
    stories.mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"text": f"Story {n} of {split}."}) for n in range(200)]
        (stories / f"{split}.jsonl").write_text("\n".join(rows))
    recipe = with_stand_ins(full, tmp_path)
    assert recipe.data == full.data
    assert recipe.stand_ins == {"tokenizer": "bpe for gpt2"}

    tokenizer = tmp_path / "bert"
    BertTokenizer(vocab={w: n for n, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
                  ).save_pretrained(tokenizer)  # fmt: skip
    named = {"tokenizer": {"kind": "pretrained", "name": str(tokenizer)}}
    recipe = with_stand_ins(load_recipe("sst2-bert", {**named, **TINY}))
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.kind == "pretrained"
    assert set(recipe.stand_ins) == {"data", "model"}

    offline = load_recipe("docstrings-gpt", TINY)
    assert with_stand_ins(offline) is offline


def test_names_of_splits_that_docstrings_do_not_have() -> None:
    settings = {**TINY, "data.report": "validation_mismatched"}
    assert with_stand_ins(load_recipe("mnli-bert", settings)).data.report is None  # type: ignore[union-attr]
    assert with_stand_ins(missing("imdb-lm-gpt")).data.train == "train"  # type: ignore[union-attr]
    honest = {**TINY, "data.report": "validation"}
    prepare(with_stand_ins(load_recipe("ag_news-gpt", honest)))


def test_what_has_no_stand_in(tmp_path: Path) -> None:
    unknown = load_recipe("docstrings-pairs", {**TINY, "model.name": "someone/zzz-9"})
    with pytest.raises(BadInput, match="model.name someone/zzz-9 is not available, and"):
        with_stand_ins(unknown)
    own = recipe_from({"data": {"name": "own", "path": str(tmp_path / "none.jsonl")}})
    assert with_stand_ins(own) is own, "the run then names the missing file"


@pytest.mark.parametrize("name", ["sst2-bert", "eeg-cocktail", "docstrings-pairs"])
def test_the_refusal_names_the_option(name: str) -> None:
    recipe = missing(name)
    with pytest.raises(Unavailable, match="; or add --stand-in") as error, suggesting_stand_in():
        build_for(recipe, prepare(recipe))
    assert "\n" not in str(error.value)


def test_pairs_of_three_kinds(tmp_path: Path) -> None:
    files = docstring_files(30, pairs=True, cache=tmp_path, classes=3)
    for path in files.values():
        labels = [json.loads(line)["label"] for line in path.read_text().splitlines()]
        assert labels.count(0) == labels.count(1) == labels.count(2) > 0
    two = docstring_files(30, pairs=False, cache=tmp_path, classes=2)
    rows = [json.loads(line) for line in two["train"].read_text().splitlines()]
    assert {row["label"] for row in rows} == {0, 1}
    with pytest.raises(BadInput, match="data.classes 4 is for docstrings; docstrings-pairs has 2"):
        recipe_from({"data": {"name": "docstrings-pairs", "classes": 4}})
    with pytest.raises(BadInput, match="data.classes 2 is for classification"):
        recipe_from({"data": {"task": "language", "classes": 2}})
