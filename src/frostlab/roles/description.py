"""Descriptions of architectures: a table for each, which maps parameter paths to roles.

A role says what a weight does, such as query, norm or head (`frostlab.roles.ROLES`). Paths
are matched segment by segment, never by substring: `{i}` matches a layer index, `*` matches one
segment, and `**` (at the end) matches all remaining segments. A path names a parameter, or a module
whose own parameters, such as its weight and bias, all get the role.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from frostlab.errors import BadInput, nearest
from frostlab.roles import ROLES
from frostlab.roles.parts import ATTENTION_INPUTS, Heads, Rows


@dataclass(frozen=True)
class Fused:
    """A table entry for a weight with several roles.

    The rows of the first role come first, then those of the next (`q k v`). If interleaved, this
    pattern repeats for each key/value head (`q k v | q k v`).
    """

    roles: tuple[str, ...]
    interleaved: bool = False
    cross: bool = False  # whether the roles belong to cross-attention

    @property
    def layout(self) -> str:
        return "interleaved" if self.interleaved else "concatenated"

    def rows(self, size: int, heads: Heads | None) -> dict[str, Rows]:
        """Return the rows of each role in a weight of `size` rows.

        Query, key and value take the rows of their heads; the other roles divide the remaining
        rows equally.
        """
        repeats = heads.kv if heads and self.interleaved else 1
        period = size // repeats
        widths = {
            role: heads.rows(role) // repeats
            for role in self.roles
            if heads and role in ATTENTION_INPUTS
        }
        without_heads = [role for role in self.roles if role not in widths]
        remaining = period - sum(widths.values())
        for role in without_heads:
            widths[role] = remaining // len(without_heads)
        if sum(widths.values()) * repeats != size:
            shares = ", ".join(f"{width} of {role}" for role, width in widths.items())
            times = f", repeated {repeats} times" if repeats > 1 else ""
            raise ValueError(f"{size} rows cannot be divided into {shares}{times}")
        rows, start = {}, 0
        for role in self.roles:
            rows[role] = Rows(period, repeats, ((start, start + widths[role]),))
            start += widths[role]
        return rows


@dataclass(frozen=True)
class Fixed:
    """A table entry for a tensor that is never trained, such as sinusoidal positions."""

    role: str


Entry = str | Fused | Fixed  # a str is a role; in cross-attention, with a prefix: `cross.query`
Table = Mapping[str, Entry]
HeadsOf = Callable[[Any, str], Heads]  # (model, stack name) → heads


@dataclass(frozen=True)
class Description:
    """The roles, heads and stacks (sequences of layers) of one architecture."""

    table: Table | Callable[[Any], Table]
    heads: HeadsOf
    stacks: Mapping[str, str] = field(default_factory=dict)  # first path segment → stack name
    # For layers that share weights: (model, index in a weight's path) → the layers that use it.
    shared: Callable[[Any, int], tuple[int, ...]] | None = None

    def table_of(self, module: nn.Module) -> Table:
        """Return the table for a module; it may depend on the module's config."""
        return self.table(module) if callable(self.table) else self.table


_by_class: dict[type, Description] = {}
_by_type: dict[str, Description] = {}


def register(target: type | str, description: Description) -> None:
    """Register a description for a class or a Hugging Face `model_type`."""
    if isinstance(target, str):
        _by_type[target] = description
    else:
        _by_class[target] = description


def known_types() -> list[str]:
    """Return the Hugging Face model types that have a description."""
    return sorted(_by_type)


def model_type(module: nn.Module) -> str | None:
    """Return the model type of a Hugging Face model; None for any other module."""
    if not hasattr(type(module), "base_model_prefix"):
        return None
    kind = getattr(module.__dict__.get("config"), "model_type", None)
    return kind if isinstance(kind, str) and kind else None


def find_description(module: nn.Module) -> Description | None:
    """Return the description for a module's class or model type, or None if there is none."""
    for cls in type(module).__mro__:
        if cls in _by_class:
            return _by_class[cls]
    kind = model_type(module)
    return None if kind is None else _by_type.get(kind)


def fused(*roles: str, interleaved: bool = False) -> Fused:
    """Return an entry for a weight with several roles, e.g. `fused("query", "key", "value")`."""
    for role in roles:
        _check_role(role, f"fused{roles}")
    return Fused(roles, interleaved)


def register_architecture(
    target: type | str,
    table: Table,
    *,
    heads: int | Heads | Callable[[Any], int | Heads],
    stacks: Mapping[str, str] | None = None,
) -> None:
    """Register an architecture: the role of each of its parameters.

    Args:
        target: the model's class, or its Hugging Face `model_type`.
        table: a map from paths to roles, e.g. `{"blocks.{i}.attn.q": "query", "lm_head": "head"}`;
            submodules whose own class is registered need no entry.
        heads: the number of heads, or a `Heads(count, kv, size)`, or a function that returns one of
            the two for a model.
        stacks: a map from the first path segment to the stack name, for models with several stacks
            of layers, e.g. `{"text_model": "text", "vision_model": "vision"}`.
    """
    for path, entry in table.items():
        if not path or any(not segment for segment in path.split(".")):
            raise BadInput(
                f"register_architecture: `{path}` is not a path such as `blocks.{{i}}.attn.q`"
            )
        for role in entry.roles if isinstance(entry, Fused) else (role_of(entry),):
            _check_role(role.removeprefix("cross."), path)

    def heads_of(module: Any, stack: str) -> Heads:
        value = heads(module) if callable(heads) else heads
        # with size 0, the rows per head follow from the weights' shapes
        return Heads(value, value, size=0) if isinstance(value, int) else value

    register(target, Description(dict(table), heads_of, dict(stacks or {})))


def role_of(entry: str | Fixed) -> str:
    """Return the role of an unfused entry, with the prefix `cross.` if the entry has it."""
    return entry.role if isinstance(entry, Fixed) else entry


def _check_role(role: str, where: str) -> None:
    if role not in ROLES:
        raise BadInput(f"`{role}` at `{where}` is not a role{nearest(role, ROLES)}")


@dataclass
class _Node:
    children: dict[str, "_Node"] = field(default_factory=dict)
    entry: Entry | None = None


class Matcher:
    """A prefix tree over the path segments of a table, for fast lookups."""

    def __init__(self, table: Table) -> None:
        self.root = _Node()
        for path, entry in table.items():
            node = self.root
            for segment in path.split("."):
                node = node.children.setdefault(segment, _Node())
            node.entry = entry

    def find(self, path: str) -> tuple[Entry, int | None] | None:
        """Return the entry for a parameter or its module, and the layer index in the path, if any.

        The result is None if the table has no matching path.
        """
        segments = path.split(".")
        return self._walk(self.root, segments, None) or self._walk(self.root, segments[:-1], None)

    def _walk(
        self, node: _Node, segments: list[str], index: int | None
    ) -> tuple[Entry, int | None] | None:
        if not segments:
            return None if node.entry is None else (node.entry, index)
        segment, rest = segments[0], segments[1:]
        branches = [(segment, index), ("*", index)]  # tried in order: the segment, `{i}`, `*`, `**`
        if segment.isdecimal():
            branches.insert(1, ("{i}", int(segment)))
        for name, layer in branches:
            child = node.children.get(name)
            match = None if child is None else self._walk(child, rest, layer)
            if match is not None:
                return match
        below = node.children.get("**")
        return None if below is None or below.entry is None else (below.entry, index)
