"""How a truth is written: a table of paths for each model, and the labels it expands to.

A truth is written by reading a model's forward pass, never by running a reader: what a reader finds
is compared with it. Its table maps a path to a role, or to the roles that share the rows of one
weight. A path names a parameter, or a module whose own parameters all have the role; `{i}` is the
index of a layer (`layer_{i}` too), `*` any one segment and `**`, at the end, anything below. In
models with stages the first of two indices is the stage's, and `{0}` is the first stage; layers are
then counted through all stages.

Role words are those of `frostlab.roles.ROLES` and three more:

    latent     a low-rank projection that several of query, key and value are computed from
    router     chooses experts
    recurrent  a weight of a state-space or linear-attention layer; its plain norms are `norm`, its
               short convolutions `conv`

`cross.query` is a query of cross-attention, and `cross?.query` one of an attention that may be
called so, or not. `embedding|other` is an embedding, and `other` is honest too, such as for a mask
token that the forward pass uses only if it is given a mask.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zoo import Case, Inputs, text, widen

Span = tuple[int, int]  # start, stop
INPUTS_OF_ATTENTION = ("query", "key", "value")
NEW_ROLES = ("latent", "router", "recurrent")


@dataclass(frozen=True)
class Label:
    """The truth about a parameter, or about the rows of it that have one role.

    The fields are those of `frostlab.roles.parts.Part` and its place. The axis matters only if
    there are rows or heads.
    """

    name: str
    role: str
    kind: str  # weight or bias
    rows: tuple[Span, ...] | None  # None: the whole parameter
    axis: int  # along which the rows lie
    heads: int | None  # of this role in these rows; None: no head has rows of its own
    size: int | None  # rows a head
    by_head: tuple[tuple[int, ...], ...]  # the rows of each head
    stack: str
    layers: tuple[int, ...]
    cross: bool | None  # None: one may call it cross-attention, or not
    also: tuple[str, ...]  # other roles that are honest
    placed: bool  # whether stack and layers are known


@dataclass(frozen=True)
class Whole:
    """A table entry for a parameter with one role that is not laid out as usual."""

    role: str
    heads: int | None = None  # None: the case's heads of the role; 0: no head has rows of its own
    axis: int | None = None  # None: 0, or 1 for Conv1D's transposed weight
    strided: bool = False  # whether row r belongs to head r % heads
    kind: str = ""


@dataclass(frozen=True)
class Shares:
    """A table entry for a weight whose rows several roles share.

    Each share is a role, its number of rows in one repeat and, if it has other heads than the
    case's, their number in all repeats.
    """

    shares: tuple[tuple[Any, ...], ...]
    repeats: int = 1
    axis: int | None = None

    def spans(self, role: str) -> tuple[Span, ...]:
        """Return the rows of a role, adjacent spans merged."""
        period = sum(share[1] for share in self.shares)
        rows: list[int] = []
        for start in range(0, period * self.repeats, period):
            for share in self.shares:
                if share[0] == role:
                    rows += range(start, start + share[1])
                start += share[1]
        return merged(rows)

    @property
    def size(self) -> int:
        return self.repeats * sum(share[1] for share in self.shares)


def shares(*of: tuple[Any, ...], repeats: int = 1, axis: int | None = None) -> Shares:
    """Return an entry for roles that follow one another, `repeats` times."""
    return Shares(of, repeats, axis)


Entry = str | Whole | Shares
Table = Mapping[str, Entry]


@dataclass(frozen=True)
class Labelled:
    """A model, inputs for it, and the truth about its parameters."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    table: Table
    heads: tuple[int, int] = (4, 4)  # of queries, and of keys and values
    # Whether query head h shares key head h % kv; else the first ones share the first, and so on.
    strided_groups: bool = False
    stacks: Mapping[str, str] = field(default_factory=dict)  # first path segment → stack
    depths: tuple[int, ...] = ()  # number of layers of each stage, if there are stages
    uncounted: str = ""  # why stacks and layers can be counted in several ways
    refused: str = ""  # why nothing but a refusal is honest
    may_refuse: str = ""  # why a refusal is honest too


def typed(
    kind: str,
    config: Mapping[str, Any],
    table: Table,
    inputs: Callable[[], Inputs] = text,
    **rest: Any,
) -> Labelled:
    """Return the truth about a Hugging Face model type."""
    return Labelled(Case(kind, dict(config), inputs).build, inputs, table, **rest)


def made(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a model whose values are far from zero and from each other."""

    def build_wide() -> nn.Module:
        torch.manual_seed(0)
        model = build()
        widen(model)
        return model.eval()

    return build_wide


def under(prefix: str, table: Table) -> dict[str, Entry]:
    """Return a table with a prefix before every path."""
    return {f"{prefix}.{path}": entry for path, entry in table.items()}


def crossed(table: Table) -> dict[str, Entry]:
    """Return a table of roles as one of cross-attention."""
    return {path: f"cross.{role}" for path, role in table.items()}


def expected(case: Labelled, model: nn.Module | None = None) -> list[Label]:
    """Return the labels of all parameters, in their order; none if the truth is a refusal.

    A tensor with several names is labelled under the first.
    """
    if case.refused:
        return []
    model = case.build() if model is None else model
    labels: list[Label] = []
    for name, parameter in model.named_parameters():
        entry, layers = _find(case, name)
        labels += _labels(case, model, name, parameter, entry, layers)
    return labels


def matches(case: Labelled, name: str) -> list[str]:
    """Return the paths of the table that name a parameter or its module."""
    return [path for path in case.table if _match(path, name) is not None]


def merged(rows: list[int]) -> tuple[Span, ...]:
    """Return rows, in ascending order, as spans."""
    spans: list[Span] = []
    for row in rows:
        if spans and spans[-1][1] == row:
            spans[-1] = (spans[-1][0], row + 1)
        else:
            spans.append((row, row + 1))
    return tuple(spans)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    parts = {"{i}": r"(\d+)", "*": r"[^.]+", "**": r".+"}
    parts |= {f"{{{n}}}": f"({n})" for n in range(9)}
    found = r"\.".join(
        parts.get(segment, re.escape(segment).replace(r"\{i\}", r"(\d+)"))
        for segment in path.split(".")
    )
    return re.compile(rf"{found}(?:\.[^.]+)?")


def _match(path: str, name: str) -> tuple[int, ...] | None:
    match = _pattern(path).fullmatch(name)
    return None if match is None else tuple(int(index) for index in match.groups())


def _find(case: Labelled, name: str) -> tuple[Entry, tuple[int, ...]]:
    paths = matches(case, name)
    if len(paths) != 1:
        raise LookupError(f"{name} is named by {paths or 'no path'}")
    indices = _match(paths[0], name) or ()
    if len(indices) == 2:
        stage, index = indices
        indices = (sum(case.depths[:stage]) + index,)
    return case.table[paths[0]], indices


def _labels(
    case: Labelled,
    model: nn.Module,
    name: str,
    parameter: Tensor,
    entry: Entry,
    layers: tuple[int, ...],
) -> list[Label]:
    path, _, local = name.rpartition(".")
    owner = model.get_submodule(path)
    kind = "bias" if local in ("bias", "in_proj_bias") else "weight"
    transposed = type(owner).__name__ == "Conv1D" and parameter.ndim == 2
    axis, strided = int(transposed), False
    if isinstance(entry, str):
        entry = Whole(entry)
    if isinstance(entry, Whole):
        kind, strided = entry.kind or kind, entry.strided
        roles: list[tuple[str, int | None]] = [(entry.role, entry.heads)]
    else:
        roles = [(s[0], s[2] if len(s) > 2 else None) for s in entry.shares]
        roles = list(dict.fromkeys(roles))
    if entry.axis is not None and parameter.ndim > entry.axis:
        axis = entry.axis
    size = parameter.shape[axis] if parameter.ndim else 1
    if isinstance(entry, Shares) and entry.size != size:
        raise LookupError(f"{name} has {size} rows, not {entry.size}")
    labels = []
    for words, own in roles:
        crossing, _, bare = words.rpartition(".")
        role, *also = bare.split("|")
        spans = entry.spans(words) if isinstance(entry, Shares) else None
        rows = [r for a, b in spans or ((0, size),) for r in range(a, b)]
        by_head = _by_head(rows, _heads(case, role, own), strided)
        labels.append(
            Label(
                name=name,
                role=role,
                kind=kind,
                rows=spans,
                axis=axis,
                heads=len(by_head) or None,
                size=len(by_head[0]) if by_head else None,
                by_head=by_head,
                stack=case.stacks.get(name.partition(".")[0], ""),
                layers=layers,
                cross=None if crossing == "cross?" else crossing == "cross",
                also=tuple(also),
                placed=not case.uncounted,
            )
        )
    return labels


def _heads(case: Labelled, role: str, own: int | None) -> int:
    if role not in INPUTS_OF_ATTENTION:
        return 0
    if own is not None:
        return own
    return case.heads[0] if role == "query" else case.heads[1]


def _by_head(rows: list[int], heads: int, strided: bool) -> tuple[tuple[int, ...], ...]:
    if not heads:
        return ()
    if len(rows) % heads:
        raise LookupError(f"{len(rows)} rows cannot be divided among {heads} heads")
    size = len(rows) // heads
    if strided:
        return tuple(tuple(rows[h::heads]) for h in range(heads))
    return tuple(tuple(rows[h * size : (h + 1) * size]) for h in range(heads))
