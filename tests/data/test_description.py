"""The description of data counts what plain loops count, and suspicious rows are said."""

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data.builtin import SYNTHETIC_SEEDS
from frostlab.data.prepare import data_digest, prepare
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
Draw = Callable[..., list]
WORDS = {"kind": "words"}
SPOILT = [
    {"text": "", "label": "a"},
    {"text": " \n", "label": "b"},
    {"text": "twice", "label": "a"},
    {"text": "twice", "label": "a"},
    {"text": "torn", "label": "a"},
    {"text": "torn", "label": "b"},
    {"text": "alone", "label": "rare"},
]


def named(rows: list) -> list:
    return [row | {"label": "ab"[row["label"]]} for row in rows]


@pytest.fixture
def folder(tmp_path: Path, write: Write, sentences: Draw) -> Path:
    """Train with spoilt rows, one of which is in test too, and a clean test."""
    test = named(sentences(20, seed=1))
    write(tmp_path / "own" / "train.jsonl", [*named(sentences(100)), *SPOILT, test[0]])
    write(tmp_path / "own" / "test.jsonl", test)
    return tmp_path / "own"


def test_labelled_text_is_counted(folder: Path, cache: Path, recipe: Make) -> None:
    data = {"name": "own", "path": str(folder), "length": 5, "tune": 0.1, "limit": 80}
    found = prepare(recipe(WORDS, **data), cache=cache)
    assert found.labels == ("a", "b", "rare")
    for role, split in found.described.items():
        tokens = found.splits[role]
        assert split.rows - sum(split.carved.values()) - sum(split.dropped.values()) == len(tokens)
        assert split.examples == len(tokens)
        counts = Counter(tokens.labels.tolist())
        assert split.classes == [counts[number] for number in range(3)]
        lengths = sorted(tokens.lengths.tolist())
        assert (split.lengths.least, split.lengths.most) == (lengths[0], lengths[-1])
        assert split.lengths.mean == pytest.approx(sum(lengths) / len(lengths))
        assert split.tokens == sum(lengths)
        assert split.digest == tokens.digest
    train, tune, report = (found.described[role] for role in ("train", "tune", "report"))
    assert train.rows == 108
    assert train.carved == {"tune": tune.rows}
    assert tune.carved_from == "train"
    assert list(train.dropped) == ["text is also in report or tune", "beyond data.limit 80"]
    assert train.dropped["text is also in report or tune"] == 1
    assert train.examples == 80
    assert report.dropped == report.carved == {}
    (file,) = report.files
    raw = (folder / "test.jsonl").read_bytes()
    assert (file.path, file.bytes) == (str(folder / "test.jsonl"), len(raw))
    assert file.sha256 == hashlib.sha256(raw).hexdigest()
    assert report.source == file.path
    assert tune.files == train.files


@pytest.mark.parametrize("kind", ["words", "bpe", "pretrained", "pairs"])
def test_examples_that_are_cut_are_counted(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, minilm: str, kind: str
) -> None:
    """Texts of 1 to 40 words, each word one token: those of more than 12 tokens are cut."""
    count = 200
    rows = [{"text": "the " * (1 + n % 40), "label": n % 2} for n in range(count)]
    special = {"words": 0, "bpe": 0, "pretrained": 2, "pairs": 1}[kind]
    words = [1 + n % 40 for n in range(count)]
    text = ("text",)
    if kind == "pairs":
        rows = [row | {"more": "the the"} for row in rows]
        words, text = [number + 2 for number in words], ("text", "more")
    tokenizer = {
        "pretrained": {"kind": "pretrained", "name": minilm},
        "bpe": {"kind": "bpe", "size": 300},
    }.get(kind, WORDS)
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.jsonl", rows)
    data = {"name": "own", "path": str(tmp_path / "own"), "text": text, "length": 12}
    found = prepare(recipe(tokenizer, **data, splits="published"), cache=cache)
    if kind == "bpe":  # the merges decide how many tokens a text has
        whole = prepare(
            recipe(tokenizer, **data | {"length": 400}, splits="published"), cache=cache
        )
        words = whole.splits["train"].lengths.tolist()
    assert found.described["train"].lengths.cut == sum(n + special > 12 for n in words) > 0


def test_running_text_is_counted(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw
) -> None:
    rows = [*sentences(98), {"text": ""}, {"text": ""}]
    path = write(tmp_path / "a.jsonl", rows)
    data = {"name": "own", "path": str(path), "task": "language", "length": 16}
    found = prepare(recipe(WORDS, **data), cache=cache)
    train, report = found.described["train"], found.described["report"]
    assert found.labels is None
    assert train.classes is None
    assert (train.rows, train.carved) == (100, {"report": 5, "tune": 5})
    assert train.characters == sum(len(row["text"]) for row in rows[:90])
    assert train.tokens == len(found.splits["train"].ids)
    assert (report.rows, report.empty, report.duplicates) == (5, 2, 1)
    assert found.notes == ("2 rows of report have an empty or blank text; they are kept",)
    (tmp_path / "b.txt").write_text("some words of one document " * 400)
    found = prepare(recipe(WORDS, **data | {"path": str(tmp_path / "b.txt")}), cache=cache)
    sizes = [split.characters for split in found.described.values()]
    assert sum(sizes) == 27 * 400
    assert found.described["tune"].note == "the 5% of the text before report"


def test_generated_data_have_seeds(cache: Path, recipe: Make) -> None:
    found = prepare(recipe(name="majority", examples=300, symbols=3), cache=cache)
    assert {role: split.seed for role, split in found.described.items()} == SYNTHETIC_SEEDS
    assert found.labels == (0, 1, 2)
    assert sum(found.described["train"].classes) == found.described["train"].examples == 300
    assert prepare(recipe(name="induction", examples=300), cache=cache).labels is None


def test_recordings_are_counted(cache: Path, recipe: Make) -> None:
    eeg = {"name": "eeg-simulated", "subjects": 2, "unseen": 1, "recordings": 4, "seconds": 12}
    found = prepare(Recipe.model_validate({
        "data": eeg | {"length": 64}, "model": {"kind": "conformer"}
    }), cache=cache)  # fmt: skip
    train, unseen = found.described["train"], found.described["unseen"]
    assert (train.recordings, train.subjects, train.seconds) == (4, 2, 48.0)
    assert (unseen.subjects, unseen.seed) == (1, 0)
    assert train.examples == len(found.splits["train"])


def test_spoilt_rows_are_said(folder: Path, cache: Path, recipe: Make) -> None:
    data = {"name": "own", "path": str(folder), "splits": "published"}
    found = prepare(recipe(WORDS, **data), cache=cache)
    train = found.described["train"]
    assert (train.empty, train.duplicates, train.contradictions) == (2, 2, 2)
    assert found.notes == (
        "2 rows of train have an empty or blank text; they are kept",
        "2 rows of train have the text of another row of train, but not its label; they are kept",
        f"labels that occur in only one row of {folder / 'train.jsonl'}: rare (line 107)",
        "1 rows of train have a text that is also in report; data.splits published keeps them",
    )
    honest = prepare(recipe(WORDS, **data | {"splits": "honest"}), cache=cache)
    assert not any("text of report" in note for note in honest.notes)


def test_many_rare_labels_are_shortened(
    tmp_path: Path, cache: Path, recipe: Make, write: Write
) -> None:
    rows = [{"text": f"text {n}", "label": f"row {n}"} for n in range(50)]
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.jsonl", rows)
    own = recipe(WORDS, name="own", path=str(tmp_path / "own"), splits="published")
    note = prepare(own, cache=cache).notes[0]
    assert note.endswith("row 4 (line 5) and 45 more")
    assert note.count("(line") == 5


TEXTS = ["plain", 'a "quoted", comma', '"begins quoted', 'ends "', '"whole"', "tab\tin it", "",
         "new\nline", "naïve café 東京 🧊", "  spaces ", "it's", "'single'", "back\\slash", "NA",
         "windows\r\nbreak", '""', '"', "1", "a,b;c|d"]  # fmt: skip


@pytest.mark.parametrize("labels", [[0, 1], ["yes", "no, never"]])
def test_one_table_has_one_digest_in_every_format(
    tmp_path: Path, cache: Path, recipe: Make, labels: list
) -> None:
    """The table as pandas writes it, with every quote, tab and newline."""
    texts = [f"{text}{n or ''}" for n in range(3) for text in TEXTS]
    import pandas as pd

    table = pd.DataFrame({"text": texts, "label": [labels[n % 2] for n in range(len(texts))]})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "a.parquet")
    digests = {}
    for kind in ("csv", "tsv", "jsonl", "parquet"):
        own = recipe(WORDS, name="own", path=str(tmp_path / f"a.{kind}"))
        digests[kind] = data_digest(own, cache=cache)
        assert prepare(own, cache=cache).described["train"].rows == len(texts)
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"Stop," he said\t1\nplain\t0\n', "a.tsv:2: .*; quote cells as pandas does, or use jsonl"),
        ('"open\t1\nplain\t0\n', "a.tsv:3: unexpected end of data; quote cells as pandas does"),
        (
            "a\rb\t1\n",
            "a.tsv:2: a carriage return in a cell without quotes; quote it, or use jsonl",
        ),
    ],
)
def test_a_table_without_quoting_is_refused(
    tmp_path: Path, cache: Path, recipe: Make, text: str, message: str
) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"text\tlabel\n" + text.encode())
    with pytest.raises(BadInput, match=message):
        prepare(recipe(WORDS, name="own", path=str(path)), cache=cache)


@pytest.mark.parametrize("name", ["dev", "eval"])
def test_a_file_that_is_no_split_is_refused_until_it_is_named(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw, name: str
) -> None:
    folder = tmp_path / "own"
    write(folder / "train.jsonl", sentences(100))
    write(folder / f"{name}.jsonl", sentences(20, seed=1))
    (folder / "readme.txt").write_text("about these data")
    data = {"name": "own", "path": str(folder)}
    with pytest.raises(BadInput) as caught:
        prepare(recipe(WORDS, **data), cache=cache)
    assert str(caught.value) == (
        f"data.path {folder}: {name}.jsonl would not be used; rename it to one of train, "
        f"validation, test, or set data.report: {name} or data.tune: {name}"
    )
    found = prepare(recipe(WORDS, **data, report=name), cache=cache)
    assert found.described["report"].source == str(folder / f"{name}.jsonl")
    assert found.notes == ()
    write(folder / "more.jsonl", sentences(20, seed=2))
    found = prepare(recipe(WORDS, **data, report=name), cache=cache)
    assert found.notes == (f"files of {folder} that are not used: more.jsonl",)


def test_report_can_be_a_share(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw
) -> None:
    """Report is carved first, so its rows do not depend on tune; no text is in two splits."""
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(400)]
    path = str(write(tmp_path / "a.jsonl", rows))

    def digest_of_report(**shares: float) -> str:
        found = prepare(recipe(WORDS, name="own", path=path, **shares), cache=cache)
        sizes = {role: split.rows for role, split in found.described.items()}
        assert sizes["report"] == 400 * shares["report"]
        assert sizes["tune"] == 400 * shares["tune"]
        carved = found.described["train"].carved
        assert carved == {"report": sizes["report"], "tune": sizes["tune"]}
        assert list(carved) == ["report", "tune"]
        examples = sum(split.examples for split in found.described.values())
        assert examples == 400, "every row is in one split"
        return found.described["report"].digest

    assert digest_of_report(report=0.2, tune=0.1) == digest_of_report(report=0.2, tune=0.3)
    with pytest.raises(BadInput, match=r"data.report 0.6 and data.tune 0.5 leave nothing"):
        prepare(recipe(WORDS, name="own", path=path, report=0.6, tune=0.5), cache=cache)


def test_one_column_needs_no_list(
    tmp_path: Path, cache: Path, recipe: Make, write: Write, sentences: Draw
) -> None:
    rows = [{"question": row["text"], "label": row["label"]} for row in sentences(100)]
    path = str(write(tmp_path / "a.jsonl", rows))
    one, listed = (recipe(WORDS, name="own", path=path, text=t) for t in ("question", ["question"]))
    assert one.data.text == listed.data.text == ("question",)
    assert one.digest == listed.digest
    assert prepare(one, cache=cache).described["train"].rows == 100
