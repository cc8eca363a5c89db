"""Attentions in a form that cannot be read: a model with one of them is refused, with the reason.

What can be read is torch's fused attention, and a matrix product of queries and keys, a softmax,
and its matrix product with values (`attentions.py`). Everything else that weighs vectors by pairs
of vectors would be missed in silence, so it is searched for here. `graph.py` explains products.
"""

from collections.abc import Collection, Iterable

from torch.autograd.graph import GradientEdge

from frostlab.errors import UnknownArchitecture
from frostlab.roles.tracing.dependence import mixes_vectors
from frostlab.roles.tracing.graph import CHECKPOINT, Graph, Node

_OPERANDS = 3  # queries, keys and values
# functions that may stand in the place of the softmax
_FUNCTIONS = {
    "Exp": "the exponentials", "Sigmoid": "the sigmoids", "Tanh": "the hyperbolic tangents",
    "Relu": "the ReLU", "Elu": "the ELU", "Gelu": "the GELU", "Silu": "the SiLU",
    "Softplus": "the softplus", "Pow": "a power",
}  # fmt: skip


def refuse_unreadable(graph: Graph, softmaxes: Iterable[Node], known: Collection[Node]) -> None:
    """Raise an error for an attention in a form that cannot be read.

    Args:
        softmaxes: those that do not look like a step of an attention.
        known: the nodes that are part of an attention, or that weigh results of experts.
    """
    for node in graph.order:
        if graph.is_custom(node) and graph.kind(node) != CHECKPOINT:
            inputs = graph.activations(node)
            triple = inputs == _OPERANDS and not graph.is_scripted(node)
            if triple or (inputs and mixes_vectors(graph, node)):
                how = "with three activations" if triple else "to mix vectors"
                name = "a function of TorchScript" if graph.is_scripted(node) else graph.kind(node)
                raise UnknownArchitecture(
                    f"{graph.where(node)} calls {name} {how}: it may be an "
                    "attention, but what it does with them is not seen"
                )
        function = _FUNCTIONS.get(graph.kind(node))
        if function is not None and _weighs(graph, node):
            scores = [p for p in graph.products_before(node) if None not in graph.operands(p)]
            if scores:
                raise UnknownArchitecture(
                    f"{graph.where(node)} multiplies {function} of a product of two "
                    "activations by a third, which is not an attention in a form that can be "
                    "read: use torch's softmax"
                )
    for node in softmaxes:
        weighs = bool(graph.products_after(node)) or _weighs_mixed(graph, node)
        if _weighs_pairs(graph, node, known, weighs) and (weighs or graph.meets_others(node)):
            raise UnknownArchitecture(
                f"{graph.where(node)} has a softmax over pairs of vectors that is not an "
                "attention in a form that can be read (a matrix product of queries and keys, "
                "a softmax, and its matrix product with values)"
            )


def _weighs(graph: Graph, function: Node) -> bool:
    """Return whether a product uses a function's result, perhaps divided by its own sum."""

    def ends(node: Node) -> bool:
        stops = graph.is_mixing(node) or graph.contraction(node) is not None
        return node is function or stops or not node.next_functions

    def is_own(node: Node) -> bool:
        walks = [graph.before(edge, ends) for edge in graph.activations_of(node)]
        return all(n is function for walk in walks for n, stopped in walk if stopped)

    def stop(node: Node) -> bool:
        return not (graph.passes(node) or (graph.kind(node) in ("Mul", "Div") and is_own(node)))

    return any(graph.is_product(n) for n, stopped in graph.after([function], stop) if stopped)


def _weighs_mixed(graph: Graph, softmax: Node) -> bool:
    """Return whether a softmax's probabilities are projected before the product with values.

    Talking-heads attention does so, to mix the heads.
    """

    def stop(node: Node) -> bool:
        return not graph.passes(node)

    mixed = [n for n, stopped in graph.after([softmax], stop) if stopped and graph.contraction(n)]
    return any(graph.is_product(n) for n, stopped in graph.after(mixed, stop) if stopped)


def _weighs_pairs(graph: Graph, softmax: Node, known: Collection[Node], through: bool) -> bool:
    """Return whether each score of a softmax is computed from a pair of vectors.

    Args:
        through: whether to look for the pairs behind a projection of the scores, too.
    """
    start = graph.edge(softmax, 0)
    starts = [] if start is None else [start]

    def stop(node: Node) -> bool:
        return graph.is_mixing(node) or graph.contraction(node) is not None

    for _ in range(2 if through else 1):
        behind: list[GradientEdge] = []
        for edge in starts:
            for node, stopped in graph.before(edge, stop):
                if graph.is_of_pairs(node) or (graph.is_product(node) and node not in known):
                    return True
                contraction = graph.contraction(node) if stopped else None
                if contraction is not None and contraction.activation is not None:
                    behind.append(contraction.activation)
        starts = behind
    return False
