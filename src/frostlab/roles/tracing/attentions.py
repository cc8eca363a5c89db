"""The attentions of a watched pass: which rows of which parameters each head is computed from.

An attention is torch's fused attention, or it is written out: a product of two activations (the
scores), its softmax (the probabilities), and the product of the probabilities with a third
activation. Its sides are the operands: query, key and value. If two projections in a row make a
side, the side is low-rank, and the first of them is a factor. `dependence.py` finds the rows of a
side's heads from gradients. `graph.py` explains contractions and products.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from frostlab.errors import UnknownArchitecture
from frostlab.roles.tracing.dependence import (
    Group,
    find_groups,
    query_operand,
    sums_along,
    touched,
)
from frostlab.roles.tracing.graph import Contraction, Graph, Node, shape_at
from frostlab.roles.tracing.passes.trace import Use
from frostlab.roles.tracing.unreadable import refuse_unreadable

SIDES = ("query", "key", "value")
_DEPTH = 3  # longest chain of projections that is followed back from a side


@dataclass(eq=False)
class Side:
    """The query, key or value of an attention."""

    role: str
    edge: GradientEdge
    operand: int  # which operand of the product, or of the fused attention, it is
    feature_axis: int  # the axis of the entries of one vector
    contractions: list[Contraction] = field(default_factory=list)
    bare: list[Use] = field(default_factory=list)  # parameters used without a projection
    # nodes, or ids of parameters, that the inputs of its projections come from
    sources: set[Node] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)  # its heads
    factors: dict[int, "Factor"] = field(default_factory=dict)  # node id → earlier projection


@dataclass(eq=False)
class Factor:
    """An earlier projection of a low-rank side, the sides that use it, and which rows they use."""

    contraction: Contraction
    roles: set[str]
    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # as in `dependence.Touched`


@dataclass(eq=False)
class Attention:
    """One execution of an attention or, if its scores are a sum of products, one such product."""

    sides: dict[str, Side]
    core: Node  # the node whose operands are the query and the key
    place: int  # number of the softmax, or of the fused attention, in the order of the graph
    result: Node  # the product with the values; `core` if it is fused, or `sides` has no value
    position: list[Contraction] = field(default_factory=list)  # projections of positions
    added: list[Use] = field(default_factory=list)  # parameters that shift or scale the scores
    lookups: list[Contraction] = field(default_factory=list)  # that shift or scale the scores
    factors: list[Factor] = field(default_factory=list)
    cross: bool = False  # whether keys come from another sequence than queries


class Attentions:
    """All attentions of a graph, in the order in which they ran."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: list[Attention] = []
        self.core: set[Node] = set()  # their softmaxes, products and fused attentions
        self.projections: set[Node] = set()  # nodes that make queries, keys and values
        # id of a parameter → why it is not clear what an attention uses it for
        self.unclear: dict[int, str] = {}
        pending: list[tuple[Node, Any]] = []
        unread: list[Node] = []  # softmaxes that do not look like an attention's
        for node in graph.order:
            if graph.is_fused_attention(node):
                self.core.add(node)
                pending.append((node, None))
            elif graph.is_softmax(node):
                products = graph.products_after(node)
                scores = graph.products_before(node)
                if products and scores:
                    self.core |= {node, *(p for p, _ in products), *scores}
                    pending.append((node, (products, scores)))
                else:
                    unread.append(node)
            elif graph.kind(node) == "LogSoftmax":
                unread.append(node)
        self.weighing = set(self._weighed_experts(unread))
        refuse_unreadable(graph, unread, self.core | self.weighing)
        self._free = self._escaping()
        self._hubs: dict[Node, bool] = {}
        self._asks: dict[Node, int | None] = {}  # product → which of its operands is the query
        for node, parts in pending:
            self.found += self._fused(node) if parts is None else self._written(node, *parts)
        for attention in self.found:
            for side in attention.sides.values():
                self._read_side(side)
                self.projections |= {contraction.node for contraction in side.contractions}
        for attention in self.found:
            self._note_unseen_outputs(attention)
            attention.cross = self._is_cross(attention)
            self._read_factors(attention)
            for side in attention.sides.values():
                side.groups = list(
                    find_groups(graph, side.edge, side.feature_axis, side.contractions, side.bare)
                )

    def _weighed_experts(self, softmaxes: list[Node]) -> Iterator[Node]:
        """Yield products that weigh vectors of one token by a softmax, such as experts' results."""
        for softmax in softmaxes:
            for product, operand in self.graph.products_after(softmax):
                edge = self.graph.operands(product)[operand]
                if edge is not None and shape_at(edge)[-2 if operand == 0 else -1] == 1:
                    yield product

    def _escaping(self) -> dict[Node, bool]:
        """Return node → whether its value reaches an output without passing through `self.core`."""
        graph = self.graph
        free: dict[Node, bool] = {}
        leaves = [node for node in graph.order if not node.next_functions]
        inner = [node for node in graph.order if node.next_functions]
        for node in [*reversed(inner), *leaves]:
            free[node] = node in graph.outputs or any(
                free.get(consumer, False) and consumer not in self.core
                for consumer, _ in graph.consumers.get(node, [])
            )
        return free

    def _fused(self, node: Node) -> list[Attention]:
        sides = {}
        for index, role in enumerate(SIDES):
            edge = self.graph.edge(node, index)
            if edge is not None:
                sides[role] = Side(role, edge, index, len(shape_at(edge)) - 1)
            else:
                self._refuse_without_history(node, role)
        return [Attention(sides, node, node._sequence_nr(), node)]

    def _refuse_without_history(self, node: Node, role: str) -> None:
        """Raise an error for a side without a history, unless it is a value made of constants."""
        if role != "value" or self.graph.without_history() - self.graph.reached():
            raise UnknownArchitecture(
                f"{self.graph.where(node)} computes the {role} of an attention without gradients, "
                "so it is not clear which weights it comes from"
            )

    def _written(
        self, softmax: Node, products: list[tuple[Node, int]], scores: list[Node]
    ) -> list[Attention]:
        """Read an attention that is written out; its scores may be a sum of several products."""
        graph = self.graph
        position: list[Contraction] = []
        listed: list[Attention] = []  # one for each product that does not score positions alone
        every: list[dict[str, Side]] = []  # both sides of each of these products
        hidden = False  # whether an operand of a product has no history
        constant: list[Attention] = []  # products of two sides made of parameters alone
        added: list[Use] = []
        # products that an earlier attention has, too, as in residual attention
        earlier = self._asks.keys() & scores
        earlier = set() if len(earlier) == len(scores) else earlier
        for product in scores:
            edges = graph.operands(product)
            if edges[0] is None or edges[1] is None:
                added += (uses := graph.parameters_alone(product))
                hidden = hidden or not uses
                continue
            asks = query_operand(graph, softmax, product, [p for p in scores if p is not product])
            if self._asks.setdefault(product, asks) == asks and product in earlier:
                continue  # these are the scores of an earlier attention, which has been read
            if asks is None:
                raise UnknownArchitecture(
                    f"{graph.where(softmax)} does not show which side of its attention is the "
                    "query: pass a batch with more tokens"
                )
            sides: dict[str, Side] = {}
            for operand, edge in enumerate(edges):
                assert edge is not None
                role = "query" if operand == asks else "key"
                axis = len(shape_at(edge)) - (1 if operand == 0 else 2)
                sides[role] = Side(role, edge, operand, axis)
            projected = {role: self._positions_of(side) for role, side in sides.items()}
            kept = {role: side for role, side in sides.items() if not projected[role]}
            if kept:
                listed.append(Attention(kept, product, softmax._sequence_nr(), product))
                every.append(sides)
                position += [c for role in sides for c in projected[role]]
            else:
                constant.append(Attention(dict(sides), product, softmax._sequence_nr(), product))
        if not listed and len(constant) == 1:  # learned tokens attend before any input comes in
            listed, every = constant, [constant[0].sides]
        whole = [attention for attention in listed if len(attention.sides) == 2]
        if listed and not whole:  # the side made of parameters is a learned query, not positions
            position.clear()
            for attention, sides in zip(listed, every, strict=True):
                attention.sides = sides
            whole = listed
        if not whole and hidden:
            raise UnknownArchitecture(
                f"{graph.where(softmax)} computes the queries or the keys of an attention without "
                "gradients, so it is not clear which weights they come from"
            )
        if not whole:
            return []
        values: list[tuple[Side, Node, set[Node]]] = []  # each with its product and projections
        for value_product, operand in products:
            edge = graph.operands(value_product)[1 - operand]
            if edge is None:
                self._refuse_without_history(softmax, "value")
                continue
            if not sums_along(softmax, value_product):
                raise UnknownArchitecture(
                    f"{graph.where(softmax)} has a softmax along one axis and sums the values "
                    "along another, so it is not clear which side is the query"
                )
            axis = len(shape_at(edge)) - (1 if operand == 0 else 2)
            value = Side("value", edge, 1 - operand, axis)
            values.append((value, value_product, self._projections(edge)))
        values = [entry for entry in values if entry[2]] or values
        if len({frozenset(entry[2]) for entry in values}) > 1:
            raise UnknownArchitecture(
                f"{graph.where(softmax)} multiplies the result of one softmax by several values"
            )
        for value, value_product, _ in values[:1]:
            whole[0].sides["value"], whole[0].result = value, value_product
        for attention in listed:
            attention.position = position
        whole[0].added += added
        start = graph.edge(softmax, 0)
        assert start is not None
        for node, stopped in graph.before(
            start, lambda n: graph.is_mixing(n) or graph.contraction(n) is not None
        ):
            contraction = graph.contraction(node) if stopped else None
            if contraction is not None:
                whole[0].lookups.append(contraction)
            elif (use := graph.use(node)) is not None:
                whole[0].added.append(use)
        return listed

    def _positions_of(self, side: Side) -> list[Contraction]:
        """Return a side's contractions if it is made of parameters and constants only; else []."""
        graph = self.graph
        made = []

        def stop(node: Node) -> bool:
            return (
                graph.is_mixing(node)
                or graph.contraction(node) is not None
                or not node.next_functions
            )

        for node, stopped in graph.before(side.edge, stop):
            if not stopped:
                continue
            contraction = graph.contraction(node)
            if contraction is None:
                if graph.use(node) is None:
                    return []
                continue
            activation = contraction.activation
            if activation is not None and not graph.weight_only(activation.node):
                return []
            made.append(contraction)
        return made

    def _projections(self, start: GradientEdge | Node) -> set[Node]:
        """Return the nearest contractions before an edge or node, up to the previous attention."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or node in self.core

        walk = graph.before(start, stop)
        return {node for node, stopped in walk if stopped and graph.contraction(node) is not None}

    def _read_side(self, side: Side) -> None:
        """Find the projections of a side: the first contractions on the way back to the inputs."""
        graph = self.graph
        made: Node = None  # a product of two activations, outside the attentions
        matrices = False  # whether matrices of parameters are multiplied entry by entry
        for node, stopped in graph.before(side.edge, self._stops):
            if not stopped:
                self._note_unseen(node, f"the {side.role} of an attention")
                continue
            contraction = graph.contraction(node)
            if contraction is not None and contraction.kind != "lookup":
                side.contractions.append(contraction)
                side.sources |= self._sources(contraction)
            elif contraction is not None or self.is_hub(node) or graph.is_input(node):
                side.sources.add(node)
            elif graph.weight_only(node):
                side.bare += graph.uses_below(node)
                matrices = matrices or (
                    sum(size > 1 for size in shape_at(GradientEdge(node, 0))) > 1
                    and any(graph.kind(n) == "Mul" for n, _ in graph.consumers.get(node, []))
                )
            elif graph.is_product(node) and node not in self.core:
                made = node
        if made is not None and not side.contractions and self._projections(made):
            how = (
                "with a matrix that is no parameter, such as a quantised weight in a buffer"
                if None in graph.operands(made) else self._how_made(made)
            )  # fmt: skip
            raise UnknownArchitecture(
                f"{graph.where(made)} computes the {side.role} of an attention {how}, so it is not "
                "clear which weights it comes from"
            )
        for use in side.bare if matrices and not side.contractions else ():
            self.unclear.setdefault(
                use.parameter,
                f"is multiplied entry by entry, not as a matrix, for the {side.role} of an "
                "attention, so it is not clear which of its rows make it",
            )

    def _how_made(self, made: Node) -> str:
        """Say how a side is computed, if it is no projection by a parameter."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return node is not made and graph.is_mixing(node)

        how = "as a product of two computed matrices"
        for edge in filter(None, graph.operands(made)):
            if graph.parameters_alone(edge.node):
                walk = [graph.module(n) for n, _ in graph.before(edge, stop) if n.next_functions]
                names = [path for path in walk if ".parametrizations." in path]
                by = names[0] if names else "a parametrization such as spectral_norm"
                return f"{how}, of which {by} {'makes' if names else 'may make'} one"
        return how

    def _note_unseen(self, node: Node, what: str) -> None:
        """Note the matrices of parameters that a node uses if it is not seen what for."""
        for parameter in self.graph.unseen(node):
            if parameter.ndim > 1:
                function = "a function of TorchScript"
                if not self.graph.is_scripted(node):
                    function = f"{self.graph.kind(node)}, a function of autograd,"
                self.unclear.setdefault(
                    id(parameter),
                    f"is used by {function} for {what}, and what that does with it is not seen",
                )

    def _note_unseen_outputs(self, attention: Attention) -> None:
        """Note the matrices that project an attention's result in a way that is not seen."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or node in self.core or self.is_hub(node)

        for node, stopped in graph.after([attention.result], stop):
            if not stopped:
                self._note_unseen(node, "the result of an attention")

    def _is_cross(self, attention: Attention) -> bool:
        """Return whether keys come from another sequence than queries, or the query is learned.

        Keys of an earlier layer, or of a longer sequence that the queries were pooled from, do not
        count as another sequence.
        """
        query, key = attention.sides.get("query"), attention.sides.get("key")
        if query is None or key is None or not key.sources or query.sources & key.sources:
            return False
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or graph.is_mixing(node)

        # The first projection of a low-rank query can also feed other weights, so compare the
        # inputs of this projection, too.
        first = [graph.contraction(node) for node in query.sources if node in graph.nodes]
        sources = query.sources.union(*(self._sources(c) for c in first if c and c.is_projection))
        nodes = [source for source in sources if source in graph.nodes]
        if any(n in key.sources for source in nodes for n, _ in graph.before(source, stop)):
            return False
        return not self._summed(sources) & self._summed(key.sources)

    def _summed(self, sources: set[Node]) -> set[Node]:
        """Return the sources; for a source x + p, an activation plus positions, return x."""
        graph = self.graph
        origins = {source for source in sources if source not in graph.nodes}
        for source in sources & graph.nodes.keys():
            parents = [p for p, _ in source.next_functions if p is not None]
            for parent in parents if graph.kind(source) == "Add" else [source]:
                for node, stopped in graph.before(parent, self._ends):
                    if stopped and not graph.weight_only(node) and not graph.is_of_positions(node):
                        origins.add(node)
        return origins

    def _stops(self, node: Node) -> bool:
        graph = self.graph
        return (
            graph.contraction(node) is not None
            or graph.is_mixing(node)
            or graph.weight_only(node)
            or not node.next_functions
            or self.is_hub(node)
        )

    def escapes(self, node: Node) -> bool:
        """Return whether a value reaches an output without passing through an attention."""
        return self._free[node]

    def is_hub(self, node: Node) -> bool:
        """Return whether a node joins activations and reaches an output, as a residual sum does."""
        if node not in self._hubs:
            self._hubs[node] = (
                self._free[node] and self.graph.activations(node) > 1 and self._has_origins(node)
            )
        return self._hubs[node]

    def refuse_multiplied_probabilities(self, known: Container[int]) -> None:
        """Raise an error if probabilities are multiplied together before they weigh the values.

        Args:
            known: ids of the parameters that queries, keys and values are computed from.
        """
        graph = self.graph
        for attention in self.found:
            value = attention.sides.get("value")
            if value is None or value.contractions:
                continue
            walk = graph.after([attention.result], lambda n: graph.contraction(n) is not None)
            for node in [n for n, stopped in walk if not stopped and graph.is_product(n)]:
                for edge in filter(None, graph.operands(node)):
                    earlier = [graph.contraction(n) for n in self._projections(edge)]
                    uses = [use for c in earlier if c is not None for use in c.weights]
                    if any(use.parameter not in known for use in uses):
                        raise UnknownArchitecture(
                            f"{graph.where(node)} multiplies the probabilities of an attention by "
                            "one another before it multiplies the values by them"
                        )

    def _has_origins(self, node: Node) -> bool:
        """Return whether a node is computed from more than one contraction, attention or input."""
        graph, origins = self.graph, set()

        def stop(other: Node) -> bool:
            return (
                graph.contraction(other) is not None
                or graph.is_mixing(other)
                or not other.next_functions
                or graph.weight_only(other)
            )

        for earlier, stopped in graph.before(node, stop):
            if stopped and not (graph.weight_only(earlier) and graph.contraction(earlier) is None):
                origins.add(earlier)
                if len(origins) > 1:
                    return True
        return False

    def _sources(self, contraction: Contraction) -> set[Node]:
        """Return the nodes, or ids of parameters, that a contraction's input is computed from."""
        graph = self.graph
        if contraction.activation is None:
            return set()  # a constant, such as the zeros that a decoder begins with
        if graph.weight_only(contraction.activation.node):
            return {use.parameter for use in graph.uses_below(contraction.activation.node)}
        origins: set[Node] = set()
        pending = [contraction.activation]
        for _ in range(_DEPTH):
            later: list[GradientEdge] = []
            for edge in pending:
                for node, stopped in graph.before(edge, lambda n: self._ends(n)):
                    if not stopped or (graph.weight_only(node) and not graph.is_input(node)):
                        continue
                    earlier = graph.contraction(node)
                    inner = earlier is not None and not self._free[node]  # only for attentions
                    if inner and earlier is not None and earlier.activation is not None:
                        later.append(earlier.activation)
                    else:
                        origins.add(node)
            pending = later
        return origins

    def _ends(self, node: Node) -> bool:
        """Return whether a walk back from a projection ends here, e.g. where activations meet."""
        graph = self.graph
        return (
            graph.contraction(node) is not None
            or graph.is_mixing(node)
            or not node.next_functions
            or graph.weight_only(node)
            or (self.graph.activations(node) > 1 and self._has_origins(node))
        )

    def _feeds_others(self, node: Node, attention: Attention) -> bool:
        """Return whether a value goes into other attentions, too, as an encoder's result does."""
        cores = {node for other in self.found if other.place != attention.place
                 for node in (other.core, other.result)}  # fmt: skip
        return any(n in cores for n, _ in self.graph.after([node], lambda n: n in self.core))

    def _read_factors(self, attention: Attention) -> None:
        """Find the first projections of low-rank sides: those that feed some but not all sides."""
        graph = self.graph
        known: dict[Node, Factor] = {}
        for role, side in attention.sides.items():
            level = list(side.contractions)
            for _ in range(_DEPTH):
                earlier: list[Contraction] = []
                for contraction in level:
                    if contraction.activation is None:
                        continue
                    for node, stopped in graph.before(contraction.activation, self._ends):
                        matrix = graph.contraction(node) if stopped else None
                        if matrix is None or not matrix.is_projection or self._free[node]:
                            continue
                        if node not in known and self._feeds_others(node, attention):
                            continue
                        factor = known.setdefault(node, Factor(matrix, set()))
                        factor.roles.add(role)
                        side.factors[id(node)] = factor
                        rows = touched(contraction.activation, [*matrix.weights, *matrix.bias])
                        for key, axes in rows.items():
                            before = factor.rows.get(key)
                            factor.rows[key] = axes if before is None else tuple(
                                a | b for a, b in zip(before, axes, strict=True)
                            )  # fmt: skip
                        earlier.append(matrix)
                level = earlier
        attention.factors = [
            factor for factor in known.values()
            if len(factor.roles) < len(attention.sides)
            # In cross-attention, what key and value share is a projection of the other sequence.
            and not (attention.cross and factor.roles == {"key", "value"})
        ]  # fmt: skip
