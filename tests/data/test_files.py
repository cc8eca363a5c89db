"""Every format is read, in bounded pieces, and every fault is named with its line."""

import gzip
import json
import os
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostlab.data import files
from frostlab.data.files import MARK, nearest_data, read_lines, read_pieces, split_files
from frostlab.data.sources import Columns, Split
from frostlab.errors import BadInput, require

TEXTS = ["plain", 'a "quoted", comma', "naïve café 東京 🧊", "tab\tand\nnewline", ""]
ROWS = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]


def as_csv(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


def encoded(kind: str) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    if kind == "csv":
        lines = [f"{as_csv(text)},{number}\n" for number, text in enumerate(TEXTS)]
        return ("text,label\n" + "".join(lines)).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_hold_what_was_written(tmp_path: Path, kind: str, packed: bool) -> None:
    path = tmp_path / f"train.{kind}{'.gz' * packed}"
    path.write_bytes(gzip.compress(encoded(kind)) if packed else encoded(kind))
    part = Split("train", str(path), (path,))
    rows = list(part.rows(Columns(("text",), "label")))
    assert [row.texts[0] for row in rows] == TEXTS
    assert [row.label for row in rows] == [0, 1, 2, 3, 4]
    assert split_files(tmp_path) == {"train": path}


@pytest.mark.parametrize("packed", [False, True])
def test_tsv_has_the_quotes_of_csv(tmp_path: Path, packed: bool) -> None:
    raw = b'text\tlabel\n"""open"\t1\nit\'s "so"\t0\n"a\tb\nc"\t1\n'
    path = tmp_path / f"train.tsv{'.gz' * packed}"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert [values["text"] for _, values in read_lines(path)] == ['"open', 'it\'s "so"', "a\tb\nc"]


def documents(path: Path) -> list[str]:
    """Put pieces together again."""
    found, text = [], ""
    for piece, ends in read_pieces(path):
        text += piece
        if ends:
            found.append(text)
            text = ""
    assert text == ""
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("piece", [16, 40, 1 << 16])
def test_running_text_is_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, packed: bool
) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    text = "Das Ärgernis:\n\n  zwei   Wörter.\r\n" * 7 + "x" * 100 + " 東京🧊 end\n"
    path = tmp_path / f"a.txt{'.gz' * packed}"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert documents(path) == [text.replace("\r\n", "\n")]
    pieces = [piece for piece, _ in read_pieces(path)]
    assert max(map(len, pieces)) <= 2 * piece + len(MARK)
    marked = tmp_path / "b.txt"
    marked.write_text(f"one two\n{MARK}\nthree\n\nfour five six\n{MARK}\n{MARK}\nseven\n{MARK}\n")
    assert documents(marked) == ["one two", "three\n\nfour five six", "seven"]


def test_pieces_begin_at_white_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 64)
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"word{number}" for number in range(200)))
    pieces = [piece for piece, _ in read_pieces(path)]
    assert len(pieces) > 10
    assert all(piece[0] == " " and piece[-1] != " " for piece in pieces[1:])


def test_words_without_end_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "short words and " + "ACGT" * 50_000 + " then\nmore " + "é" * 700 + " end"
    path.write_text(text)
    assert documents(path) == [text]
    words = [word for piece, _ in read_pieces(path) for word in piece.split()]
    assert max(map(len, words)) < 2 * files.WORD
    assert {"short", "words", "then", "more", "end"} <= set(words)


BAD = {
    "a.jsonl": (b'{"text": "a", "label": 0}\n{"text": \n', "a.jsonl:2 is not valid JSON"),
    "b.jsonl": (
        b'{"text": "a", "label": 0}\n[1]\n',
        "b.jsonl:2: the line should be an object with columns, not list",
    ),
    "c.jsonl": (b'{"text": "a", "label": 0}\n{"txt": "b", "label": 1}\n', "c.jsonl:2: no column "),
    "d.jsonl": (b'{"text": 5, "label": 0}\n', "d.jsonl:1: column text holds 5, not text"),
    "e.jsonl": (b'{"text": "a", "label": -1}\n', "e.jsonl:1: label -1 means unlabelled"),
    "f.jsonl": (b'{"text": "a", "label": null}\n', "f.jsonl:1: label None is neither"),
    "g.jsonl": (b'{"text": "a", "label": 0.5}\n', "g.jsonl:1: label 0.5 is neither"),
    "h.jsonl": (b'{"text": "a", "label": 0}\n{"text": "\xff"}\n', "h.jsonl:2: byte 0xff is not"),
    "i.csv": (b"text,label\na,0\nb\n", "i.csv:3: the row has 1 columns, but the header has 2"),
    "j.csv": (b"text,label\na,\n", "j.csv:2: label '' is neither"),
    "k.csv": (b"texts,label\na,1\n", "k.csv:2: no column text; did you mean `texts`?"),
    "l.tsv": (b"text\tlabel\na\t1\nb\xe9\t0\n", "l.tsv:3: byte 0xe9 is not UTF-8"),
    "m.parquet": (b"nothing of the kind", "m.parquet is not parquet"),
    "n.jsonl.gz": (b"not packed", "n.jsonl.gz cannot be read: Not a gzipped file"),
    "o.txt": (b"text", "o.txt: .txt has no labels; use a jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_with_their_line(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        list(Split("train", str(path), (path,)).rows(Columns(("text",), "label")))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_running_text_names_the_line_of_a_bad_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 32)
    path = tmp_path / "a.txt"
    path.write_bytes(b"ten letters\n" * 50 + b"caf\xe9\n")
    with pytest.raises(BadInput, match=r"a\.txt:51: byte 0xe9"):
        list(read_pieces(path))


def test_a_cut_off_archive_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(encoded("jsonl"))[:-10])
    with pytest.raises(BadInput, match="cannot be read"):
        list(read_lines(path))


def test_two_files_of_one_split_are_refused(tmp_path: Path, write: Callable[..., Path]) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "train.jsonl.gz", ROWS)
    with pytest.raises(BadInput, match="both the split train"):
        split_files(tmp_path)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"x needs the package no_such: pip install 'frostlab\[data"):
        require("no_such", "data", "x")


def refusal(path: Path, label: str | None = "label") -> str:
    """Return the one line that refuses a file, which must come at once."""
    rows = Split("train", str(path), (path,)).rows(Columns(("text",), label))
    start = time.monotonic()
    with pytest.raises(BadInput) as caught:
        deque(rows, maxlen=0)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    message.encode()
    return message


HOSTILE = {
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
    "digits.jsonl": (b'{"text": "a", "label": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "digits-as-text.jsonl": (
        json.dumps({"text": "a", "label": "9" * 5000}).encode(),
        "neither a whole number nor a short text",
    ),
    "large.jsonl": (b'{"text": "a", "label": 9223372036854775808}', "neither a whole number"),
    "nan.jsonl": (b'{"text": "a", "label": NaN}', "label nan is neither"),
    "infinite.jsonl": (b'{"text": "a", "label": 1e999}', "label inf is neither"),
    "list.jsonl": (b'{"text": "a", "label": [1]}', "label [1] is neither"),
    "object.jsonl": (
        b'{"text": "a", "label": {"a": 1}}',
        "is neither a whole number nor a short text",
    ),
    "surrogate.jsonl": (b'{"text": "a", "label": "\\ud800"}', "label '\\ud800' is neither"),
    "surrogate-name.jsonl": (b'{"\\ud800": 1, "label": 1}', "there are \\ud800, label"),
    "names.jsonl": (
        json.dumps({f"column {n}": 0 for n in range(100_000)}).encode(),
        "there are column 0, column 1",
    ),
    "row.jsonl": (b'["text", 1]', "an object with columns, not list"),
    "null.csv": (b"text,label\na\x00b\n", "the row has 1 columns, but the header has 2"),
    "twice.csv": (b"text,label,text\na,1,b\n", "two columns are called 'text'"),
    "twice.tsv": (b"text\tlabel\ttext\na\t1\tb\n", "two columns are called 'text'"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a", "label": 1}\n' * 100)[:-12], "cannot be read"),
    "not.jsonl.gz": (b"text", "cannot be read"),
    "not.parquet": (b"PAR1" * 10, "is not parquet"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows_are_one_line(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert message in refusal(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.jsonl.gz"])
def test_a_line_without_end_is_not_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    piece = random.Random(0).randbytes(1 << 19).hex().encode()
    with gzip.open(path, "wb", 1) if name.endswith(".gz") else path.open("wb") as file:
        for _ in range(60):
            file.write(piece)
    tracemalloc.start()
    assert "a line or text is longer than 16 MiB" in refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_quoted_row_of_many_lines_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,label\n"' + (b"x" * 1000 + b"\n") * 20_000 + b'",1\n')
    assert "a line or text is longer than 16 MiB" in refusal(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.csv.gz", "a.parquet.gz"])
def test_a_gzip_bomb_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(b"\n" * (1 << 20))
    assert "unpacks to more than 100 times its size" in refusal(path, label=None)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.csv").symlink_to("/dev/zero")
    for name in ("a.jsonl", "b.csv"):
        assert "is not a regular file" in refusal(tmp_path / name)


def test_parquet_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    good = encoded("parquet")
    path.write_bytes(good.replace("café".encode(), b"caf\xff\xff"))
    assert "is not parquet" in refusal(path)
    pq.write_table(pa.table({"text": [["a"]], "label": [1]}), path)
    assert "column text holds list" in refusal(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    assert "two columns are called 'text'" in refusal(path)
    pq.write_table(pa.table({"txt": ["a"], "label": [1]}), path)
    assert "no column text; did you mean `txt`?" in refusal(path)
    pq.write_table(pa.table({"text": ["x" * (17 << 20)], "label": [1]}), path)
    assert "a line or text is longer than 16 MiB" in refusal(path)


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "label": [1], "more": [[1, 2]]}), path)
    (row,) = Split("train", "a", (path,)).rows(Columns(("text",), "label"))
    assert (row.texts, row.label) == (("a",), 1)


def test_a_missing_file_is_not_taken_for_something_else(tmp_path: Path) -> None:
    for name in ("train.csv", "p.csv", "trian.sh"):
        (tmp_path / name).touch()
    assert nearest_data(tmp_path / "trian.csv") == "; did you mean `train.csv`?"
    assert nearest_data(tmp_path / "nofile.csv") == "", "only the ending is alike"
    assert nearest_data(tmp_path / "trian.shh") == "", "trian.sh holds no data"
    assert nearest_data(tmp_path / "nowhere" / "train.csv") == ""
