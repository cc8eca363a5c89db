"""Compiling for CUDA: products that share their input become one, dropout stays torch's own."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

_IN_PLACE = {"setitem", *(name for name in dir(operator) if name[:1] == "i")}


def joined(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """A backend for torch.compile.

    A GPU multiplies one wide matrix faster than three narrow ones. Dropout that the compiler
    draws itself takes as long as what it is fused with; torch's own also gives an eager step's
    masks.
    """
    from torch._inductor.compile_fx import compile_fx

    join_products(module.graph)
    module.recompile()
    return compile_fx(module, inputs, config_patches={"fallback_random": True})


@dataclass(frozen=True)
class _Linear:
    """A linear map in a graph, its weight and its bias inputs of the graph."""

    node: Node
    x: Node
    weights: tuple[Node, ...]  # the weight, and the bias if there is one
    learns: bool

    @property
    def rows(self) -> int:
        return int(self.weights[0].meta["example_value"].shape[0])


def _read(node: Node) -> _Linear | None:
    if node.op != "call_function" or node.target is not F.linear or node.kwargs:
        return None
    x, *rest = node.args
    weights = tuple(given for given in rest if isinstance(given, Node))
    learns = {given.meta["example_value"].requires_grad for given in weights}
    if not isinstance(x, Node) or any(w.op != "placeholder" for w in weights) or len(learns) > 1:
        return None
    return _Linear(node, x, weights, learns.pop())


def join_products(graph: Graph) -> None:
    """Join linear maps of one input; of a joined one, only rows that learn get a gradient."""
    alike: dict[Any, list[_Linear]] = defaultdict(list)
    for node in list(graph.nodes):
        if _writes(node):  # what was read before may be another value by now
            _join_all(graph, alike.values())
            alike.clear()
        linear = _read(node)
        if linear is not None:
            alike[linear.x, len(linear.weights)].append(linear)
    _join_all(graph, alike.values())
    graph.lint()


def _writes(node: Node) -> bool:
    """Whether it may change a value in its place."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    named = name.endswith("_") or name in _IN_PLACE or bool({"out", "inplace"} & set(node.kwargs))
    return node.op == "call_function" and named


def _join_all(graph: Graph, groups: Iterable[list[_Linear]]) -> None:
    for linears in groups:
        if len(linears) > 1:
            _join(graph, linears)


def _join(graph: Graph, linears: list[_Linear]) -> None:
    first = linears[0]
    ordered = sorted(linears, key=lambda linear: linear.learns)  # the frozen ones first
    kinds = [[one for one in ordered if one.learns == learns] for learns in (False, True)]
    kinds = [kind for kind in kinds if kind]
    with graph.inserting_before(first.node):
        stacked = [
            _cat(graph, [one.weights[place] for one in kind])
            for place in range(len(first.weights))
            for kind in kinds
        ]
        target = F.linear if len(kinds) == 1 else partly_frozen
        whole = graph.call_function(target, (first.x, *stacked))
        parts = graph.call_function(torch.split, (whole, [one.rows for one in ordered], -1))
        for i, one in enumerate(ordered):
            one.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, i)))
    for one in ordered:
        graph.erase_node(one.node)


def _cat(graph: Graph, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else graph.call_function(torch.cat, (nodes,))


def partly_frozen(x: Tensor, frozen: Tensor, learning: Tensor, *biases: Tensor) -> Tensor:
    """A linear map whose first rows are frozen: one product forward, one back, and for the
    weights' gradient one over the rows that learn."""
    device = x.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else x.dtype
    weight, given = torch.cat([frozen, learning]).to(dtype), x.to(dtype)
    bias = torch.cat(biases).to(dtype).detach() if biases else None
    learns = [learning, *biases[1:]]
    with torch.autocast(device, enabled=False):
        return _PartlyFrozen.apply(given, weight.detach(), bias, *(t.to(dtype) for t in learns))


class _PartlyFrozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *learning: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.frozen, ctx.count = len(weight) - len(learning[0]), len(learning)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = slope[..., ctx.frozen :].flatten(0, -2)
        made = (rows.t() @ x.flatten(0, -2), rows.sum(0))
        return slope @ weight, None, None, *made[: ctx.count]
