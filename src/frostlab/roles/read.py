"""Reading the anatomy of a model: the role, stack and layer of each of its parts.

Reading collects the slots (the parameters of the unmodified model, which freezing may have split),
looks up the role and place of each slot in the architecture's description (a table from parameter
paths to roles, `roles/description.py`), and divides fused slots, which hold several roles in their
rows, into one part per role. A place names the stack and layers that contain a slot. Slots have the
names of the unmodified model, except PEFT's adapters and the originals of modules that PEFT trains
as copies (`roles/peft_names.py`). If there is no description, a forward pass shows the roles, and a
test checks them; what both show is called the evidence (`roles/tracing`). A parameter without a
role is an error: an anatomy is never partial.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import frostlab.roles.architectures  # noqa: F401  (registers them)
from frostlab.errors import BadInput, FrostlabError, UnknownArchitecture, first_line
from frostlab.roles.copies import shared_copy
from frostlab.roles.description import (
    Description,
    Entry,
    Fixed,
    Fused,
    Matcher,
    find_description,
    role_of,
)
from frostlab.roles.fingerprint import code_digest, digest, state_digest
from frostlab.roles.parts import (
    ATTENTION_INPUTS,
    Heads,
    Kind,
    Multiplies,
    Part,
    Piece,
    Place,
    Rows,
    Slot,
    Split,
    State,
    Tie,
)
from frostlab.roles.peft_names import ParameterName, PeftNames, is_adapted
from frostlab.roles.refusals import computed_weight, how_to_register, refuse_complex, refuse_lazy
from frostlab.roles.snapshot import Anatomy, Evidence
from frostlab.roles.tracing.claims import Indescribable
from frostlab.roles.tracing.find import Found, as_call, find_roles
from frostlab.roles.tracing.passes.facts import Call
from frostlab.roles.tracing.siblings import Measured
from frostlab.roles.undisturbed import undisturbed

_BIASES = ("bias", "in_proj_bias")

# A slot's entry in the table (or what the evidence says), its place, and the attention's heads if
# it is a query, key or value.
Placement = tuple[Entry | Measured, Place, Heads | None]


def anatomy(model: nn.Module, batch: Any = None) -> Anatomy:
    """Return a model's anatomy: the role and layer of each parameter, or of its rows if fused.

    If no table describes the architecture, a copy of the model runs small forward passes, which
    show the weights that each head uses. The result is tested by changing weights.

    Args:
        batch: the arguments of that forward pass (a dict, a tuple or a tensor); default: they are
            guessed. With a batch, the pass runs even if a table exists. The batch is kept for other
            models with the same code and shapes, so that later calls, such as `freeze`, need none.
    """
    return survey(model, batch)[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers DataParallel, DDP and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def survey(model: nn.Module, batch: Any = None) -> tuple[Anatomy, dict[str, Slot]]:
    """Return the anatomy, and the slots that hold its tensors, by name."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"{model!r} is not a model; build the model first, and pass that")
    model = unwrapped(model)
    refuse_lazy(model)
    slots = {slot.name: slot for slot in slots_of(model)}
    if not slots:
        raise UnknownArchitecture(f"{type(model).__name__} has no parameters")
    placements, evidence = _placed(model, _probed(slots.values()), batch)
    for name, (entry, _, _) in placements.items():
        if isinstance(entry, Measured) and entry.axis not in (None, slots[name].axis):
            slots[name] = _turned(slots[name], entry.axis)
    placements |= _place_adapters(slots.values(), placements)
    placements |= {s.name: placements[s.replaced] for s in slots.values() if s.replaced is not None}
    parts: list[Part] = []
    for names in _tied_names(slots.values()):
        placed = [(name, *placements[name]) for name in names]
        # the role `head` last: a tensor that is both embedding and head counts as an embedding
        placed.sort(key=lambda item: isinstance(item[1], str) and item[1] == "head")
        name, entry, place, heads = placed[0]
        _refuse_mixed_tie(placed)
        if len(placed) > 1:
            place = replace(place, layers=_all_layers(place, [p for _, _, p, _ in placed]))
        ties = tuple(Tie(tied, tied_place) for tied, _, tied_place, _ in placed[1:])
        matmul = any(_is_matmul(slots[tied], placements[tied][0]) for tied in names)
        matmul = matmul and not slots[name].unused
        parts += _parts(slots[name], entry, place, heads, ties, matmul)
    order = {name: i for i, name in enumerate(slots)}
    parts.sort(key=lambda part: order[part.name])
    if evidence.method == "table":
        _check_attention(parts, type(model).__name__)
    return Anatomy(type(model).__name__, tuple(parts), evidence), slots


def _refuse_mixed_tie(placed: Sequence[tuple[str, Entry | Measured, Place, Heads | None]]) -> None:
    """Raise an error if one tensor is, for example, the query and the key of attentions."""
    sides = {
        place.role: name
        for name, entry, place, _ in placed
        if isinstance(entry, str) and place.role in ATTENTION_INPUTS
    }
    if len(sides) > 1:
        roles, names = " and ".join(sides), " and ".join(sides.values())
        raise UnknownArchitecture(
            f"{names} are one tensor, which is {roles} at once, so neither can be frozen alone"
        )


def _placed(
    model: nn.Module, slots: Sequence[Slot], batch: Any
) -> tuple[dict[str, Placement], Evidence]:
    """Return the placement of each slot, by a table or by evidence."""
    instead = ""
    if batch is None:
        try:
            return _place_slots(model, slots), Evidence()
        except UnknownArchitecture as error:
            instead = f"; {error}"
    try:
        found = _found(model, slots, batch)
    except UnknownArchitecture as error:
        instead = "" if isinstance(error, Indescribable) else instead
        why = f"{error}{computed_weight(model, str(error))}"
        raise UnknownArchitecture(f"{type(model).__name__}: {why}{instead}") from None
    placements: dict[str, Placement] = {
        name: (measured, place, measured.heads.get(place.role))
        for name, (measured, place) in found.placements.items()
    }
    evidence = Evidence("probe", found.attentions, found.passes, found.unreached, found.copied)
    return placements, evidence


_FOUND: "WeakKeyDictionary[nn.Module, tuple[str, Found]]" = WeakKeyDictionary()
_FOUND_BY_CONFIG: dict[str, Found] = {}
_KEPT_CONFIGS = 256  # in `_FOUND_BY_CONFIG`
_BATCHES: dict[str, Call] = {}  # digest of a model's shapes and code → its last batch
_KEPT_BATCHES = 8


def _found(model: nn.Module, slots: Sequence[Slot], batch: Any) -> Found:
    """Return the evidence for a model.

    It is kept for this model as long as its code, settings and ties stay the same, and for models
    with the same config. A batch is kept, too: other models with the same code and shapes are read
    on it.
    """
    key, state = code_digest(model, slots), state_digest(model, slots)
    kept = _FOUND.get(model)
    if batch is None and kept is not None and kept[0] == state:
        return kept[1]
    if batch is None and key in _BATCHES:
        with suppress(BadInput):  # this model may need another batch
            return _found(model, slots, _BATCHES[key])
    shared = _with_config(model, state) if batch is None else None
    found = None if shared is None else _FOUND_BY_CONFIG.get(shared)
    if found is None:
        try:
            found = _find(model, slots, batch)
        except FrostlabError:
            raise
        except Exception as error:  # a model's own code can fail in many ways
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UnknownArchitecture(f"its forward pass cannot be followed ({reason})") from error
    state = state_digest(model, slots)  # the pass may have set an attribute of a class
    _FOUND[model] = (state, found)
    if batch is not None:
        _keep(_BATCHES, key, as_call(batch).copied(), _KEPT_BATCHES)
    elif shared is not None:
        _keep(_FOUND_BY_CONFIG, _with_config(model, state) or shared, found, _KEPT_CONFIGS)
    return found


def keep_evidence(model: nn.Module) -> None:
    """Keep the evidence for a model in which surgery has just split or joined parameters."""
    model = unwrapped(model)
    if model in _FOUND:
        _FOUND[model] = (state_digest(model, _probed(slots_of(model))), _FOUND[model][1])


def _probed(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots of the model without its adapters."""
    return [slot for slot in slots if slot.adapts is None and slot.replaced is None]


def _with_config(model: nn.Module, state: str) -> str | None:
    """Return a digest that models of one config share, or None if the model has no config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    return digest(state, json.dumps(config.to_dict(), sort_keys=True, default=repr))


def _keep(cache: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Put a value into a cache, which then has at most `most` values: the oldest one is removed."""
    cache.pop(key, None)
    if len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value


def _find(model: nn.Module, slots: Sequence[Slot], batch: Any) -> Found:
    """Find the evidence; if the model has split projections or adapters, run it without them."""
    refuse_complex(model)
    original = model
    if any(isinstance(module, Split) or is_adapted(module) for module in model.modules()):
        model = _unmodified(model)
        names = {slot.name for slot in slots}
        slots = [slot for slot in _slots(model) if slot.name in names and slot.replaced is None]
    with ExitStack() as stack:
        stack.enter_context(undisturbed(original))
        stack.enter_context(torch.inference_mode(False))
        for device in {piece.parameter.device.type for slot in slots for piece in slot.pieces}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return find_roles(model, slots, batch)


def _unmodified(model: nn.Module) -> nn.Module:
    """Return a copy without splits and adapters, which shares all other weights."""
    root = nn.Module()  # so that the model itself is a child, too
    root.add_module("model", shared_copy(model))
    for parent in list(root.modules()):
        children: dict[str, Any] = parent._modules
        for name, child in list(children.items()):
            if is_adapted(child):
                children[name] = child = child.get_base_layer()
            if isinstance(child, Split):
                children[name] = child.joined()
    return root.get_submodule("model")


def _turned(slot: Slot, axis: int) -> Slot:
    """Return a slot whose rows lie along another axis."""
    (piece,) = slot.pieces
    return replace(slot, axis=axis, pieces=(Piece(Rows.whole(slot.shape[axis]), piece.parameter),))


def slots_of(model: nn.Module) -> list[Slot]:
    """Return a slot for each name of each parameter; a tied parameter has several names.

    Parameters that frostlab split or PEFT wrapped have the names of the unmodified model.
    """
    return list(_slots(model))


def _slots(model: nn.Module) -> Iterator[Slot]:
    peft = PeftNames(model)
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        in_slots: set[int] = set()
        if isinstance(module, Split):
            for local, (shape, axis, pieces) in module.slots().items():
                in_slots |= {id(piece.parameter) for piece in pieces}
                yield _slot(peft.find(f"{prefix}{local}"), module, local, shape, axis, pieces)
        for local, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in in_slots:
                shape = tuple(parameter.shape)
                axis = 1 if len(shape) == 2 and _is_transposed(module) else 0
                piece = Piece(Rows.whole(shape[axis] if shape else 1), parameter)
                yield _slot(peft.find(f"{prefix}{local}"), module, local, shape, axis, (piece,))


def _slot(
    parameter: ParameterName,
    owner: Any,
    local: str,
    shape: tuple[int, ...],
    axis: int,
    pieces: tuple[Piece, ...],
) -> Slot:
    return Slot(
        parameter.name,
        owner,
        local,
        shape,
        axis,
        pieces,
        parameter.adapts,
        parameter.replaced,
        parameter.unused,
    )


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module stores its weight as (in, out), like GPT-2's Conv1D."""
    source = sys.modules.get("transformers.pytorch_utils")
    return source is not None and isinstance(module, source.Conv1D)


def _is_matmul(slot: Slot, entry: Entry | Measured) -> bool:
    """Return whether the tensor is the weight of a matmul with activations."""
    if isinstance(entry, Measured) and entry.matmul and len(slot.shape) > 2:
        return all(size == 1 for size in slot.shape[2:])  # a convolution over one token
    if len(slot.shape) != 2:
        return False
    if isinstance(entry, Measured) and entry.matmul:
        return True
    linear = isinstance(slot.owner, nn.Linear | nn.MultiheadAttention | Multiplies)
    return linear or _is_transposed(slot.owner)


def _tied_names(slots: Iterable[Slot]) -> list[list[str]]:
    """Group the names of each tensor; leave out unused ones, unless all names are unused."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(id(slot.pieces[0].parameter), []).append(slot)
    used = ([slot for slot in group if not slot.unused] or group for group in groups.values())
    return [[slot.name for slot in group] for group in used]


def _all_layers(place: Place, tied: Sequence[Place]) -> tuple[int, ...]:
    """Return the layers in which a tied tensor has the role of `place`."""
    alike = [p for p in tied if replace(p, layers=()) == replace(place, layers=())]
    return tuple(sorted({index for p in alike for index in p.layers}))


def _place_slots(model: nn.Module, slots: Sequence[Slot]) -> dict[str, Placement]:
    """Look up the placement of each slot; raise an error if a slot has no role."""
    readers = list(_readers(model))
    submodels = [reader for reader in readers if reader.path]
    outermost = [reader for reader in submodels if not any(reader.inside(r) for r in submodels)]
    several = len(outermost) > 1  # then stack names begin with the submodel's path
    placements: dict[str, Placement] = {}
    unplaced: dict[str, None] = {}
    for slot in slots:
        placement = _first(reader.read(slot, several) for reader in readers)
        placement = placement or _first(reader.read_head(slot, several) for reader in readers)
        if placement is None:
            unplaced[slot.name.rpartition(".")[0] or slot.name] = None
        else:
            placements[slot.name] = placement
    if unplaced:
        raise UnknownArchitecture(how_to_register(model, unplaced))
    return placements


def _first(placements: Iterable[Placement | None]) -> Placement | None:
    return next((placement for placement in placements if placement is not None), None)


class _Reader:
    """Reader of the roles and places of all slots inside one module that has a description."""

    def __init__(self, path: str, module: nn.Module, description: Description) -> None:
        self.path, self.module, self.description = path, module, description
        self.prefix = f"{path}." if path else ""
        self.matcher = Matcher(description.table_of(module))
        base = getattr(module, "base_model_prefix", "")
        # path of the body in a Hugging Face model with a head, such as `bert.`
        self.base = f"{base}." if base and module._modules.get(base) is not None else ""
        self.heads: dict[str, Heads] = {}  # stack → its heads

    def inside(self, other: "_Reader") -> bool:
        """Return whether this reader's module is a submodule of another's."""
        return self is not other and self.path.startswith(other.prefix)

    def read(self, slot: Slot, named: bool) -> Placement | None:
        """Return the entry, place and heads that the description's table gives a slot.

        The result is None if no path in the table matches. If `named`, the stack name begins with
        the path of this reader's module.
        """
        if not slot.name.startswith(self.prefix):
            return None
        local = slot.name[len(self.prefix) :]
        if not local.startswith(self.base):
            return None
        local = local.removeprefix(self.base)
        match = self.matcher.find(local)
        if match is None:
            return None
        entry, index = match
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

    def read_head(self, slot: Slot, named: bool) -> Placement | None:
        """Place a slot outside the body of a Hugging Face model: its role is `head`."""
        local = slot.name[len(self.prefix) :]
        if not self.base or not slot.name.startswith(self.prefix) or local.startswith(self.base):
            return None
        return "head", Place("head", self._stack("", named)), None

    def _stack(self, stack: str, named: bool) -> str:
        path = self.path.replace(".", "_") if named else ""
        return "_".join(name for name in (path, stack) if name)

    def _heads(self, stack: str) -> Heads:
        if stack not in self.heads:
            self.heads[stack] = self.description.heads(self.module, stack)
        return self.heads[stack]


def _readers(model: nn.Module) -> Iterator[_Reader]:
    """Yield a reader for each module that has a description, outermost first."""
    readers: list[_Reader] = []
    for path, module in model.named_modules():
        description = find_description(module)
        if description is None:
            continue
        if any(path.startswith(r.prefix) and r.description is description for r in readers):
            continue  # a submodule of a module with the same description
        reader = _Reader(path, module, description)
        readers.append(reader)
        yield reader


def _place_adapters(
    slots: Iterable[Slot], placements: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Place adapters in the layers of the modules that they adapt."""
    places = {name.rpartition(".")[0]: place for name, (_, place, _) in placements.items()}
    adapters: dict[str, Placement] = {}
    for slot in slots:
        if slot.adapts is not None:
            place = places[slot.adapts]
            adapters[slot.name] = ("adapter", Place("adapter", place.stack, place.layers), None)
    return adapters


def _parts(
    slot: Slot,
    entry: Entry | Measured,
    place: Place,
    heads: Heads | None,
    ties: tuple[Tie, ...],
    matmul: bool,
) -> list[Part]:
    """Divide a slot into parts, one for each role."""
    kind: Kind = "bias" if slot.local in _BIASES else "weight"
    if isinstance(entry, Measured):
        kind = "bias" if entry.bias and len(slot.shape) == 1 else kind
        if entry.rows is None:
            state = _state(slot, None, slot.unused)
            return [Part(slot.name, place, kind, slot.shape, state, None, slot.axis, heads,
                         "separate", matmul, ties)]  # fmt: skip
        return _fused_parts(slot, entry.rows, entry.heads, entry.layout, place, kind, ties, matmul)
    size = slot.shape[slot.axis] if slot.shape else 1
    if heads is not None:
        heads = _with_size(heads, entry, size)
    if not isinstance(entry, Fused):
        if heads is not None and heads.rows(place.role) != size:
            raise UnknownArchitecture(
                f"{slot.name} has {size} rows, not {heads.of(place.role)} heads of "
                f"{heads.size} rows each"
            )
        state = _state(slot, None, slot.unused or isinstance(entry, Fixed))
        return [Part(slot.name, place, kind, slot.shape, state, None, slot.axis, heads,
                     "separate", matmul, ties)]  # fmt: skip
    try:
        rows_of = entry.rows(size, heads)
    except ValueError as error:
        raise UnknownArchitecture(f"{slot.name}: {error}") from None
    heads_of = {role: heads for role in rows_of if heads and role in ATTENTION_INPUTS}
    return _fused_parts(slot, rows_of, heads_of, entry.layout, place, kind, ties, matmul)


def _fused_parts(
    slot: Slot,
    rows_of: Mapping[str, Rows],
    heads_of: Mapping[str, Heads],
    layout: str,
    place: Place,
    kind: Kind,
    ties: tuple[Tie, ...],
    matmul: bool,
) -> list[Part]:
    """Return a part for the rows of each role."""
    parts = []
    for role, rows in rows_of.items():
        shape = list(slot.shape)
        shape[slot.axis] = len(rows)
        role_ties = tuple(replace(tie, place=replace(tie.place, role=role)) for tie in ties)
        state = _state(slot, rows, slot.unused)
        parts.append(
            Part(slot.name, replace(place, role=role), kind, tuple(shape), state, rows, slot.axis,
                 heads_of.get(role), layout, matmul, role_ties)
        )  # fmt: skip
    return parts


def _with_size(heads: Heads, entry: Entry, size: int) -> Heads:
    """Fill in the head size if a description gave only the number of heads."""
    if heads.size:
        return heads
    roles = entry.roles if isinstance(entry, Fused) else (role_of(entry).removeprefix("cross."),)
    return replace(heads, size=size // sum(heads.of(role) for role in roles))


def _state(slot: Slot, rows: Rows | None, fixed: bool) -> State:
    if fixed:
        return "fixed"
    return "trainable" if slot.piece_of(rows).parameter.requires_grad else "frozen"


def _check_attention(parts: Sequence[Part], model: str) -> None:
    """Raise an error if an attention lacks the weight of its query, key or value."""
    inputs: dict[tuple[str, tuple[int, ...], bool], set[str]] = {}
    for part in parts:
        if part.role in ATTENTION_INPUTS and part.kind == "weight":
            place = (part.stack, part.layers, part.place.cross)
            inputs.setdefault(place, set()).add(part.role)
    for (stack, layers, _), roles in inputs.items():
        for role in ATTENTION_INPUTS:
            if role not in roles:
                layer = f"layer {layers[0]}" if layers else "attention outside the layers"
                where = f"{stack} {layer}" if stack else layer
                raise UnknownArchitecture(
                    f"{model}: {where} has no {role} weight; the weights of quantised or "
                    "replaced modules cannot be read"
                )
