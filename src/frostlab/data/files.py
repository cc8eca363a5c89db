"""Readers of text files: rows of tables, pieces of running text, or lines.

Running text is the content of a `.txt` file: one or more documents. All files are read in parts of
bounded size.
"""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from frostlab.data.parquet import batch_rows
from frostlab.errors import BadInput, first_line, nearest, require
from frostlab.storage import open_regular, parse_json

FORMATS = ("jsonl", "csv", "tsv", "txt", "parquet")
PIECE = 1 << 16  # approximate number of characters in a piece of running text
MARK = "<|endoftext|>"  # separates the documents of a .txt file
LINE = 16 << 20  # the most bytes of a line, of a row of a table, and of a text in parquet
LABEL = 1000  # the most characters of a label
# A .gz or .npz may unpack to UNPACKED bytes or, if that is more, to RATIO times its own size.
UNPACKED = 1 << 20
RATIO = 100  # gzip makes text 3 to 20 times smaller, and one repeated character 1,000 times
WORD = 512  # characters; a longer word may be cut, as BPE takes quadratic time in a word's length
_SPACE = re.compile(r"\s")
_WORD_END = re.compile(r"(?<=\S)\s")  # the first white space after a word
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode
_READ_ERRORS = (OSError, EOFError, zlib.error)
_SHOWN = 8  # the most columns that a message lists

Line = tuple[int, Mapping[str, Any]]  # line number of a row, and its values by column
Piece = tuple[str, bool]  # text, and whether its document ends with this piece


def format_of(path: Path) -> str | None:
    """Return the format that a file's ending names, with or without `.gz`, or None if unknown."""
    ending = path.name.removesuffix(".gz").rpartition(".")[2]
    return ending if ending in FORMATS else None


def nearest_data(path: Path) -> str:
    """Return "; did you mean `x`?" if a folder or data file next to `path` has a similar name."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [other.name for other in siblings if format_of(other) or other.is_dir()]
    return nearest(path.name, names, cutoff=0.7)  # endings alone make two names half alike


def split_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by split, such as train.jsonl for train."""
    files: dict[str, Path] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {_reason(error)}") from error
    for path in paths:
        if format_of(path) is None or not path.is_file():
            continue
        split = path.name.removesuffix(".gz").rpartition(".")[0]
        if split in files:
            raise BadInput(f"{path} and {files[split].name} are both the split {split}; remove one")
        files[split] = path
    return files


def named_path(name: str, key: str) -> Path:
    """Return a path with ~ expanded; the error for an impossible path begins with `key`."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, ~nobody
        raise BadInput(
            f"{key} {name!r:.80} is not a path on this machine ({_reason(error)})"
        ) from None
    return path


def read_lines(path: Path, columns: Iterable[str] = ()) -> Iterator[Line]:
    """Yield the rows of a table, each with the number of its last line (parquet: its row number).

    If `columns` are given, only these are read from a parquet file.
    """
    try:
        with _opened(path) as file:
            kind = format_of(path)
            if kind == "jsonl":
                yield from _json(path, file)
            elif kind == "parquet":
                yield from _parquet(path, file, tuple(columns))
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


def read_texts(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without their line breaks; each line is a text."""
    try:
        with _opened(path) as file:
            yield from _lines(path, file)
    except _READ_ERRORS as error:
        raise BadInput(f"{path} cannot be read: {_reason(error)}") from error


def read_stream_texts(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of the standard input, as `read_texts` does for a file."""
    yield from _lines(Path("standard input"), file)


def _lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    for _, text in _decoded(path, file):
        yield text.removesuffix("\n").removesuffix("\r")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with open_regular(path) as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with io.BufferedReader(_Unpacked(path, raw), PIECE) as file:
            yield file


class _Unpacked(io.RawIOBase):
    """A .gz file that is refused once it has unpacked to far more bytes than text would."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self._path, self._raw, self._file = path, raw, gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        if self._file.tell() > max(UNPACKED, RATIO * self._raw.tell()):
            raise BadInput(
                f"{self._path} unpacks to more than {RATIO} times its size, which text does not; "
                "unpack it yourself if you trust it"
            )
        return count


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)[:300]


def shown(value: object, most: int = 40) -> str:
    """Return the beginning of a value's repr, for messages."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return f"an {type(value).__name__} of many digits"
    return text if len(text) <= most else f"{text[:most]}…"


def is_label(value: object) -> bool:
    """Return whether a value can be a label: a whole number of 64 bits, or a short text."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if not isinstance(value, str):
        return False
    return 0 < len(value) <= LABEL and not _LONE_SURROGATE.search(value)


def missing_column(place: object, line: int, name: str, names: Iterable[str]) -> BadInput:
    """Return the error for a column that a row lacks; `names` are the columns that it has."""
    listed = [str(key) for key in names][:1000]
    some = ", ".join(shown(key)[1:-1] for key in listed[:_SHOWN])
    hint = nearest(name, [key for key in listed if key.isprintable()])
    more = " and more" * (len(listed) > _SHOWN)
    return BadInput(f"{place}:{line}: no column {name}{hint or f'; there are {some}{more}'}")


def _decoded(path: Path, file: IO[bytes]) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(iter(lambda: file.readline(LINE + 1), b""), 1):
        if len(raw) > LINE:
            raise _too_long(path, number)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from error
        # The first line may begin with a byte-order mark.
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _too_long(path: Path, line: int) -> BadInput:
    return BadInput(f"{path}:{line}: a line or text is longer than {LINE >> 20} MiB, the limit")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> BadInput:
    byte = error.object[error.start]
    return BadInput(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8")


def _json(path: Path, file: IO[bytes]) -> Iterator[Line]:
    for number, text in _decoded(path, file):
        if not text.strip():
            continue
        value = parse_json(text.strip(), f"{path}:{number}")
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise BadInput(
                f"{path}:{number}: the line should be an object with columns, not {kind}"
            )
        yield number, value


def _table(path: Path, file: IO[bytes], *, tabs: bool) -> Iterator[Line]:
    """Yield the rows of a CSV or TSV file, with cells quoted as `csv.writer` and pandas do.

    Some TSV files are written without quoting. A cell that begins with a quote would then swallow
    the cells and rows up to the next quote, so a TSV file with invalid quoting is refused.
    """
    csv.field_size_limit(LINE)  # the default is 128 KiB per cell
    row_size = 0  # bytes of the row so far, which may have several lines

    def lines() -> Iterator[str]:
        nonlocal row_size
        for number, text in _decoded(path, file):
            row_size += len(text.encode())
            if row_size > LINE:
                raise _too_long(path, number)
            yield text

    reader = csv.reader(lines(), delimiter="\t", strict=True) if tabs else csv.reader(lines())
    header: list[str] | None = None
    try:
        for cells in reader:
            row_size = 0
            if not cells:
                continue
            if header is None:
                header = cells
                _check_header(path, reader.line_num, header)
            elif len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            else:
                raise BadInput(
                    f"{path}:{reader.line_num}: the row has {len(cells)} columns, but the "
                    f"header has {len(header)}"
                )
    except csv.Error as error:
        problem, hint = str(error), "; quote cells as pandas does, or use jsonl" if tabs else ""
        if problem.startswith("new-line character"):
            problem, hint = "a carriage return in a cell without quotes", "; quote it, or use jsonl"
        raise BadInput(f"{path}:{reader.line_num}: {problem}{hint}") from error


def _check_header(path: Path, line: int, names: list[str]) -> None:
    """Refuse a table with two columns of one name, of which only one could be read."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadInput(f"{path}:{line}: two columns are called {shown(name)}; rename one")
        seen.add(name)


def _parquet(path: Path, file: IO[bytes], columns: tuple[str, ...]) -> Iterator[Line]:
    parquet = require("pyarrow.parquet", "data", f"reading {path}")
    if path.suffix == ".gz":  # `_Unpacked` refuses a huge file here, before pyarrow seeks its end
        while file.read(PIECE):
            pass
    number = 0
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        _check_header(path, 1, names)
        for name in columns:
            if name not in names:
                raise missing_column(path, 1, name, names)
        read = list(columns) or names
        _check_types(path, table.schema_arrow, read)
        sizes = batch_rows(path, file, table.metadata, set(read))
        for group, rows in enumerate(sizes):
            for batch in table.iter_batches(rows, row_groups=[group], columns=read):
                batch.validate(full=True)  # refuses text that is not UTF-8, and bad offsets
                if batch.nbytes > LINE and (long := _long_row(batch.to_pydict())) is not None:
                    raise _too_long(path, number + long)
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except BadInput:
        raise
    except Exception as error:  # pyarrow raises many types of errors for a damaged file
        raise BadInput(f"{path} is not parquet: {_reason(error)}") from error


def _long_row(columns: dict[str, list[Any]]) -> int | None:
    """Return the number, from 1, of the first row with a text of more than LINE bytes."""
    for number, values in enumerate(zip(*columns.values(), strict=True), 1):
        if any(isinstance(value, str) and len(value.encode()) > LINE for value in values):
            return number
    return None


def _check_types(path: Path, schema: Any, columns: Iterable[str]) -> None:
    """Refuse nested columns, whose rows have no bounded size."""
    types = require("pyarrow.types", "data", f"reading {path}")
    for name in columns:
        kind = schema.field(name).type
        if types.is_nested(kind):
            raise BadInput(f"{path}:1: column {name} holds {kind!s:.40}, not text or a number")


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
    """Yield a piece of text, cut after each block of WORD characters without white space."""
    start = 0
    for stop in range(WORD, len(text), WORD):
        if _SPACE.search(text, stop - WORD, stop) is None:
            yield text[start:stop], False
            start = stop
    yield text[start:], ends


def _safe_cut(buffer: str) -> int:
    """Return where to cut a buffer: after its last whole word, else near its end; 0: nowhere."""
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
