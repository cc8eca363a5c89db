"""Which examples each step sees, as pure functions, and the tensors they become."""

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
from frostlab.models.attention import Packing

IGNORED = -100
_POOL = 50  # batches whose examples are sorted by length together
Order = list[NDArray[np.int64]]


def epoch_order(
    lengths: NDArray[np.int64], batch: int, seed: int, epoch: int, bucket: bool
) -> Order:
    """The examples of every step of an epoch, the last step's perhaps fewer.

    Bucketed, examples of like length share a batch: a shuffled pool of batches is sorted by
    length and cut, and the batches are shuffled again.
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
    """Every example once, longest first, so that running out of memory happens at once."""
    rows = np.argsort(-lengths, kind="stable")
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def scored_counts(tokens: Tokens) -> NDArray[np.int64]:
    """How many targets of each example count."""
    if tokens.labels is not None:
        return np.ones(len(tokens), np.int64)
    first = 1 if tokens.scored_from is None else np.maximum(tokens.scored_from, 1)
    return np.maximum(tokens.lengths - first, 0)


def widest(tokens: Tokens, device: torch.device) -> int | None:
    """What `collate` may fill up to on a device; None: only to the longest of each batch."""
    return int(tokens.lengths.max()) if device.type == "cuda" else None


def order_digest(order: Order, before: str = "") -> str:
    """A digest of the order of examples, chained to that of the epochs before."""
    made = hashlib.sha256(before.encode())
    for rows in order:
        made.update(len(rows).to_bytes(8, "little"))
        made.update(np.ascontiguousarray(rows, dtype="<i8").data)
    return made.hexdigest()[:16]


def shared(rows: NDArray[np.int64], rank: int, size: int, parts: int) -> Order:
    """One process's share of a step's examples, in as many parts as every other's.

    A part may be empty: that process then computes nothing that counts.
    """
    longest = -(-len(rows) // size)
    mine = rows[rank::size]
    width = -(-longest // min(parts, longest))
    return [mine[i : i + width] for i in range(0, longest, width)]


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
        """The same batch on a device; the copy does not wait."""
        if self.targets.device.type == device.type:
            return self
        return self.with_tensors([_moved(tensor, device) for tensor in self.tensors()])

    @property
    def held(self) -> int:
        """Places for tokens or samples, filler and all."""
        return next(iter(self.inputs.values())).shape[:2].numel()

    def tensors(self) -> list[Tensor]:
        """Everything in it that lies on a device, always in one order."""
        packing = self.packing
        places = [] if packing is None else [packing.bounds, packing.owners, packing.places]
        return [*self.inputs.values(), self.targets, *places]

    def with_tensors(self, tensors: list[Tensor]) -> "Batch":
        """The same batch with other tensors, in the order of `tensors`."""
        inputs = dict(zip(self.inputs, tensors, strict=False))
        targets, *places = tensors[len(inputs) :]
        packing = self.packing
        if packing is not None:
            bounds, owners, in_own = places
            packing = replace(packing, bounds=bounds, owners=owners, places=in_own)
        return replace(self, inputs=inputs, targets=targets, packing=packing)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


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
    """Fill up to the longest example, without a loop over examples.

    `types` tells the second text of a pair from the first, for models that want to know; `most`
    fills up a little further, to few different widths, for devices that want that.
    No rows make one example that counts for nothing, so that every process takes every step.
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
    """What the loop, an evaluation and a timing ask of a split; examples are told by numbers."""

    def __len__(self) -> int:
        """How many examples an epoch has."""

    def epoch(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        """The examples of every step of an epoch."""

    def sweep(self, batch: int) -> Order:
        """Every example once, for an evaluation."""

    def scored(self, rows: Rows) -> int:
        """How many targets of examples count."""

    def read(self, rows: Rows) -> int:
        """How many tokens or samples of examples are read."""

    def collate(self, rows: Rows) -> Batch:
        """Examples as tensors; no rows make one that counts for nothing."""


@dataclass(frozen=True)
class TokenExamples:
    """Tokens, padded."""

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

    def read(self, rows: Rows) -> int:
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
    """Windows of recordings; those of an epoch are drawn anew, those of a sweep lie on a grid."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def epoch(self, batch: int, seed: int, epoch: int, bucket: bool) -> Order:
        rows = self.windows.draw(seed, epoch)
        return cut(np.random.default_rng([seed, epoch]).permutation(rows), batch)

    def sweep(self, batch: int) -> Order:
        return cut(self.windows.grid, batch)

    def scored(self, rows: Rows) -> int:
        return len(rows)

    def read(self, rows: Rows) -> int:
        return len(rows) * self.windows.length

    def collate(self, rows: Rows) -> Batch:
        count = len(rows)
        eeg, envelopes, subjects = self.windows.cut(rows if count else np.zeros(1, np.int64))
        return Batch(
            {"eeg": torch.from_numpy(eeg), "subject": torch.from_numpy(subjects)},
            torch.from_numpy(envelopes),
            examples=count,
            tokens=self.read(rows),
            scored=count,
        )


def cut(rows: Rows, batch: int) -> Order:
    """Examples in the order they have, so many a step."""
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


def examples_of(
    prepared: Material, split: Split, device: torch.device, types: bool = False
) -> Examples:
    """A split in the form its kind of data has; `types` is for models that tell two texts apart."""
    if isinstance(split, Windows):
        return WindowExamples(split)
    return TokenExamples(split, text_of(prepared).pad, types, widest(split, device))


def row_lengths(tokens: Tokens, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.int64]:
    """How many tokens of examples are read: a language model's last is only a target."""
    lengths = tokens.stops[rows] - tokens.starts[rows]
    return lengths if tokens.labels is not None else lengths - 1
