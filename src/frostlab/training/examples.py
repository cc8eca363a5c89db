"""A split as training sees it, be it made of tokens or of signals: an order, and batches."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from frostlab.data import Material, Tokens, Windows, text_of
from frostlab.training.batching import (
    Batch,
    Order,
    collate,
    epoch_order,
    evaluation_order,
    scored_counts,
    widest,
)
from frostlab.training.packing import row_lengths

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
