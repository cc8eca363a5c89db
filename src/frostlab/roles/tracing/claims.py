"""What the attentions of a watched pass say about each parameter: roles of rows, and heads.

Every head of every side (query, key or value) claims the rows of weights that it is computed from.
A row has one role: a model in which two sides claim the same row is refused. The exception is the
first of two low-rank projections (a factor, see `attentions.py`): rows from which several sides are
computed have the role `latent`. `graph.py` explains contractions, and `trace.py` aliases.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from frostlab.errors import UnknownArchitecture
from frostlab.roles.parts import Heads, Rows
from frostlab.roles.tracing.attentions import Attention, Attentions
from frostlab.roles.tracing.dependence import Group, is_plain, output_axis
from frostlab.roles.tracing.graph import Contraction, Graph, shape_at
from frostlab.roles.tracing.passes.trace import Use


class Contradiction(UnknownArchitecture):
    """The evidence does not fit together; the message says where."""


class Indescribable(UnknownArchitecture):
    """An error about a model for which a table would not help either, such as a quantised one."""


@dataclass(frozen=True)
class Claim:
    """Some rows of a parameter that one head, or a whole side, is computed from."""

    role: str
    place: int  # number of the attention, see Attention.place
    head: int | None  # None: all heads, as in the first of two low-rank projections
    axes: tuple[Tensor, ...]  # for each axis of the parameter, a mask of the claimed indices
    axis: int | None = None  # which axis has the rows, if the projection shows it
    entries: int = 0  # number of entries of a head's vector; 0: the claim is not of one head


@dataclass
class Finding:
    """What is known about one parameter."""

    axis: int | None = None  # the axis of the rows; None: as the module's class implies
    roles: dict[str, Tensor] = field(default_factory=dict)  # role → which rows
    heads: dict[str, Heads] = field(default_factory=dict)
    # (role, number of the head) → which rows; None: all heads
    head_rows: dict[tuple[str, int | None], Tensor] = field(default_factory=dict)
    cross: bool = False  # whether only cross-attention uses it
    bias: bool = False
    attentions: set[int] = field(default_factory=set)  # places of the attentions that use it
    name: str = ""


def read_claims(
    graph: Graph, attentions: Attentions, names: dict[int, str], axes: dict[int, int]
) -> dict[int, Finding]:
    """Return the id of each claimed parameter → what the attentions say about it.

    Args:
        names: id of a parameter → its name.
        axes: id of a parameter → the axis that has the rows in its module.
    """
    for parameter, reason in attentions.unclear.items():
        raise UnknownArchitecture(f"{names[parameter] or 'a weight'} {reason}")
    claims: dict[int, list[Claim]] = {}
    cross: dict[int, set[bool]] = {}
    where: dict[int, set[int]] = {}
    biases: set[int] = set()
    for attention in attentions.found:
        for use, claim in _claims_of(graph, attention):
            claims.setdefault(use.parameter, []).append(claim)
            cross.setdefault(use.parameter, set()).add(attention.cross)
            where.setdefault(use.parameter, set()).add(claim.place)
        for side in attention.sides.values():
            for contraction in side.contractions:
                biases |= {use.parameter for use in contraction.bias}
            biases |= {use.parameter for use in side.bare}
    findings = {}
    for parameter, own_claims in claims.items():
        finding = _combined(own_claims, names[parameter], axes[parameter])
        finding.name = names[parameter]
        finding.cross = cross[parameter] == {True}
        finding.bias = parameter in biases
        finding.attentions = where[parameter]
        findings[parameter] = finding
    _share_head_counts(findings)
    return findings


def _claims_of(graph: Graph, attention: Attention) -> Iterable[tuple[Use, Claim]]:
    """Yield the claims of one attention."""
    uses = graph.trace.uses
    factors: dict[int, tuple[Tensor, ...]] = {}
    roles_of: dict[int, set[str]] = {}
    by_channel = _has_keys_of_channels(attention)
    for factor in attention.factors:
        role = next(iter(factor.roles)) if len(factor.roles) == 1 else "latent"
        for alias, axes in factor.rows.items():
            factors[alias] = axes
            roles_of[alias] = factor.roles
            yield uses[alias], Claim(role, attention.place, None, axes)
    for role, side in attention.sides.items():
        projections = [c for c in side.contractions if not is_short_convolution(c)]
        projected = {id(u.alias) for c in projections for u in (*c.weights, *c.bias)}
        projected |= {id(use.alias) for use in side.bare if is_bias(graph, use, side.contractions)}
        plain = [c for c in projections if is_plain(graph, c)]
        row_axes = {id(c.weights[0].alias): output_axis(graph, c) for c in plain}
        entries = shape_at(side.edge)[side.feature_axis]
        for head, group in enumerate(side.groups):
            for alias, axes in group.rows.items():
                if alias not in projected or alias in graph.trace.norms:
                    continue
                shared = alias in factors and role not in roles_of[alias] and all(
                    bool((a & b).any()) for a, b in zip(axes, factors[alias], strict=True)
                )  # fmt: skip
                # Rows that an earlier projection of the same side claims are not claimed again.
                if alias in factors and not shared:
                    axes = tuple(
                        a if b.all() else a & ~b for a, b in zip(axes, factors[alias], strict=True)
                    )
                    whole = all(bool(b.all()) for b in factors[alias])
                    if whole or not all(bool(a.any()) for a in axes):
                        continue
                number = None if by_channel else head
                axis = row_axes.get(alias)
                yield uses[alias], Claim(role, attention.place, number, axes, axis, entries)


def _has_keys_of_channels(attention: Attention) -> bool:
    """Return whether keys are channels, not tokens: then each key of a head has other rows."""
    side = attention.sides.get("key")
    first: dict[tuple[int, ...], Group] = {}
    for group in [] if side is None else side.groups:
        for batch in {vector[:-1] for vector in group.vectors}:
            other = first.setdefault(batch, group)
            for alias in group.rows.keys() & other.rows.keys() if other is not group else ():
                masks = list(zip(group.rows[alias], other.rows[alias], strict=True))
                if len(masks) <= 2 and not all(bool((a & b).any()) for a, b in masks):
                    return True
    return False


def is_short_convolution(contraction: Contraction) -> bool:
    """Return whether a contraction is a depthwise convolution over several tokens."""
    shape = contraction.weights[0].alias.shape if contraction.weights else ()
    depthwise = contraction.kind == "convolution" and len(shape) > 2 and shape[1] == 1
    return depthwise and any(size > 1 for size in shape[2:])


def is_bias(graph: Graph, use: Use, contractions: Iterable[object]) -> bool:
    """Return whether a parameter outside the projections is a bias: a vector that is added."""
    if use.alias.ndim != 1 or not contractions:
        return False
    return meets(graph, use) in ("Add", "Sub", "Addmm", "Baddbmm")


def meets(graph: Graph, use: Use) -> str:
    """Return the operation in which a parameter meets an activation; empty if in none."""
    starts = [n for n in graph.nodes if graph.use(n) is use]
    for node, stopped in graph.after(starts, lambda n: not graph.weight_only(n)):
        if stopped:
            return graph.kind(node)
    return ""


def _combined(claims: list[Claim], name: str, default: int) -> Finding:
    """Combine the claims on one parameter."""
    divided = _divided_axes(claims)
    default = min(default, len(claims[0].axes) - 1)
    shown = {claim.axis for claim in claims} - {None}
    if not divided and len(shown) == 1:
        default = next(axis for axis in shown if axis is not None)
    axis = default if not divided or default in divided else divided[0]
    by_head: dict[tuple[str, int, int | None], Tensor] = {}
    for claim in claims:
        key = (claim.role, claim.place, claim.head)
        mask = claim.axes[axis]
        by_head[key] = mask if key not in by_head else by_head[key] | mask
    roles: dict[str, Tensor] = {}
    for (role, _, _), mask in by_head.items():
        roles[role] = mask if role not in roles else roles[role] | mask
    names = list(roles)
    for i, role in enumerate(names):
        for other in names[i + 1 :]:
            both = roles[role] & roles[other]
            if both.any():
                raise two_roles(name, role, other, both)
    finding = Finding(axis, roles)
    for role, rows in roles.items():
        # If claims differ along two axes, such as experts and heads, heads are not distinguished.
        partitions = _partitions(role, by_head) if len(divided) < 2 else []
        heads = {_heads(parts, rows) for parts in partitions}
        own = [claim for claim in claims if claim.role == role]
        # After an operation that mixes heads, such as an unknown norm, each head has more rows.
        mixed = any(part.size > claim.entries > 0 for part in heads if part for claim in own)
        if mixed or _lie_elsewhere(own, axis):
            heads = set()
        if len(heads) == 1 and (part := heads.pop()) is not None:
            finding.heads[role] = part
        first = partitions[0] if partitions else []
        for number, mask in enumerate(first):
            finding.head_rows[role, number] = mask
        if not partitions:
            finding.head_rows[role, None] = rows
    return finding


def two_roles(name: str, role: str, other: str, both: Tensor) -> Indescribable:
    """Return the error about rows of a parameter that have two roles."""
    return Indescribable(
        f"{name} is {role} and {other} at once ({int(both.sum())} rows, such as row "
        f"{int(both.nonzero()[0])}), so neither can be frozen alone"
    )


def _lie_elsewhere(claims: list[Claim], axis: int) -> bool:
    """Return whether heads that have the same rows differ along another axis."""
    seen: dict[tuple[int, bytes], list[bytes]] = {}
    for claim in claims:
        masks = [bytes(mask.numpy(force=True)) for mask in claim.axes]
        if seen.setdefault((claim.place, masks[axis]), masks) != masks:
            return True
    return False


def _partitions(
    role: str, by_head: dict[tuple[str, int, int | None], Tensor]
) -> list[list[Tensor]]:
    """Return, for each attention that uses the parameter, the rows of its distinct heads."""
    places: dict[int, list[Tensor]] = {}
    for (owner, place, head), mask in by_head.items():
        if owner == role and head is not None:
            known = places.setdefault(place, [])
            if not any(torch.equal(mask, other) for other in known):
                known.append(mask)
    return [sorted(masks, key=lambda m: int(m.nonzero()[0])) for masks in places.values()]


def _heads(parts: list[Tensor], rows: Tensor) -> Heads | None:
    """Return the heads if they follow one another in equal numbers of rows."""
    sizes = {int(mask.sum()) for mask in parts}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    order = rows.nonzero().flatten()
    if size * len(parts) != len(order):
        return None
    for number, mask in enumerate(parts):
        if not torch.equal(mask.nonzero().flatten(), order[number * size : (number + 1) * size]):
            return None
    return Heads(len(parts), len(parts), size)


def _divided_axes(claims: list[Claim]) -> list[int]:
    """Return the axes along which no row has two roles.

    If there is no such axis, or only one role: the axes along which some two claims share no row.
    """
    apart = [axis for axis in range(len(claims[0].axes)) if _roles_lie_apart(claims, axis)]
    if len({claim.role for claim in claims}) > 1 and apart:
        return apart
    axes = []
    for axis in range(len(claims[0].axes)):
        masks = {bytes(claim.axes[axis].numpy(force=True)): claim.axes[axis] for claim in claims}
        distinct = list(masks.values())
        if any(not bool((a & b).any()) for i, a in enumerate(distinct) for b in distinct[i + 1 :]):
            axes.append(axis)
    return axes


def _roles_lie_apart(claims: list[Claim], axis: int) -> bool:
    """Return whether no row along an axis has two roles."""
    roles: dict[str, Tensor] = {}
    for claim in claims:
        mask = claim.axes[axis]
        roles[claim.role] = roles[claim.role] | mask if claim.role in roles else mask
    return int(sum(mask.int() for mask in roles.values()).max()) <= 1  # type: ignore[union-attr]


def _share_head_counts(findings: dict[int, Finding]) -> None:
    """Complete the `Heads` of query, key and value with the head counts of one another.

    If the heads of a query are not known, there may be more of them than heads of its keys. So, if
    the query has another number of rows than the key, the heads of the key are removed; the same
    holds for the value.
    """
    counts: dict[int, dict[str, int]] = {}
    unknown: dict[int, set[int]] = {}  # place → numbers of rows of queries without heads
    queries = [finding for finding in findings.values() if "query" in finding.roles]
    known = {p for finding in queries if "query" in finding.heads for p in finding.attentions}
    for finding in queries:
        for place in finding.attentions - known:
            unknown.setdefault(place, set()).add(int(finding.roles["query"].sum()))
    for finding in findings.values():
        for role in {"key", "value"} & finding.heads.keys():
            rows = {int(finding.roles[role].sum())}
            if any(unknown.get(place, rows) != rows for place in finding.attentions):
                del finding.heads[role]
    for finding in findings.values():
        for role, heads in finding.heads.items():
            for place in finding.attentions:
                of_place = counts.setdefault(place, {})
                of_place[role] = max(of_place.get(role, 0), heads.count)
    for finding in findings.values():
        for role, heads in finding.heads.items():
            counted = counts[min(finding.attentions)]
            if role == "query":
                finding.heads[role] = replace(heads, kv=counted.get("key", heads.kv))
            else:
                finding.heads[role] = replace(
                    heads, count=counted.get("query", heads.count), kv=heads.count
                )


def as_rows(labels: list[str]) -> dict[str, Rows]:
    """Return label → rows, as spans of the shortest period; `labels` has one label per row."""
    size = len(labels)
    period = next(
        p for p in range(1, size + 1)
        if size % p == 0 and all(labels[i] == labels[i % p] for i in range(p, size))
    )  # fmt: skip
    spans: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for i in range(1, period + 1):
        if i == period or labels[i] != labels[start]:
            spans.setdefault(labels[start], []).append((start, i))
            start = i
    return {
        label: Rows(period, size // period, tuple(own_spans)) for label, own_spans in spans.items()
    }
