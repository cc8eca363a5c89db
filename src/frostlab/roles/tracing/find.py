"""The roles of a model's parameters, found by evidence: a watched forward pass, then a test.

`find_roles` runs a copy of the model, reads query, key and value from the autograd graph, tests
them by changing rows (`verify`), and gives the other parameters roles by their places in the graph.
A model whose evidence contradicts itself is refused. A slot is a parameter of the unmodified model;
its pieces are the parameters that store its rows if it has been split.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from frostlab.errors import BadInput, UnknownArchitecture, first_line
from frostlab.roles.copies import Unwatchable
from frostlab.roles.parts import Heads, Place, Rows, Slot
from frostlab.roles.tracing.attentions import SIDES, Attentions
from frostlab.roles.tracing.claims import (
    Finding,
    Indescribable,
    as_rows,
    is_short_convolution,
    read_claims,
)
from frostlab.roles.tracing.graph import CHECKPOINT, Graph, Node
from frostlab.roles.tracing.layers import Layers
from frostlab.roles.tracing.passes.facts import Call
from frostlab.roles.tracing.passes.inputs import MOST_CALLS, candidate_inputs, no_inputs
from frostlab.roles.tracing.passes.small import Small, small_copy
from frostlab.roles.tracing.passes.trace import Trace, tensors_in, traced, watched_copy
from frostlab.roles.tracing.siblings import Measured, Placements, compare_layers
from frostlab.roles.tracing.surroundings import Around
from frostlab.roles.tracing.verify import Unsteady, verify, verify_rest

_LARGE = 300_000_000  # a model with more parameters is read from a small copy, if one can be built
_SMALL = 1 << 16  # parameters of a small copy get noise if they have at most this many entries
_RECOMPUTED = "its layers are recomputed, so they are not seen; turn torch.utils.checkpoint off"
_SCANS = {"Cumsum", "Cumprod", "Logcumsumexp"}


@dataclass(frozen=True)
class Found:
    """The evidence for a model: placements by parameter name, and how they were tested."""

    placements: Placements
    attentions: int
    passes: int  # number of forward passes of the test
    # parameters that the outputs do not depend on, and whose role no other layer or expert shows
    unreached: tuple[str, ...]
    # names of each attention's projections, and of its output projections
    attention_names: tuple[tuple[list[str], list[str]], ...] = ()
    copied: bool = False  # whether a small copy was read instead of the model


def find_roles(model: nn.Module, slots: Sequence[Slot], batch: Any = None) -> Found:
    """Find the role of every slot; raise UnknownArchitecture if the evidence does not suffice.

    If the model has no values (on `meta`), or is large and no batch is given, a small copy is built
    from the config, if possible, and read instead.
    """
    empty = any(parameter.is_meta for parameter in model.parameters())
    if empty or (batch is None and _size(model) > _LARGE):
        small = small_copy(model)
        if small is not None:
            return _from_copy(small, slots, batch)
        if empty:
            raise UnknownArchitecture(
                "its weights are on `meta`, and no small copy can be built from a config; build it "
                "with values first"
            )
    _refuse_unseen(model)
    return _find(model, slots, batch)


def _shapes(slots: Sequence[Slot]) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for slot in slots}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _refuse_unseen(model: nn.Module) -> None:
    """Raise an error for weights that cannot be changed, and for code that cannot be watched."""
    quantised = {
        name: str(parameter.dtype).removeprefix("torch.")
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and (not parameter.is_floating_point() or parameter.itemsize == 1)
    }
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Indescribable(
                "it is compiled by TorchScript, so its forward pass cannot be watched; pass the "
                "model that it was made from"
            )
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            quantised[name] = type(module).__name__
    for name, kind in quantised.items():
        raise Indescribable(
            f"{name} is quantised ({kind}), so its rows cannot be probed; load the model without "
            "quantisation"
        )


def _from_copy(small: Small, slots: Sequence[Slot], batch: Any) -> Found:
    """Return the evidence of a small copy, carried over to the parameters of the original."""
    from frostlab.roles.read import slots_of  # imports this module

    _add_noise(small.model)
    found = _find(small.model, slots_of(small.model), batch)
    shapes = {name: tuple(p.shape) for name, p in small.model.named_parameters()}
    layers = Layers(_shapes(slots), found.attention_names, {})
    placements: Placements = {}
    for slot in slots:
        if slot.name not in small.names:
            raise UnknownArchitecture(f"{slot.name} is not in a copy that is built from the config")
        stand_in = small.names[slot.name]
        measured, place = found.placements[stand_in]
        if measured.rows is not None:
            axis = slot.axis if measured.axis is None else measured.axis
            before, after = shapes[stand_in][axis], slot.shape[axis]
            measured = replace(
                measured,
                rows={r: _scaled(rows, before, after) for r, rows in measured.rows.items()},
            )
        stack, indices = layers.place(slot.name)
        indices = () if not place.layers else indices
        expert = None if place.expert is None else layers.expert(slot.name)
        placements[slot.name] = (
            measured,
            replace(place, stack=stack, layers=indices, expert=expert),
        )
    unreached = [s.name for s in slots if small.names[s.name] in found.unreached]
    return replace(found, placements=placements, unreached=tuple(unreached), copied=True)


@torch.no_grad()
def _add_noise(model: nn.Module) -> None:
    """Add noise to the small parameters of a copy: zeros, as in biases, would show nothing."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.numel() <= _SMALL:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def _scaled(rows: Rows, before: int, after: int) -> Rows:
    """Return rows of a copy's narrower weight as rows of the original."""
    if before == after:
        return rows
    edges = [rows.period, *(edge for span in rows.spans for edge in span)]
    if any(edge * after % before for edge in edges):
        raise UnknownArchitecture(
            "a narrower copy does not show which rows of the original have which role"
        )
    spans = tuple((start * after // before, stop * after // before) for start, stop in rows.spans)
    return Rows(rows.period * after // before, rows.repeats, spans)


def _find(model: nn.Module, slots: Sequence[Slot], batch: Any) -> Found:
    watched = watched_copy(model)
    call, trace = _first_pass(watched, batch)
    try:
        return _roles_in(model, slots, watched, call, trace)
    except CheckpointError as error:
        raise Indescribable(_RECOMPUTED) from error
    except Unsteady:  # earlier passes may have filled a cache, of the copy or of its class
        watched = watched_copy(model)
        return _roles_in(model, slots, watched, call, traced(watched, call))


def _roles_in(
    model: nn.Module, slots: Sequence[Slot], watched: nn.Module, call: Call, trace: Trace
) -> Found:
    """Find the roles from one watched pass, and test them with further passes."""
    graph = Graph(trace)
    attentions = Attentions(graph)
    if not attentions.found:
        if any(graph.kind(node) == CHECKPOINT for node in graph.nodes):
            raise Indescribable(_RECOMPUTED)
        used = {use.parameter for use in trace.uses.values()}
        unused = [s.name for s in slots if not any(id(p.parameter) in used for p in s.pieces)]
        raise Indescribable(
            "its forward pass has no attention (a product of two activations, a softmax and a "
            "product with a third)" + _hidden_by(graph) + _pass_another(unused)
        )
    owners = _owners(slots)
    names = {key: slot.name for key, (slot, _) in owners.items()}
    axes = {key: slot.axis for key, (slot, _) in owners.items()}
    for parameter in watched.parameters():  # those that are in no slot, such as adapters
        names.setdefault(id(parameter), "")
        axes.setdefault(id(parameter), 0)
    findings = read_claims(graph, attentions, names, axes)
    attentions.refuse_multiplied_probabilities(findings)
    findings = {key: finding for key, finding in findings.items() if names[key]}
    if not any(set(finding.roles) & {"query", "key"} for finding in findings.values()):
        raise UnknownArchitecture("the queries and keys of its attention have no weights")
    passes = verify(model, watched, call, graph, attentions, findings, names)
    pairs = tuple(_attention_names(graph, attentions, findings, names))
    layers = Layers(_shapes(slots), pairs, trace.modules)
    around = Around(
        graph, attentions, findings, lambda key: layers.path(names[key]),
        _recurrent(graph, attentions, layers, names),
    )  # fmt: skip
    around.find()
    placements: Placements = {}
    for slot in slots:
        measured, role, cross = _measured(slot, findings, around)
        stack, indices = layers.place(slot.name)
        if role == "position" and _in_many(slot, attentions, layers, names):
            indices = ()  # such as T5's table, which is in the first layer and used by all
        expert = layers.expert(slot.name) if role in ("up", "gate", "down") else None
        placements[slot.name] = (measured, Place(role, stack, indices, cross, expert))
    used = {*findings, *around.roles} - _silent(attentions, findings)
    unreached = [s.name for s in slots if not any(id(p.parameter) in used for p in s.pieces)]
    by_name = {slot.name: slot for slot in slots}
    compare_layers(placements, unreached, by_name, layers, model)
    _refuse_without_history(graph, slots, placements, layers)
    uses = trace.uses.values()
    looked_up = {use.parameter for use in uses if trace.records[use.call].name == "embedding"}
    rest = [
        key for key, (slot, _) in owners.items()
        if key not in looked_up and _is_rest(slot, placements, findings)
    ]  # fmt: skip
    passes += verify_rest(model, watched, call, graph, attentions, findings, names, rest)
    return Found(placements, len(attentions.found), passes, tuple(unreached), pairs)


def _is_rest(slot: Slot, placements: Placements, findings: Mapping[int, Finding]) -> bool:
    """Return whether a parameter is a matrix that seems to be in no attention, network or norm."""
    matrix = len([size for size in slot.shape if size > 1]) > 1
    claimed = any(id(piece.parameter) in findings for piece in slot.pieces)
    return matrix and not claimed and placements[slot.name][1].role in ("other", "embedding")


def _hidden_by(graph: Graph) -> str:
    """Name a custom autograd.Function that may hide an attention, such as a user's softmax."""
    names = sorted({graph.kind(node) for node in graph.nodes if graph.is_custom(node)})
    if not names:
        return ""
    return f"; frostlab cannot see inside {names[0]}, a custom autograd.Function"


def _pass_another(unused: Sequence[str]) -> str:
    """Ask for a batch that uses the parameters which were not used; no attention was seen."""
    if not unused:
        return ""
    names = ", ".join(f"`{name}`" for name in unused[:3]) + (", …" if len(unused) > 3 else "")
    return (
        f"; it did not use {names}: if an attention has these weights, give a batch that runs it: "
        "fl.anatomy(model, batch)"
    )


def _refuse_without_history(
    graph: Graph,
    slots: Sequence[Slot],
    placements: Mapping[str, tuple[Measured, Place]],
    layers: Layers,
) -> None:
    """Raise an error if a projection of an attention is computed without gradients.

    The trace misses such an attention. The same weight is a projection in another layer, but the
    attentions may differ. If the result of a projection is never used, its role may be copied.
    """
    hidden = graph.without_history() - graph.reached()
    roles: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for slot in slots:
        measured, place = placements[slot.name]
        of_all = roles.setdefault((layers.in_any_layer(slot.name), slot.shape), set())
        of_all |= {place.role, *(measured.rows or ())}
    for slot in slots:
        own = {id(piece.parameter) for piece in slot.pieces}
        in_layers = roles[layers.in_any_layer(slot.name), slot.shape]
        if in_layers & set(SIDES) and own & hidden:
            raise UnknownArchitecture(
                f"{slot.name} is used, but the outputs have no gradient for it, so it is not clear "
                "which role it has"
            )


def _silent(attentions: Attentions, findings: Mapping[int, Finding]) -> set[int]:
    """Return ids of attentions' projections that no head depends on, e.g. if their input is 0."""
    return {
        use.parameter
        for attention in attentions.found for side in attention.sides.values()
        for contraction in side.contractions for use in contraction.weights
        if use.parameter not in findings and not is_short_convolution(contraction)
    }  # fmt: skip


def _in_many(slot: Slot, attentions: Attentions, layers: Layers, names: Mapping[int, str]) -> bool:
    """Return whether the attentions of several layers add this parameter to their scores."""
    key = id(slot.pieces[0].parameter)
    paths = set()
    for attention in attentions.found:
        uses = [*attention.added, *(u for c in attention.lookups for u in c.weights)]
        if any(use.parameter == key for use in uses):
            sides = attention.sides.values()
            paths |= {
                layers.path(names[u.parameter])
                for side in sides for c in side.contractions for u in c.weights
            }  # fmt: skip
    return len(paths) > 1


def _first_pass(model: nn.Module, batch: Any) -> tuple[Call, Trace]:
    """Run the model with the user's batch or with guessed inputs; return the call and a trace."""
    calls: Iterator[Call] | list[Call]
    calls = candidate_inputs(model) if batch is None else [as_call(batch)]
    furthest, problem = Trace(), None
    for number, call in enumerate(calls):
        if number >= MOST_CALLS:
            break
        trace = Trace()
        try:
            with warnings.catch_warnings():
                if batch is None:
                    warnings.simplefilter("ignore")  # a guess that does not fit may cause some
                traced(model, call, trace=trace)
            if trace.outputs:
                again = traced(model, call)  # caches are filled now, as in all later passes
                # The first pass may have filled a cache that the second reads instead of some
                # parameters; then take the first.
                differs = _parameters_used(again) != _parameters_used(trace)
                return call, trace if differs else again
            raise TypeError("it returns no tensor that depends on its weights")
        except Unwatchable:
            raise
        except Exception as error:  # a model's own code can fail in many ways
            if problem is None or len(trace.records) > len(furthest.records):
                furthest, problem = trace, error
    reason = f" ({type(problem).__name__}: {first_line(problem)})" if problem else ""
    if batch is not None:
        which = "this batch" if call.args or call.kwargs else "an empty batch"
        raise BadInput(f"{type(model).__name__} does not run with {which}{reason}")
    raise UnknownArchitecture(no_inputs(model, reason, bool(furthest.uses)))


def _parameters_used(trace: Trace) -> list[int]:
    """Return the parameters that a pass used, in their order."""
    return [use.parameter for use in trace.uses.values()]


def as_call(batch: Any) -> Call:
    """Return the call for a batch: a dict of arguments, a tuple, or the first argument."""
    if isinstance(batch, Call):
        return batch
    tensors = list(tensors_in(batch))
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise BadInput(f"the batch is empty: it has only tensors without values, of shape {shapes}")
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    return Call(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def _owners(slots: Sequence[Slot]) -> dict[int, tuple[Slot, Rows]]:
    """Return id of a parameter → its slot, and which rows of the slot it holds."""
    owners: dict[int, tuple[Slot, Rows]] = {}
    for slot in slots:
        for piece in slot.pieces:
            owners.setdefault(id(piece.parameter), (slot, piece.rows))
    return owners


def _attention_names(
    graph: Graph, attentions: Attentions, findings: Mapping[int, Finding], names: Mapping[int, str]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names of each attention's projections, and of the projection of its result."""
    around = Around(graph, attentions, dict(findings), lambda key: "", lambda key: False)
    for attention in attentions.found:
        inputs = [
            names[use.parameter]
            for side in attention.sides.values() for c in side.contractions for use in c.weights
            if names[use.parameter]
        ]  # fmt: skip
        outputs = [
            names[use.parameter]
            for contraction in around.outputs(attention.result) for use in contraction.weights
            if names[use.parameter]
        ]  # fmt: skip
        yield inputs, outputs


def _mixes(graph: Graph, attentions: Attentions, node: Node) -> bool:
    """Return whether a node mixes tokens: a scan, a loop, or a product of two activations."""
    if graph.kind(node) in _SCANS or graph.is_recurrent(node):
        return True
    if not graph.is_product(node) or None in graph.operands(node):
        return False
    return node not in attentions.weighing


def _recurrent(
    graph: Graph, attentions: Attentions, layers: Layers, names: Mapping[int, str]
) -> Any:
    """Return a function that says whether a parameter is in a recurrent module.

    Such a module mixes tokens without an attention: by a scan, a loop or a product of activations.
    """
    mixing: set[str] = set()
    attending: set[str] = set()
    for node in graph.order:
        if not node.next_functions:
            continue
        module = f"{graph.module(node)}."
        if node in attentions.core:
            attending.add(module)
        elif _mixes(graph, attentions, node):
            mixing.add(module)
    cache: dict[str, bool] = {}

    def recurrent(key: int) -> bool:
        name = names[key]
        path = layers.path(name)
        if not path:
            return False
        rest = name[len(path) + 1 :].split(".")
        module = f"{path}.{rest[0]}." if len(rest) > 1 else f"{path}."
        if module not in cache:
            mixes = any(m.startswith(module) for m in mixing)
            cache[module] = mixes and not any(m.startswith(module) for m in attending)
        return cache[module]

    return recurrent


def _measured(
    slot: Slot, findings: Mapping[int, Finding], around: Around
) -> tuple[Measured, str, bool]:
    """Return what is known about a slot, its first row's role, and whether cross-attention uses it.

    What is known about the slot's pieces is joined.
    """
    axis: int | None = None
    heads: dict[str, Heads] = {}
    cross = bias = matmul = False
    finding = None
    for piece in slot.pieces:
        finding = findings.get(id(piece.parameter))
        if finding is not None and finding.axis is not None:
            axis = finding.axis
    row_axis = slot.axis if axis is None else axis
    size = slot.shape[row_axis] if slot.shape else 1
    labels = ["other"] * size
    for piece in slot.pieces:
        key = id(piece.parameter)
        own = [row for start, stop in piece.rows.ranges() for row in range(start, stop)]
        if len(slot.pieces) == 1:
            own = list(range(size))
        finding = findings.get(key)
        if finding is not None:
            masks, cross, bias = finding.roles, finding.cross, finding.bias
            heads |= finding.heads
        else:
            masks, bias = around.roles.get(key, {}), key in around.biases
            cross = cross or key in around.crosses
        matmul = matmul or key in around.matrices
        if len(slot.pieces) == 1 and finding is None and key in around.axes:
            axis = around.axes[key]  # in a batch of experts, rows are not on the first axis
            own, labels = list(range(slot.shape[axis])), ["other"] * slot.shape[axis]
        for role, mask in masks.items():
            rows = mask.nonzero().flatten().tolist() if len(mask) > 1 else range(len(own))
            for row in rows:
                labels[own[row]] = role
        for role, mask in around.beyond.get(key, {}).items():
            for row in mask.nonzero().flatten().tolist():
                labels[own[row]] = role if labels[own[row]] == "other" else labels[own[row]]
    kinds = list(dict.fromkeys(labels))
    matmul = matmul and not {"position", "conv"} & set(kinds)
    if len(kinds) == 1:
        return Measured(None, heads, axis, "separate", bias, matmul), kinds[0], cross
    rows_of = as_rows(labels)
    layout = "concatenated" if next(iter(rows_of.values())).repeats == 1 else "interleaved"
    return Measured(rows_of, heads, axis, layout, bias, matmul), kinds[0], cross
