"""Finding the place of every parameter: described modules read the paths below them."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

import frostlab.anatomy.architectures  # noqa: F401  (makes them known)
from frostlab.anatomy.description import (
    REFUSED,
    Description,
    Entry,
    Fused,
    Matcher,
    find_description,
    known_types,
    model_type,
    role_of,
)
from frostlab.anatomy.parts import ATTENTION_INPUTS, Heads, Place, Slot
from frostlab.errors import UnknownArchitecture, nearest

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
