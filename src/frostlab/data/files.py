"""Readers of text files: rows of tables, or pieces of running text.

Running text is a `.txt` file of documents. A file is never read into memory as a whole.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from frostlab.errors import BadInput, require

FORMATS = ("jsonl", "csv", "tsv", "txt", "parquet")
PIECE = 1 << 16  # approximate number of characters in a piece of running text
MARK = "<|endoftext|>"  # separates the documents of a .txt file
WORD = 512  # characters; longer words may be cut, because BPE takes quadratic time in their length
_SPACE = re.compile(r"\s")
_WORD_END = re.compile(r"(?<=\S)\s")  # the first white space after a word
_READ_ERRORS = (OSError, EOFError, zlib.error)

Line = tuple[int, Mapping[str, Any]]  # line number of a row, and its values by column
Piece = tuple[str, bool]  # text, and whether its document ends with this piece


def format_of(path: Path) -> str | None:
    """Return the format that a file's ending names, with or without `.gz`, or None if unknown."""
    ending = path.name.removesuffix(".gz").rpartition(".")[2]
    return ending if ending in FORMATS else None


def split_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by split, such as train.jsonl for train."""
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if format_of(path) is None or not path.is_file():
            continue
        split = path.name.removesuffix(".gz").rpartition(".")[0]
        if split in files:
            raise BadInput(f"{path} and {files[split].name} are both split {split}; remove one")
        files[split] = path
    return files


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the rows of a table, each with its line number (parquet: its row number)."""
    try:
        with _opened(path) as file:
            kind = format_of(path)
            if kind == "jsonl":
                yield from _json(path, file)
            elif kind == "parquet":
                yield from _parquet(path, file)
            else:
                yield from _table(path, file, tabs=kind == "tsv")
    except _READ_ERRORS as error:
        raise BadInput(f"{path} cannot be read: {_reason(error)}") from error


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield running text in pieces that end at the end of a word; only very long words are cut."""
    try:
        with _opened(path) as file:
            for text, ends in _pieces(_chunks(path, file)):
                yield from _without_long_words(text, ends)
    except _READ_ERRORS as error:
        raise BadInput(f"{path} cannot be read: {_reason(error)}") from error


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


def _decoded(path: Path, file: IO[bytes]) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(file, 1):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from error
        # The first line may begin with a byte-order mark.
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> BadInput:
    byte = error.object[error.start]
    return BadInput(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8")


def _json(path: Path, file: IO[bytes]) -> Iterator[Line]:
    for number, text in _decoded(path, file):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}:{number}: not JSON: {error.msg}") from error
        if not isinstance(value, dict):
            raise BadInput(f"{path}:{number}: {type(value).__name__}, not an object with columns")
        yield number, value


def _table(path: Path, file: IO[bytes], *, tabs: bool) -> Iterator[Line]:
    """Yield the rows of a CSV or TSV file; in TSV, quotes have no special meaning."""
    csv.field_size_limit((1 << 31) - 1)  # the default is 128 KiB per cell
    lines = (text for _, text in _decoded(path, file))
    reader = (
        csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines)
    )
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = cells
            elif len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            else:
                raise BadInput(
                    f"{path}:{reader.line_num}: {len(cells)} columns, the header has {len(header)}"
                )
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: {error}") from error


def _parquet(path: Path, file: IO[bytes]) -> Iterator[Line]:
    parquet = require("pyarrow.parquet", "data", f"reading {path}")
    arrow = require("pyarrow", "data", f"reading {path}")
    try:
        table = parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield number, values
    except arrow.ArrowException as error:
        raise BadInput(f"{path} is not parquet: {_reason(error)}") from error


def _chunks(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Yield decoded text, with line endings of all systems converted to newlines."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    line = 1
    while raw := file.read(PIECE):
        try:
            text = decoder.decode(raw)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise _not_utf8(path, line, error) from error
        line += text.count("\n")
        yield text
    try:
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line, error) from error


def _pieces(chunks: Iterator[str]) -> Iterator[Piece]:
    """Yield the pieces of documents, without MARK and the newlines around it."""
    buffer = ""
    begun = False  # whether a piece of the current document has been yielded
    several = False  # whether a MARK has been read
    for chunk in chunks:
        buffer += chunk
        while MARK in buffer:
            text, _, buffer = buffer.partition(MARK)
            text = text.rstrip("\n")
            if begun or text:
                yield text, True
            begun, several = False, True
            buffer = buffer.lstrip("\n")
        if several and not begun:
            buffer = buffer.lstrip("\n")
        if cut := _safe_cut(buffer):
            yield buffer[:cut], False
            buffer, begun = buffer[cut:], True
    if begun or buffer:
        yield buffer.rstrip("\n") if several else buffer, True


def _without_long_words(text: str, ends: bool) -> Iterator[Piece]:
    """Yield a piece of text, cut wherever WORD characters have no white space, as in DNA."""
    start = 0
    for stop in range(WORD, len(text), WORD):
        if _SPACE.search(text, stop - WORD, stop) is None:
            yield text[start:stop], False
            start = stop
    yield text[start:], ends


def _safe_cut(buffer: str) -> int:
    """Return where to cut a full buffer: after its last whole word, else near its end."""
    if len(buffer) < PIECE:
        return 0
    for begin in (len(buffer) - 1024, 0):  # a search of the last characters is usually enough
        ends = [match.start() for match in _WORD_END.finditer(buffer, begin)]
        if ends:
            return ends[-1]
    return len(buffer) - len(MARK)  # the last characters may be the beginning of a MARK


def word_end(text: str, start: int) -> int:
    """Return the end of the word at `start`, or `start` if no white space follows."""
    match = _WORD_END.search(text, start)
    return match.start() if match else start
