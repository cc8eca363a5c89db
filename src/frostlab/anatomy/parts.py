"""The nouns of the anatomy: roles, parts, and the slots that hold their tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab.anatomy.rows import Rows, join

ROLES = (
    "embedding",
    "position",
    "query",
    "key",
    "value",
    "output",
    "up",
    "gate",
    "down",
    "conv",
    "norm",
    "head",
    "other",
    "adapter",
)
ATTENTION_INPUTS = ("query", "key", "value")

Kind = Literal["weight", "bias"]
State = Literal["trainable", "frozen", "fixed"]


@dataclass(frozen=True)
class Heads:
    """How an attention is cut into heads: query heads, key/value heads, rows a head."""

    count: int
    kv: int
    size: int

    def of(self, role: str) -> int:
        """How many heads a role has."""
        return self.count if role == "query" else self.kv

    def rows(self, role: str) -> int:
        """How many rows a role has."""
        return self.of(role) * self.size


@dataclass(frozen=True)
class Place:
    """Where a tensor stands in the model, apart from its values."""

    role: str
    stack: str = ""
    layers: tuple[int, ...] = ()
    cross: bool = False


@dataclass(frozen=True)
class Tie:
    """Another name of the same tensor, and the place that name has."""

    name: str
    place: Place


@dataclass(frozen=True)
class Part:
    """One parameter, or the rows of a fused one, that plays one role."""

    name: str
    place: Place
    kind: Kind
    shape: tuple[int, ...]
    state: State
    rows: Rows | None = None  # None: the whole parameter
    axis: int = 0  # the axis the rows lie along: 1 for Conv1D's transposed weight
    heads: Heads | None = None
    layout: str = "separate"
    matmul: bool = False
    ties: tuple[Tie, ...] = ()

    @property
    def role(self) -> str:
        return self.place.role

    @property
    def stack(self) -> str:
        return self.place.stack

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that uses this part; several where layers share one set of weights."""
        return self.place.layers

    @property
    def layer(self) -> int | None:
        """The one layer this part belongs to, or None."""
        return self.layers[0] if len(self.layers) == 1 else None

    @property
    def key(self) -> str:
        """The name by which records speak of this part: unique within a model."""
        return self.name if self.rows is None else f"{self.name}[{self.role}]"

    @property
    def parameters(self) -> int:
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
    """A parameter that holds some rows of a slot."""

    rows: Rows
    parameter: nn.Parameter


@dataclass(frozen=True)
class Slot:
    """A parameter of the untouched model, and the parameters that hold it now."""

    name: str
    owner: Any  # the module that holds it
    local: str
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]
    adapts: str | None = None  # the path of the module it adapts, if it is an adapter's

    @property
    def parameter(self) -> nn.Parameter:
        """The one parameter of a slot that is in one piece."""
        (piece,) = self.pieces
        return piece.parameter

    def piece_of(self, rows: Rows | None) -> Piece:
        """The piece that holds these rows (a role is never cut in two)."""
        if len(self.pieces) == 1 or rows is None:
            (piece,) = self.pieces
            return piece
        return next(p for p in self.pieces if p.rows | rows == p.rows)

    def read(self, rows: Rows | None = None) -> Tensor:
        """Return the values of these rows, detached; gathered where they are sharded."""
        whole = read_pieces(self.pieces, self.axis)
        return whole if rows is None else rows.take(whole, self.axis)

    @torch.no_grad()
    def write(self, value: Tensor, rows: Rows | None = None) -> None:
        """Write values into these rows, in place, cast to the dtype that is there."""
        if rows is None and len(self.pieces) > 1:
            for piece in self.pieces:
                piece.parameter.copy_(piece.rows.take(value, self.axis))
            return
        piece = self.piece_of(rows)
        if rows is None or piece.rows == rows:
            piece.parameter.copy_(value)
            return
        whole = self.read().clone()
        rows.put(whole, value.to(whole), self.axis)
        piece.parameter.copy_(piece.rows.take(whole, self.axis))


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor (a collective call), or the tensor itself."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


@torch.no_grad()
def read_pieces(pieces: tuple[Piece, ...], axis: int) -> Tensor:
    """Assemble a slot's pieces into the tensor the untouched model would have."""
    if len(pieces) == 1:
        return gathered(pieces[0].parameter.detach())
    values = [gathered(piece.parameter.detach()) for piece in pieces]
    if len(pieces) == 2:
        return join(pieces[0].rows, values[0], values[1], axis)
    return torch.cat(values, axis)  # three pieces, of torch's attention, are in order


Held = tuple[tuple[int, ...], int, tuple[Piece, ...]]  # shape, axis of the rows, pieces


class Split(ABC):
    """A module that holds fused parameters in pieces, and can say which."""

    @abstractmethod
    def slots(self) -> dict[str, Held]:
        """Map each canonical local name to its shape, row axis and pieces."""
