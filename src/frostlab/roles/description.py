"""How an architecture is described: a table from paths to roles, and nothing else.

Paths are matched segment by segment, never by substring: `{i}` is a layer's index, `*` one
segment, `**` (last) anything below. An entry names a module, whose weight and bias it then
places, or a parameter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from frostlab.errors import BadInput, nearest
from frostlab.roles.parts import ATTENTION_INPUTS, ROLES, Heads, Rows


@dataclass(frozen=True)
class Fused:
    """Several roles in the rows of one weight: one after another, or interleaved per head."""

    roles: tuple[str, ...]
    interleaved: bool = False
    cross: bool = False

    @property
    def layout(self) -> str:
        return "interleaved" if self.interleaved else "concatenated"

    def rows(self, size: int, heads: Heads | None) -> dict[str, Rows]:
        """Say which of a weight's rows belong to which role."""
        repeats = heads.kv if heads and self.interleaved else 1
        widths = {
            role: heads.rows(role) // repeats
            for role in self.roles
            if heads and role in ATTENTION_INPUTS
        }
        others = [role for role in self.roles if role not in widths]
        period = size // repeats
        for role in others:
            widths[role] = (period - sum(widths[r] for r in self.roles if r not in others)) // len(
                others
            )
        if sum(widths.values()) * repeats != size:
            raise ValueError(f"{size} rows are not {widths} × {repeats}")
        rows, start = {}, 0
        for role in self.roles:
            rows[role] = Rows(period, repeats, ((start, start + widths[role]),))
            start += widths[role]
        return rows


@dataclass(frozen=True)
class Fixed:
    """A role whose tensor the architecture itself never trains."""

    role: str


Entry = str | Fused | Fixed
Table = Mapping[str, Entry]
HeadsOf = Callable[[Any, str], Heads]


@dataclass(frozen=True)
class Description:
    """Everything the anatomy needs to know of one architecture."""

    table: Table | Callable[[Any], Table]
    heads: HeadsOf
    stacks: Mapping[str, str] = field(default_factory=dict)  # first path segment -> stack's name
    shared: Callable[[Any, int], tuple[int, ...]] | None = None  # index in the path -> layers

    def table_of(self, module: nn.Module) -> Table:
        return self.table(module) if callable(self.table) else self.table


_by_class: dict[type, Description] = {}
_by_type: dict[str, Description] = {}
REFUSED: dict[str, str] = {}  # model types we know and cannot describe, with the reason


def register(target: type | str, description: Description) -> None:
    """Make an architecture known, by its class or its Hugging Face `model_type`."""
    if isinstance(target, str):
        _by_type[target] = description
    else:
        _by_class[target] = description


def known_types() -> list[str]:
    """The Hugging Face model types that are described."""
    return sorted(_by_type)


def model_type(module: nn.Module) -> str | None:
    """The Hugging Face model type of a module that is itself such a model."""
    if not hasattr(type(module), "base_model_prefix"):
        return None
    found = getattr(module.__dict__.get("config"), "model_type", None)
    return found if isinstance(found, str) and found else None


def find_description(module: nn.Module) -> Description | None:
    """Return the description of a module's class or model type, if there is one."""
    for cls in type(module).__mro__:
        if cls in _by_class:
            return _by_class[cls]
    kind = model_type(module)
    return None if kind is None else _by_type.get(kind)


def fused(*roles: str, interleaved: bool = False) -> Fused:
    """Describe a weight that holds several roles, such as `fused("query", "key", "value")`."""
    for role in roles:
        _check_role(role, f"fused{roles}")
    return Fused(roles, interleaved)


def describe(
    target: type | str,
    table: Table,
    *,
    heads: int | Heads | Callable[[Any], int | Heads],
    stacks: Mapping[str, str] | None = None,
) -> None:
    """Teach frostlab an architecture: which path plays which role.

    Args:
        target: the model's class, or its Hugging Face `model_type`.
        table: paths to roles, e.g. `{"blocks.{i}.attn.q": "query", "lm_head": "head"}`; a
            submodule frostlab already knows needs no entry.
        heads: the number of heads, `Heads(count, kv, size)`, or a function of the model.
        stacks: names for stacks, by first path segment, where a model has more than one.
    """
    for path, entry in table.items():
        if not path or any(not segment for segment in path.split(".")):
            raise BadInput(f"describe: `{path}` is not a path such as `blocks.{{i}}.attn.q`")
        for role in entry.roles if isinstance(entry, Fused) else (role_of(entry),):
            _check_role(role.removeprefix("cross."), path)

    def heads_of(module: Any, stack: str) -> Heads:
        found = heads(module) if callable(heads) else heads
        return Heads(found, found, 0) if isinstance(found, int) else found

    register(target, Description(dict(table), heads_of, dict(stacks or {})))


def role_of(entry: str | Fixed) -> str:
    """The role an entry that is not fused names, `cross.` before it where it does."""
    return entry.role if isinstance(entry, Fixed) else entry


def _check_role(role: str, where: str) -> None:
    if role not in ROLES:
        raise BadInput(f"describe: `{role}` at `{where}` is not a role{nearest(role, ROLES)}")


@dataclass
class _Node:
    children: dict[str, "_Node"] = field(default_factory=dict)
    entry: Entry | None = None


class Matcher:
    """A table compiled so that a path is found in as many steps as it has segments."""

    def __init__(self, table: Table) -> None:
        self.root = _Node()
        for path, entry in table.items():
            node = self.root
            for segment in path.split("."):
                node = node.children.setdefault(segment, _Node())
            node.entry = entry

    def find(self, path: str) -> tuple[Entry, int | None] | None:
        """Return the entry for a parameter's path, and the layer index in it."""
        segments = path.split(".")
        return self._walk(self.root, segments, None) or self._walk(self.root, segments[:-1], None)

    def _walk(
        self, node: _Node, segments: list[str], index: int | None
    ) -> tuple[Entry, int | None] | None:
        if not segments:
            return None if node.entry is None else (node.entry, index)
        head, rest = segments[0], segments[1:]
        steps = [(head, index), ("*", index)]
        if head.isdecimal():
            steps.insert(1, ("{i}", int(head)))
        for name, found in steps:
            child = node.children.get(name)
            result = None if child is None else self._walk(child, rest, found)
            if result is not None:
                return result
        tail = node.children.get("**")
        return None if tail is None or tail.entry is None else (tail.entry, index)
