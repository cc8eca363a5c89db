"""Reading the anatomy: every parameter of a model gets exactly one place."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from frostlab.anatomy.adapters import adapted, place_adapters, without_wrapping
from frostlab.anatomy.description import Entry, Fixed, Fused, role_of
from frostlab.anatomy.parts import (
    ATTENTION_INPUTS,
    Heads,
    Kind,
    Part,
    Piece,
    Place,
    Slot,
    Split,
    State,
    Tie,
)
from frostlab.anatomy.placing import place_slots
from frostlab.anatomy.rows import Rows
from frostlab.anatomy.snapshot import Anatomy
from frostlab.errors import BadInput, UnknownArchitecture

_BIASES = ("bias", "in_proj_bias")


def anatomy(model: nn.Module) -> Anatomy:
    """See which parameter, or rows of a fused one, plays which role in which layer."""
    return survey(model)[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DDP or torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def survey(model: nn.Module) -> tuple[Anatomy, dict[str, Slot]]:
    """Return the anatomy and, by canonical name, the slots that hold its tensors."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"{model!r} is not a model; build it first, then call anatomy")
    model = unwrapped(model)
    slots = {slot.name: slot for slot in _slots(model)}
    if not slots:
        raise UnknownArchitecture(f"{type(model).__name__} has no parameters to see")
    placed = place_slots(model, [slot for slot in slots.values() if slot.adapts is None])
    placed |= place_adapters(slots.values(), placed)
    parts: list[Part] = []
    for names in _same_tensor(slots.values()):
        own = [(name, *placed[name]) for name in names]
        # a tensor that is both an embedding and a head is an embedding
        own.sort(key=lambda item: isinstance(item[1], str) and item[1] == "head")
        name, entry, place, heads = own[0]
        if len(own) > 1:
            place = replace(place, layers=_all_layers(place, [other for _, _, other, _ in own]))
        ties = tuple(Tie(other, other_place) for other, _, other_place, _ in own[1:])
        uses = [slots[n] for n in names]
        parts += _parts(slots[name], entry, place, heads, ties, any(map(_is_matmul, uses)))
    order = {name: i for i, name in enumerate(slots)}
    parts.sort(key=lambda part: order[part.name])
    _check_attention(parts, type(model).__name__)
    return Anatomy(type(model).__name__, tuple(parts)), slots


def _all_layers(place: Place, others: Sequence[Place]) -> tuple[int, ...]:
    """The layers of a tensor that plays one role in several of them."""
    alike = [p for p in others if replace(p, layers=()) == replace(place, layers=())]
    return tuple(sorted({index for p in alike for index in p.layers}))


def _slots(model: nn.Module) -> Iterator[Slot]:
    """Every parameter under every name it has, split and adapted ones under canonical names."""
    wrapped = adapted(model)
    for path, module in model.named_modules(remove_duplicate=False):
        path, adapts = without_wrapping(path, wrapped)
        dot = f"{path}." if path else ""
        held: set[int] = set()
        if isinstance(module, Split):
            for local, (shape, axis, pieces) in module.slots().items():
                held |= {id(piece.parameter) for piece in pieces}
                yield Slot(f"{dot}{local}", module, local, shape, axis, pieces, adapts)
        for local, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in held:
                shape = tuple(parameter.shape)
                axis = 1 if len(shape) == 2 and _is_transposed(module) else 0
                piece = Piece(Rows.whole(shape[axis] if shape else 1), parameter)
                yield Slot(f"{dot}{local}", module, local, shape, axis, (piece,), adapts)


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module keeps its weight as (in, out), as GPT-2's Conv1D does."""
    source = sys.modules.get("transformers.pytorch_utils")
    return source is not None and isinstance(module, source.Conv1D)


def _is_matmul(slot: Slot) -> bool:
    if len(slot.shape) != 2:
        return False
    linear = isinstance(slot.owner, nn.Linear | nn.MultiheadAttention | Split)
    return linear or _is_transposed(slot.owner)


def _same_tensor(slots: Iterable[Slot]) -> list[list[str]]:
    """Group the names that stand for one tensor."""
    groups: dict[int, list[str]] = {}
    for slot in slots:
        groups.setdefault(id(slot.pieces[0].parameter), []).append(slot.name)
    return list(groups.values())


def _parts(
    slot: Slot, entry: Entry, place: Place, heads: Heads | None, ties: tuple[Tie, ...], matmul: bool
) -> list[Part]:
    """Cut a slot into its parts: one, or one a role where it is fused."""
    kind: Kind = "bias" if slot.local in _BIASES else "weight"
    size = slot.shape[slot.axis] if slot.shape else 1
    if heads is not None:
        heads = _sized(heads, entry, size)
    if not isinstance(entry, Fused):
        if heads is not None and heads.rows(place.role) != size:
            raise UnknownArchitecture(
                f"{slot.name} has {size} rows, not {heads.of(place.role)} heads of {heads.size}"
            )
        state = _state(slot, None, isinstance(entry, Fixed))
        return [Part(slot.name, place, kind, slot.shape, state, None, slot.axis, heads,
                     "separate", matmul, ties)]  # fmt: skip
    try:
        rows = entry.rows(size, heads)
    except ValueError as error:
        raise UnknownArchitecture(f"{slot.name}: {error}") from None
    parts = []
    for role, taken in rows.items():
        shape = list(slot.shape)
        shape[slot.axis] = len(taken)
        own = tuple(replace(tie, place=replace(tie.place, role=role)) for tie in ties)
        parts.append(
            Part(slot.name, replace(place, role=role), kind, tuple(shape),
                 _state(slot, taken, False), taken, slot.axis,
                 heads if role in ATTENTION_INPUTS else None, entry.layout, matmul, own)
        )  # fmt: skip
    return parts


def _sized(heads: Heads, entry: Entry, size: int) -> Heads:
    """Fill in the head size where a description gave only the number of heads."""
    if heads.size:
        return heads
    roles = entry.roles if isinstance(entry, Fused) else (role_of(entry).removeprefix("cross."),)
    return replace(heads, size=size // sum(heads.of(role) for role in roles))


def _state(slot: Slot, rows: Rows | None, fixed: bool) -> State:
    if fixed:
        return "fixed"
    return "trainable" if slot.piece_of(rows).parameter.requires_grad else "frozen"


def _check_attention(parts: Sequence[Part], model: str) -> None:
    """Every attention has all of query, key and value, or the answer would be partial."""
    found: dict[tuple[str, tuple[int, ...], bool], set[str]] = {}
    for part in parts:
        if part.role in ATTENTION_INPUTS and part.kind == "weight":
            place = (part.stack, part.layers, part.place.cross)
            found.setdefault(place, set()).add(part.role)
    for (stack, layers, _), roles in found.items():
        for role in ATTENTION_INPUTS:
            if role not in roles:
                where = f"{stack + ' ' if stack else ''}layer {layers[0] if layers else '-'}"
                raise UnknownArchitecture(
                    f"{model}: {where} has no {role}; quantised or rebuilt modules "
                    "have no weights to see"
                )
