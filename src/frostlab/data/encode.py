"""Encoding of text as token arrays: the splits of a recipe, and other text for a trained run.

A split has a role: train, tune (to select checkpoints) or report (for the final scores). A trained
run evaluates or predicts text that is encoded with its own tokenizer.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from frostlab.data.files import (
    FORMATS,
    format_of,
    named_path,
    nearest_data,
    read_stream_texts,
    read_texts,
    split_files,
)
from frostlab.data.sources import (
    PUBLIC_SETS,
    Columns,
    Split,
    TextData,
    plan_splits,
    public_splits,
)
from frostlab.data.split_record import Label
from frostlab.data.splits import Numbers, Portion, class_numbers, limit_rows, survey
from frostlab.data.tokenizers import Encoder, Texts
from frostlab.data.tokens import Tokens, TokenWriter, concatenate, load_tokens
from frostlab.errors import BadInput
from frostlab.recipe.data import Docstrings, Named, Own

STDIN = "-"  # names the standard input instead of a file
# File names that a role may have in a folder, the preferred one first.
_ROLE_NAMES = {"report": ("report", "test", "validation"), "tune": ("tune", "validation")}
BATCH = 1 << 20  # approximate number of characters per encoded batch
ROWS = 1024  # maximum number of texts per encoded batch
T = TypeVar("T")


class Encoded(NamedTuple):
    """The outcome of encoding a split."""

    digest: str
    lengths: Numbers  # number of tokens of each example
    tokens: int  # number of tokens that were written
    cut: int | None  # number of examples cut at data.length; None for running text
    limited: bool  # whether running text reached the limit of examples


def encode_labelled(
    portion: Portion,
    rows: Numbers,
    numbers: Numbers,
    columns: Columns,
    encoder: Encoder,
    length: int,
    writer: TokenWriter,
) -> Encoded:
    """Write some rows of a portion (the part of a split that a role gets) as examples.

    `rows` holds the indices of these rows in the split, and `numbers` the class of every row of the
    split. Each example is cut at `length` tokens.
    """
    chosen = np.zeros(len(portion.survey), dtype=np.bool_)
    chosen[rows] = True
    texts = (
        row.texts
        for number, row in enumerate(portion.split.rows(columns))
        if number < len(chosen) and chosen[number]
    )
    lengths: list[int] = []
    second: list[int] = []  # for pairs of texts: the position of each second text's first token
    cut = encoder.truncated
    with writer:
        for batch in batches(texts, lambda row_texts: sum(map(len, row_texts))):
            encoded = encoder.examples(batch, length)
            ids = [tokens or [encoder.end] for tokens, _ in encoded]  # an example needs a token
            writer.append(concatenate(ids))
            lengths += map(len, ids)
            second += (begin for _, begin in encoded if begin is not None)
    stops = np.cumsum(lengths, dtype=np.int64)
    sizes = np.array(lengths, dtype=np.int64)
    digest = writer.finish(
        {
            "starts": stops - sizes,
            "stops": stops,
            "labels": numbers[rows],
            "second": np.array(second) if second else None,
        }
    )
    cut = encoder.truncated - cut
    return Encoded(digest, sizes, int(sizes.sum()), cut, limited=False)


def encode_running(
    portion: Portion,
    columns: Columns,
    encoder: Encoder,
    length: int,
    stride: int,
    limit: int | None,
    writer: TokenWriter,
) -> Encoded:
    """Write documents as one stream of tokens and cut it into examples.

    An example starts every `stride` tokens and has `length` + 1 tokens; the last ones may be
    shorter. With a stride of `length`, the last target of an example is the first token of the next
    example. With a larger stride, examples share no token, and tokens between them may be left out.
    """
    max_tokens = None if limit is None else (limit - 1) * stride + length + 1
    with writer:
        for ids in _stream(portion, columns, encoder):
            writer.append(ids if max_tokens is None else ids[: max_tokens - writer.count])
            if writer.count == max_tokens:
                break
        count = writer.count
    if count < 2:
        raise BadInput(
            f"{portion.split.place} has {count} tokens for {writer.role}; at least two are needed"
        )
    starts = np.arange(0, count - 1, stride, dtype=np.int64)
    stops = np.minimum(starts + length + 1, count)
    digest = writer.finish({"starts": starts, "stops": stops})
    return Encoded(digest, stops - starts, count, None, limited=count == max_tokens)


def _stream(portion: Portion, columns: Columns, encoder: Encoder) -> Iterator[Numbers]:
    """Yield the tokens of documents, with an end token where a document that is not empty ends."""
    open_document = False  # whether tokens of a document are waiting for their end token
    for batch in batches(portion.pieces(columns), lambda piece: len(piece[0])):
        ids: list[list[int]] = []
        encoded = encoder.running([text for text, _ in batch])
        for tokens, (_, ends) in zip(encoded, batch, strict=True):
            ids.append(tokens)
            open_document = open_document or bool(tokens)
            if ends and open_document:
                ids.append([encoder.end])
                open_document = False
        yield concatenate(ids)


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items into batches of about BATCH characters and at most ROWS items."""
    batch: list[T] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if characters >= BATCH or len(batch) == ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# Text for a trained run


def columns_of(data: TextData) -> Columns:
    """Return the columns from which a recipe's text and labels are read."""
    label = "label" if data.task == "classification" else None
    if isinstance(data, Own):
        return Columns(data.text, label and data.label)
    if isinstance(data, Named):
        defaults = PUBLIC_SETS[data.name]
        return Columns(defaults.texts, label, defaults.joined)
    pairs = isinstance(data, Docstrings) and data.name == "docstrings-pairs"
    return Columns(("summary", "body") if pairs else ("text",), label)


def given_split(path: str | Path, role: str, key: str, named: object = None) -> Split:
    """Return a file as a split; in a folder, take the file for this role, or the only file.

    `key` is the option that gave the path; messages show it. If the recipe names a split for this
    role, `named` is that name, and a file of that name is preferred.
    """
    place = named_path(str(path), key)
    if place.is_dir():
        files = split_files(place)
        names = [name for name in (named, *_ROLE_NAMES.get(role, (role,))) if name in files]
        if not names and len(files) == 1:
            names = list(files)
        if not names:
            listed = ", ".join(sorted(file.name for file in files.values())) or "no data file"
            raise BadInput(
                f"{key} {place} has no file for {role}; it has {listed}; name one of its files"
            )
        place = files[names[0]]
    elif not place.is_file():
        raise BadInput(f"{key} {place} does not exist{nearest_data(place)}")
    if format_of(place) is None:
        raise BadInput(f"{key} {place} is not one of .{', .'.join(FORMATS)}, plain or .gz")
    return Split(role, str(place), (place,))


def recipe_split(
    data: TextData, role: str, language: str | None, data_dir: Path | None, cache: Path
) -> Split:
    """Return the split that has this role in a recipe; refuse a split that is a share of train."""
    if role == "tune" and data.splits == "published":
        raise BadInput(
            "--split tune: a run with data.splits published has no tune split; use --split report"
        )
    split: Split | float | str | None
    if isinstance(data, Named):
        defaults = PUBLIC_SETS[data.name]
        published = defaults.published if data.splits == "published" else None
        names = {
            "train": data.train,
            "tune": defaults.tune if data.tune is None else data.tune,
            "report": data.report or published or defaults.report,
        }
        split = names[role]
        if isinstance(split, str):
            name = data.name
            if role == "train" and name == "xnli":  # its models train on MNLI, as in `plan_splits`
                if language not in (None, "en"):
                    raise BadInput(
                        f"--split train, data.language {language}: models of xnli train on "
                        "English MNLI; leave data.language out, or name a file with --data"
                    )
                name, language = "mnli", "en"
            splits = public_splits(name, language or data.language, data_dir)
            if split not in splits:
                raise BadInput(f"{name} has no split {split}; it has {', '.join(splits)}")
            return splits[split]
    else:
        split = getattr(plan_splits(data, data_dir, cache), role)
    if not isinstance(split, Split):
        raise BadInput(
            f"the {role} split of data.name {data.name} is a share of train, which is only "
            "evaluated with the run's own settings; leave out --set, or name a file with --data"
        )
    return split


def encode_split(
    split: Split,
    columns: Columns,
    encoder: Encoder,
    data: TextData,
    labels: Sequence[Label] | None,
    limit: int | None,
    cache: Path,
) -> Tokens:
    """Encode a split like the splits of a trained run; refuse a label that is not in `labels`."""
    rows = survey(split, columns, cache)
    portion = Portion(split, rows, np.ones(len(rows), dtype=np.bool_))
    length, stride = data.length, data.stride or data.length
    numbers = None if labels is None else class_numbers(split, rows, tuple(labels))
    with tempfile.TemporaryDirectory() as folder:
        writer = TokenWriter(Path(folder), split.name, encoder.vocabulary)
        if numbers is None:
            encoded = encode_running(portion, columns, encoder, length, stride, limit, writer)
        else:
            chosen = limit_rows(portion, numbers, limit)
            encoded = encode_labelled(portion, chosen, numbers, columns, encoder, length, writer)
        return load_tokens(Path(folder), split.name, encoded.digest)


def read_texts_to_predict(path: str, columns: Columns) -> Iterator[Texts]:
    """Yield the texts to predict: lines of a .txt file or the standard input, or a table's rows."""
    if path != STDIN:
        split = given_split(path, "report", "FILE")
        if format_of(split.files[0]) != "txt":
            yield from (row.texts for row in split.rows(Columns(columns.texts, None)))
            return
    if len(columns.texts) > 1:
        raise BadInput(
            f"the run reads pairs of texts, and {path} has one text per line; use a csv, tsv, "
            f"jsonl or parquet file with the columns {' and '.join(columns.texts)}"
        )
    lines = read_stream_texts(sys.stdin.buffer) if path == STDIN else read_texts(split.files[0])
    yield from ((text,) for text in lines)


def encode_examples(texts: list[Texts], encoder: Encoder, length: int) -> Tokens:
    """Encode texts, or pairs of texts, to be classified; each is cut at `length` tokens."""
    encoded = encoder.examples(texts, length)
    ids = [tokens or [encoder.end] for tokens, _ in encoded]  # an example needs a token
    second = [begin for _, begin in encoded if begin is not None]
    stops = np.cumsum([len(tokens) for tokens in ids], dtype=np.int64)
    return Tokens(
        ids=concatenate(ids),
        starts=np.concatenate(([0], stops[:-1])),
        stops=stops,
        labels=np.zeros(len(ids), dtype=np.int64),  # unknown
        second=np.array(second, dtype=np.int32) if second else None,
        scored_from=None,
        digest="",
    )


def encode_documents(texts: list[str], encoder: Encoder, length: int) -> tuple[Tokens, Numbers]:
    """Encode texts to be scored by a language model; return the index of each example's text, too.

    A text follows an end token, as in training, so that its first token is predicted as well. A
    text of more than `length` tokens becomes several examples.
    """
    ids: list[list[int]] = []
    starts: list[int] = []
    stops: list[int] = []
    owners: list[int] = []
    begin = 0
    for owner, document in enumerate(encoder.running(texts)):
        ids.append([encoder.end, *document])
        for start in range(0, len(document), length):
            starts.append(begin + start)
            stops.append(begin + min(start + length, len(document)) + 1)
            owners.append(owner)
        begin += 1 + len(document)
    tokens = Tokens(
        ids=concatenate(ids),
        starts=np.array(starts, dtype=np.int64),
        stops=np.array(stops, dtype=np.int64),
        labels=None,
        second=None,
        scored_from=None,
        digest="",
    )
    return tokens, np.array(owners, dtype=np.int64)
