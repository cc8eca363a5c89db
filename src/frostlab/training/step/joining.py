"""Rewrite of a layer's graph: linear maps of the same input are joined into one product.

A GPU multiplies by one wide matrix faster than by three narrow ones, such as query, key and value.
"""

import inspect
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from frostlab.models.fused.joined_linear import joined_linear


@dataclass(frozen=True)
class _Linear:
    """A linear map in a graph, with a weight and perhaps a bias that are inputs of the graph."""

    node: Node
    x: Node  # the map's input
    weights: tuple[Node, ...]  # the weight, and the bias if there is one
    learns: bool  # whether weight and bias are trainable

    @property
    def rows(self) -> int:
        """Return the number of outputs."""
        return int(self.weights[0].meta["example_value"].shape[0])

    @property
    def offset(self) -> int:
        """Return where the weight begins in the memory that it may share with other weights."""
        return int(self.weights[0].meta["example_value"].storage_offset())


def join_linears(graph: Graph) -> None:
    """Join linear maps of the same input into one product; only trainable rows get a gradient."""
    by_input: dict[Any, list[_Linear]] = defaultdict(list)
    for node in list(graph.nodes):
        if writes_in_place(node):  # may change an input, so maps before and after it stay apart
            _join_groups(graph, by_input.values())
            by_input.clear()
        linear = _as_linear(node)
        if linear is not None:
            # maps with a bias are joined separately from maps without
            by_input[linear.x, len(linear.weights)].append(linear)
    _join_groups(graph, by_input.values())
    graph.lint()


# In-place operators such as iadd; other names that begin with i, such as index, do no harm.
_IN_PLACE = {"setitem", *(name for name in dir(operator) if name[:1] == "i")}


def writes_in_place(node: Node) -> bool:
    """Return whether a node may change a tensor in place."""
    if isinstance(node.target, str):  # the name of a method, or of an input
        return node.op == "call_method" and node.target.endswith("_")
    if isinstance(node.target, OpOverloadPacket):
        named = node.target.overloads()
        return any(getattr(node.target, name)._schema.is_mutable for name in named)
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a function of C has no signature
        given = node.kwargs
    name = getattr(node.target, "__name__", "")
    named = name.endswith("_") or name in _IN_PLACE
    given = {**given, **node.kwargs}  # a signature with ** has its own name for them
    return named or given.get("out") is not None or given.get("inplace", False) is not False


# Operations that may return views of their first argument.
_VIEWS = {
    "view", "reshape", "transpose", "permute", "unflatten", "flatten", "split", "chunk", "unbind",
    "getitem",
}  # fmt: skip


def is_view(node: Node) -> bool:
    """Return whether a node may be a view of its first argument."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _VIEWS


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are views of the same memory, which may be the whole of it."""
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _is_written_to(node: Node) -> bool:
    """Return whether a node or a view of it may be changed in place."""
    return any(
        writes_in_place(user) or (_is_view_of(user, node) and _is_written_to(user))
        for user in node.users
    )


def _is_view_of(user: Node, node: Node) -> bool:
    """Return whether a node's value, or the first of several, has the memory of another's."""
    values = (n.meta.get("example_value") for n in (user, node))
    view, base = (v[0] if isinstance(v, tuple | list) and v else v for v in values)
    if isinstance(view, Tensor) and isinstance(base, Tensor):
        return share_memory(view, base)
    return is_view(user)


def _as_linear(node: Node) -> _Linear | None:
    """Return a node as a linear map; None if it is not one that can be joined with others.

    Weight and bias must be inputs of the graph, and both learn or neither does. The output may not
    be changed in place, because autograd does not allow that for a part of a tensor that was split.
    """
    if node.op != "call_function" or node.target is not F.linear or node.kwargs:
        return None
    if _is_written_to(node):
        return None
    x, *rest = node.args
    weights = tuple(argument for argument in rest if isinstance(argument, Node))
    learns = {weight.meta["example_value"].requires_grad for weight in weights}
    if not isinstance(x, Node) or any(w.op != "placeholder" for w in weights) or len(learns) > 1:
        return None
    return _Linear(node, x, weights, learns.pop())


def _join_groups(graph: Graph, groups: Iterable[list[_Linear]]) -> None:
    for linears in groups:
        if len(linears) > 1:
            _join(graph, linears)


def _join(graph: Graph, linears: list[_Linear]) -> None:
    """Replace linear maps of one input with one product, split into the outputs of the maps."""
    first = linears[0]
    # frozen maps first, and then in the order in which the weights may lie side by side in memory
    ordered = sorted(linears, key=lambda linear: (linear.learns, linear.offset))
    frozen = sum(not linear.learns for linear in linears)
    weights = [linear.weights[0] for linear in ordered]
    biases = [bias for linear in ordered for bias in linear.weights[1:]]
    with graph.inserting_before(first.node):
        product = graph.call_function(joined_linear, (first.x, weights, biases, frozen))
        rows = [linear.rows for linear in ordered]
        outputs = graph.call_function(torch.split, (product, rows, -1))
        for i, linear in enumerate(ordered):
            output = graph.call_function(operator.getitem, (outputs, i))
            output.meta |= linear.node.meta
            output.meta["columns"] = product, sum(rows[:i]), sum(rows)
            linear.node.replace_all_uses_with(output)
    for linear in ordered:
        graph.erase_node(linear.node)
