"""The feed: the micro-batches of each training step, whose examples are padded or packed.

With a prefix cache, batches also hold the cached outputs of the frozen lowest layers, or their
indices in the cache.
"""

from dataclasses import replace

import numpy as np

from frostlab.devices import prepares_kernels
from frostlab.recipe.settings import Train
from frostlab.training.batches.batch import (
    Batch,
    Examples,
    Order,
    Rows,
    TokenExamples,
    micro_batches,
    padded_width,
    row_lengths,
)
from frostlab.training.batches.packing import least_padding, pack, shapes_for
from frostlab.training.batches.prefix import Prefix
from frostlab.training.distributed import Compute


def packs_examples(train: Train) -> bool:
    """Return whether a recipe packs several examples into one row, in all or some of its stages.

    With `train.cache_prefix`, examples are packed in each stage that uses the cache, whatever
    `train.batching` is.
    """
    return train.batching == "packed" or train.cache_prefix is not None


def fixed_width(train: Train, longest: int) -> int | None:
    """Return `longest`, the longest example's width, if all batches have it; None if not."""
    return longest if train.batching == "fixed" else None


class Feed:
    """This process's training batches, in the order and batching mode that a recipe sets."""

    def __init__(
        self,
        examples: Examples,
        train: Train,
        seed: int,
        compute: Compute,
        prefix: Prefix | None = None,
    ) -> None:
        self.examples, self.train, self.seed, self.prefix = examples, train, seed, prefix
        self._world = compute.world
        self.packs = train.batching == "packed" or prefix is not None
        self.shapes = None
        if self.packs and prepares_kernels(compute.device):  # use few shapes: a new one is slow
            parts = [part for rows in self.order(0) for part in self._micro_batches(rows)]
            self.shapes = shapes_for(self._text.tokens, parts)

    def use_few_widths(self, steps: int, cost: float) -> None:
        """Pad batches to fewer widths if that saves time, because the first use of a width is slow.

        The first use of a width takes as long as training on `cost` tokens, padding included. The
        widths are chosen so that a stage of `steps` steps takes the least time, first uses
        included. This assumes that the batches of every epoch are like those of the first epoch.
        """
        examples = self.examples
        if self.packs or not isinstance(examples, TokenExamples) or examples.limit is None:
            return
        if examples.width is not None:  # all batches have this width
            return
        lengths, order = examples.tokens.lengths, self.order(0)
        parts = [rows for all_rows in order for rows in self._micro_batches(all_rows) if len(rows)]
        needed, counts = np.unique(
            [padded_width(int(lengths[rows].max()), examples.limit) for rows in parts],
            return_counts=True,
        )
        epochs, rows_per_part = steps / len(order), sum(map(len, parts)) / len(parts)
        widths = least_padding(needed, counts, len(needed), cost / rows_per_part / epochs)
        self.examples = replace(examples, widths=widths)

    @property
    def number_of_shapes(self) -> int:
        """Return the number of shapes that batches are padded to; 1 if no shapes were chosen."""
        if self.shapes is not None:
            return len(self.shapes.widths)
        return max(1, len(getattr(self.examples, "widths", ())))

    @property
    def one_shape(self) -> bool:
        """Return whether the micro-batches of all steps and processes have the same shape.

        `train.batch` is a multiple of processes × micro-batches, so full batches divide evenly.
        """
        fixed = not isinstance(self.examples, TokenExamples) or self.examples.width is not None
        return (
            not self.packs and fixed and {len(rows) for rows in self.order(0)} == {self.train.batch}
        )

    def order(self, epoch: int) -> Order:
        """Return the examples of every step of an epoch."""
        train = self.train
        order = self.examples.epoch_order(
            train.batch, self.seed, epoch, train.batching == "bucketed"
        )
        return [rows for rows in order if len(rows) == train.batch] if train.drop_last else order

    def __call__(self, rows: Rows) -> list[Batch]:
        """Return this process's micro-batches of a step; the step accumulates their gradients."""
        parts = self._micro_batches(rows)
        if not self.packs:
            return [self.examples.collate(part) for part in parts]
        width = None
        if self.shapes is not None:  # one width for all micro-batches of the step
            longest = max(int(row_lengths(self._text.tokens, part).sum()) for part in parts)
            width = self.shapes.width(longest)
        return [self._packed(part, width) for part in parts]

    @property
    def _text(self) -> TokenExamples:
        assert isinstance(self.examples, TokenExamples), "only text is packed"
        return self.examples

    def _packed(self, rows: Rows, width: int | None) -> Batch:
        prefix, text = self.prefix, self._text
        starts = None if prefix is None else prefix.starts
        batch = pack(text.tokens, rows, text.pad, types=text.types, shapes=self.shapes,
                     width=width, cached_starts=starts)  # fmt: skip
        if prefix is None or prefix.facts["where"] == "memory":
            return batch
        # a table on disk stays on the CPU: look up its vectors here, not in the step
        cached = prefix.table.index_select(0, batch.inputs["cached"].flatten()).unsqueeze(0)
        return replace(batch, inputs=batch.inputs | {"cached": cached})

    def _micro_batches(self, rows: Rows) -> Order:
        return micro_batches(rows, self._world.rank, self._world.size, self.train.accumulate)
