"""Which examples each step sees, as pure functions of the seed, and the tensors they become."""

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

IGNORED = -100
_POOL = 50  # batches whose examples are sorted by length together
Order = list[NDArray[np.int64]]


def epoch_order(
    lengths: NDArray[np.int64], batch: int, seed: int, epoch: int, bucket: bool
) -> Order:
    """Return the examples of every step of an epoch; the last step may have fewer.

    With `bucket`, examples of similar length share a batch: a shuffled pool of batches is sorted
    by length and cut, and the batches are shuffled again.
    """
    draw = np.random.default_rng([seed, epoch])
    rows = draw.permutation(len(lengths))
    if bucket:
        pools = [rows[i : i + _POOL * batch] for i in range(0, len(rows), _POOL * batch)]
        rows = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    if bucket:
        batches = [batches[i] for i in draw.permutation(len(batches))]
    return batches


def evaluation_order(lengths: NDArray[np.int64], batch: int) -> Order:
    """Return every example once, longest first, so that running out of memory happens at once."""
    rows = np.argsort(-lengths, kind="stable")
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def scored_counts(tokens: Tokens) -> NDArray[np.int64]:
    """Return how many targets of each example are scored."""
    if tokens.labels is not None:
        return np.ones(len(tokens), np.int64)
    first = 1 if tokens.scored_from is None else np.maximum(tokens.scored_from, 1)
    return np.maximum(tokens.lengths - first, 0)


def padding_limit(tokens: Tokens, device: torch.device) -> int | None:
    """Return the width `collate` may pad to; None: only to the longest example of each batch."""
    return int(tokens.lengths.max()) if prepares_kernels(device) else None


def order_digest(order: Order, before: str = "") -> str:
    """Return a digest of the order of examples, chained to that of the epochs before."""
    digest = hashlib.sha256(before.encode())
    for rows in order:
        digest.update(len(rows).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
    return digest.hexdigest()[:16]


def micro_batches(rows: NDArray[np.int64], rank: int, size: int, count: int) -> Order:
    """Cut a process's part of a step's examples into as many micro-batches as every other's.

    A micro-batch may be empty: that process then computes nothing that counts.
    """
    longest = -(-len(rows) // size)
    own_rows = rows[rank::size]
    width = -(-longest // min(count, longest))
    return [own_rows[i : i + width] for i in range(0, longest, width)]


@dataclass(frozen=True)
class Batch:
    """Examples as tensors, and how much in them is real."""

    inputs: dict[str, Tensor]  # what the model is called with
    targets: Tensor  # (B,) classes, (B, T) next tokens (IGNORED is not scored) or envelopes
    examples: int
    tokens: int  # or samples, without padding
    scored: int  # targets that count
    packing: Packing | None = None  # where examples lie that share one row

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; the copy does not wait."""
        if self.targets.device.type == device.type:
            return self
        return self.with_tensors([to_device(tensor, device) for tensor in self.tensors()])

    @property
    def padded_tokens(self) -> int:
        """Return the places for tokens or samples, padding included."""
        return next(iter(self.inputs.values())).shape[:2].numel()

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the batch, always in the same order."""
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


def padded_width(longest: int, most: int) -> int:
    """Round a width up to one of eight an octave, but not past `most`.

    A GPU prepares its kernels for every new width, for a tenth of a second and more.
    """
    step = max(8, 1 << max(0, (longest - 1).bit_length() - 4))
    return max(longest, min(most, -(-longest // step) * step))


def collate(
    tokens: Tokens,
    rows: NDArray[np.int64],
    pad: int,
    *,
    types: bool = False,
    most: int | None = None,
) -> Batch:
    """Pad examples to the longest one, without a loop over examples.

    `types` marks the second text of a pair for models that have token types. `most` allows to pad
    further, to few different widths, for devices that prepare kernels for every width. No rows
    give one example that counts for nothing, so that every process takes every step.
    """
    counts = bool(len(rows))
    rows = rows if counts else np.zeros(1, np.int64)
    language = tokens.labels is None
    starts, lengths = tokens.starts[rows], tokens.stops[rows] - tokens.starts[rows]
    width = max(int(lengths.max()), 2 if language else 1)  # something to read, in any case
    if most is not None:
        width = padded_width(width, most)
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
    if not (language or real.all()):  # a causal model never sees what is filled up behind
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


Split = Tokens | Windows
Rows = NDArray[np.int64]


class Examples(Protocol):
    """A split as training and evaluation use it; examples are numbered rows."""

    def __len__(self) -> int:
        """Return how many examples an epoch has."""

    def epoch(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        """Return the examples of every step of an epoch."""

    def sweep(self, batch: int) -> Order:
        """Return every example once, in batches, for an evaluation."""

    def scored(self, rows: Rows) -> int:
        """Return how many targets of these examples are scored."""

    def tokens_read(self, rows: Rows) -> int:
        """Return how many tokens or samples of these examples the model reads."""

    def collate(self, rows: Rows) -> Batch:
        """Return examples as tensors; no rows give one example that counts for nothing."""


@dataclass(frozen=True)
class TokenExamples:
    """Examples of token ids, padded."""

    tokens: Tokens
    pad: int
    types: bool = False
    most: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def epoch(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        return epoch_order(self.tokens.lengths, batch, seed, epoch, bucket)

    def sweep(self, batch: int) -> Order:
        return evaluation_order(self.tokens.lengths, batch)

    def scored(self, rows: Rows) -> int:
        return int(self._scored[rows].sum())

    def tokens_read(self, rows: Rows) -> int:
        return int(self._read[rows].sum())

    def collate(self, rows: Rows) -> Batch:
        return collate(self.tokens, rows, self.pad, types=self.types, most=self.most)

    @cached_property
    def _scored(self) -> NDArray[np.int64]:
        return scored_counts(self.tokens)

    @cached_property
    def _read(self) -> NDArray[np.int64]:
        return row_lengths(self.tokens)


@dataclass(frozen=True)
class WindowExamples:
    """Windows of recordings: drawn at random for an epoch, on a grid for an evaluation."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def epoch(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        rows = self.windows.draw(seed, epoch)
        return in_batches(np.random.default_rng([seed, epoch]).permutation(rows), batch)

    def sweep(self, batch: int) -> Order:
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


def in_batches(rows: Rows, batch: int) -> Order:
    """Cut rows into batches, in the order they have."""
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def token_examples(
    prepared: Material, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return a split of text; `types` is for models that tell two texts apart."""
    assert isinstance(split, Tokens)
    return TokenExamples(split, text_of(prepared).pad, types, padding_limit(split, device))


def window_examples(
    prepared: Material, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return a split of recordings."""
    assert isinstance(split, Windows)
    return WindowExamples(split)


def row_lengths(tokens: Tokens, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.int64]:
    """How many tokens of examples are read: a language model's last is only a target."""
    lengths = tokens.stops[rows] - tokens.starts[rows]
    return lengths if tokens.labels is not None else lengths - 1
