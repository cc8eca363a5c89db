"""A parquet file is read within limits, whatever its footer and its pages say."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostlab.data import parquet
from frostlab.data.files import read_lines
from frostlab.data.parquet import PAGE, ROWS, batch_rows
from frostlab.errors import BadInput

TABLE = pa.table({
    "text": [f"words {'and more ' * (row % 50)}" for row in range(500)],
    "label": [row % 3 for row in range(500)],
    "note": [None if row % 2 else "x" for row in range(500)],
})  # fmt: skip


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        list(read_lines(path, ("text", "label")))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sizes(path: Path, *columns: str) -> list[int]:
    with path.open("rb") as file:
        return batch_rows(path, file, pq.ParquetFile(path).metadata, columns)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("more", [
    {},
    {"use_dictionary": False, "write_statistics": False},
    {"data_page_size": 500, "write_batch_size": 10, "row_group_size": 70},
    {"write_page_checksum": True, "write_page_index": True},
])  # fmt: skip
def test_what_pyarrow_writes_is_read(
    tmp_path: Path, compression: str, version: str, more: dict[str, Any]
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, compression=compression, data_page_version=version, **more)
    assert [row for _, row in read_lines(path)] == TABLE.to_pylist()
    assert [number for number, _ in read_lines(path)] == list(range(1, 501))


def test_a_large_page_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * (PAGE + 1)], "label": [1], "other": ["y"]})
    for dictionary in (True, False):
        pq.write_table(table, path, compression="zstd", use_dictionary=dictionary)
        assert path.stat().st_size < 1 << 20
        assert f"the most is {PAGE:,}; write the file with smaller pages" in refusal(path)
    assert sizes(path, "other") == [ROWS], "only the columns that are read count"


def test_a_large_row_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=250, use_dictionary=False)
    monkeypatch.setattr(parquet, "GROUP", 50_000)
    assert "row group 1 takes " in refusal(path)
    assert "the most is 50,000; write the file with smaller row groups" in refusal(path)
    pq.write_table(TABLE, path, row_group_size=50, use_dictionary=False)
    assert len(list(read_lines(path, ("text", "label")))) == 500


def test_long_texts_are_decoded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BATCH", 1 << 20)
    path = tmp_path / "a.parquet"
    text = "x" * (1 << 18)
    pq.write_table(pa.table({"text": [text] * 100, "label": [1] * 100}), path)
    (rows,) = sizes(path, "text", "label")
    assert rows == 3
    assert all(row["text"] == text for _, row in read_lines(path))


def test_a_small_file_cannot_claim_millions_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = 3_000_000
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), ["same"])
    table = pa.table({"text": text, "label": pa.array([1] * rows, pa.int8())})
    pq.write_table(table, path, data_page_size=1 << 30, max_rows_per_page=rows)
    assert "claims 3,000,000 rows; a file of " in refusal(path)


def test_damaged_pages_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    good = path.read_bytes()
    path.write_bytes(good[:4] + b"\xff" * 40 + good[44:])
    assert "is damaged: there is no page at byte 4" in refusal(path)


class _Chunk:
    """The footer's description of a column, which an attacker can write."""

    path_in_schema = "text"
    has_dictionary_page, dictionary_page_offset = False, None

    def __init__(self, start: int, size: int) -> None:
        self.data_page_offset, self.total_compressed_size = start, size
        self.total_uncompressed_size = 1


class _Footer:
    num_rows = 1

    def __init__(self, *chunks: _Chunk) -> None:
        self._chunks, self.num_row_groups, self.num_columns = chunks, 1, len(chunks)

    def row_group(self, group: int) -> "_Footer":
        return self

    def column(self, index: int) -> _Chunk:
        return self._chunks[index]


def test_the_footer_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "PAGE", 1 << 20)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * (1 << 20)]}), path, compression="zstd")
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    size = chunk.total_compressed_size
    with path.open("rb") as file:
        with pytest.raises(BadInput, match="has a page of 1,048,5"):
            batch_rows(path, file, _Footer(_Chunk(4, size)), ["text"])
        pq.write_table(TABLE, path)
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    with path.open("rb") as file:
        for footer in (_Footer(_Chunk(4, size), _Chunk(4, size)), _Footer(_Chunk(4, 1 << 40)),
                       _Footer(_Chunk(-9, size))):  # fmt: skip
            with pytest.raises(BadInput, match="outside the file or inside another"):
                batch_rows(path, file, footer, ["text"])
        with pytest.raises(BadInput, match="a page is longer than its column"):
            batch_rows(path, file, _Footer(_Chunk(4, 30)), ["text"])
