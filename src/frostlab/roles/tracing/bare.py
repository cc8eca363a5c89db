"""Roles of parameters that are in no projection: they are added, multiplied or concatenated.

Examples are learned tokens, positions, scales, and biases that are added by hand.
"""

import math
from dataclasses import dataclass

from torch.autograd.graph import GradientEdge

from frostlab.roles.tracing.graph import Contraction, Node, counts_up, shape_at
from frostlab.roles.tracing.networks import Networks
from frostlab.roles.tracing.passes.trace import Use


@dataclass
class Bare(Networks):
    """Finds the roles of bare parameters, once those of all projections are known."""

    def find_bare(self) -> None:
        """Give a role to parameters that are only added, multiplied or concatenated."""
        graph = self.graph
        for leaf in graph.order:
            use = graph.use(leaf)
            if use is None or use.parameter in self.claimed or use.parameter in self.roles:
                continue
            meeting = next(
                (n for n, stop in graph.after([leaf], lambda n: not graph.weight_only(n)) if stop),
                None,
            )
            role = "other" if meeting is None else self._bare_role(use, meeting)
            self.set(use, role)
        for use in graph.trace.uses.values():  # of lookups without a history, e.g. fixed positions
            if graph.trace.records[use.call].name == "embedding":
                self.set(
                    use, "position" if counts_up(graph.trace.records[use.call]) else "embedding"
                )

    def _bare_role(self, use: Use, meeting: Node) -> str:
        kind = self.graph.kind(meeting)
        if kind not in ("Add", "Sub") and (use.alias.numel() == 1 or self._is_factor(meeting)):
            return "other"
        if self.layer_of(use.parameter):
            if kind in ("Add", "Sub") and use.alias.ndim == 1:
                return self._role_before(use, meeting)
            into_attention = kind == "Add" and not self.attentions.escapes(meeting)
            return "position" if into_attention else "other"
        if kind in ("Cat", "Where", "Stack", "IndexPut", "CopySlices", "MaskedFill"):
            return "other" if self._meets_side(meeting) else "embedding"
        if not self.reaches_attention(meeting):
            if kind in ("Add", "Sub") and use.alias.ndim == 1:
                return self._role_before(use, meeting)
            return "other"
        if kind == "Add" and self._tokens_of(meeting) > 1:
            return "position"
        if kind == "Add" and use.alias.ndim == 1:
            return self._role_before(use, meeting)
        if kind == "Add":
            return "embedding"
        return "embedding" if kind == "Mul" and not self._follows(meeting) else "other"

    def _shapes_of(self, meeting: Node) -> list[tuple[int, ...]]:
        """Return the shapes of what this node adds or multiplies that is made of parameters."""
        return [
            tuple(shape_at(edge))
            for index in range(len(meeting.next_functions))
            if (edge := self.graph.edge(meeting, index)) and self.graph.weight_only(edge.node)
        ]

    def _tokens_of(self, meeting: Node) -> int:
        """Return the number of vectors (rows) of the parameters that this node adds."""
        return max((math.prod(shape[:-1]) for shape in self._shapes_of(meeting)), default=1)

    def _is_factor(self, meeting: Node) -> bool:
        """Return whether parameters come here as one number, or as one for each of several parts.

        An example is the weight of an earlier layer's result in a sum of such results.
        """
        shapes = self._shapes_of(meeting)
        return bool(shapes) and all(
            math.prod(shape) == 1 or (len(shape) > 1 and math.prod(shape[1:]) == 1)
            for shape in shapes
        )

    def _meets_side(self, meeting: Node) -> bool:
        """Return whether a parameter is joined to an attention's queries, keys or values."""
        edges = [self.graph.edge(meeting, i) for i in range(len(meeting.next_functions))]
        others = [edge for edge in edges if edge and not self.graph.weight_only(edge.node)]
        nearest = [c for edge in others for c in self.before(edge)[0]]
        return any(c is not None and self.is_claimed(c) for c in nearest)

    def _follows(self, node: Node) -> bool:
        core = self.attentions.core
        return any(n in core for n, _ in self.graph.before(node, lambda n: n in core))

    def _role_before(self, use: Use, meeting: Node) -> str:
        """Return the role of the projection whose bias a parameter is; else `other`."""
        for parent, number in meeting.next_functions:
            if parent is None or self.graph.weight_only(parent):
                continue
            nearest, between = self.before(GradientEdge(parent, number))
            if (
                len(nearest) == 1
                and nearest[0] is not None
                and not any(map(self.activates, between))
            ):
                role = self._role_of_bias(use, nearest[0])
                if role:
                    self.biases.add(use.parameter)
                    return role
        return "other"

    def set_bias(self, use: Use, contraction: Contraction) -> None:
        """Give a bias the role of its projection, unless it has one."""
        role = self._role_of_bias(use, contraction)
        if role and not self.roles.get(use.parameter):
            self.set(use, role)
            self.biases.add(use.parameter)

    def _role_of_bias(self, use: Use, contraction: Contraction) -> str:
        """Return the role of the bias of a projection; empty if it is not clear.

        The weight of a decoder may be that of the embedding; its bias is then the head's.
        """
        weight = contraction.weights[0]
        known = self.roles.get(weight.parameter, {})
        if len(known) != 1 or use.alias.shape[0] not in weight.alias.shape:
            return ""
        role = next(iter(known))
        tied = role == "embedding" and self.follows_attention(contraction)
        return "head" if tied and not self.reaches_attention(contraction.node) else role

    def reaches_attention(self, node: Node) -> bool:
        core = self.attentions.core
        return any(later in core for later, _ in self.graph.after([node], lambda n: n in core))

    def follows_attention(self, contraction: Contraction) -> bool:
        if contraction.activation is None:
            return False
        core = self.attentions.core
        walk = self.graph.before(contraction.activation, lambda n: n in core)
        return any(node in core for node, _ in walk)
