"""Turns the examples of a step into the batches that this process computes."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from frostlab.data.eeg.recordings import Material, text_of
from frostlab.recipe.settings import Train
from frostlab.training.batches.batch import Batch, Order, examples_of, row_lengths, shared
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.batches.prefix import Prefix
from frostlab.training.distributed import World


class Feed:
    """The training split, in the order and the form a recipe asks for."""

    def __init__(
        self,
        prepared: Material,
        train: Train,
        seed: int,
        world: World,
        device: torch.device,
        types: bool,
        prefix: Prefix | None = None,
    ) -> None:
        self.prepared, self.types = prepared, types
        self.examples = examples_of(prepared, prepared.splits["train"], device, types)
        self.train, self.seed, self.world, self.prefix = train, seed, world, prefix
        self.packs = train.batching == "packed" or prefix is not None
        self.shapes = None
        if self.packs and device.type == "cuda":  # a GPU is prepared for few shapes only
            parts = [part for rows in self.order(0) for part in self._shares(rows)]
            self.shapes = shapes_for(text_of(prepared).splits["train"], parts)

    def order(self, epoch: int) -> Order:
        """The examples of every step of an epoch."""
        bucket = self.train.batching == "bucketed"
        return self.examples.epoch(self.train.batch, self.seed, epoch, bucket)

    def __call__(self, rows: NDArray[np.int64]) -> list[Batch]:
        """This process's share of a step, in parts whose gradients are added up."""
        shares = self._shares(rows)
        if not self.packs:
            return [self.examples.collate(part) for part in shares]
        tokens, width = text_of(self.prepared).splits["train"], None
        if self.shapes is not None:
            most = max(int(row_lengths(tokens, part).sum()) for part in shares)
            width = self.shapes.width(most)
        return [self._packed(part, width) for part in shares]

    def _packed(self, rows: NDArray[np.int64], width: int | None) -> Batch:
        prefix, text = self.prefix, text_of(self.prepared)
        table = None if prefix is None else prefix.starts
        batch = pack(text.splits["train"], rows, text.pad, types=self.types, shapes=self.shapes,
                     width=width, table=table)  # fmt: skip
        if prefix is None or prefix.facts["where"] == "memory":
            return batch
        read = prefix.table.index_select(0, batch.inputs["cached"].flatten()).unsqueeze(0)
        return replace(batch, inputs=batch.inputs | {"cached": read})

    def _shares(self, rows: NDArray[np.int64]) -> Order:
        return shared(rows, self.world.rank, self.world.size, self.train.accumulate)
