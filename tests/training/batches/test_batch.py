"""Batches: every example once, the same for everyone, nothing lost in padding."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostlab.data.tokens import Tokens
from frostlab.training.batches.batch import (
    IGNORED,
    collate,
    epoch_order,
    evaluation_order,
    full_batches,
    micro_batches,
    order_digest,
    padded_width,
    scored_counts,
)


def tokens_of(
    examples: list[list[int]],
    labels: list[int] | None = None,
    second: list[int] | None = None,
    scored_from: list[int] | None = None,
) -> Tokens:
    lengths = np.array([len(e) for e in examples])
    stops = np.cumsum(lengths)
    return Tokens(
        ids=np.array([i for e in examples for i in e], np.uint16),
        starts=stops - lengths,
        stops=stops,
        labels=None if labels is None else np.array(labels),
        second=None if second is None else np.array(second, np.int32),
        scored_from=None if scored_from is None else np.array(scored_from, np.int32),
        digest="",
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=300),
    st.integers(1, 16),
    st.integers(0, 5),
    st.booleans(),
)
def test_an_epoch_is_every_example_once(
    lengths: list[int], batch: int, epoch: int, bucket: bool
) -> None:
    order = epoch_order(np.array(lengths), batch, 3, epoch, bucket)
    assert sorted(np.concatenate(order)) == list(range(len(lengths)))
    assert len(order) == -(-len(lengths) // batch)
    assert sorted(map(len, order))[1:] == [batch] * (len(order) - 1)


def test_orders_follow_seed_and_epoch_alone() -> None:
    lengths = np.arange(1, 100)

    def digest(order: list[np.ndarray], before: str = "") -> str:
        for rows in order:
            before = order_digest(before, rows)
        return before

    def made(seed: int, epoch: int, bucket: bool = True) -> str:
        return digest(epoch_order(lengths, 8, seed, epoch, bucket))

    assert made(1, 0) == made(1, 0)
    assert len({made(1, 0), made(2, 0), made(1, 1), made(1, 0, bucket=False)}) == 4
    assert digest([np.array([1, 2])]) != digest([np.array([1]), np.array([2])])
    assert digest([np.array([1])], "before") != digest([np.array([1])])


def test_bucketing_saves_padding() -> None:
    lengths = np.random.default_rng(0).integers(4, 128, 5000)

    def share(bucket: bool) -> float:
        order = epoch_order(lengths, 32, 0, 0, bucket)
        return 1 - lengths.sum() / sum(lengths[rows].max() * len(rows) for rows in order)

    assert share(True) < 0.05 < 0.4 < share(False)


def test_evaluation_takes_the_longest_first() -> None:
    order = evaluation_order(np.array([3, 9, 1, 9]), 3)
    assert [rows.tolist() for rows in order] == [[1, 3, 0], [2]]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=80), st.integers(1, 9), st.booleans())
def test_full_batches_have_about_as_many_tokens_as_the_first(
    values: list[int], batch: int, rounds: bool
) -> None:
    lengths, limit = np.array(values), max(values) if rounds else None
    order = full_batches(lengths, batch, limit)
    assert sorted(np.concatenate(order)) == list(range(len(values)))
    assert order[0].tolist() == evaluation_order(lengths, batch)[0].tolist()
    assert len(order) <= len(evaluation_order(lengths, batch))
    flat = lengths[np.concatenate(order)]
    assert (np.diff(flat) <= 0).all(), "longest first"

    def size(rows: Any) -> int:
        longest = int(lengths[rows].max())
        return len(rows) * (longest if limit is None else padded_width(longest, limit))

    most = batch * max(values)
    assert all(
        size(rows) <= most < size(rows) // len(rows) * (len(rows) + 1) for rows in order[:-1]
    )
    assert size(order[-1]) <= most


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_processes_share_a_batch_in_equally_many_parts(count: int, size: int, parts: int) -> None:
    rows = np.arange(count)
    shares = [micro_batches(rows, rank, size, parts) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) <= parts
    assert sorted(np.concatenate([r for share in shares for r in share])) == list(range(count))


def test_classification_is_filled_up_and_masked() -> None:
    tokens = tokens_of([[5, 6, 7], [8], [9, 4]], labels=[1, 0, 2])
    batch = collate(tokens, np.array([2, 0]), pad=3)
    assert batch.inputs["input_ids"].tolist() == [[9, 4, 3], [5, 6, 7]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.targets.tolist() == [2, 1]
    assert (batch.examples, batch.tokens, batch.scored) == (2, 5, 2)
    assert set(collate(tokens, np.array([1]), pad=3).inputs) == {"input_ids"}, "nothing to mask"


def test_pairs_tell_their_texts_apart_for_models_that_ask() -> None:
    tokens = tokens_of([[5, 6, 7], [8, 9]], labels=[1, 0], second=[2, 1])
    batch = collate(tokens, np.array([0, 1]), pad=0, types=True)
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert "token_type_ids" not in collate(tokens, np.array([0, 1]), pad=0).inputs


def test_language_predicts_the_next_token() -> None:
    tokens = tokens_of([[5, 6, 7, 8], [9, 4]], scored_from=[2, 0])
    batch = collate(tokens, np.array([0, 1]), pad=0)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [9, 4, 0]]
    assert batch.targets.tolist() == [[IGNORED, 7, 8], [4, IGNORED, IGNORED]]
    assert (batch.scored, batch.tokens) == (3, 4)
    assert scored_counts(tokens).tolist() == [2, 1]
    assert scored_counts(tokens_of([[1, 2, 3]])).tolist() == [2]


@given(st.integers(1, 4096), st.integers(0, 600))
def test_few_widths_and_little_more_padding(longest: int, more: int) -> None:
    most = longest + more
    width = padded_width(longest, most)
    assert longest <= width <= most
    assert width - longest < max(8, longest / 8)
    assert width % 8 == 0 or width == most or longest == width


def test_widths_are_few() -> None:
    assert len({padded_width(n, 512) for n in range(1, 513)}) == 32
    tokens = tokens_of([[1] * 9, [2] * 30], labels=[0, 1])
    assert collate(tokens, np.array([0]), 0, limit=30).inputs["input_ids"].shape == (1, 16)
    assert collate(tokens, np.array([0, 1]), 0, limit=30).inputs["input_ids"].shape == (2, 30)
    assert collate(tokens, np.array([0]), 0).inputs["input_ids"].shape == (1, 9)
    fixed = collate(tokens, np.array([0]), 0, width=40)
    assert fixed.inputs["input_ids"].tolist() == [[1] * 9 + [0] * 31]
    assert fixed.inputs["attention_mask"].sum() == fixed.tokens == 9


@given(st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=9), min_size=1, max_size=9))
def test_language_equals_a_naive_loop(examples: list[list[int]]) -> None:
    batch = collate(tokens_of(examples), np.arange(len(examples)), pad=0)
    for i, example in enumerate(examples):
        length = len(example) - 1
        assert batch.inputs["input_ids"][i, :length].tolist() == example[:-1]
        assert batch.targets[i, :length].tolist() == example[1:]
        assert bool((batch.targets[i, length:] == IGNORED).all())


@pytest.mark.parametrize("labels", [[1, 0], None])
def test_no_rows_make_an_example_that_counts_for_nothing(labels: list[int] | None) -> None:
    tokens = tokens_of([[5, 6, 7], [8, 9]], labels=labels)
    batch = collate(tokens, np.array([], np.int64), pad=0)
    assert (batch.examples, batch.tokens, batch.scored) == (0, 0, 0)
    assert len(batch.inputs["input_ids"]) == 1
    assert torch.all(batch.targets == IGNORED)
