"""Limits on the memory that a parquet file may take, checked before pyarrow reads its rows.

The sizes in a file's footer can be wrong, so the header of every page is read too: it says how many
bytes pyarrow will allocate for the page. The footer is parsed here, because pyarrow ends the
process if it is asked about a column whose statistics do not fit the schema.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from frostlab.errors import BadInput

GROUP = 1 << 30  # the most bytes of the columns that are read, uncompressed, in one row group
PAGE = 128 << 20  # the most bytes of one page or dictionary, uncompressed
BATCH = 64 << 20  # approximate bytes that are decoded at once
ROWS = 64  # the most rows that are decoded at once; they may all repeat one long text
FEW_ROWS = 1 << 20  # rows that any file may have; larger numbers are limited by ROWS_PER_BYTE
ROWS_PER_BYTE = 100  # the most rows per byte of a file; only repeated values could have more
FOOTER = 16 << 20  # the most bytes of the footer
_HEADER = 1 << 20  # the most bytes of the header of a page
_DEPTH = 12  # the most levels of structs and lists in a footer
_PADDING = 100  # the most bytes by which old writers understate the length of a column


def batch_rows(path: Path, file: IO[bytes], metadata: Any, columns: Collection[str]) -> list[int]:
    """Return how many rows of each row group to decode at once; refuse a file beyond the limits."""
    size = file.seek(0, 2)
    if metadata.num_rows > max(FEW_ROWS, ROWS_PER_BYTE * size):
        raise BadInput(
            f"{path} claims {metadata.num_rows:,} rows; a file of {size:,} bytes may have "
            f"{max(FEW_ROWS, ROWS_PER_BYTE * size):,}"
        )
    chunks = []  # start, end and row group of each column that is read
    groups = _footer(path, file, size)
    for group, columns_of_group in enumerate(groups):
        total = 0
        for chunk in columns_of_group:
            if chunk.path in columns:
                total += chunk.uncompressed
                chunks.append((chunk.start, chunk.start + chunk.compressed, group))
        if total > GROUP:
            raise BadInput(
                f"{path}: row group {group + 1} takes {total:,} bytes; the most is {GROUP:,}; "
                "write the file with smaller row groups"
            )
    pages = [1] * len(groups)  # bytes of the largest page of each row group
    before = 0
    for start, end, group in sorted(chunks):  # in the file's order: in a .gz, going back is slow
        if start < before or end > size:
            raise BadInput(f"{path} is damaged: a column is outside the file or inside another")
        before = end
        pages[group] = max(pages[group], _largest_page(path, file, start, end))
    return [max(1, min(ROWS, BATCH // page)) for page in pages]


@dataclass(frozen=True)
class _Chunk:
    """A column of one row group."""

    path: str  # in the schema, with dots
    start: int  # byte at which its first page begins
    compressed: int  # bytes of its pages in the file
    uncompressed: int  # bytes of its pages when they are uncompressed


def _footer(path: Path, file: IO[bytes], size: int) -> list[list[_Chunk]]:
    """Return the columns of every row group, as the file's footer lists them."""
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    if length > FOOTER:
        raise BadInput(f"{path} has a footer of {length:,} bytes; the most is {FOOTER:,}")
    file.seek(max(0, size - 8 - length))
    try:
        footer = _Compact(file.read(length)).struct()
        # The numbers are ids of fields in parquet.thrift: of FileMetaData, RowGroup and
        # ColumnChunk, and of ColumnMetaData in `_chunk`.
        return [[_chunk(column[3]) for column in group[1]] for group in footer[4]]
    except (IndexError, KeyError, TypeError, ValueError):
        raise BadInput(f"{path} is damaged: its footer cannot be read") from None


def _chunk(fields: dict[int, Any]) -> _Chunk:
    start, dictionary = fields[9], fields.get(11, 0)
    name = ".".join(part.decode() for part in fields[3])
    sizes = fields[7], fields[6]
    if not all(isinstance(number, int) for number in (start, dictionary, *sizes)):
        raise ValueError("not a whole number")
    return _Chunk(name, dictionary if 0 < dictionary < start else start, *sizes)


def _largest_page(path: Path, file: IO[bytes], start: int, end: int) -> int:
    """Return the uncompressed size of the largest page between two offsets."""
    largest = 1
    while start < end:
        uncompressed, compressed, length = _page_header(path, file, start)
        if uncompressed > PAGE:
            raise BadInput(
                f"{path} has a page of {uncompressed:,} bytes at byte {start:,}; the most is "
                f"{PAGE:,}; write the file with smaller pages"
            )
        start += length + compressed
        if min(uncompressed, compressed) < 0 or start > end + _PADDING:
            raise BadInput(f"{path} is damaged: a page is longer than its column")
        largest = max(largest, uncompressed)
    return largest


def _page_header(path: Path, file: IO[bytes], start: int) -> tuple[int, int, int]:
    """Return a page's uncompressed and compressed size, and the length of its header."""
    for most in (512, _HEADER):
        file.seek(start)
        header = _Compact(file.read(most))
        try:
            fields = header.struct()
            sizes = int(fields[2]), int(fields[3])  # fields of PageHeader
            return *sizes, header.position
        except IndexError:  # the header is longer than the bytes read
            continue
        except (KeyError, TypeError, ValueError):
            break
    raise BadInput(f"{path} is damaged: there is no page at byte {start:,}")


class _Compact:
    """A reader of Thrift's compact protocol, in which footers and page headers are written."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read a struct, and return its values by field; IndexError if it is cut off."""
        values: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            values[field] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return values

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        if kind in (1, 2, 3):  # a byte; inside a list, true and false are bytes, too
            return self._byte()
        if kind in (4, 5, 6):  # whole numbers of 16, 32 and 64 bits
            return self._zigzag()
        if kind == 7:  # a double
            return self._take(8)
        if kind == 8:
            return self._take(self._varint())
        if kind == 9 or kind == 10:  # a list or a set
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError("not part of a footer or a page's header")

    def _byte(self) -> int:
        self.position += 1
        return self.content[self.position - 1]

    def _take(self, count: int) -> bytes:
        self.position += count
        if self.position > len(self.content):
            raise IndexError
        return self.content[self.position - count : self.position]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
