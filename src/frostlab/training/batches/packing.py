"""Packing: a micro-batch's examples one after another in one row, padded if `Shapes` are given."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frostlab.data.tokens import Tokens
from frostlab.models.attention import Packing
from frostlab.training.batches.batch import IGNORED, Batch, Order, row_lengths

_GRAIN = 64  # widths are multiples of this number of tokens
_WIDTHS = 8  # maximum number of different widths


@dataclass(frozen=True)
class Shapes:
    """The shapes that packed rows may have: few, because a GPU prepares kernels for each shape."""

    widths: tuple[int, ...]  # tokens per row, ascending
    examples: int  # sequences per row; a row with fewer examples gets empty sequences
    longest: int  # tokens of the longest example, rounded up to a multiple of _GRAIN

    def width(self, tokens: int) -> int:
        """Return the smallest width that holds the tokens; if none does, round their number up."""
        return next((w for w in self.widths if w >= tokens), int(_round_up(tokens)))


def shapes_for(tokens: Tokens, parts: Order) -> Shapes:
    """Return the shapes, with at most _WIDTHS widths, that pad these micro-batches the least."""
    lengths = row_lengths(tokens)
    sums = np.array([int(lengths[rows].sum()) for rows in parts])
    needed, counts = np.unique(_round_up(sums), return_counts=True)
    examples = max(len(rows) for rows in parts)
    widths = least_padding(needed, counts, _WIDTHS)
    return Shapes(widths, examples, int(_round_up(lengths.max())))


def _round_up(count: Any) -> Any:
    return -(-count // _GRAIN) * _GRAIN


def least_padding(
    needed: NDArray[np.int64], counts: NDArray[np.int64], most: int, cost: float = 0.0
) -> tuple[int, ...]:
    """Choose at most `most` of the needed widths, by dynamic programming, to pad rows the least.

    `needed` holds widths in ascending order, and `counts` the number of rows that need each width.
    Every chosen width counts as much as `cost` padding tokens.
    """
    row_sums = np.concatenate([[0], np.cumsum(counts)])
    token_sums = np.concatenate([[0], np.cumsum(counts * needed)])
    last = np.arange(1, len(needed) + 1)
    # waste[i, j]: padding tokens if rows of widths i…j are all padded to width j
    waste = (row_sums[last] - row_sums[:, None]) * needed
    waste -= token_sums[last] - token_sums[:, None]
    waste = np.where(np.arange(len(needed) + 1)[:, None] < last, waste, np.inf)
    # best[j]: the least padding of the rows that need one of the j smallest widths, if at most n
    # widths are chosen; n is the number of passes of the loop so far
    best = np.concatenate([[0.0], np.full(len(needed), np.inf)])
    choices, costs = [], []
    for number in range(1, min(most, len(needed)) + 1):
        total = best[:, None] + waste
        choices.append(total.argmin(0))
        best = np.concatenate([[0.0], total.min(0)])
        costs.append(best[-1] + cost * number)
    widths, end = [], len(needed)  # walk back from the largest width
    for choice in reversed(choices[: int(np.argmin(costs)) + 1]):
        if end:
            widths.append(int(needed[end - 1]))
            end = int(choice[end - 1])
    return tuple(sorted(widths))


def pack(
    tokens: Tokens,
    rows: NDArray[np.int64],
    pad: int,
    *,
    types: bool = False,
    shapes: Shapes | None = None,
    width: int | None = None,
    cached_starts: NDArray[np.int64] | None = None,
) -> Batch:
    """Concatenate examples into one row, padded to `width`, else by `shapes`, else not padded.

    `cached_starts` holds the index of each example's first token in a prefix's table (see
    `frostlab.training.batches.prefix`); with it, the batch has an input `cached`, the table index
    of each token. Without examples, the row is padding that is not scored, so that a process
    without examples still takes part in the step.
    """
    lengths = row_lengths(tokens, rows)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(rows) else 0
    if width is None:
        width = max(total, 1) if shapes is None else shapes.width(total)
    examples = max(len(rows), 1) if shapes is None else shapes.examples
    longest = int(lengths.max(initial=1))
    # attention treats the padding as one more sequence, so `longest` must cover the padding, too
    if shapes is not None:  # double `longest`, so that few different values occur
        longest = shapes.longest
        while longest < width - total:
            longest *= 2
    longest = max(longest, width - total)

    owner = np.repeat(np.arange(len(rows)), lengths)  # the example of each real token
    place = np.arange(total) - np.repeat(ends - lengths, lengths)  # its position in the example
    token_indices = np.repeat(tokens.starts[rows], lengths) + place
    ids = np.full(width, pad, np.int64)
    owners, places = np.full(width, examples, np.int64), np.zeros(width, np.int64)
    ids[:total], owners[:total], places[:total] = np.take(tokens.ids, token_indices), owner, place
    bounds = np.full(examples + 2, total, np.int32)
    bounds[0], bounds[1 : len(rows) + 1], bounds[-1] = 0, ends, width

    if tokens.labels is not None:
        targets = np.full(examples, IGNORED, tokens.labels.dtype)
        targets[: len(rows)] = tokens.labels[rows]
    else:
        targets = np.full(width, IGNORED, np.int64)
        targets[:total] = np.take(tokens.ids, token_indices + 1)
        if tokens.scored_from is not None:
            targets[:total][place + 1 < tokens.scored_from[rows][owner]] = IGNORED
    # Numpy's `[None]` would give the new axis the stride 0. A graph's input has another stride, and
    # the compiler treats tensors with other strides as a new case.
    inputs = {"input_ids": torch.from_numpy(ids)[None]}
    if types and tokens.second is not None:
        second = np.zeros((1, width), np.int64)
        second[0, :total] = place >= tokens.second[rows][owner]
        inputs["token_type_ids"] = torch.from_numpy(second)
    if cached_starts is not None:
        cached = np.zeros((1, width), np.int64)
        cached[0, :total] = np.repeat(cached_starts[rows], lengths) + place
        inputs["cached"] = torch.from_numpy(cached)
    return Batch(
        inputs,
        torch.from_numpy(targets) if tokens.labels is not None else torch.from_numpy(targets)[None],
        examples=len(rows),
        tokens=total,
        scored=int((targets != IGNORED).sum()),
        packing=Packing(
            torch.from_numpy(bounds), torch.from_numpy(owners), torch.from_numpy(places), longest
        ),
    )
