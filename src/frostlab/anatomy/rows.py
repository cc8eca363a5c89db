"""Rows of a fused weight: which of them belong to which role.

Every layout met in practice repeats one pattern. Concatenated weights repeat it once,
per-head ones once a head, Falcon's grouped ones once a key/value head:

    concatenated   | q q q q | k k | v v |            period = all rows, 1 repeat
    interleaved    | q k v | q k v | q k v |          period = 3 head sizes, one repeat a head
    grouped        | q q k v | q q k v |              period = 4 head sizes, one repeat a kv head

so a set of rows is the spans it takes within one period, and every operation is a view of
(repeats, period) and a few slices: no index tensors, no loops over heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """The same spans within each of `repeats` equal periods along one axis of a tensor."""

    period: int
    repeats: int
    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, size: int) -> "Rows":
        """All of an axis."""
        return cls(size, 1, ((0, size),))

    @property
    def size(self) -> int:
        """How long the axis is that these rows are taken from."""
        return self.period * self.repeats

    def __len__(self) -> int:
        return self.repeats * sum(stop - start for start, stop in self.spans)

    def __or__(self, other: "Rows") -> "Rows":
        if (self.period, self.repeats) != (other.period, other.repeats):
            raise ValueError(f"rows of different patterns cannot be joined: {self} and {other}")
        return Rows(self.period, self.repeats, _merge([*self.spans, *other.spans]))

    def rest(self) -> "Rows":
        """The rows these leave over."""
        edges = [0, *(edge for span in self.spans for edge in span), self.period]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return Rows(self.period, self.repeats, tuple(p for p in pairs if p[0] < p[1]))

    def ranges(self) -> list[Span]:
        """The rows as plain (start, stop) pairs along the axis, neighbours merged."""
        starts = range(0, self.size, self.period)
        return list(_merge((s + a, s + b) for s in starts for a, b in self.spans))

    def pieces(self, tensor: Tensor, axis: int) -> list[Tensor]:
        """Views (…, repeats, span, …) of a tensor that has the whole axis, one a span."""
        folded = tensor.unflatten(axis, (self.repeats, self.period))
        return [folded.narrow(axis + 1, start, stop - start) for start, stop in self.spans]

    def take(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return these rows in order: a view where they are one run, else a copy."""
        pieces = self.pieces(tensor, axis)
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis + 1)
        return joined.flatten(axis, axis + 1)

    def put(self, tensor: Tensor, value: Tensor, axis: int = 0) -> None:
        """Write `value`, rows in order, into a tensor that has the whole axis."""
        width = len(self) // self.repeats
        folded = value.unflatten(axis, (self.repeats, width))
        sizes = [stop - start for start, stop in self.spans]
        for target, source in zip(
            self.pieces(tensor, axis), folded.split(sizes, axis + 1), strict=True
        ):
            target.copy_(source)


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def join(first: Rows, a: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """Interleave `a` (at rows `first`) and `b` (at the rest) into one tensor, in one copy."""
    rest = first.rest()
    sources: list[tuple[Span, Tensor]] = []
    for rows, tensor in ((first, a), (rest, b)):
        folded = tensor.unflatten(axis, (rows.repeats, len(rows) // rows.repeats))
        sizes = [stop - start for start, stop in rows.spans]
        sources += zip(rows.spans, folded.split(sizes, axis + 1), strict=True)
    ordered = [tensor for _, tensor in sorted(sources, key=lambda item: item[0])]
    return torch.cat(ordered, axis + 1).flatten(axis, axis + 1)
