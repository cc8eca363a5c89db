"""Compiling for CUDA: products that share their input become one, dropout stays torch's own."""

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

_LINEAR = F.linear


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


def join_products(graph: Graph) -> None:
    """Join linear maps of one input, those that learn and those that do not apart."""
    alike: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if _writes(node):  # what was read before may be another value by now
            _join_all(graph, alike)
        if node.op == "call_function" and node.target is _LINEAR and not node.kwargs:
            x, weight, bias = (*node.args, None)[:3]
            if all(given is None or given.op == "placeholder" for given in (weight, bias)):
                alike[x, bias is None, _learns(weight), bias and _learns(bias)].append(node)
    _join_all(graph, alike)
    graph.lint()


def _writes(node: Node) -> bool:
    """Whether it may change a value in its place."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    named = name.endswith("_") or name in {"setitem", *(n for n in dir(operator) if n[:1] == "i")}
    return node.op == "call_function" and (named or bool({"out", "inplace"} & set(node.kwargs)))


def _join_all(graph: Graph, alike: dict[Any, list[Node]]) -> None:
    for nodes in alike.values():
        if len(nodes) > 1:
            _join(graph, nodes)
    alike.clear()


def _learns(node: Node) -> bool:
    return bool(node.meta["example_value"].requires_grad)


def _join(graph: Graph, nodes: list[Node]) -> None:
    sizes = [node.args[1].meta["example_value"].shape[0] for node in nodes]  # type: ignore[union-attr]
    with graph.inserting_before(nodes[0]):
        x, _, *bias = nodes[0].args
        stacked = [
            graph.call_function(torch.cat, ([node.args[place] for node in nodes],))
            for place in range(1, 3 if bias and bias[0] is not None else 2)
        ]
        whole = graph.call_function(_LINEAR, (x, *stacked))
        parts = graph.call_function(torch.split, (whole, sizes, -1))
        for i, node in enumerate(nodes):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, i)))
    for node in nodes:
        graph.erase_node(node)
