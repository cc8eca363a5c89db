"""Tokenizers: trained on the training split alone, with the right default."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from frostlab.data import tokenizers as vocabulary
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput
from frostlab.recipe.data import BPE, PretrainedTokenizer, Words
from frostlab.recipe.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize("task", ["classification", "language"])
def test_no_word_comes_from_tune_or_report(
    tmp_path: Path, cache: Path, recipe: Make, write: Callable[..., Path], task: str
) -> None:
    rows = [{"text": f"shared alone{n}", "label": n % 2} for n in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    own = recipe({"kind": "words"}, name="own", path=str(path), task=task)
    found = prepare(own, cache=cache)
    backend = Tokenizer.from_file(str(found.tokenizer))
    words = {word for word in backend.get_vocab() if word.startswith("alone")}
    assert len(words) == 180  # of 200, ten tune and ten report
    unknown = backend.token_to_id("<unk>")
    assert unknown not in found.splits["train"].ids
    for role in ("tune", "report"):
        assert (found.splits[role].ids == unknown).sum() == 10


@pytest.mark.parametrize(("also", "known"), [(["tune"], 190), (["tune", "report"], 200)])
def test_words_of_other_splits_are_counted_when_asked_for_and_it_is_said(
    tmp_path: Path,
    cache: Path,
    recipe: Make,
    write: Callable[..., Path],
    also: list[str],
    known: int,
) -> None:
    rows = [{"text": f"shared alone{n}", "label": n % 2} for n in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    wanted = {"kind": "words", "also": tuple(also)}
    found = prepare(recipe(wanted, name="own", path=str(path)), cache=cache)
    words = Tokenizer.from_file(str(found.tokenizer)).get_vocab()
    assert sum(word.startswith("alone") for word in words) == known
    assert found.caution == (f"vocabulary made with the words of {' and '.join(also)}, too")
    honest = prepare(recipe({"kind": "words"}, name="own", path=str(path)), cache=cache)
    assert honest.caution is None
    assert honest.digest != found.digest


def test_bpe_learns_from_training_only(
    tmp_path: Path, cache: Path, recipe: Make, write: Callable[..., Path], sentences: Callable
) -> None:
    for split, mark in (("train", "alpha"), ("validation", "omega"), ("test", "omega")):
        write(tmp_path / "own" / f"{split}.jsonl", sentences(100, mark=mark, seed=len(split)))
    own = recipe({"kind": "bpe", "size": 600}, name="own", path=str(tmp_path / "own"))
    tokens = Tokenizer.from_file(str(prepare(own, cache=cache).tokenizer)).get_vocab()
    assert any("alpha" in token for token in tokens)
    assert not any("omeg" in token for token in tokens)


def test_a_small_text_gives_a_small_vocabulary(tmp_path: Path) -> None:
    vocabulary.train_tokenizer(BPE(kind="bpe", size=50000), ["low lower lowest"] * 5, tmp_path)
    coder = vocabulary.load_trained(tmp_path / "tokenizer.json")
    assert 259 < coder.vocabulary < 300
    assert coder.backend.decode(coder.running(["née 東京"])[0]) == "née 東京"


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    vocabulary.train_tokenizer(BPE(kind="bpe", size=300), ["some text"], tmp_path)
    coder = vocabulary.load_trained(tmp_path / "tokenizer.json")
    ids = coder.running(["a <|end|> b <|pad|>"])[0]
    assert not {coder.end, coder.pad} & set(ids)
    assert coder.backend.decode(ids) == "a <|end|> b <|pad|>"


def test_words_are_counted(tmp_path: Path) -> None:
    texts = ["The the cat <unk>", "cat the dog <unk> zebra"]
    special = ["<|pad|>", "<|end|>", "<|sep|>", "<unk>"]
    for wanted, words in (
        (Words(kind="words"), ["the", "cat", "dog", "zebra"]),
        (Words(kind="words", size=6), ["the", "cat"]),
        (Words(kind="words", lowercase=False), ["cat", "the", "The", "dog", "zebra"]),
    ):
        vocabulary.train_tokenizer(wanted, texts, tmp_path)
        coder = vocabulary.load_trained(tmp_path / "tokenizer.json")
        numbers = coder.backend.get_vocab()
        assert sorted(numbers, key=numbers.__getitem__) == special + words
        assert coder.vocabulary == len(special + words)
    assert coder.running(["dog unseen <unk>"])[0] == [numbers["dog"], 3, 3]


def test_long_texts_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SAMPLE", 10)
    assert list(vocabulary.sample_texts("abcdefghij", 10)) == list("abcdefghij")
    assert list(vocabulary.sample_texts("abcdefghij", 25)) == list("adgj")
    monkeypatch.setattr(vocabulary, "ENDLESS", 1500)
    texts = ["A" * 600, "B" * 600, "C" * 600, "words " * 200]
    assert list(vocabulary.sample_texts(texts, 5)) == [texts[0], texts[1], texts[3]]


def test_the_default_is_the_models_own(tmp_path: Path) -> None:
    def chosen(**model: object) -> object:
        return vocabulary.tokenizer_settings(Recipe.model_validate({"model": model}))

    own = PretrainedTokenizer(kind="pretrained", name=str(tmp_path))
    bpe = BPE(kind="bpe", size=8000)
    assert chosen(kind="gpt") == bpe
    assert chosen(kind="pretrained", name=str(tmp_path)) == own
    assert chosen(kind="pretrained", name=str(tmp_path), weights=False) == bpe
    (tmp_path / "tokenizer.json").write_text("{}")
    assert chosen(kind="pretrained", name=str(tmp_path), weights=False) == own
    words = Recipe.model_validate({"tokenizer": {"kind": "words"}})
    assert vocabulary.tokenizer_settings(words) == Words(kind="words")


def test_a_missing_tokenizer_is_one_line(tmp_path: Path, cache: Path, recipe: Make) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words " * 100)
    for name, where in ((str(tmp_path), "this folder"), ("no/such", "the hub, and no folder")):
        own = recipe(
            {"kind": "pretrained", "name": name}, name="own", path=str(path), task="language"
        )
        with pytest.raises(BadInput) as caught:
            prepare(own, cache=cache)
        assert f"tokenizer.name {name} cannot be loaded from {where}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_brings_code_is_refused(tmp_path: Path) -> None:
    vocabulary.train_tokenizer(Words(kind="words"), ["some words"], tmp_path)
    own = {"auto_map": {"AutoTokenizer": ["run.Mine", None]}}
    (tmp_path / "run.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(own))
        with pytest.raises(BadInput) as caught:
            vocabulary.load_pretrained(str(tmp_path))
        assert f"{tmp_path / name} has auto_map" in str(caught.value)
        (tmp_path / name).unlink()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 5000, b"\xff", b'{"version": 1}', b'{"model": {}}']
)
def test_damaged_tokenizers_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    for load in (
        vocabulary.load_trained,
        lambda path: vocabulary.load_pretrained(str(path.parent)),
    ):
        with pytest.raises(BadInput) as caught:
            load(path)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_without_the_special_tokens_is_refused(tmp_path: Path) -> None:
    vocabulary.train_tokenizer(Words(kind="words"), ["some words"], tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace(vocabulary.PAD, "<|other|>"))
    with pytest.raises(BadInput, match="it has no token <|pad|>"):
        vocabulary.load_trained(path)


def test_pipes_in_a_tokenizers_folder_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match="is not a regular file"):
        vocabulary.load_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("end", "cut"), [(" more", 1), ("  ", 0)], ids=["a further word", "white space"]
)
def test_a_text_whose_beginning_just_fills_the_length_is_cut_if_more_follows(
    tmp_path: Path, end: str, cut: int
) -> None:
    words = ["abcdefg"] * 4
    vocabulary.train_tokenizer(Words(kind="words"), [" ".join(words), "more"], tmp_path)
    coder = vocabulary.load_trained(tmp_path / "tokenizer.json")
    text = " ".join(words) + end
    length = len(words)
    assert vocabulary.word_end(text, vocabulary.HEAD * length) == len(" ".join(words))
    ((ids, _),) = coder.examples([(text,)], length)
    assert len(ids) == length
    assert coder.truncated == cut
