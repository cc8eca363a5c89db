"""The parts of a model, and the parameters that hold them.

A fused parameter holds several roles in its rows, such as query, key and value. A part is a whole
parameter, or the rows of a fused parameter that have one role; users select and freeze parts. A
slot is a parameter of the unmodified model, that is, of the model before frostlab split parameters
and PEFT wrapped modules. Freezing may store the rows of a slot in several parameters, its pieces.
The rows of a fused weight are its output units, even if it is stored transposed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

ATTENTION_INPUTS = ("query", "key", "value")

Kind = Literal["weight", "bias"]
# fixed: never trained, because the architecture does not train it, or the model does not use it
State = Literal["trainable", "frozen", "fixed"]


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads and of key/value heads of an attention, and the rows per head."""

    count: int
    kv: int
    size: int  # 0: derived later from the shape of the weight

    def of(self, role: str) -> int:
        """Return the number of heads of a role: query, key or value."""
        return self.count if role == "query" else self.kv

    def rows(self, role: str) -> int:
        """Return the number of rows of a role: query, key or value."""
        return self.of(role) * self.size


Span = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight, such as the rows of one role, as spans within a repeated period.

    Every supported layout repeats one pattern: concatenated weights once, interleaved weights
    once per head, and Falcon's grouped weights once per key/value head:

        concatenated   | q q q q | k k | v v |       period = all rows, 1 repeat
        interleaved    | q k v | q k v | q k v |     period = 3 head sizes, 1 repeat per head
        grouped        | q q k v | q q k v |         period = 4 head sizes, 1 repeat per kv head

    Reading and writing therefore view the row axis as (repeats, period) and take one slice per
    span, without index tensors or loops over heads.
    """

    period: int  # rows in one repeat of the pattern
    repeats: int
    spans: tuple[Span, ...]  # within one period, in ascending order

    @classmethod
    def whole(cls, size: int) -> "Rows":
        """Return all rows of an axis of this size."""
        return cls(size, 1, ((0, size),))

    @property
    def size(self) -> int:
        """The length of the axis that these rows are taken from."""
        return self.period * self.repeats

    def __len__(self) -> int:
        return self.repeats * sum(stop - start for start, stop in self.spans)

    def __or__(self, other: "Rows") -> "Rows":
        if (self.period, self.repeats) != (other.period, other.repeats):
            raise ValueError(f"rows of different patterns cannot be joined: {self} and {other}")
        return Rows(self.period, self.repeats, _merge([*self.spans, *other.spans]))

    def rest(self) -> "Rows":
        """Return the complement: all other rows of the axis."""
        edges = [0, *(edge for span in self.spans for edge in span), self.period]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return Rows(self.period, self.repeats, tuple(gap for gap in gaps if gap[0] < gap[1]))

    def ranges(self) -> list[Span]:
        """Return the rows as (start, stop) pairs along the axis, with adjacent pairs merged."""
        starts = range(0, self.size, self.period)
        return list(_merge((s + a, s + b) for s in starts for a, b in self.spans))

    def pieces(self, tensor: Tensor, axis: int) -> list[Tensor]:
        """Return a view per span, (…, repeats, span length, …), of a tensor that has all rows."""
        folded = tensor.unflatten(axis, (self.repeats, self.period))
        return [folded.narrow(axis + 1, start, stop - start) for start, stop in self.spans]

    def take(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return these rows in order: a view if they are contiguous, otherwise a copy."""
        pieces = self.pieces(tensor, axis)
        folded = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis + 1)
        return folded.flatten(axis, axis + 1)

    def put(self, tensor: Tensor, value: Tensor, axis: int = 0) -> None:
        """Write the rows of `value`, in order, into these rows of a tensor that has all rows."""
        width = len(self) // self.repeats
        folded = value.unflatten(axis, (self.repeats, width))
        sizes = [stop - start for start, stop in self.spans]
        for target, source in zip(
            self.pieces(tensor, axis), folded.split(sizes, axis + 1), strict=True
        ):
            target.copy_(source)


def join(first: Rows, a: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """Merge `a` (at rows `first`) and `b` (at the other rows) into one tensor, in one copy."""
    rest = first.rest()
    sources: list[tuple[Span, Tensor]] = []
    for rows, tensor in ((first, a), (rest, b)):
        folded = tensor.unflatten(axis, (rows.repeats, len(rows) // rows.repeats))
        sizes = [stop - start for start, stop in rows.spans]
        sources += zip(rows.spans, folded.split(sizes, axis + 1), strict=True)
    ordered = [tensor for _, tensor in sorted(sources, key=lambda item: item[0])]
    return torch.cat(ordered, axis + 1).flatten(axis, axis + 1)


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the model: its role, stack and layers."""

    role: str
    stack: str = ""  # such as "encoder"; empty if the model has one stack, or outside the stacks
    layers: tuple[int, ...] = ()  # several if layers share the tensor; empty outside the layers
    cross: bool = False  # whether it belongs to cross-attention
    expert: int | None = None  # None outside experts, or if one tensor holds several experts


@dataclass(frozen=True)
class Tie:
    """Another name of a tied tensor, and the tensor's place under that name."""

    name: str
    place: Place


@dataclass(frozen=True)
class Part:
    """One parameter, or the rows of a fused parameter that have one role."""

    name: str
    place: Place
    kind: Kind
    shape: tuple[int, ...]
    state: State
    rows: Rows | None = None  # None: the whole parameter
    axis: int = 0  # the axis of the rows: 1 for Conv1D's transposed weight
    heads: Heads | None = None
    # "separate" or, in a fused parameter, "concatenated" or "interleaved" (by head or by group)
    layout: str = "separate"
    matmul: bool = False  # whether it is the weight of a matmul with activations
    ties: tuple[Tie, ...] = ()

    @property
    def role(self) -> str:
        return self.place.role

    @property
    def stack(self) -> str:
        return self.place.stack

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that use this part: several if layers share weights."""
        return self.place.layers

    @property
    def layer(self) -> int | None:
        """The layer that uses this part; None if there is no layer or more than one."""
        return self.layers[0] if len(self.layers) == 1 else None

    @property
    def key(self) -> str:
        """The name of this part in records, unique within a model."""
        return self.name if self.rows is None else f"{self.name}[{self.role}]"

    @property
    def parameters(self) -> int:
        """The number of parameters in this part."""
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        heads = self.heads
        return {
            "key": self.key,
            "name": self.name,
            "role": self.role,
            "kind": self.kind,
            "stack": self.stack or None,
            "layer": self.layer,
            "layers": list(self.layers),
            "cross": self.place.cross,
            "expert": self.place.expert,
            "shape": list(self.shape),
            "parameters": self.parameters,
            "state": self.state,
            "layout": self.layout,
            "rows": None if self.rows is None else [list(r) for r in self.rows.ranges()],
            "heads": heads.of(self.role) if heads else None,
            "head_size": heads.size if heads else None,
            "ties": [tie.name for tie in self.ties],
        }


@dataclass(frozen=True)
class Piece:
    """A parameter that holds some or all rows of a slot."""

    rows: Rows
    parameter: nn.Parameter


@dataclass(frozen=True)
class Slot:
    """A parameter of the unmodified model, and the parameters that hold its rows now."""

    name: str
    owner: Any  # the module that holds the parameter
    local: str  # the name within the owner, as in the unmodified model
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]
    adapts: str | None = None  # for an adapter: the path of the adapted module
    replaced: str | None = None  # if another weight is used in its place: that weight's name
    unused: bool = False  # whether the model does not compute with it

    @property
    def parameter(self) -> nn.Parameter:
        """The only parameter of a slot that is not split."""
        (piece,) = self.pieces
        return piece.parameter

    def piece_of(self, rows: Rows | None) -> Piece:
        """Return the piece that holds all of these rows, which have one role.

        Freezing never divides a role between pieces.
        """
        if len(self.pieces) == 1 or rows is None:
            (piece,) = self.pieces
            return piece
        return next(p for p in self.pieces if p.rows | rows == p.rows)

    def read(self, rows: Rows | None = None) -> Tensor:
        """Return the values of these rows (default: all), detached, and gathered if sharded."""
        values = join_pieces(self.pieces, self.axis)
        return values if rows is None else rows.take(values, self.axis)

    @torch.no_grad()
    def write(self, value: Tensor, rows: Rows | None = None) -> None:
        """Write values into these rows (default: all), in place, cast to the parameter's dtype."""
        if rows is None and len(self.pieces) > 1:
            for piece in self.pieces:
                piece.parameter.copy_(piece.rows.take(value, self.axis))
            return
        piece = self.piece_of(rows)
        if rows is None or piece.rows == rows:
            piece.parameter.copy_(value)
            return
        values = self.read().clone()
        rows.put(values, value.to(values), self.axis)
        piece.parameter.copy_(piece.rows.take(values, self.axis))


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded tensor (a collective call), or the tensor itself."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


@torch.no_grad()
def join_pieces(pieces: tuple[Piece, ...], axis: int) -> Tensor:
    """Join a slot's pieces into the fused tensor of the unmodified model."""
    if len(pieces) == 1:
        return gathered(pieces[0].parameter.detach())
    values = [gathered(piece.parameter.detach()) for piece in pieces]
    if len(pieces) == 2:
        return join(pieces[0].rows, values[0], values[1], axis)
    return torch.cat(values, axis)  # three pieces: nn.MultiheadAttention's, already in order


SlotPieces = tuple[tuple[int, ...], int, tuple[Piece, ...]]  # shape, axis of the rows, pieces


class Multiplies:
    """Marks a module whose weights are those of matmuls with activations (`Part.matmul`)."""


class Split(ABC):
    """A module that stores its fused parameters in pieces."""

    @abstractmethod
    def slots(self) -> dict[str, SlotPieces]:
        """Map the name of each fused parameter to its shape, row axis and pieces."""

    @abstractmethod
    def joined(self) -> nn.Module:
        """Return a module with whole parameters of the current values.

        It may be this module, changed in place. If it is not, this one must no longer be used.
        """
