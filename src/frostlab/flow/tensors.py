"""The layout of a model that `fl.watch` measures: its parts, and the parameters in each part.

A part is all tensors of one role in one layer, or of one role outside the layers; if the
architecture is unknown, it is all tensors of one module. (A part in `frostlab.roles` is smaller: a
parameter, or the rows of a fused parameter that have one role.) A part consists of slices: a
`ParameterSlice` is a whole parameter, or some rows of a fused parameter. If the parameter is
sharded, the slice covers only this process's shard.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from frostlab.errors import BadInput, UnknownArchitecture
from frostlab.flow.measurements import PartFacts
from frostlab.roles.parts import Part, Place, Rows, Slot
from frostlab.roles.read import survey, unwrapped

Ranges = tuple[tuple[int, int], ...]  # (start, stop) pairs of rows


@dataclass(frozen=True)
class ParameterSlice:
    """The elements of one parameter that belong to one part."""

    tensor: str  # the tensor's name; rows of a fused tensor have names like `qkv.weight[query]`
    parameter: int  # index in `Layout.parameters`
    part: int  # index in `Layout.parts`
    axis: int = 0  # the axis of the rows
    rows: Rows | None = None  # None: the whole parameter
    ranges: Ranges | None = None  # for rows of a sharded parameter: where they are in this shard

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the whole parameter."""
        return self.rows is None and self.ranges is None

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return the views of this slice in a tensor shaped like the parameter or its shard."""
        if self.ranges is not None:
            return [tensor.narrow(self.axis, a, b - a) for a, b in self.ranges]
        return [tensor] if self.rows is None else self.rows.pieces(tensor, self.axis)


@dataclass(frozen=True)
class Layout:
    """The parts of a model, its trainable parameters, and the slices that belong to each part."""

    parts: tuple[PartFacts, ...]
    parameters: tuple[nn.Parameter, ...]  # trainable parameters
    names: tuple[str, ...]  # names of `parameters`
    slices: tuple[ParameterSlice, ...]
    front: tuple[int, ...]  # indices of the trainable parameters in the first two layers
    back: tuple[int, ...]  # indices of the trainable parameters in the last two layers
    output: tuple[int, ...]  # indices of the trainable parameters in the head
    fingerprint: tuple[int, ...]  # result of the function `fingerprint`


@dataclass(frozen=True)
class _PlacedTensor:
    """A tensor, its place in the model, and the parameter that holds it.

    A fused parameter holds several tensors, each in its own rows. `fl.freeze` splits a fused
    parameter if only some of its tensors are frozen.
    """

    name: str
    place: Place
    parameter: nn.Parameter
    state: str  # trainable, frozen, or fixed (never trained by the model)
    axis: int  # the axis of the rows
    rows: Rows | None  # the tensor's rows in `parameter`; None: all rows
    peers: str  # the role; in an unknown architecture, the module's path with `*` for numbers
    is_head: bool

    @property
    def elements(self) -> int:
        """The number of elements."""
        count, shape = self.parameter.numel(), self.parameter.shape
        return count if self.rows is None else count // shape[self.axis] * len(self.rows)

    @property
    def part_name(self) -> str:
        """The name of the tensor's part, such as `layers[0].query`, or its module's path."""
        place = self.place
        if not place.role:
            return self.name.rpartition(".")[0] or self.name
        name = f"{place.stack}." if place.stack else ""
        if place.layers:
            first, last = place.layers[0], place.layers[-1]
            name += f"layers[{first}]." if first == last else f"layers[{first}:{last + 1}]."
        return name + ("cross." if place.cross else "") + place.role


def read_layout(model: nn.Module, optimizers: Sequence[Optimizer]) -> Layout:
    """Divide a model into parts by role and layer or, if its architecture is unknown, by module."""
    for name, parameter in unwrapped(model).named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise BadInput(f"watch: {name} has no shape yet; give the model a batch first")
    tensors = _placed_tensors(model)
    if not tensors:
        raise BadInput(f"watch: {type(model).__name__} has no parameters to watch")
    by_part: dict[str, list[_PlacedTensor]] = {}
    by_parameter: dict[int, list[_PlacedTensor]] = {}
    for tensor in tensors:
        by_part.setdefault(tensor.part_name, []).append(tensor)
        if tensor.state == "trainable":
            by_parameter.setdefault(id(tensor.parameter), []).append(tensor)
    index = {key: i for i, key in enumerate(by_parameter)}
    groups = _group_of_parameter(optimizers)
    parts, slices = [], []
    for name, part_tensors in by_part.items():
        parts.append(_facts(name, part_tensors, groups))
        for t in part_tensors:
            if t.state == "trainable":
                ranges = shard_ranges(t.parameter, t.rows, t.axis)
                i = index[id(t.parameter)]
                slices.append(ParameterSlice(t.name, i, len(parts) - 1, t.axis, t.rows, ranges))
    front, back, output = _front_back_output(tensors)

    def trainable(chosen: list[_PlacedTensor]) -> tuple[int, ...]:
        keys = [id(t.parameter) for t in chosen]
        return tuple(dict.fromkeys(index[key] for key in keys if key in index))

    return Layout(
        parts=tuple(parts),
        parameters=tuple(group[0].parameter for group in by_parameter.values()),
        names=tuple(_parameter_name(group) for group in by_parameter.values()),
        slices=tuple(slices),
        front=trainable(front),
        back=trainable(back),
        output=trainable(output),
        fingerprint=fingerprint(model, optimizers),
    )


def fingerprint(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """Return ids of the trainable parameters and of the parameters in every optimizer group.

    The result changes if a parameter is frozen or thawed, a trainable parameter is replaced, or an
    optimizer group gains or loses a parameter.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    parameters = (p for module in unwrapped(model).modules() for p in module._parameters.values())
    trainable = (id(p) if p.requires_grad else 0 for p in parameters if p is not None)
    return (*trainable, *map(len, groups), *(id(p) for group in groups for p in group))


def former_indices(old: Layout, new: Layout) -> list[int | None]:
    """Return the index in `old` of each part of `new`; None for a part that `old` does not have.

    Parts are matched by their parameters, and the remaining parts by their names.
    """
    old_parts = {(id(old.parameters[s.parameter]), s.rows): s.part for s in old.slices}
    matches: dict[int, int] = {}
    for s in new.slices:
        if (before := old_parts.get((id(new.parameters[s.parameter]), s.rows))) is not None:
            matches.setdefault(s.part, before)
    unmatched = {part.name: i for i, part in enumerate(old.parts) if i not in matches.values()}
    return [matches.get(i, unmatched.get(part.name)) for i, part in enumerate(new.parts)]


def _placed_tensors(model: nn.Module) -> list[_PlacedTensor]:
    try:
        anatomy, slots = survey(model)
    except UnknownArchitecture:
        tensors = list(_by_module(unwrapped(model)))
    else:
        tensors = [_by_anatomy(part, slots[part.name]) for part in anatomy.parts]
    return [t for t in tensors if t.parameter.numel()]  # skip empty parameters


def _by_anatomy(part: Part, slot: Slot) -> _PlacedTensor:
    piece = slot.piece_of(part.rows)
    rows = None if part.rows is None else rows_within(piece.rows, part.rows)
    if rows is not None and len(rows) == rows.size:
        rows = None  # the parameter holds only these rows
    is_head = part.role == "head" or any(tie.place.role == "head" for tie in part.ties)
    return _PlacedTensor(
        part.key, part.place, piece.parameter, part.state, part.axis, rows, part.role, is_head
    )


def _by_module(model: nn.Module) -> Iterator[_PlacedTensor]:
    """Yield the tensors of an unknown architecture, where each module is a part.

    Modules are peers if their paths differ only in numbers; the last module counts as the head.
    """
    parameters = list(model.named_parameters())
    last = parameters[-1][0].rpartition(".")[0] if parameters else ""
    for name, parameter in parameters:
        path = name.rpartition(".")[0]
        numbers = [int(s) for s in path.split(".") if s.isdecimal()]
        place = Place("", layers=tuple(numbers[:1]))
        state = "trainable" if parameter.requires_grad else "frozen"
        peers = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        yield _PlacedTensor(name, place, parameter, state, 0, None, peers, path == last)


def _parameter_name(tensors: list[_PlacedTensor]) -> str:
    """Return a parameter's name, without a suffix like `[query]` if it holds several tensors."""
    return tensors[0].name if len(tensors) == 1 else tensors[0].name.partition("[")[0]


def rows_within(stored: Rows, wanted: Rows) -> Rows:
    """Renumber the `wanted` rows of a full tensor for a tensor with only its `stored` rows."""
    if (stored.period, stored.repeats) != (wanted.period, wanted.repeats):
        return wanted  # `stored` is the whole tensor, with another row pattern
    spans, before = [], 0
    for start, stop in stored.spans:
        for a, b in wanted.spans:
            low, high = max(a, start), min(b, stop)
            if low < high:
                spans.append((before + low - start, before + high - start))
        before += stop - start
    return Rows(before, stored.repeats, tuple(spans))


def _group_of_parameter(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Map the id of each parameter to the index of its optimizer group."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(p): i for i, group in enumerate(groups) for p in group["params"]}


def _facts(name: str, tensors: list[_PlacedTensor], groups: dict[int, int]) -> PartFacts:
    trainable = [t for t in tensors if t.state == "trainable"]
    first = tensors[0]
    return PartFacts(
        name=name,
        peers=first.peers,
        stack=first.place.stack,
        layer=first.place.layers[0] if len(first.place.layers) == 1 else None,
        state="trainable" if trainable else first.state,
        tensors=tuple(t.name for t in tensors),
        learning=tuple(t.name for t in trainable),
        missing=tuple(t.name for t in trainable if id(t.parameter) not in groups),
        groups=tuple(
            sorted({groups[id(t.parameter)] for t in trainable if id(t.parameter) in groups})
        ),
        dtype=str((trainable or tensors)[0].parameter.dtype).removeprefix("torch."),
        elements=sum(t.elements for t in trainable),
    )


def _front_back_output(
    tensors: list[_PlacedTensor],
) -> tuple[list[_PlacedTensor], list[_PlacedTensor], list[_PlacedTensor]]:
    """Return the tensors of the first two layers, of the last two layers, and of the head.

    In a model with several stacks, such as an encoder and a decoder, the first layers are taken
    from the first stack and the last layers from the last stack.
    """
    stacks = list(dict.fromkeys(t.place.stack for t in tensors if t.place.layers and not t.is_head))
    output = [t for t in tensors if t.is_head]
    if not stacks:
        return [], [], output

    def in_stack(stack: str) -> list[_PlacedTensor]:
        return [t for t in tensors if t.place.stack == stack and t.place.layers and not t.is_head]

    def layers(chosen: list[_PlacedTensor]) -> list[int]:  # indices of the layers with weights
        return sorted({index for t in chosen for index in t.place.layers})

    first, last = in_stack(stacks[0]), in_stack(stacks[-1])
    bottom, top = set(layers(first)[:2]), set(layers(last)[-2:])
    front = [t for t in first if bottom & set(t.place.layers)]
    return front, [t for t in last if top & set(t.place.layers)], output


def shard_ranges(parameter: Any, rows: Rows | None, axis: int) -> Ranges | None:
    """Return where `rows` are in this process's shard; None without `rows` or without shards."""
    if rows is None or not hasattr(parameter, "to_local"):
        return None
    start, size = _shard_of(parameter, axis)
    overlaps = ((max(a, start), min(b, start + size)) for a, b in rows.ranges())
    return tuple((a - start, b - start) for a, b in overlaps if a < b)


def _shard_of(parameter: Any, axis: int) -> tuple[int, int]:
    """Return the start and length of this process's shard along an axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[axis], shape[axis]


def shard_group(parameters: Sequence[Any]) -> Any:
    """Return the process group over which parameters are sharded, or None if none is sharded."""
    groups: dict[Any, Any] = {}
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            dimensions = [i for i, p in enumerate(parameter.placements) if p.is_shard()]
            if len(dimensions) > 1:
                raise BadInput(
                    "watch: a parameter is sharded along two mesh dimensions; shard it along one"
                )
            for dimension in dimensions:
                group = parameter.device_mesh.get_group(dimension)
                groups[group.group_name] = group
    if len(groups) > 1:
        raise BadInput(
            "watch: parameters are sharded over different groups of processes; use a single group"
        )
    return next(iter(groups.values()), None)


def is_sharded(parameter: Any) -> bool:
    """Return whether a parameter is sharded across processes."""
    return hasattr(parameter, "to_local") and any(p.is_shard() for p in parameter.placements)


def local(tensor: Any) -> Tensor:
    """Return this process's shard of a tensor; sparse becomes dense, complex becomes real."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if shard.layout != torch.strided:
        shard = shard.to_dense()
    return torch.view_as_real(shard.resolve_conj()) if shard.is_complex() else shard
