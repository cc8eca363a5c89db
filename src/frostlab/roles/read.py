"""Reading the anatomy: every parameter of a model gets exactly one place."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

import frostlab.roles.architectures  # noqa: F401  (registers them)
from frostlab.errors import BadInput, UnknownArchitecture, nearest
from frostlab.roles.description import (
    REFUSED,
    Description,
    Entry,
    Fixed,
    Fused,
    Matcher,
    find_description,
    known_types,
    model_type,
    role_of,
)
from frostlab.roles.parts import (
    ATTENTION_INPUTS,
    Heads,
    Kind,
    Part,
    Piece,
    Place,
    Rows,
    Slot,
    Split,
    State,
    Tie,
)
from frostlab.roles.snapshot import Anatomy

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


Placed = tuple[Entry, Place, Heads | None]


def place_slots(model: nn.Module, slots: Sequence[Slot]) -> dict[str, Placed]:
    """Find the entry, place and heads of every slot, or say what could not be placed."""
    kind = model_type(model)
    if kind in REFUSED:
        raise UnknownArchitecture(f"{type(model).__name__} is not supported: {REFUSED[kind]}")
    readers = list(_readers(model))
    below = [reader for reader in readers if reader.path]
    several = len([r for r in below if not any(r.inside(other) for other in below)]) > 1
    placed: dict[str, Placed] = {}
    lost: dict[str, Slot] = {}
    for slot in slots:
        found = _first(reader.read(slot, several) for reader in readers)
        found = found or _first(reader.read_head(slot, several) for reader in readers)
        if found is None:
            lost[slot.name.rpartition(".")[0] or slot.name] = slot
        else:
            placed[slot.name] = found
    if lost:
        raise UnknownArchitecture(_how_to_describe(model, lost, described=bool(readers)))
    return placed


def _first(found: Iterable[Placed | None]) -> Placed | None:
    return next((item for item in found if item is not None), None)


class _Reader:
    """One described module within a model, matching the paths below it."""

    def __init__(self, path: str, module: nn.Module, description: Description) -> None:
        self.path, self.module, self.description = path, module, description
        self.dot = f"{path}." if path else ""
        self.matcher = Matcher(description.table_of(module))
        prefix = getattr(module, "base_model_prefix", "")
        self.base = f"{prefix}." if prefix and module._modules.get(prefix) is not None else ""
        self.heads: dict[str, Heads] = {}

    def inside(self, other: "_Reader") -> bool:
        return self is not other and self.path.startswith(other.dot)

    def read(self, slot: Slot, named: bool) -> Placed | None:
        if not slot.name.startswith(self.dot):
            return None
        local = slot.name[len(self.dot) :]
        if not local.startswith(self.base):
            return None
        local = local.removeprefix(self.base)
        found = self.matcher.find(local)
        if found is None:
            return None
        entry, index = found
        stack = self.description.stacks.get(local.partition(".")[0], "")
        role = entry.roles[0] if isinstance(entry, Fused) else role_of(entry)
        cross = entry.cross if isinstance(entry, Fused) else role.startswith("cross.")
        layers: tuple[int, ...] = () if index is None else (index,)
        if index is not None and self.description.shared is not None:
            layers = self.description.shared(self.module, index)
        role = role.removeprefix("cross.")
        heads = self._heads(stack) if role in ATTENTION_INPUTS else None
        place = Place(role, self._stack(stack, named), layers, cross)
        return entry, place, heads

    def read_head(self, slot: Slot, named: bool) -> Placed | None:
        """What a Hugging Face model has outside its base, and nothing else knows, is its head."""
        local = slot.name[len(self.dot) :]
        if not self.base or not slot.name.startswith(self.dot) or local.startswith(self.base):
            return None
        return "head", Place("head", self._stack("", named)), None

    def _stack(self, stack: str, named: bool) -> str:
        own = self.path.replace(".", "_") if named else ""
        return "_".join(name for name in (own, stack) if name)

    def _heads(self, stack: str) -> Heads:
        if stack not in self.heads:
            self.heads[stack] = self.description.heads(self.module, stack)
        return self.heads[stack]


def _readers(model: nn.Module) -> Iterator[_Reader]:
    """The described modules of a model, outermost first."""
    seen: list[_Reader] = []
    for path, module in model.named_modules():
        description = find_description(module)
        if description is None:
            continue
        if any(path.startswith(o.dot) and o.description is description for o in seen):
            continue  # a part of a model of the same kind
        reader = _Reader(path, module, description)
        seen.append(reader)
        yield reader


def _how_to_describe(model: nn.Module, lost: dict[str, Slot], described: bool) -> str:
    """One line that names what could not be placed, then a stub to fill in."""
    name = type(model).__name__
    first, slot = next(iter(lost.items()))
    kind = model_type(model)
    known = nearest(kind, known_types()) if kind and not described else ""
    stub = "".join(f'    "{path}": "other",\n' for path in _templates(lost))
    return (
        f"{name}: cannot place `{first}` ({type(slot.owner).__name__} "
        f"{'×'.join(map(str, slot.shape))}){f' and {len(lost) - 1} more' if len(lost) > 1 else ''}"
        f"{known}; describe it:\n\nfl.describe({name}, {{\n{stub}}}, heads=…)\n\n"
        "with a role for each path (docs/describe.md)"
    )


def _templates(paths: Iterable[str]) -> list[str]:
    """The paths with their numbers as `{i}`, each once."""
    found: dict[str, None] = {}
    for path in paths:
        segments, numbered = path.split("."), False
        for i, segment in enumerate(segments):
            if segment.isdecimal():
                segments[i] = "*" if numbered else "{i}"
                numbered = True
        found[".".join(segments)] = None
    return list(found)[:40]


_BASE = "base_layer"  # what PEFT calls the module it wraps


def adapted(model: nn.Module) -> set[str]:
    """The paths of the modules that PEFT wrapped."""
    source = sys.modules.get("peft.tuners.tuners_utils")
    if source is None:  # then nothing can be wrapped
        return set()
    modules = model.named_modules(remove_duplicate=False)
    return {path for path, module in modules if isinstance(module, source.BaseTunerLayer)}


def without_wrapping(path: str, wrapped: set[str]) -> tuple[str, str | None]:
    """The path a module has without PEFT, and the path of what it adapts if it is an adapter's."""
    if not path or not wrapped:
        return path, None
    here, plain = "", ""
    for segment in path.split("."):
        if here in wrapped:
            if segment != _BASE:
                return path, plain
        else:
            plain = f"{plain}.{segment}" if plain else segment
        here = f"{here}.{segment}" if here else segment
    return plain, None


def place_adapters(slots: Iterable[Slot], placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Adapters stand where the module stands that they adapt."""
    places = {name.rpartition(".")[0]: place for name, (_, place, _) in placed.items()}
    found: dict[str, Placed] = {}
    for slot in slots:
        if slot.adapts is not None:
            place = places[slot.adapts]
            found[slot.name] = ("adapter", Place("adapter", place.stack, place.layers), None)
    return found
