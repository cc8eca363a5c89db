"""Feed-forward networks: two projections with an activation function between them.

In a layer, the first projection of such a network is `up` and the last is `down`. If the results of
two first projections are multiplied, the one with the activation function is the `gate`.
Several projections may be rows of one weight, which may also hold an attention's queries.
`graph.py` explains contractions. An alias is a tensor that stands for one use of a parameter. A
parameter is claimed if an attention's query, key or value is computed from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from frostlab.roles.tracing.attentions import Attentions
from frostlab.roles.tracing.claims import Finding, two_roles
from frostlab.roles.tracing.dependence import Touched, activation_operand, touched
from frostlab.roles.tracing.graph import (
    SHAPES,
    Contraction,
    Graph,
    Node,
    device_at,
    dtype_at,
    saved_axis,
    shape_at,
)
from frostlab.roles.tracing.passes.trace import Use

# Operations that are not part of an activation function.
_LINEAR = SHAPES - {"Where"} | {
    "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "NativeDropout", "Sum", "Mean", "AccumulateGrad",
    "Addcmul", "Addcdiv", "NativeBatchNorm", "MkldnnConvolution", "Bernoulli",
}  # fmt: skip
_TAKEN = {"output", "up", "gate", "down", "head"}  # roles that no claimed row has as well


@dataclass
class Networks:
    """The roles that parameters (by id) have been given so far."""

    graph: Graph
    attentions: Attentions
    claimed: dict[int, Finding]  # parameter → what the attentions say about it
    layer_of: Callable[[int], str]  # parameter → path of its layer; empty outside the layers
    recurrent: Callable[[int], bool]  # parameter → whether a recurrent module holds it
    roles: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # parameter → role → rows
    axes: dict[int, int] = field(default_factory=dict)  # parameter → axis of its rows
    # claimed parameter → role → rows that no attention claims
    beyond: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    biases: set[int] = field(default_factory=set)
    crosses: set[int] = field(default_factory=set)  # in output projections of cross-attention
    matrices: set[int] = field(default_factory=set)  # weights of projections

    def __post_init__(self) -> None:
        """Give the role `other` to parameters that are used, but it is not seen what for."""
        seen = self.graph.reached()
        for parameter in (p for node in self.graph.nodes for p in self.graph.unseen(node)):
            if id(parameter) not in seen:
                self.roles[id(parameter)] = {"other": torch.ones(1, dtype=torch.bool)}

    def give(
        self,
        contraction: Contraction,
        role: str,
        rows: dict[int, tuple[int, Tensor]] | None = None,
    ) -> None:
        """Give a role to the parameters of a contraction, or to some of their rows.

        Args:
            rows: id of an alias → the axis of the rows, and which of them get the role.
        """
        for use in (*contraction.weights, *contraction.bias):
            if use.parameter in self.claimed:
                self._give_claimed(contraction, use, role, rows)
            if use.parameter in self.claimed or id(use.alias) in self.graph.trace.norms:
                continue
            if self.recurrent(use.parameter) and role not in ("position", "conv"):
                role = "recurrent"
            known = self.roles.setdefault(use.parameter, {})
            if rows is None:
                if not known:
                    known[role] = torch.ones(1, dtype=torch.bool)
            elif id(use.alias) in rows:
                self.axes[use.parameter], mask = rows[id(use.alias)]
                known[role] = mask if role not in known else known[role] | mask
            if use in contraction.bias:
                self.biases.add(use.parameter)

    def _give_claimed(
        self,
        contraction: Contraction,
        use: Use,
        role: str,
        rows: dict[int, tuple[int, Tensor]] | None,
    ) -> None:
        """Give a role to rows that no attention claims; raise an error if one claims them, too."""
        finding = self.claimed[use.parameter]
        if rows is None:
            if role not in _TAKEN or contraction.node in self.attentions.projections:
                return
            axis = finding.axis or 0
            used = _rows_of(GradientEdge(contraction.node, 0), [contraction]).get(id(use.alias))
            rows = {} if used is None else {id(use.alias): (axis, used[axis])}
        axis, mask = rows.get(id(use.alias), (-1, torch.zeros(1)))
        if axis != (finding.axis or 0):
            return
        for other, claimed in finding.roles.items():
            if role in _TAKEN and bool((both := claimed & mask).any()):
                raise two_roles(finding.name, other, role, both)
        self.beyond.setdefault(use.parameter, {})[role] = mask

    def set(self, use: Use, role: str) -> None:
        """Give a role to a parameter, unless it has one, is claimed, or belongs to a norm."""
        taken = use.parameter in self.claimed or id(use.alias) in self.graph.trace.norms
        if not taken and not self.roles.get(use.parameter):
            role = "recurrent" if self.recurrent(use.parameter) else role
            self.roles[use.parameter] = {role: torch.ones(1, dtype=torch.bool)}

    def is_claimed(self, contraction: Contraction) -> bool:
        return any(use.parameter in self.claimed for use in contraction.weights)

    def read_network(self, contraction: Contraction) -> None:
        """Read a feed-forward network, if this contraction is its last projection."""
        graph = self.graph
        names = [use.parameter for use in contraction.weights]
        if contraction.activation is None or any(p in self.claimed for p in names):
            return
        if any(self.roles.get(p) for p in names) and "down" not in self.roles.get(names[0], {}):
            return
        earlier, between = self.before(contraction.activation)
        if not earlier or any(c is None for c in earlier):
            return
        contractions = [c for c in earlier if c is not None]
        layers = {self.layer_of(p) for c in contractions for p in (u.parameter for u in c.weights)}
        if layers != {self.layer_of(names[0])}:
            return
        if layers == {""} and not self._is_residual(contraction, contractions):
            return
        active = any(self.activates(node) for node in between)
        gating = [n for n in between if graph.kind(n) == "Mul" and self.gates(n)]
        if not active and not gating:
            return
        projections = [c for c in contractions if c.is_projection]
        for conv in contractions:
            if conv not in projections and conv.activation is not None:
                more, _ = self.before(conv.activation)
                projections += [c for c in more if c is not None and c.is_projection]
        if not projections or not contraction.is_projection:
            return
        if len(contractions) > len(projections) or any(c not in projections for c in contractions):
            before = [n for c in contractions if c.activation for n in self.before(c.activation)[1]]
            if any(graph.kind(n) in ("Glu", "Mul") and self._gates_any(n) for n in before):
                for part in (contraction, *projections):  # a convolution after a gate
                    self.give(part, "conv")
                return
        self.give(contraction, "down")
        self.read_ups(contraction.activation, projections, between)

    def read_ups(
        self, edge: GradientEdge, projections: list[Contraction], between: list[Node]
    ) -> None:
        """Give the first projections of a network their roles: up, or gate and up."""
        graph = self.graph
        gating = [n for n in between if graph.kind(n) == "Mul" and self.gates(n)]
        for node in gating:
            self._gated(node, projections)
        glu = next((node for node in between if graph.kind(node) == "Glu"), None)
        if glu is not None:
            self._glu(glu, projections)
        elif not gating:
            for up in projections:
                self.give(up, "up", self._unclaimed(up, edge))

    def _unclaimed(
        self, contraction: Contraction, edge: GradientEdge
    ) -> dict[int, tuple[int, Tensor]] | None:
        """Return the rows of a claimed weight that an activation depends on; None: not claimed."""
        if not self.is_claimed(contraction):
            return None
        uses = [u for u in (*contraction.weights, *contraction.bias) if u.parameter in self.claimed]
        axes = {id(use.alias): self.claimed[use.parameter].axis or 0 for use in uses}
        rows = _rows_of(edge, [contraction])
        return {key: (axis, rows[key][axis]) for key, axis in axes.items() if key in rows}

    def _glu(self, node: Node, projections: list[Contraction]) -> None:
        """Find the rows of the two halves that torch's `glu` multiplies: up, then gate."""
        edge = self.graph.edge(node, 0)
        assert edge is not None
        shape = shape_at(edge)
        seed = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        seed = seed.to(device_at(edge), dtype_at(edge))
        axis = saved_axis(node, len(shape))
        first = torch.arange(shape[axis], device=seed.device) < shape[axis] // 2
        first = first.view([-1 if a == axis else 1 for a in range(len(shape))])
        halves = [_rows_of(edge, projections, seed * half) for half in (first, ~first)]
        for contraction in projections:
            self.give(contraction, "up", _apart(halves[0], halves[1]))
            self.give(contraction, "gate", _apart(halves[1], halves[0]))

    def _is_residual(self, last: Contraction, first: list[Contraction]) -> bool:
        """Return whether the result of a network is added to what the network is applied to."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or self.attentions.is_hub(node)

        given = {n for c in first if c.activation for n, _ in graph.before(c.activation, stop)}
        for node, stopped in graph.after([last.node], stop):
            if stopped and graph.kind(node) == "Add":
                for parent, _ in node.next_functions:
                    if parent is not None and given & {n for n, _ in graph.before(parent, stop)}:
                        return True
        return False

    def _gated(self, product: Node, projections: list[Contraction]) -> None:
        """Decide which factor of a product is the gate; the other is the projection `up`."""
        graph = self.graph
        sides = []
        for index in (0, 1):
            edge = graph.edge(product, index)
            assert edge is not None
            earlier, between = self.before(edge)
            active = any(self.activates(node) for node in between)
            sides.append((edge, [c for c in earlier if c is not None], active))
        gate = 0 if sides[0][2] else 1
        if not sides[gate][2]:
            gate = -1  # neither has an activation function
        for index, (edge, contractions, _) in enumerate(sides):
            role = "gate" if index == gate else "up"
            for contraction in contractions:
                if contraction not in projections:
                    continue
                other_edge, other, _ = sides[1 - index]
                rows = None
                if contraction in other:
                    rows = _apart(*(_rows_of(e, [contraction]) for e in (edge, other_edge)))
                self.give(contraction, role, rows)

    def activates(self, node: Node) -> bool:
        """Return whether a node is an activation function, or a part of one."""
        graph = self.graph
        if graph.kind(node) == "Mul":  # a product of activations, as in a squared ReLU
            edges = [graph.edge(node, index) for index in (0, 1)]
            nodes = [edge.node for edge in edges if edge is not None]
            return len(nodes) == 2 and not any(map(graph.weight_only, nodes))
        return graph.kind(node) not in _LINEAR or graph.is_custom(node)

    def _gates_any(self, node: Node) -> bool:
        return self.graph.kind(node) == "Glu" or self.gates(node)

    def gates(self, node: Node) -> bool:
        """Return whether the factors of a product come from different projections or rows.

        In an activation function that is written out, both come from the same rows.
        """
        graph, sides = self.graph, []
        for index in (0, 1):
            edge = graph.edge(node, index)
            if edge is None or graph.weight_only(edge.node):
                return False
            earlier, _ = self.before(edge)
            contractions = [c for c in earlier if c is not None]
            if not contractions:
                return False
            sides.append((edge, contractions))
        if shape_at(sides[0][0]) != shape_at(sides[1][0]):
            return False
        if set(sides[0][1]) != set(sides[1][1]):
            return True
        uses = [use for c in sides[0][1] for use in c.weights]
        left, right = (touched(edge, uses) for edge, _ in sides)
        return any(
            not torch.equal(a, b)
            for key in left.keys() & right.keys()
            for a, b in zip(left[key], right[key], strict=True)
        )

    def before(self, edge: GradientEdge) -> tuple[list[Contraction | None], list[Node]]:
        """Return the nearest contractions before an edge, and the nodes between.

        None stands for any other origin, such as a lookup or a residual sum.
        """
        graph, nearest, between = self.graph, [], []

        def stop(node: Node) -> bool:
            return (
                graph.contraction(node) is not None
                or graph.weight_only(node)
                or graph.is_mixing(node)
                or not node.next_functions
                or (self.attentions.is_hub(node) and self._is_stream(node))
            )

        for node, stopped in graph.before(edge, stop):
            if not stopped:
                between.append(node)
            elif (contraction := graph.contraction(node)) is not None:
                nearest.append(contraction if contraction.kind != "lookup" else None)
            elif not graph.weight_only(node):
                nearest.append(None)
        return nearest, between

    def _is_stream(self, node: Node) -> bool:
        """Return whether a node adds or joins activations, as in a residual stream.

        Joining results of one weight, such as those of the experts that it holds, does not count.
        """
        kind = self.graph.kind(node)
        if kind == "Cat" and self._joins_experts(node):
            return False
        return kind in ("Add", "Sub", "Cat", "Addcmul", "Stack")

    def _joins_experts(self, node: Node) -> bool:
        graph, weights = self.graph, set()

        def stop(other: Node) -> bool:
            return graph.contraction(other) is not None or not other.next_functions

        for earlier, stopped in graph.before(node, stop):
            if stopped:
                contraction = graph.contraction(earlier)
                if contraction is None or contraction.kind != "matrix":
                    return False
                weights |= {use.parameter for use in contraction.weights}
        return len(weights) == 1


def _rows_of(
    edge: GradientEdge, contractions: Sequence[Contraction], seed: Tensor | None = None
) -> Touched:
    """Return on which rows of these contractions' parameters the value at an edge depends.

    Earlier uses of the same parameters do not count.
    """
    uses = [use for c in contractions for use in (*c.weights, *c.bias)]
    return touched(edge, uses, seed, [activation_operand(c) for c in contractions])


def _apart(
    own: dict[int, tuple[Tensor, ...]], other: dict[int, tuple[Tensor, ...]]
) -> dict[int, tuple[int, Tensor]]:
    """Return for each alias (by id) an axis on which two factors differ, and the rows of `own`."""
    rows = {}
    for key, masks in own.items():
        pairs = list(zip(masks, other.get(key, masks), strict=True))
        apart = [axis for axis, (a, b) in enumerate(pairs) if not bool((a & b).any())]
        apart += [axis for axis, mask in enumerate(masks) if not mask.all()]
        axis = apart[0] if apart else 0
        rows[key] = axis, masks[axis]
    return rows
