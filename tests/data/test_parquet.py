"""A parquet file is read within limits, whatever its footer and its pages say."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostlab.data import parquet
from frostlab.data.files import read_lines
from frostlab.data.parquet import ROWS, batch_rows
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


def test_a_large_page_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 8 << 20
    monkeypatch.setattr(parquet, "PAGE", page)
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * (page + 1)], "label": [1], "other": ["y"]})
    for dictionary in (True, False):
        pq.write_table(table, path, compression="zstd", use_dictionary=dictionary)
        assert path.stat().st_size < 1 << 20
        assert f"the most is {page:,}; write the file with smaller pages" in refusal(path)
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
    # old versions of pyarrow have no such limit
    limit = {"max_rows_per_page": rows} if "max_rows_per_page" in pq.write_table.__doc__ else {}
    pq.write_table(table, path, data_page_size=1 << 30, **limit)
    assert "claims 3,000,000 rows; a file of " in refusal(path)


def test_damaged_pages_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    good = path.read_bytes()
    path.write_bytes(good[:4] + b"\xff" * 40 + good[44:])
    assert "is damaged: there is no page at byte 4" in refusal(path)


def claim(monkeypatch: pytest.MonkeyPatch, *chunks: tuple[int, int]) -> None:
    """Let the footer claim columns with these starts and sizes, as an attacker can write it."""
    claimed = [[parquet._Chunk("text", start, size, 1) for start, size in chunks]]
    monkeypatch.setattr(parquet, "_footer", lambda path, file, size: claimed)


def test_the_footer_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "PAGE", 1 << 20)
    path = tmp_path / "a.parquet"

    def refused(*chunks: tuple[int, int]) -> str:
        with monkeypatch.context() as patch, path.open("rb") as file:
            claim(patch, *chunks)
            with pytest.raises(BadInput) as caught:
                batch_rows(path, file, pq.ParquetFile(path).metadata, ["text"])
        return str(caught.value)

    pq.write_table(pa.table({"text": ["x" * (1 << 20)]}), path, compression="zstd")
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    assert "has a page of 1,048,5" in refused((4, size))
    pq.write_table(TABLE, path)
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    for chunks in ([(4, size), (4, size)], [(4, 1 << 40)], [(-9, size)]):
        assert "outside the file or inside another" in refused(*chunks)
    assert "a page is longer than its column" in refused((4, 30))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_the_footer_is_read_as_pyarrow_reads_it(
    dictionary: bool, compression: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": ["x", "y", None] * 50, "b": [[1], [2, 3], []] * 50,
                      "c": [{"d": 1.5, "e": True}] * 150, "f": range(150)})  # fmt: skip
    pq.write_table(table, path, compression=compression, use_dictionary=dictionary,
                   row_group_size=60, write_page_index=True)  # fmt: skip
    metadata = pq.ParquetFile(path).metadata
    with path.open("rb") as file:
        groups = parquet._footer(path, file, path.stat().st_size)
    assert len(groups) == metadata.num_row_groups == 3
    for number, chunks in enumerate(groups):
        group = metadata.row_group(number)
        for index, chunk in enumerate(chunks):
            column = group.column(index)
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            assert (chunk.path, chunk.start) == (column.path_in_schema, start)
            sizes = column.total_compressed_size, column.total_uncompressed_size
            assert (chunk.compressed, chunk.uncompressed) == sizes
        assert len(chunks) == group.num_columns


def test_a_damaged_footer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    size = path.stat().st_size
    for content in (b"", b"\x00" * 60, b"\xff" * 60, (b"\x19" * 59) + b"\xfc"):
        path.write_bytes(content + len(content).to_bytes(4, "little") + b"PAR1")
        with path.open("rb") as file, pytest.raises(BadInput, match="its footer cannot be read"):
            parquet._footer(path, file, path.stat().st_size)
    path.write_bytes(b"x" * size + (1 << 30).to_bytes(4, "little") + b"PAR1")
    with path.open("rb") as file, pytest.raises(BadInput, match="has a footer of 1,073,741,824"):
        parquet._footer(path, file, path.stat().st_size)
