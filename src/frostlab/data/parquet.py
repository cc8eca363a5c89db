"""Limits on what a parquet file may take in memory, checked before pyarrow reads its rows.

The sizes in a file's footer can be wrong, so the header of every page is read too: it says how many
bytes pyarrow will allocate for the page.
"""

from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from frostlab.errors import BadInput

GROUP = 1 << 30  # the most bytes of the columns that are read, uncompressed, in one row group
PAGE = 128 << 20  # the most bytes of one page or dictionary, uncompressed
BATCH = 64 << 20  # approximate bytes that are decoded at once
ROWS = 64  # the most rows that are decoded at once; they may all repeat one long text
FEW_ROWS = 1 << 20  # rows that any file may have; more only up to ROWS_PER_BYTE
ROWS_PER_BYTE = 100  # a file with one repeated text has more
_HEADER = 1 << 20  # the most bytes of the header of a page
_PADDING = 100  # bytes by which old writers understate the length of a column


def batch_rows(path: Path, file: IO[bytes], metadata: Any, columns: Collection[str]) -> list[int]:
    """Return how many rows of each row group to decode at once; refuse a file beyond the limits."""
    size = file.seek(0, 2)
    if metadata.num_rows > max(FEW_ROWS, ROWS_PER_BYTE * size):
        raise BadInput(
            f"{path} claims {metadata.num_rows:,} rows; a file of {size:,} bytes may have "
            f"{max(FEW_ROWS, ROWS_PER_BYTE * size):,}"
        )
    chunks = []  # start, end and row group of each column that is read
    for group in range(metadata.num_row_groups):
        row_group, total = metadata.row_group(group), 0
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if chunk.path_in_schema in columns:
                total += chunk.total_uncompressed_size
                start = _start(chunk)
                chunks.append((start, start + chunk.total_compressed_size, group))
        if total > GROUP:
            raise BadInput(
                f"{path}: row group {group + 1} takes {total:,} bytes; the most is {GROUP:,}; "
                "write the file with smaller row groups"
            )
    pages = [1] * metadata.num_row_groups  # bytes of the largest page of each row group
    before = 0
    for start, end, group in sorted(chunks):  # in the order of the file, which may be a .gz
        if start < before or end > size:
            raise BadInput(f"{path} is damaged: a column is outside the file or inside another")
        before = end
        pages[group] = max(pages[group], _largest_page(path, file, start, end))
    return [max(1, min(ROWS, BATCH // page)) for page in pages]


def _start(chunk: Any) -> int:
    """Return where the first page of a column begins, as pyarrow finds it."""
    start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    return int(dictionary if chunk.has_dictionary_page and 0 < dictionary < start else start)


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
            sizes = header.whole_numbers()
            return sizes[2], sizes[3], header.position  # fields 2 and 3 of PageHeader
        except IndexError:  # the header goes on
            continue
        except (KeyError, ValueError):
            break
    raise BadInput(f"{path} is damaged: there is no page at byte {start:,}")


class _Compact:
    """A reader of Thrift's compact protocol, in which page headers are written."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def whole_numbers(self, depth: int = 0) -> dict[int, int]:
        """Read a struct, and return its whole numbers by field; IndexError if it is cut off."""
        values: dict[int, int] = {}
        field = 0
        if depth > 4:
            raise ValueError("nested too deeply")
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            if kind in (4, 5, 6):  # whole numbers of 16, 32 and 64 bits
                values[field] = self._zigzag()
            elif kind == 8:  # bytes
                self._skip(self._varint())
            elif kind == 12:  # a struct
                self.whole_numbers(depth + 1)
            elif kind in (3, 7):  # a byte, a double
                self._skip(1 if kind == 3 else 8)
            elif kind not in (1, 2):  # true, false
                raise ValueError("not part of a page's header")
        return values

    def _byte(self) -> int:
        self.position += 1
        return self.content[self.position - 1]

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self.content):
            raise IndexError

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
