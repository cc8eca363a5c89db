"""The test of the roles that a watched pass has shown: change some heads' rows, see what changes.

To move a row is to change its values. Every head of every role gets a binary code, the same in all
layers. For each bit there are two passes: one moves the heads whose bit is 1, the other the heads
whose bit is 0. In each pass, the vectors of a head (its queries, keys or values) must change if and
only if the rows of this head were moved. Rows of the same weights that belong to no head are moved
in every pass and must change nothing. So that a change in one layer does not reach the next, chosen
calls return the results of the first pass (pins, see `trace.py`).

In one more pass, the matrices that seem to belong to no attention are moved, and no query, key or
value may change: a weight between a projection and its attention has no gradient if what uses it
has none, such as a comparison or a function of the user's.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.roles.tracing.attentions import SIDES, Attention, Attentions, Side
from frostlab.roles.tracing.claims import Contradiction, Finding, is_short_convolution
from frostlab.roles.tracing.dependence import Touched, one_vector, touched
from frostlab.roles.tracing.graph import Graph, Node
from frostlab.roles.tracing.passes.facts import Call
from frostlab.roles.tracing.passes.trace import (
    PRODUCTS,
    PROJECTIONS,
    SUMS,
    AnotherWay,
    Pin,
    Trace,
    noisy,
    traced,
    watched_copy,
)
from frostlab.roles.tracing.surroundings import Around

_STILL = 1e-5  # largest change of a vector that has not moved, relative to the largest entry
_MOVED = 1e-4  # smallest change of a vector that has moved, relative to the same
_FACTOR, _SHIFT = 1.5, 0.05  # moved rows are shifted, so that zeros change, and multiplied
# operand of a product → the name under which autograd saves it
_SAVED = {0: "self", 1: "mat2"}
_OPERANDS = ("_saved_self", "_saved_mat2", "_saved_query", "_saved_key", "_saved_value")
Unit = tuple[str, int | None]  # role, number of the head


_REST_FACTOR = -2.0  # what belongs to no attention also changes its sign, so that ReLU lets it pass
_MOST_NAMED = 32  # weights that are moved one by one, to name the one that changed something


class Unsteady(Contradiction):
    """A model computes something else each time that it runs."""


def verify(
    model: nn.Module,
    watched: nn.Module,
    call: Call,
    graph: Graph,
    attentions: Attentions,
    findings: Mapping[int, Finding],
    names: Mapping[int, str],
) -> int:
    """Raise Contradiction unless moving a head's rows changes its vectors and no others.

    Return the number of passes that were run.
    """
    try:
        return _verify(lambda: watched, call, graph, attentions, findings, names)
    except AnotherWay:  # the model remembers something: every pass gets a new copy
        with suppress(AnotherWay):
            return _verify(lambda: watched_copy(model), call, graph, attentions, findings, names)
    raise Unsteady("a second pass with the same inputs computes something else than the first")


def verify_rest(
    model: nn.Module,
    watched: nn.Module,
    call: Call,
    graph: Graph,
    attentions: Attentions,
    findings: Mapping[int, Finding],
    names: Mapping[int, str],
    rest: Collection[int],
) -> int:
    """Raise Contradiction if a parameter of `rest` (ids) changes a query, key or value.

    Return the number of passes that were run.
    """
    if not rest:
        return 0
    pins = _pins(graph, attentions)
    sides = [side for attention in attentions.found for side in attention.sides.values()]
    for side in sides:  # what enters a projection of an attention may be anything
        made = (*side.contractions, *(factor.contraction for factor in side.factors.values()))
        for number in {graph.call(contraction.node) for contraction in made} & pins.keys():
            pins[number] = replace(pins[number], always=True)

    def test(copied: nn.Module, moved: Collection[int]) -> None:
        values = {
            id(p): (p.detach() + _SHIFT) * _REST_FACTOR
            for p in copied.parameters() if id(p) in moved
        }  # fmt: skip
        try:
            trace = traced(copied, call, values, pins)
        except Exception as error:  # such as tokens that the moved weights cut in other places
            raise AnotherWay from error
        for attention in attentions.found:
            for role in SIDES:
                if _changes(graph, trace, attention, role):
                    raise Contradiction(
                        f"the {role} of an attention changes with {names[min(moved)]}, but in a "
                        "way that cannot be read"
                    )

    try:
        test(watched, rest)
    except AnotherWay:  # what the weight changes is another way through the model, or its memory
        with suppress(AnotherWay):
            test(watched_copy(model), rest)
    except Contradiction:
        for key in list(rest)[:_MOST_NAMED]:
            with suppress(AnotherWay):
                test(watched_copy(model), [key])
        raise
    return 1


def _changes(graph: Graph, trace: Trace, attention: Attention, role: str) -> bool:
    """Return whether a side of an attention has other values in a second pass."""
    side = attention.sides.get(role)
    node = attention.core if role != "value" else attention.result
    again = _same_node(graph, trace, node)
    if again is None:
        raise AnotherWay
    if side is not None:
        pairs = [(_operand(node, node, side), _operand(again, node, side))]
    else:  # without a history, it is not known which operand the side is
        pairs = [(getattr(node, name, None), getattr(again, name, None)) for name in _OPERANDS]
        pairs = [(before, after) for before, after in pairs if isinstance(before, Tensor)]
    for before, after in pairs:
        if before is None or after is None or after.shape != before.shape:
            raise AnotherWay
        change = float((after.detach() - before.detach()).abs().max())
        if not change <= _MOVED * float(before.detach().abs().max()):
            return True
    return False


def _verify(
    copy: Callable[[], nn.Module],
    call: Call,
    graph: Graph,
    attentions: Attentions,
    findings: Mapping[int, Finding],
    names: Mapping[int, str],
) -> int:
    units = sorted(
        {unit for finding in findings.values() for unit in finding.head_rows},
        key=lambda unit: (unit[0], -1 if unit[1] is None else unit[1]),
    )
    codes = {unit: code for code, unit in enumerate(units, 1)}
    bits = max(codes.values(), default=0).bit_length()
    pins = _pins(graph, attentions)
    units_of = {
        (id(side), number): _units(graph, side, number, findings)
        for attention in attentions.found
        for side in attention.sides.values()
        for number in range(len(side.groups))
    }
    passes = 0
    for bit in range(bits):
        for value in (1, 0):
            moved = {unit for unit, code in codes.items() if (code >> bit & 1) == value}
            model = copy()
            values = {
                id(p): _moved(p.detach(), findings[id(p)], moved)
                for p in model.parameters() if id(p) in findings
            }  # fmt: skip
            trace = traced(model, call, values, pins)
            passes += 1
            for attention in attentions.found:
                _check(graph, trace, attention, findings, units_of, moved, names)
    return passes


def _pins(graph: Graph, attentions: Attentions) -> dict[int, Pin]:
    """Return the calls that repeat their recorded result in later passes, by number.

    Statistics of norms, results and output projections of attentions, and residual sums always do.
    Other projections do unless one of their parameters is moved. Depthwise convolutions over
    several tokens that make queries, keys or values do not, as their inputs may change.
    """
    records = graph.trace.records
    sides = [side for attention in attentions.found for side in attention.sides.values()]
    made = [contraction for side in sides for contraction in side.contractions]
    free = {
        graph.call(contraction.node) for contraction in made if is_short_convolution(contraction)
    }
    pins = {
        number: Pin(record.name, record.result, record.name not in PROJECTIONS, record.held)
        for number, record in enumerate(records)
        if record.result is not None and record.name not in PRODUCTS | SUMS and number not in free
    }
    around = Around(graph, attentions, {}, lambda key: "", lambda key: False)
    nodes = [node for node in graph.order if node.next_functions and attentions.is_hub(node)]
    nodes = [node for node in nodes if records[graph.call(node)].name in SUMS]
    for attention in attentions.found:
        nodes += [attention.result, *(c.node for c in around.outputs(attention.result))]
        nodes += _sums_after(graph, attentions, attention.result)
    for number in map(graph.call, nodes):
        record = records[number]
        if record.result is not None:
            pins[number] = Pin(record.name, record.result)
    return pins


def _sums_after(graph: Graph, attentions: Attentions, result: Node) -> list[Node]:
    """Return the sums with an attention's result, such as attention(q, k, v) + q.

    Only sums that go into projections count, and not those that reach another attention first.
    """

    def stop(node: Node) -> bool:
        return graph.contraction(node) is not None or node in attentions.core

    sums = []
    for node, stopped in graph.after([result], stop):
        if not stopped and graph.kind(node) == "Add":
            ends = [end for end, at_end in graph.after([node], stop) if at_end]
            if ends and not any(end in attentions.core for end in ends):
                sums.append(node)
    return [node for node in sums if graph.trace.records[graph.call(node)].name in SUMS]


def _moved(values: Tensor, finding: Finding, moved: set[Unit]) -> Tensor:
    """Return a parameter with the rows of these heads moved, and those that belong to no head."""
    values = noisy(values) if values.numel() <= 1 << 16 else values
    axis = finding.axis or 0
    size = values.shape[axis] if values.ndim else 1
    rows = torch.zeros(size, dtype=torch.bool, device=values.device)
    claimed = torch.zeros_like(rows)
    for unit, mask in finding.head_rows.items():
        claimed |= mask.to(rows.device)
        if unit in moved:
            rows |= mask.to(rows.device)
    shape = [1] * values.ndim
    if values.ndim:
        shape[axis] = size
    factors = torch.where(rows, _FACTOR, 1.0).masked_fill(~claimed, _REST_FACTOR)
    factor = factors.view(shape).to(values)
    return (values + _SHIFT * (factor - 1)) * factor


def _check(
    graph: Graph,
    trace: Trace,
    attention: Attention,
    findings: Mapping[int, Finding],
    units_of: Mapping[tuple[int, int], set[Unit]],
    moved: set[Unit],
    names: Mapping[int, str],
) -> None:
    """Raise Contradiction unless exactly the vectors that depend on moved rows have changed."""
    for role, side in attention.sides.items():
        node = attention.core if role != "value" else attention.result
        before = _operand(node, node, side)
        again = _same_node(graph, trace, node)
        if again is None or before is None:
            raise AnotherWay
        after = _operand(again, node, side)
        if after is None or after.shape != before.shape:
            raise AnotherWay
        largest = float(before.abs().max())
        if not math.isfinite(largest):
            raise Contradiction(f"the {role} of an attention has values that are not finite")
        for number, group in enumerate(side.groups):
            units = units_of[id(side), number]
            if not units:
                continue
            expected = bool(units & moved)
            still = 0  # vectors that depend on nothing that was moved, such as those of padding
            zeros = True  # whether all vectors are zeros, such as those of a head that is pruned
            for vector in group.vectors:
                index: list[Any] = list(vector)
                index.insert(side.feature_axis, slice(None))
                change = float((after[tuple(index)] - before[tuple(index)]).abs().max())
                zeros = zeros and not bool(before[tuple(index)].any())
                if (change <= _STILL * largest) == expected and not (
                    expected and change > _MOVED * largest
                ):
                    if expected and not _depends(graph, side, vector, findings, moved):
                        still += 1
                        continue
                    raise _contradiction(graph, side, number, expected, names)
            if zeros or still < len(group.vectors):
                continue
            if _units_of(graph, [group.rows], findings) & moved:
                raise _contradiction(graph, side, number, expected, names)


def _contradiction(
    graph: Graph, side: Side, number: int, expected: bool, names: Mapping[int, str]
) -> Contradiction:
    change, cause = ("did not change", "did") if expected else ("changed", "did not")
    rows = side.groups[number].rows
    where = sorted({names[graph.trace.uses[alias].parameter] for alias in rows})
    return Contradiction(
        f"the {side.role} of head {number} {change}, although its rows of "
        f"{', '.join(where[:3])} {cause}"
    )


def _depends(
    graph: Graph,
    side: Side,
    vector: tuple[int, ...],
    findings: Mapping[int, Finding],
    moved: set[Unit],
) -> bool:
    """Return whether one vector depends on what was moved.

    Keys of padding may depend on no weight, and neither may those whose entries are all clamped. If
    keys are joined from several tensors, some may come from another projection.
    """
    made = [*side.contractions, *(factor.contraction for factor in side.factors.values())]
    uses = [use for c in made for use in (*c.weights, *c.bias)] + side.bare
    with graph.true_gradients():
        rows = touched(side.edge, uses, one_vector(side.edge, side.feature_axis, vector))
    return bool(_units_of(graph, [rows], findings) & moved)


def _units(graph: Graph, side: Side, number: int, findings: Mapping[int, Finding]) -> set[Unit]:
    """Return the units (role and head) whose rows the vectors of a head depend on."""
    rows = [side.groups[number].rows, *(factor.rows for factor in side.factors.values())]
    return _units_of(graph, rows, findings)


def _units_of(graph: Graph, rows: Iterable[Touched], findings: Mapping[int, Finding]) -> set[Unit]:
    units: set[Unit] = set()
    for axes_by_alias in rows:
        for alias, axes in axes_by_alias.items():
            finding = findings.get(graph.trace.uses[alias].parameter)
            if finding is None:
                continue
            mask = axes[finding.axis or 0]
            units |= {unit for unit, own in finding.head_rows.items() if bool((own & mask).any())}
    return units


def _operand(node: Node, original: Node, side: Side) -> Tensor | None:
    """Return the value of a side, as the node keeps it for its gradient."""
    if original.name().find("ScaledDotProduct") >= 0:
        name = ("query", "key", "value")[side.operand]
    elif original.name().find("Baddbmm") >= 0:
        name = f"batch{side.operand + 1}"
    else:
        name = _SAVED[side.operand]
    value = getattr(node, f"_saved_{name}", None)
    return value.detach() if isinstance(value, Tensor) else None


def _same_node(graph: Graph, trace: Trace, node: Node) -> Node | None:
    """Return the node of a second pass that does what this one did in the first."""
    number = graph.call(node)
    first = graph.trace.records[number]
    if number >= len(trace.records):
        return None
    second = trace.records[number]
    if second.name != first.name:
        return None
    wanted = node._sequence_nr() - first.first
    pending, seen = [second.node], set()
    while pending:
        current = pending.pop()
        if current is None or current in seen or not current.next_functions:
            continue
        seen.add(current)
        offset = current._sequence_nr() - second.first
        if offset < 0:
            continue
        if offset == wanted and current.name() == node.name():
            return current
        pending += [parent for parent, _ in current.next_functions]
    return None
