"""The order of examples in an epoch, fixed by the seed, and their collation into padded batches."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frostlab.data.eeg.recordings import Windows
from frostlab.data.prepare import PreparedData, as_token_data
from frostlab.data.tokens import Tokens
from frostlab.devices import prepares_kernels, to_device
from frostlab.models.attention import Packing

# The target of a position that the loss leaves out. All other targets of a text are scored targets;
# for EEG, each window counts as one scored target.
IGNORED = -100
_POOL = 50  # batches per pool; `epoch_order` sorts the examples of a pool by length
Rows = NDArray[np.int64]  # indices of examples; the index of an EEG window is its first sample
Order = list[Rows]  # the rows of each batch
Split = Tokens | Windows


def epoch_order(
    lengths: NDArray[np.int64], batch: int, seed: int, epoch: int, bucket: bool
) -> Order:
    """Return the shuffled examples of each step of an epoch; one step may have fewer than `batch`.

    With `bucket`, examples of similar length share a batch: each pool of shuffled examples is
    sorted by length and split into batches, and the batches are shuffled again.
    """
    generator = np.random.default_rng([seed, epoch])
    rows = generator.permutation(len(lengths))
    if bucket:
        pools = [rows[i : i + _POOL * batch] for i in range(0, len(rows), _POOL * batch)]
        rows = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = in_batches(rows, batch)
    if bucket:
        batches = [batches[i] for i in generator.permutation(len(batches))]
    return batches


def evaluation_order(lengths: NDArray[np.int64], batch: int) -> Order:
    """Return batches of all examples, longest first: if memory runs out, it does so at once."""
    return in_batches(np.argsort(-lengths, kind="stable"), batch)


def full_batches(lengths: NDArray[np.int64], batch: int, limit: int | None) -> Order:
    """Return batches of all examples, longest first, none with more tokens than the first batch.

    The first batch has the `batch` longest examples; batches of shorter examples have more. The
    tokens include padding; with `limit`, batches are padded to `padded_width(longest, limit)`.
    """
    rows = np.argsort(-lengths, kind="stable")
    batches: Order = []
    first = tokens = 0
    while first < len(rows):
        longest = max(int(lengths[rows[first]]), 1)
        width = longest if limit is None else padded_width(longest, limit)
        tokens = tokens or batch * width  # of the first batch
        batches.append(rows[first : first + tokens // width])
        first += tokens // width
    return batches


def in_batches(rows: Rows, batch: int) -> Order:
    """Split rows into consecutive batches."""
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def scored_counts(tokens: Tokens) -> NDArray[np.int64]:
    """Return the number of scored targets of each example."""
    if tokens.labels is not None:
        return np.ones(len(tokens), np.int64)
    # the first token is never predicted, so scoring starts at token 1 or later
    first = 1 if tokens.scored_from is None else np.maximum(tokens.scored_from, 1)
    return np.maximum(tokens.lengths - first, 0)


def row_lengths(tokens: Tokens, rows: Rows | slice = slice(None)) -> NDArray[np.int64]:
    """Return the input length of each example; a language model's last token is only a target."""
    lengths = tokens.stops[rows] - tokens.starts[rows]
    return lengths if tokens.labels is not None else lengths - 1


def padding_limit(tokens: Tokens, device: torch.device) -> int | None:
    """Return the `limit` for `collate`.

    On CUDA, this is the longest example's length, so that batches have few different widths; on
    other devices it is None, and each batch is padded to its own longest example.
    """
    return int(tokens.lengths.max()) if prepares_kernels(device) else None


def order_digest(before: str, rows: Rows) -> str:
    """Return a digest of the examples of all steps up to this one, in order.

    `before` is the digest up to the previous step. `rows` has this step's examples in all
    processes, so the digest does not depend on how a batch is divided among them.
    """
    digest = hashlib.sha256(before.encode())
    digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
    return digest.hexdigest()[:16]


def micro_batches(rows: Rows, rank: int, size: int, count: int) -> Order:
    """Return the micro-batches of process `rank` of `size` processes, for the examples of a step.

    Every process gets the same number of micro-batches, at most `count`. A micro-batch may be
    empty: `collate` then makes a placeholder example that is not scored.
    """
    longest = -(-len(rows) // size)
    own_rows = rows[rank::size]
    width = -(-longest // min(count, longest))
    return [own_rows[i : i + width] for i in range(0, longest, width)]


@dataclass(frozen=True)
class Batch:
    """Examples as tensors, with the numbers of real tokens and scored targets."""

    inputs: dict[str, Tensor]  # the model's arguments
    targets: Tensor  # (B,) classes, or (B, T): next tokens, some of them IGNORED, or envelopes
    examples: int
    tokens: int  # tokens or EEG samples, without padding
    scored: int  # number of scored targets; for EEG, number of windows
    packing: Packing | None = None  # positions of the examples in a packed row; None: not packed

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
        packed = [] if packing is None else [packing.bounds, packing.owners, packing.places]
        return [*self.inputs.values(), self.targets, *packed]

    def with_tensors(self, tensors: list[Tensor]) -> "Batch":
        """Return a copy of the batch with new tensors, given in the order of `self.tensors()`."""
        inputs = dict(zip(self.inputs, tensors, strict=False))
        targets, *packed = tensors[len(inputs) :]
        packing = self.packing
        if packing is not None:
            bounds, owners, places = packed
            packing = replace(packing, bounds=bounds, owners=owners, places=places)
        return replace(self, inputs=inputs, targets=targets, packing=packing)


def padded_width(longest: int, limit: int) -> int:
    """Round `longest` up, but not above `limit`, so that few different widths occur.

    There are at most eight widths between two powers of two. Few widths save time, because a GPU
    takes at least a tenth of a second to prepare its kernels for a new width.
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
    width: int | None = None,
) -> Batch:
    """Return examples as tensors, padded to `width` tokens, or else to the longest of them.

    With `limit` and without `width`, they are padded to `padded_width(longest, limit)` tokens. For
    a language model, these widths count the last token, which is only a target, so the tensors have
    one column less. `types` adds token types, which mark the second text of a pair. Without rows,
    the batch is one placeholder that is not scored, so that a process without examples still takes
    part in the step.
    """
    has_rows = bool(len(rows))
    rows = rows if has_rows else np.zeros(1, np.int64)
    language = tokens.labels is None
    starts, lengths = tokens.starts[rows], tokens.stops[rows] - tokens.starts[rows]
    # a language model reads all tokens but the last, and must read at least one
    longest = max(int(lengths.max()), 2 if language else 1)
    if width is None:
        width = longest if limit is None else padded_width(longest, limit)
    places = np.arange(width)
    real = places < lengths[:, None]  # (B, T)
    token_indices = np.minimum(starts[:, None] + places, tokens.stops[rows][:, None] - 1)
    ids = np.where(real, tokens.ids[token_indices], pad).astype(np.int64)
    if language:
        targets = np.where(real, ids, IGNORED)[:, 1:]
        if tokens.scored_from is not None:
            early = places[1:] < tokens.scored_from[rows][:, None]
            targets = np.where(early, IGNORED, targets)
        ids, real = ids[:, :-1], real[:, 1:]
    else:
        assert tokens.labels is not None
        targets = np.asarray(tokens.labels[rows])
    targets = targets if has_rows else np.full_like(targets, IGNORED)
    inputs: dict[str, Any] = {"input_ids": ids}
    if not (language or real.all()):  # a causal model never attends to trailing padding
        inputs["attention_mask"] = real.astype(np.int64)
    if types and tokens.second is not None:
        inputs["token_type_ids"] = (places >= tokens.second[rows][:, None]).astype(np.int64) * real
    return Batch(
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()},
        torch.from_numpy(np.ascontiguousarray(targets)),
        examples=len(rows) if has_rows else 0,
        tokens=int(real.sum()) if has_rows else 0,
        scored=int((targets != IGNORED).sum()),
    )


class Examples(Protocol):
    """The examples of a split; a row is a text's index, or the first sample of an EEG window."""

    def __len__(self) -> int:
        """Return the number of examples in an epoch."""

    def epoch_order(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        """Return the rows of each step of an epoch."""

    def evaluation_order(self, batch: int) -> Order:
        """Return the rows of each batch of an evaluation; the first has the `batch` longest."""

    def scored(self, rows: Rows) -> int:
        """Return the number of scored targets of these examples."""

    def tokens_read(self, rows: Rows) -> int:
        """Return the number of tokens or samples that the model reads in these examples."""

    def collate(self, rows: Rows) -> Batch:
        """Return examples as tensors; without rows, one placeholder that is not scored."""


@dataclass(frozen=True)
class TokenExamples:
    """Examples of token ids, padded by `collate`."""

    tokens: Tokens
    pad: int  # token id of padding
    types: bool = False  # whether to add token types
    limit: int | None = None  # see `collate`
    width: int | None = None  # see `collate`
    # if `width` is None, a batch is padded to the smallest of these widths that holds it; if none
    # does, `limit` decides
    widths: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def epoch_order(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        return epoch_order(self.tokens.lengths, batch, seed, epoch, bucket)

    def evaluation_order(self, batch: int) -> Order:
        return full_batches(self.tokens.lengths, batch, self.limit)

    def scored(self, rows: Rows) -> int:
        return int(self._scored[rows].sum())

    def tokens_read(self, rows: Rows) -> int:
        return int(self._lengths[rows].sum())

    def collate(self, rows: Rows) -> Batch:
        width = self.width
        if width is None and self.widths and len(rows):
            longest = int(self.tokens.lengths[rows].max())
            width = next((width for width in self.widths if width >= longest), None)
        return collate(self.tokens, rows, self.pad, types=self.types, limit=self.limit, width=width)

    @cached_property
    def _scored(self) -> NDArray[np.int64]:
        return scored_counts(self.tokens)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return row_lengths(self.tokens)


@dataclass(frozen=True)
class WindowExamples:
    """Windows of EEG: at random or regular starts in training, on a fixed grid in evaluations."""

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
    prepared: PreparedData, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return a text split as padded examples; `types` adds token types."""
    assert isinstance(split, Tokens)
    return TokenExamples(split, as_token_data(prepared).pad, types, padding_limit(split, device))


def window_examples(
    prepared: PreparedData, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """Return an EEG split as examples; called like `token_examples`, but only `split` is used."""
    assert isinstance(split, Windows)
    return WindowExamples(split)
