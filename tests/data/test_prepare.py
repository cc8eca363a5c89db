"""Prepared arrays equal a plain encoding of the same text, and are made once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer

from frostlab.data import files
from frostlab.data import splits as survey
from frostlab.data import tokenizers as vocabulary
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared, Tokens, TokenWriter
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe
from frostlab.storage import build_once, cache_folder

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
    problem = r"data\.length 3 leaves no room .* 3 special tokens; set data.length to at least 4"
    with pytest.raises(BadInput, match=problem):
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
    vocabulary.train_tokenizer(
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


WORDS = {"kind": "words"}


@pytest.mark.parametrize(
    ("name", "head", "row", "train", "report", "count"),
    [
        ("sst2", "sentence\tlabel", "s{}\t{}", 67_349, "validation", 872),
        pytest.param(
            "mnli",
            "premise\thypothesis\tlabel",
            "p\th{}\t{}",
            392_702,
            "validation_matched",
            9_815,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_published_splits_are_whole(
    tmp_path: Path,
    cache: Path,
    recipe: Callable[..., Recipe],
    name: str,
    head: str,
    row: str,
    train: int,
    report: str,
    count: int,
) -> None:
    (tmp_path / name).mkdir()
    for split, rows in (("train", train), (report, count)):
        lines = [row.format(number % 1000, number % 2) for number in range(rows)]
        (tmp_path / name / f"{split}.tsv").write_text("\n".join([head, *lines]))
    found = prepare(recipe(WORDS, name=name, splits="published"), tmp_path, cache)
    assert {role: len(split) for role, split in found.splits.items()} == {
        "train": train,
        "report": count,
    }
    assert found.caution == "checkpoint selected on the reporting split"
    assert found.classes == {"sst2": 2, "mnli": 3}[name]


def test_splits_and_shares_given_by_hand(
    tmp_path: Path,
    cache: Path,
    recipe: Callable[..., Recipe],
    write: Callable[..., Path],
    sentences: Callable[..., list],
) -> None:
    for split, count in (("big", 400), ("validation", 50), ("test", 30)):
        rows = [{"sentence": r["text"], "label": r["label"]} for r in sentences(count, seed=count)]
        write(tmp_path / "sst2" / f"{split}.jsonl", rows)

    def sizes(**data: object) -> dict[str, int]:
        found = prepare(recipe(WORDS, name="sst2", train="big", **data), tmp_path, cache)
        return {role: len(split) for role, split in found.splits.items()}

    assert sizes() == {"train": 380, "tune": 20, "report": 50}
    assert sizes(tune=0.25) == {"train": 300, "tune": 100, "report": 50}
    assert sizes(tune="validation", report="test") == {"train": 400, "tune": 50, "report": 30}
    assert sizes(limit=64, evaluation_limit=16) == {"train": 64, "tune": 16, "report": 16}


def test_the_seed_of_the_run_plays_no_part(
    tmp_path: Path,
    cache: Path,
    write: Callable[..., Path],
    sentences: Callable[..., list],
) -> None:
    path = write(tmp_path / "a.jsonl", sentences(100))
    made = [
        Recipe.model_validate(
            {"data": {"name": "own", "path": str(path)}, "tokenizer": WORDS, "seed": seed}
        )
        for seed in (0, 7)
    ]
    assert len({prepare(one, cache=cache).digest for one in made}) == 1


def test_a_large_vocabulary_takes_wider_numbers(
    tmp_path: Path, cache: Path, recipe: Callable[..., Recipe]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"w{number}" for number in range(80_000)))
    found = prepare(recipe(WORDS, name="own", path=str(path), task="language"), cache=cache)
    assert found.vocabulary > 65_536
    assert found.splits["train"].ids.dtype == "int32"
    assert found.splits["train"].ids.max() == found.vocabulary - 1


PROGRAM = """
import json, sys, time
from pathlib import Path
from frostlab.data.prepare import prepare
from frostlab.data.tokens import TokenWriter
from frostlab.recipe.recipe import Recipe
path, cache, log, wait = sys.argv[1:]
real = TokenWriter.append
def logged(self, ids):
    with open(log, "a") as file:
        file.write(self.role + "\\n")
    real(self, ids)
    time.sleep(float(wait))
TokenWriter.append = logged
found = prepare(
    Recipe.model_validate({"data": {"name": "own", "path": path}, "tokenizer": {"kind": "words"}}),
    cache=Path(cache),
)
print(json.dumps([found.digest, {role: split.digest for role, split in found.splits.items()}]))
print("torch" in sys.modules)
"""


def start(path: Path, cache: Path, log: Path, wait: float, seed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(cache), str(log), str(wait)]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def digests(found: Prepared) -> list[object]:
    return [found.digest, {role: split.digest for role, split in found.splits.items()}]


@pytest.fixture
def own(tmp_path: Path, write: Callable[..., Path], sentences: Callable[..., list]) -> Path:
    return write(tmp_path / "own.jsonl", sentences(300, classes=3))


@pytest.fixture
def wanted(own: Path, recipe: Callable[..., Recipe]) -> Recipe:
    return recipe({"kind": "words"}, name="own", path=str(own))


def test_two_processes_do_the_work_once(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe
) -> None:
    log = tmp_path / "log"
    both = [start(own, cache, log, 0.2, seed) for seed in ("1", "2")]
    printed = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == printed[1]
    assert printed[0][1] == "False"  # nothing imported torch
    assert sorted(log.read_text().split()) == ["report", "train", "tune"]
    # Another process, hash seed and cache: the same numbers.
    assert json.loads(printed[0][0]) == digests(prepare(wanted, cache=tmp_path / "other"))


def test_a_killed_preparer_leaves_nothing_to_be_mistaken(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe
) -> None:
    log = tmp_path / "log"
    process = start(own, cache, log, 60, "0")
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list((cache / "prepared").glob(".*.tmp"))
    found = prepare(wanted, cache=cache)
    assert digests(found) == digests(prepare(wanted, cache=tmp_path / "other"))
    assert not list(cache.glob("*/.*.tmp"))


def test_a_second_call_reads_no_text(
    own: Path, cache: Path, wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(wanted, cache=cache)

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(survey.Split, "rows", fail)
    monkeypatch.setattr(TokenWriter, "append", fail)
    second = prepare(wanted, cache=cache)
    assert digests(second) == digests(first)
    assert second.origin == first.origin
    os.utime(own, ns=(1, 1))
    with pytest.raises(AssertionError, match="read again"):
        prepare(wanted, cache=cache)


def test_equal_texts_elsewhere_are_found(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe, recipe: Callable[..., Recipe]
) -> None:
    first = prepare(wanted, cache=cache)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(own.read_bytes())
    second = prepare(recipe({"kind": "words"}, name="own", path=str(copy)), cache=cache)
    assert second.digest == first.digest
    assert len(list((cache / "prepared").glob("*/prepared.json"))) == 1
    assert str(copy) in second.origin["train"]
    copy.write_bytes(own.read_bytes().replace(b"w1", b"w2"))
    other = prepare(recipe({"kind": "words"}, name="own", path=str(copy)), cache=cache)
    assert other.digest != first.digest


def test_each_setting_changes_the_digest(own: Path, cache: Path, recipe: Callable) -> None:
    words, data = {"kind": "words"}, {"name": "own", "path": str(own)}
    made = [
        prepare(made, cache=cache).digest
        for made in (
            recipe(words, **data),
            recipe(words, **data, length=5),
            recipe(words, **data, limit=50),
            recipe(words, **data, evaluation_limit=5),
            recipe(words, **data, tune=0.1),
            recipe(words, **data, task="language"),
            recipe(words | {"lowercase": False}, **data),
            recipe(words | {"size": 100}, **data),
            recipe({"kind": "bpe", "size": 300}, **data),
        )
    ]
    assert len(set(made)) == len(made)


def test_arrays_are_mapped_and_read_only(cache: Path, wanted: Recipe) -> None:
    ids = prepare(wanted, cache=cache).splits["train"].ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(cache / "a", fail)
    assert [path.name for path in cache.iterdir()] == ["a.lock"]


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BadInput, match=r"it cannot be built or read \(Not a directory: .*; if this disk is full"
    ):
        build_once(tmp_path / "file" / "in" / "it", lambda _: None)


def test_a_build_without_its_input_names_the_input(cache: Path, tmp_path: Path) -> None:
    line = rf"cannot be built or read \(No such file or directory: {tmp_path}/gone\); if this disk"
    with pytest.raises(BadInput, match=line):
        build_once(cache / "a", lambda _: open(tmp_path / "gone").close())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(Path("x")) == Path("x")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("FROSTLAB_CACHE", raising=False)
    assert cache_folder(None) == Path("/xdg/frostlab")
    monkeypatch.setenv("FROSTLAB_CACHE", "/mine")
    assert cache_folder(None) == Path("/mine")
    monkeypatch.delenv("FROSTLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/c")
    with pytest.raises(BadInput, match="^the cache ~nobody-of-this-name/c: the home folder that ~"):
        cache_folder(None)


def test_a_file_that_changes_meanwhile_is_refused(
    own: Path, cache: Path, wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenWriter.append

    def touching(self: TokenWriter, ids: object) -> None:
        own.write_bytes(own.read_bytes() + b"\n")
        real(self, ids)

    monkeypatch.setattr(TokenWriter, "append", touching)
    with pytest.raises(BadInput, match=r"own\.jsonl changed while it was read"):
        prepare(wanted, cache=cache)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "majority", "symbols": 10**6}, "data.symbols 1000000 is too large with data."),
        ({"name": "induction", "length": 10**6}, "data.length 1000000 is too large with data.exam"),
        ({"name": "recall", "examples": 2, "symbols": 10**6}, "the most is 262,144"),
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_taken(
    cache: Path, recipe: Make, data: dict, message: str
) -> None:
    start = time.monotonic()
    with pytest.raises(BadInput) as caught:
        prepare(recipe(**{"examples": 900} | data), cache=cache)
    assert message in str(caught.value)
    assert time.monotonic() - start < 1
    assert not (cache / "prepared").exists()


def test_a_recording_that_memory_cannot_hold_is_refused(cache: Path) -> None:
    data = {"name": "eeg-simulated", "subjects": 1, "unseen": 0, "recordings": 3, "seconds": 1e5}
    long = Recipe.model_validate({"data": data, "model": {"kind": "conformer"}})
    with pytest.raises(BadInput, match=r"data.seconds 100000 is too large at 64 Hz"):
        prepare(long, cache=cache)


def test_a_token_that_does_not_fit_is_refused_not_wrapped(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "train", 300) as writer:
        writer.append([1, 65535])
        with pytest.raises(BadInput, match="token 65536 is not in the vocabulary"):
            writer.append([65536])
