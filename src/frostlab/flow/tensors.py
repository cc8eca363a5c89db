"""What is watched: the parts of a model, layer by role, and where their numbers lie.

A part is everything of one role in one layer. Its tensors are whole parameters, rows of a fused
one, or what this process holds of a sharded one; `Bit` says which.
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


@dataclass(frozen=True)
class Bit:
    """What of one parameter belongs to one part."""

    tensor: str
    parameter: int
    part: int
    axis: int = 0
    rows: Rows | None = None  # None: all of it
    ranges: tuple[tuple[int, int], ...] | None = None  # the same, of a shard

    @property
    def whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.rows is None and self.ranges is None

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Views of this bit in a tensor that is shaped as the parameter is."""
        if self.ranges is not None:
            return [tensor.narrow(self.axis, a, b - a) for a, b in self.ranges]
        return [tensor] if self.rows is None else self.rows.pieces(tensor, self.axis)


@dataclass(frozen=True)
class Watched:
    """The parts of a model, its parameters that learn, and which bit of them belongs where."""

    parts: tuple[PartFacts, ...]
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    bits: tuple[Bit, ...]
    front: tuple[int, ...]  # parameters of the first two layers
    back: tuple[int, ...]  # of the last two
    output: tuple[int, ...]  # of the head
    flags: tuple[int, ...]  # what `flags_of` said when this was read


@dataclass(frozen=True)
class _Held:
    """A tensor of the untouched model, where it stands, and the parameter that holds it now."""

    name: str
    place: Place
    parameter: nn.Parameter
    state: str
    axis: int
    rows: Rows | None
    peers: str
    head: bool

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        count, shape = self.parameter.numel(), self.parameter.shape
        return count if self.rows is None else count // shape[self.axis] * len(self.rows)


def flags_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """Who requires a gradient now, and whom each of the optimizers' groups holds.

    A tensor is known by its identity: another one in its place is another one.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    held = (p for module in unwrapped(model).modules() for p in module._parameters.values())
    flags = (id(p) if p.requires_grad else 0 for p in held if p is not None)
    return (*flags, *map(len, groups), *(id(p) for group in groups for p in group))


def former_places(old: Watched, new: Watched) -> list[int | None]:
    """Where each part stood before: that of the same parameters, else of the same name."""
    held = {(id(old.parameters[bit.parameter]), bit.rows): bit.part for bit in old.bits}
    found: dict[int, int] = {}
    for bit in new.bits:
        if (before := held.get((id(new.parameters[bit.parameter]), bit.rows))) is not None:
            found.setdefault(bit.part, before)
    left = {part.name: i for i, part in enumerate(old.parts) if i not in found.values()}
    return [found.get(i, left.get(part.name)) for i, part in enumerate(new.parts)]


def look(model: nn.Module, optimizers: Sequence[Optimizer]) -> Watched:
    """See a model's parts by its anatomy or, where that is unknown, by its modules."""
    for name, parameter in unwrapped(model).named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise BadInput(f"watch: {name} has no shape yet; give the model a batch first")
    try:
        anatomy, slots = survey(model)
    except UnknownArchitecture:
        every = list(_by_module(unwrapped(model)))
    else:
        every = [_by_anatomy(part, slots[part.name]) for part in anatomy.parts]
    held = [each for each in every if each.parameter.numel()]  # of nothing nothing is learned
    if not held:
        raise BadInput(f"watch: {type(model).__name__} has no parameters to watch")
    groups = _groups(optimizers)
    names: dict[str, list[_Held]] = {}
    for each in held:
        names.setdefault(name_of(each), []).append(each)
    learning: dict[int, list[_Held]] = {}
    for each in held:
        if each.state == "trainable":
            learning.setdefault(id(each.parameter), []).append(each)
    number = {key: i for i, key in enumerate(learning)}
    parts, bits = [], []
    for name, own in names.items():
        parts.append(_facts(name, own, groups))
        for h in own:
            if h.state == "trainable":
                ranges = shard_ranges(h.parameter, h.rows, h.axis)
                at = number[id(h.parameter)]
                bit = Bit(h.name, at, len(parts) - 1, h.axis, h.rows, ranges)
                bits.append(bit)
    front, back, output = _ends(held)

    def chosen(some: list[_Held]) -> tuple[int, ...]:
        known = [id(h.parameter) for h in some]
        return tuple(dict.fromkeys(number[key] for key in known if key in number))

    return Watched(
        parts=tuple(parts),
        parameters=tuple(own[0].parameter for own in learning.values()),
        names=tuple(_whole_name(own) for own in learning.values()),
        bits=tuple(bits),
        front=chosen(front),
        back=chosen(back),
        output=chosen(output),
        flags=flags_of(model, optimizers),
    )


def _whole_name(own: list[_Held]) -> str:
    """A parameter's name, without a role where it holds several."""
    return own[0].name if len(own) == 1 else own[0].name.partition("[")[0]


def name_of(held: _Held) -> str:
    """A part's name, as a selection would call it."""
    place = held.place
    if not place.role:
        return held.name.rpartition(".")[0] or held.name
    name = f"{place.stack}." if place.stack else ""
    if place.layers:
        first, last = place.layers[0], place.layers[-1]
        name += f"layers[{first}]." if first == last else f"layers[{first}:{last + 1}]."
    return name + ("cross." if place.cross else "") + place.role


def _by_anatomy(part: Part, slot: Slot) -> _Held:
    piece = slot.piece_of(part.rows)
    rows = None if part.rows is None else within(piece.rows, part.rows)
    if rows is not None and len(rows) == rows.size:
        rows = None
    head = part.role == "head" or any(tie.place.role == "head" for tie in part.ties)
    name = part.key
    return _Held(name, part.place, piece.parameter, part.state, part.axis, rows, part.role, head)


def _by_module(model: nn.Module) -> Iterator[_Held]:
    """A part is a module with parameters of its own; its peers differ in numbers only."""
    found = list(model.named_parameters())
    last = found[-1][0].rpartition(".")[0] if found else ""
    for name, parameter in found:
        path = name.rpartition(".")[0]
        numbers = [int(s) for s in path.split(".") if s.isdecimal()]
        place = Place("", layers=tuple(numbers[:1]))
        state = "trainable" if parameter.requires_grad else "frozen"
        peers = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        yield _Held(name, place, parameter, state, 0, None, peers, path == last)


def within(held: Rows, wanted: Rows) -> Rows:
    """Where rows of the whole lie in a tensor that holds only some of its rows."""
    if (held.period, held.repeats) != (wanted.period, wanted.repeats):
        return wanted  # held is all of it, described another way
    spans, before = [], 0
    for start, stop in held.spans:
        for a, b in wanted.spans:
            low, high = max(a, start), min(b, stop)
            if low < high:
                spans.append((before + low - start, before + high - start))
        before += stop - start
    return Rows(before, held.repeats, tuple(spans))


def _groups(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """The number of the optimizer's group that each parameter is in."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(p): i for i, group in enumerate(groups) for p in group["params"]}


def _facts(name: str, own: list[_Held], groups: dict[int, int]) -> PartFacts:
    learning = [h for h in own if h.state == "trainable"]
    return PartFacts(
        name=name,
        peers=own[0].peers,
        stack=own[0].place.stack,
        layer=own[0].place.layers[0] if len(own[0].place.layers) == 1 else None,
        state="trainable" if learning else own[0].state,
        tensors=tuple(h.name for h in own),
        learning=tuple(h.name for h in learning),
        missing=tuple(h.name for h in learning if id(h.parameter) not in groups),
        groups=tuple(
            sorted({groups[id(h.parameter)] for h in learning if id(h.parameter) in groups})
        ),
        dtype=str((learning or own)[0].parameter.dtype).removeprefix("torch."),
        elements=sum(h.elements for h in learning),
    )


def _ends(held: list[_Held]) -> tuple[list[_Held], list[_Held], list[_Held]]:
    """The first two layers, the last two, and the head; stacks follow one another."""
    stacks = list(dict.fromkeys(h.place.stack for h in held if h.place.layers and not h.head))
    output = [h for h in held if h.head]
    if not stacks:
        return [], [], output

    def inside(stack: str) -> list[_Held]:
        return [h for h in held if h.place.stack == stack and h.place.layers and not h.head]

    def numbers(some: list[_Held]) -> list[int]:  # modules without weights leave gaps
        return sorted({index for h in some for index in h.place.layers})

    first, last = inside(stacks[0]), inside(stacks[-1])
    bottom, top = set(numbers(first)[:2]), set(numbers(last)[-2:])
    front = [h for h in first if bottom & set(h.place.layers)]
    return front, [h for h in last if top & set(h.place.layers)], output


Ranges = tuple[tuple[int, int], ...]


def shard_ranges(parameter: Any, rows: Rows | None, axis: int) -> Ranges | None:
    """Which of these rows lie in this process's shard, counted in it; None if it is no shard."""
    if rows is None or not hasattr(parameter, "to_local"):
        return None
    start, size = _shard_of(parameter, axis)
    cut = ((max(a, start), min(b, start + size)) for a, b in rows.ranges())
    return tuple((a - start, b - start) for a, b in cut if a < b)


def _shard_of(parameter: Any, axis: int) -> tuple[int, int]:
    """Where this process's shard begins along an axis, and how long it is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[axis], shape[axis]


def shard_group(parameters: Sequence[nn.Parameter]) -> Any:
    """The processes that share the parameters among them, or None if nothing is sharded."""
    groups: dict[Any, Any] = {}
    for each in parameters:
        parameter: Any = each
        if hasattr(parameter, "to_local"):
            cut = [i for i, place in enumerate(parameter.placements) if place.is_shard()]
            if len(cut) > 1:
                raise BadInput("watch: parameters sharded along two mesh dimensions; use one")
            for i in cut:
                group = parameter.device_mesh.get_group(i)
                groups[group.group_name] = group
    if len(groups) > 1:
        raise BadInput("watch: parameters are sharded over different groups of processes; use one")
    return next(iter(groups.values()), None)


def is_sharded(parameter: Any) -> bool:
    """Whether other processes hold some of a parameter."""
    return hasattr(parameter, "to_local") and any(p.is_shard() for p in parameter.placements)


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor, as plain real numbers."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if held.layout != torch.strided:
        held = held.to_dense()
    return torch.view_as_real(held.resolve_conj()) if held.is_complex() else held


def wide_dtype(device: torch.device) -> torch.dtype:
    """What numbers are added up in."""
    return torch.float32 if device.type == "mps" else torch.float64
