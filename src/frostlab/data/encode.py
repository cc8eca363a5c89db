"""Portions of text to token arrays, in batches of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from frostlab.data.division import Portion
from frostlab.data.rows import Columns
from frostlab.data.tokens import Writer, flat
from frostlab.data.vocabulary import Coder
from frostlab.errors import BadInput

BATCH = 1 << 20  # characters encoded at once
ROWS = 1024  # and texts
T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items until they hold about BATCH characters or are ROWS."""
    batch: list[T] = []
    full = 0
    for item in items:
        batch.append(item)
        full += size(item)
        if full >= BATCH or len(batch) == ROWS:
            yield batch
            batch, full = [], 0
    if batch:
        yield batch


def encode_labelled(
    portion: Portion,
    rows: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    columns: Columns,
    coder: Coder,
    length: int,
    folder: Path,
    role: str,
) -> str:
    """Write the chosen rows as examples of at most `length` tokens; return the digest."""
    chosen = np.zeros(len(portion.survey), dtype=np.bool_)
    chosen[rows] = True
    texts = (
        row.texts
        for number, row in enumerate(portion.part.rows(columns))
        if number < len(chosen) and chosen[number]
    )
    lengths: list[int] = []
    second: list[int] = []
    with Writer(folder, role, coder.vocabulary) as writer:
        for batch in batches(texts, lambda pair: sum(map(len, pair))):
            encoded = coder.examples(batch, length)
            ids = [found or [coder.end] for found, _ in encoded]  # never an example of nothing
            writer.append(flat(ids))
            lengths += map(len, ids)
            second += (begin for _, begin in encoded if begin is not None)
    stops = np.cumsum(lengths, dtype=np.int64)
    return writer.finish(
        {
            "starts": stops - np.array(lengths, dtype=np.int64),
            "stops": stops,
            "labels": numbers[rows],
            "second": np.array(second) if second else None,
        }
    )


def encode_running(
    portion: Portion,
    columns: Columns,
    coder: Coder,
    length: int,
    limit: int | None,
    folder: Path,
    role: str,
    stride: int | None = None,
) -> str:
    """Write documents as one stream of tokens, cut every `length`; return the digest.

    An example has one token more than `length`, the first of the next: the last target. With a
    longer stride examples share no token, or leave some out.
    """
    stride = stride or length
    most = None if limit is None else (limit - 1) * stride + length + 1
    with Writer(folder, role, coder.vocabulary) as writer:
        for ids in _stream(portion, columns, coder):
            writer.append(ids if most is None else ids[: most - writer.count])
            if writer.count == most:
                break
        count = writer.count
    if count < 2:
        raise BadInput(f"{portion.part.place} has {count} tokens for {role}; two are the least")
    starts = np.arange(0, count - 1, stride, dtype=np.int64)
    return writer.finish({"starts": starts, "stops": np.minimum(starts + length + 1, count)})


def _stream(portion: Portion, columns: Columns, coder: Coder) -> Iterator[npt.NDArray[np.int64]]:
    open_document = False
    for batch in batches(portion.pieces(columns), lambda piece: len(piece[0])):
        ids: list[list[int]] = []
        encoded = coder.running([text for text, _ in batch])
        for found, (_, ends) in zip(encoded, batch, strict=True):
            ids.append(found)
            open_document = open_document or bool(found)
            if ends and open_document:
                ids.append([coder.end])
                open_document = False
        yield flat(ids)
