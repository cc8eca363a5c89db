"""The order of examples, a pure function of the seed, and their collation into batches."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frostlab.data.eeg.recordings import Material, Windows, text_of
from frostlab.data.tokens import Tokens
from frostlab.devices import prepares_kernels, to_device
from frostlab.models.attention import Packing

IGNORED = -100  # the target of a position that is not scored
_POOL = 50  # batches per pool; the examples of a pool are sorted by length
Rows = NDArray[np.int64]  # indices of examples
Order = list[Rows]  # the example indices of each batch
Split = Tokens | Windows


def epoch_order(
    lengths: NDArray[np.int64], batch: int, seed: int, epoch: int, bucket: bool
) -> Order:
    """Return the examples of every step of an epoch; the last step may have fewer.

    With `bucket`, examples of similar length share a batch: each pool of shuffled examples is
    sorted by length and split into batches, and the batches are shuffled again.
    """
    draw = np.random.default_rng([seed, epoch])
    rows = draw.permutation(len(lengths))
    if bucket:
        pools = [rows[i : i + _POOL * batch] for i in range(0, len(rows), _POOL * batch)]
        rows = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = in_batches(rows, batch)
    if bucket:
        batches = [batches[i] for i in draw.permutation(len(batches))]
    return batches


def evaluation_order(lengths: NDArray[np.int64], batch: int) -> Order:
    """Return batches of all examples, longest first, so that memory runs out at once if at all."""
    return in_batches(np.argsort(-lengths, kind="stable"), batch)


def in_batches(rows: Rows, batch: int) -> Order:
    """Split rows into batches and keep their order."""
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def scored_counts(tokens: Tokens) -> NDArray[np.int64]:
    """Return the number of scored targets of each example."""
    if tokens.labels is not None:
        return np.ones(len(tokens), np.int64)
    first = 1 if tokens.scored_from is None else np.maximum(tokens.scored_from, 1)
    return np.maximum(tokens.lengths - first, 0)


def row_lengths(tokens: Tokens, rows: Rows | slice = slice(None)) -> NDArray[np.int64]:
    """Return the input length of each example; a language model's last token is only a target."""
    lengths = tokens.stops[rows] - tokens.starts[rows]
    return lengths if tokens.labels is not None else lengths - 1


def padding_limit(tokens: Tokens, device: torch.device) -> int | None:
    """Return the largest width `collate` may pad to; None: each batch's longest example."""
    return int(tokens.lengths.max()) if prepares_kernels(device) else None


def order_digest(order: Order, before: str = "") -> str:
    """Return a digest of an epoch's order, chained to the digest of earlier epochs."""
    digest = hashlib.sha256(before.encode())
    for rows in order:
        digest.update(len(rows).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
    return digest.hexdigest()[:16]


def micro_batches(rows: Rows, rank: int, size: int, count: int) -> Order:
    """Split a process's share of a step into micro-batches, the same number in each process.

    A micro-batch may be empty: `collate` then makes a placeholder example that is not scored.
    """
    longest = -(-len(rows) // size)
    own_rows = rows[rank::size]
    width = -(-longest // min(count, longest))
    return [own_rows[i : i + width] for i in range(0, longest, width)]


@dataclass(frozen=True)
class Batch:
    """Examples as tensors, with the numbers of real tokens and scored targets."""

    inputs: dict[str, Tensor]  # the model's arguments
    targets: Tensor  # (B,) classes, (B, T) next tokens (IGNORED is not scored) or envelopes
    examples: int
    tokens: int  # or EEG samples, without padding
    scored: int  # scored targets
    packing: Packing | None = None  # where each example lies in a packed row

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, without waiting for the copy."""
        if self.targets.device.type == device.type:
            return self
        return self.with_tensors([to_device(tensor, device) for tensor in self.tensors()])

    @property
    def padded_tokens(self) -> int:
        """Return the number of tokens or samples, padding included."""
        return next(iter(self.inputs.values())).shape[:2].numel()

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the batch, in a fixed order."""
        packing = self.packing
        places = [] if packing is None else [packing.bounds, packing.owners, packing.places]
        return [*self.inputs.values(), self.targets, *places]

    def with_tensors(self, tensors: list[Tensor]) -> "Batch":
        """Return the batch with other tensors, in the order of `tensors`."""
        inputs = dict(zip(self.inputs, tensors, strict=False))
        targets, *places = tensors[len(inputs) :]
        packing = self.packing
        if packing is not None:
            bounds, owners, in_own = places
            packing = replace(packing, bounds=bounds, owners=owners, places=in_own)
        return replace(self, inputs=inputs, targets=targets, packing=packing)


def padded_width(longest: int, limit: int) -> int:
    """Round a width up to one of eight widths per octave, at most `limit`.

    Preparing a GPU's kernels for a new width takes at least a tenth of a second.
    """
    step = max(8, 1 << max(0, (longest - 1).bit_length() - 4))
    return max(longest, min(limit, -(-longest // step) * step))


def collate(
    tokens: Tokens,
    rows: Rows,
    pad: int,
    *,
    types: bool = False,
    limit: int | None = None,
) -> Batch:
    """Pad examples to the longest of them, without a loop over examples.

    `types` adds token types, which mark the second text of a pair. `limit` allows more padding, up
    to that width, so that a device that prepares kernels for each width sees only a few. Without
    rows, the batch is one placeholder that is not scored, so that every process takes every step.
    """
    counts = bool(len(rows))
    rows = rows if counts else np.zeros(1, np.int64)
    language = tokens.labels is None
    starts, lengths = tokens.starts[rows], tokens.stops[rows] - tokens.starts[rows]
    width = max(int(lengths.max()), 2 if language else 1)  # at least one token to read
    if limit is not None:
        width = padded_width(width, limit)
    places = np.arange(width)
    real = places < lengths[:, None]  # (B, T)
    at = np.minimum(starts[:, None] + places, tokens.stops[rows][:, None] - 1)
    ids = np.where(real, tokens.ids[at], pad).astype(np.int64)
    if language:
        targets = np.where(real, ids, IGNORED)[:, 1:]
        if tokens.scored_from is not None:
            early = places[1:] < tokens.scored_from[rows][:, None]
            targets = np.where(early, IGNORED, targets)
        ids, real = ids[:, :-1], real[:, 1:]
    else:
        assert tokens.labels is not None
        targets = np.asarray(tokens.labels[rows])
    targets = targets if counts else np.full_like(targets, IGNORED)
    inputs: dict[str, Any] = {"input_ids": ids}
    if not (language or real.all()):  # a causal model never attends to trailing padding
        inputs["attention_mask"] = real.astype(np.int64)
    if types and tokens.second is not None:
        inputs["token_type_ids"] = (places >= tokens.second[rows][:, None]).astype(np.int64) * real
    return Batch(
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()},
        torch.from_numpy(np.ascontiguousarray(targets)),
        examples=len(rows) if counts else 0,
        tokens=int(real.sum()) if counts else 0,
        scored=int((targets != IGNORED).sum()),
    )


class Examples(Protocol):
    """The examples of a split for training and evaluation, indexed by rows from 0."""

    def __len__(self) -> int:
        """Return the number of examples in an epoch."""

    def epoch_order(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        """Return the examples of every step of an epoch."""

    def evaluation_order(self, batch: int) -> Order:
        """Return the examples of every batch of an evaluation."""

    def scored(self, rows: Rows) -> int:
        """Return the number of scored targets of these examples."""

    def tokens_read(self, rows: Rows) -> int:
        """Return the number of tokens or samples that the model reads in these examples."""

    def collate(self, rows: Rows) -> Batch:
        """Return examples as tensors; without rows, one placeholder that is not scored."""


@dataclass(frozen=True)
class TokenExamples:
    """Padded examples of token ids."""

    tokens: Tokens
    pad: int
    types: bool = False
    limit: int | None = None  # the largest padded width, as in `collate`

    def __len__(self) -> int:
        return len(self.tokens)

    def epoch_order(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        return epoch_order(self.tokens.lengths, batch, seed, epoch, bucket)

    def evaluation_order(self, batch: int) -> Order:
        return evaluation_order(self.tokens.lengths, batch)

    def scored(self, rows: Rows) -> int:
        return int(self._scored[rows].sum())

    def tokens_read(self, rows: Rows) -> int:
        return int(self._lengths[rows].sum())

    def collate(self, rows: Rows) -> Batch:
        return collate(self.tokens, rows, self.pad, types=self.types, limit=self.limit)

    @cached_property
    def _scored(self) -> NDArray[np.int64]:
        return scored_counts(self.tokens)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return row_lengths(self.tokens)


@dataclass(frozen=True)
class WindowExamples:
    """Windows of recordings: drawn at random for an epoch, on a grid for an evaluation."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def epoch_order(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        rows = self.windows.draw(seed, epoch)
        return in_batches(np.random.default_rng([seed, epoch]).permutation(rows), batch)

    def evaluation_order(self, batch: int) -> Order:
        return in_batches(self.windows.grid, batch)

    def scored(self, rows: Rows) -> int:
        return len(rows)

    def tokens_read(self, rows: Rows) -> int:
        return len(rows) * self.windows.length

    def collate(self, rows: Rows) -> Batch:
        count = len(rows)
        eeg, envelopes, subjects = self.windows.cut(rows if count else np.zeros(1, np.int64))
        return Batch(
            {"eeg": torch.from_numpy(eeg), "subject": torch.from_numpy(subjects)},
            torch.from_numpy(envelopes),
            examples=count,
            tokens=self.tokens_read(rows),
            scored=count,
        )


def token_examples(
    prepared: Material, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return a split of text; `types` is for models with token types."""
    assert isinstance(split, Tokens)
    return TokenExamples(split, text_of(prepared).pad, types, padding_limit(split, device))


def window_examples(
    prepared: Material, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return a split of recordings."""
    assert isinstance(split, Windows)
    return WindowExamples(split)
