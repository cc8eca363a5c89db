"""Prepared arrays equal what a few plain lines make of the same text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer

from frostlab.data import files
from frostlab.data import tokenizers as vocabulary
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Tokens
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
Draw = Callable[..., list]


def examples(tokens: Tokens) -> list[list[int]]:
    pairs = zip(tokens.starts, tokens.stops, strict=True)
    return [tokens.ids[start:stop].tolist() for start, stop in pairs]


def cut(stream: list[int], length: int) -> list[list[int]]:
    """Cut a stream the plain way: every token but the first is a target exactly once."""
    starts = range(0, len(stream), length)
    found = [stream[start : start + length + 1] for start in starts]
    return [one for one in found if len(one) >= 2]


@pytest.mark.parametrize("wanted", [{"kind": "bpe", "size": 400}, {"kind": "words"}])
@pytest.mark.parametrize("length", [7, 64])
def test_language_is_one_stream_of_documents(
    tmp_path: Path,
    cache: Path,
    recipe: Make,
    write: Write,
    sentences: Draw,
    wanted: dict,
    length: int,
) -> None:
    rows = {
        "train": sentences(80),
        "validation": sentences(20, seed=1),
        "test": sentences(9, seed=2),
    }
    for split, values in rows.items():
        write(tmp_path / "own" / f"{split}.jsonl", values)
    own = recipe(wanted, name="own", path=str(tmp_path / "own"), task="language", length=length)
    found = prepare(own, cache=cache)
    backend = Tokenizer.from_file(str(found.tokenizer))
    end = backend.token_to_id("<|end|>")
    for role, split in (("train", "train"), ("tune", "validation"), ("report", "test")):
        stream: list[int] = []
        for row in rows[split]:
            stream += [*backend.encode(row["text"]).ids, end]
        assert examples(found.splits[role]) == cut(stream, length)
        targets = [token for one in examples(found.splits[role]) for token in one[1:]]
        assert targets == stream[1:]
    assert found.vocabulary == backend.get_vocab_size()
    assert found.pad == backend.token_to_id("<|pad|>")
    assert found.classes == 0


@pytest.mark.parametrize("wanted", [{"kind": "bpe", "size": 500}, {"kind": "words"}])
def test_reading_in_pieces_changes_no_token(
    tmp_path: Path, cache: Path, recipe: Make, monkeypatch: pytest.MonkeyPatch, wanted: dict
) -> None:
    monkeypatch.setattr(files, "PIECE", 100)
    folder = tmp_path / "own"
    folder.mkdir()
    text = "".join(f"Line {n},\n\n  with   spaces… it's\n" for n in range(200))
    for split in ("train", "validation", "test"):
        (folder / f"{split}.txt").write_text(f"{text} {split}\n")
    found = prepare(recipe(wanted, name="own", path=str(folder), task="language"), cache=cache)
    backend = Tokenizer.from_file(str(found.tokenizer))
    end = backend.token_to_id("<|end|>")
    for role, split in (("train", "train"), ("tune", "validation"), ("report", "test")):
        whole = [*backend.encode(f"{text} {split}\n").ids, end]
        assert found.splits[role].ids.tolist() == whole


def test_the_first_examples_are_the_limit(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw
) -> None:
    path = write(tmp_path / "a.jsonl", sentences(300))
    data = {"name": "own", "path": str(path), "task": "language", "length": 10}
    whole = prepare(recipe({"kind": "words"}, **data), cache=cache)
    less = prepare(recipe({"kind": "words"}, **data, limit=5, evaluation_limit=2), cache=cache)
    assert examples(less.splits["train"]) == examples(whole.splits["train"])[:5]
    assert examples(less.splits["tune"]) == examples(whole.splits["tune"])[:2]
    assert less.vocabulary == whole.vocabulary
    assert less.digest != whole.digest


@pytest.mark.parametrize("stride", [11, 13])
def test_a_stride_cuts_examples_that_share_no_token(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw, stride: int
) -> None:
    path = write(tmp_path / "a.jsonl", sentences(300))
    data = {"name": "own", "path": str(path), "task": "language", "length": 10}
    whole = prepare(recipe({"kind": "words"}, **data), cache=cache).splits["train"].ids.tolist()
    apart = prepare(recipe({"kind": "words"}, **data, stride=stride, limit=5), cache=cache)
    wanted = [whole[start : start + 11] for start in range(0, 5 * stride, stride)]
    assert examples(apart.splits["train"]) == wanted


@pytest.mark.parametrize("length", [4, 12, 128])
def test_classification_equals_the_pretrained_tokenizer(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, minilm: str, length: int
) -> None:
    lines = [
        "It's a charming journey.",
        "naïve [SEP] café 東京",
        "",
        "unbelievably " * 30,
        "a" * 300,
    ]
    rows = [{"text": f"{line} {n}", "label": n % 2} for n, line in enumerate(lines * 3)]
    write(tmp_path / "own" / "train.jsonl", rows)
    write(tmp_path / "own" / "test.jsonl", [{"text": "", "label": 0}, {"text": "b", "label": 1}])
    own = recipe(
        {"kind": "pretrained", "name": minilm}, name="own", path=str(tmp_path / "own"),
        splits="published", length=length,
    )  # fmt: skip
    found = prepare(own, cache=cache)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    wanted = [tokenizer(r["text"], truncation=True, max_length=length)["input_ids"] for r in rows]
    assert examples(found.splits["train"]) == wanted
    assert found.splits["train"].labels.tolist() == [row["label"] for row in rows]
    assert found.splits["train"].second is None
    assert examples(found.splits["report"])[0] == [101, 102]
    assert (found.vocabulary, found.pad) == (30522, 0)
    assert found.splits["train"].ids.dtype == np.uint16
    again = AutoTokenizer.from_pretrained(found.tokenizer)
    assert again("so it goes")["input_ids"] == tokenizer("so it goes")["input_ids"]


@pytest.mark.parametrize("length", [8, 64])
def test_pairs_equal_the_pretrained_tokenizer(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, minilm: str, length: int
) -> None:
    rows = [
        {
            "premise": f"The cat {n} sat " * n,
            "hypothesis": f"It sat {n}. " * (9 - n),
            "label": n % 3,
        }
        for n in range(1, 9)
    ]
    for split in ("train", "validation_matched"):
        write(tmp_path / "mnli" / f"{split}.jsonl", rows)
    own = recipe(
        {"kind": "pretrained", "name": minilm}, name="mnli", splits="published", length=length
    )
    tokens = prepare(own, tmp_path, cache).splits["train"]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    for number, row in enumerate(rows):
        wanted = tokenizer(row["premise"], row["hypothesis"], truncation=True, max_length=length)
        assert examples(tokens)[number] == wanted["input_ids"]
        types = np.arange(tokens.lengths[number]) >= tokens.second[number]
        assert types.astype(int).tolist() == wanted["token_type_ids"]


def test_a_length_without_room_for_text_is_refused(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, minilm: str
) -> None:
    rows = [{"premise": "a b", "hypothesis": "c", "label": n} for n in range(3)]
    for split in ("train", "validation_matched"):
        write(tmp_path / "mnli" / f"{split}.jsonl", rows)
    named = {"kind": "pretrained", "name": minilm}
    with pytest.raises(BadInput, match=r"data\.length 3 leaves no text .* 3 special tokens; 4 is"):
        prepare(recipe(named, name="mnli", splits="published", length=3), tmp_path, cache)
    least = prepare(recipe(named, name="mnli", splits="published", length=4), tmp_path, cache)
    assert least.splits["train"].lengths.tolist() == [4, 4, 4]


def test_pairs_of_a_trained_tokenizer_have_a_separator(
    tmp_path: Path, cache: Path, recipe: Make, write: Write
) -> None:
    rows = [{"premise": "a b c d e", "hypothesis": f"f g{n}", "label": n % 3} for n in range(9)]
    for split in ("train", "validation_matched"):
        write(tmp_path / "mnli" / f"{split}.jsonl", rows)
    own = recipe({"kind": "words"}, name="mnli", splits="published", length=6)
    found = prepare(own, tmp_path, cache)
    backend = Tokenizer.from_file(str(found.tokenizer))
    words = ["a", "b", "c", "<|sep|>", "f", "g4"]  # the longer text gives way
    assert examples(found.splits["train"])[4] == [backend.token_to_id(word) for word in words]
    assert found.splits["train"].second.tolist() == [4] * 9


def test_beginnings_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = [f"word{n} " * n + "x" * 50 + " end" * n for n in range(1, 40)]
    vocabulary.train(
        Recipe.model_validate({"tokenizer": {"kind": "bpe"}}).tokenizer, texts, tmp_path
    )
    coder = vocabulary.load_trained(tmp_path / "tokenizer.json")
    batch = [(text,) for text in texts]
    for length in (2, 9, 30):
        found = [ids for ids, _ in coder.examples(batch, length)]
        assert found == [ids[:length] for ids in coder.running(texts)]


def test_a_tokenizer_without_a_fast_form(
    tmp_path: Path, cache: Path, recipe: Make, write: Write
) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    rows = [{"text": f"héllo {n}", "label": n % 2} for n in range(4)]
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.jsonl", rows)
    data = {"name": "own", "path": str(tmp_path / "own"), "splits": "published"}
    named = {"kind": "pretrained", "name": str(tmp_path / "byt5")}
    found = prepare(recipe(named, **data, length=6), cache=cache)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "byt5")
    wanted = [tokenizer(r["text"], truncation=True, max_length=6)["input_ids"] for r in rows]
    assert examples(found.splits["train"]) == wanted
    stream = prepare(recipe(named, **data, task="language"), cache=cache).splits["train"].ids
    plain = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    assert stream.tolist() == [number for ids in plain for number in (*ids, tokenizer.eos_token_id)]
