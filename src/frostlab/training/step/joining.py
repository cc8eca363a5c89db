"""Rewrite of a layer's graph: linear maps of the same input are joined into one product.

A GPU multiplies by one wide matrix faster than by three narrow ones, such as query, key and value.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node


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
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    writes = name.endswith("_") or name in _IN_PLACE or bool({"out", "inplace"} & set(node.kwargs))
    return node.op == "call_function" and writes


def _as_linear(node: Node) -> _Linear | None:
    """Return a node as a linear map; None if it is not one that can be joined with others.

    Weight and bias must be inputs of the graph, and both learn or neither does.
    """
    if node.op != "call_function" or node.target is not F.linear or node.kwargs:
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
    ordered = sorted(linears, key=lambda linear: linear.learns)  # frozen maps first
    groups = [[linear for linear in ordered if linear.learns == learns] for learns in (False, True)]
    groups = [group for group in groups if group]
    with graph.inserting_before(first.node):
        stacked = [
            _cat(graph, [linear.weights[place] for linear in group])
            for place in range(len(first.weights))
            for group in groups
        ]
        target = F.linear if len(groups) == 1 else partly_frozen_linear
        product = graph.call_function(target, (first.x, *stacked))
        rows = [linear.rows for linear in ordered]
        outputs = graph.call_function(torch.split, (product, rows, -1))
        for i, linear in enumerate(ordered):
            output = graph.call_function(operator.getitem, (outputs, i))
            output.meta |= linear.node.meta
            output.meta["columns"] = product, sum(rows[:i]), sum(rows)
            linear.node.replace_all_uses_with(output)
    for linear in ordered:
        graph.erase_node(linear.node)


def _cat(graph: Graph, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else graph.call_function(torch.cat, (nodes,))


def partly_frozen_linear(x: Tensor, frozen: Tensor, learning: Tensor, *biases: Tensor) -> Tensor:
    """Apply a linear map with the frozen rows first and the trainable rows after them.

    `biases` is empty, or holds the bias of the frozen and the bias of the trainable rows. There is
    one product in the forward pass, and two in the backward pass: the input's gradient, and the
    gradient of the weight's trainable rows.
    """
    device = x.device.type
    autocasts = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else x.dtype
    weight, x = torch.cat([frozen, learning]).to(dtype), x.to(dtype)
    bias = torch.cat(biases).to(dtype).detach() if biases else None
    trainable = [learning, *biases[1:]]
    with torch.autocast(device, enabled=False):
        return _PartlyFrozen.apply(x, weight.detach(), bias, *(t.to(dtype) for t in trainable))


class _PartlyFrozen(torch.autograd.Function):
    """The autograd function of `partly_frozen_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *learning: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # the number of frozen rows, and of trainable tensors: the weight, and the bias if any
        ctx.frozen, ctx.count = len(weight) - len(learning[0]), len(learning)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = upstream[..., ctx.frozen :].flatten(0, -2)
        gradients = (rows.t() @ x.flatten(0, -2), rows.sum(0))
        return upstream @ weight, None, None, *gradients[: ctx.count]
