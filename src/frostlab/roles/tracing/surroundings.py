"""Roles of the weights around the attentions, from where they stand in the graph.

The first projection of an attention's result is its output projection. Weights before all
attentions are embeddings or positions, and weights after all attentions are the head. A contraction
is an operation in which parameters meet an activation: a matrix product, a convolution or a lookup.
A parameter is claimed if an attention's query, key or value is computed from it. A hub is a node
that joins activations, such as a residual sum (`Attentions.is_hub`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from frostlab.roles.tracing.attentions import Attention
from frostlab.roles.tracing.bare import Bare
from frostlab.roles.tracing.claims import meets
from frostlab.roles.tracing.dependence import gradients, is_plain, one_vector, output_axis
from frostlab.roles.tracing.graph import (
    SHAPES,
    Contraction,
    Node,
    saved_axis,
    shape_at,
)

# Operations after the projection of a router: they choose experts, make a weight for each expert,
# or select some of these weights.
_CHOICES = {"Topk", "Gather", "Sort", "Max"}
_WEIGHTS = {"Softmax", "SafeSoftmax", "Sigmoid"}
_PARTS = {"Select", "Unbind", "Split", "SplitWithSizes", "Slice", "Index"}


@dataclass
class Around(Bare):
    """Finds the roles of all parameters that no attention claims as query, key or value."""

    pooling: set[Node] = field(default_factory=set)  # projections that weigh tokens

    def find(self) -> None:
        """Give roles to the parameters of all contractions, then to those that are in none."""
        graph = self.graph
        contractions = [c for c in map(graph.contraction, graph.order) if c is not None]
        for contraction in contractions:
            if contraction.is_projection:
                self.matrices |= {use.parameter for use in contraction.weights}
        self._positions()
        own: set[int] = set()  # outputs of attentions that are no cross-attention
        for attention in self.attentions.found:
            for contraction in self.outputs(attention.result):
                if self._is_pooled(attention, contraction) or self._is_first(contraction):
                    continue
                joined = self._joined(contraction)
                self.give(contraction, "output", None if joined is None else joined[0])
                if joined is not None:
                    self._give_joined(contraction, *joined)
                parameters = {use.parameter for use in (*contraction.weights, *contraction.bias)}
                if attention.cross:
                    self.crosses |= parameters
                elif "query" in attention.sides and "key" in attention.sides:
                    own |= parameters
        self.crosses -= own
        for contraction in contractions:
            if contraction.kind != "lookup":
                self.read_network(contraction)
        for contraction in contractions:
            if contraction.kind == "lookup":
                self._rest(contraction)
        for contraction in reversed(contractions):
            self._rest(contraction)
        for parameter in {graph.trace.uses[alias].parameter for alias in graph.trace.norms}:
            if parameter not in self.claimed:
                self.roles[parameter] = {"norm": torch.ones(1, dtype=torch.bool)}
        self.find_bare()

    def _positions(self) -> None:
        """Give roles to what shifts or scales scores, and to projections of positions."""
        for attention in self.attentions.found:
            for contraction in (*attention.position, *attention.lookups):
                for part in (contraction, *self._position_network(contraction)):
                    self.give(part, "position")
                activation = contraction.activation
                if activation is not None and self.graph.weight_only(activation.node):
                    for use in self.graph.uses_below(activation.node):
                        self.set(use, "position")
            for use in attention.added:
                # A factor of the scores is a temperature; what is joined to them is a sink.
                apart = meets(self.graph, use) in ("Mul", "Div", "Cat")
                self.set(use, "other" if apart else "position")

    def _position_network(self, last: Contraction) -> list[Contraction]:
        """Return the earlier projections of a network that computes scores from positions alone."""
        graph = self.graph
        projections: list[Contraction] = []
        pending = [last]
        while pending:
            activation = pending.pop().activation
            if activation is None:
                continue
            for node, stopped in graph.before(activation, lambda n: bool(graph.contraction(n))):
                earlier = graph.contraction(node)
                if earlier is not None and not self.attentions.escapes(node):
                    projections.append(earlier)
                    pending.append(earlier)
                elif stopped or graph.is_input(node) or graph.is_mixing(node):
                    return []  # it is computed from activations
        return projections

    def outputs(self, result: Node) -> Iterable[Contraction]:
        """Yield the first projections after an attention that do not make a query, key or value."""
        graph, projections = self.graph, self.attentions.projections

        def stop(node: Node) -> bool:
            return (
                graph.contraction(node) is not None
                or (
                    self.attentions.is_hub(node)
                    and graph.kind(node) in ("Add", "Sub")
                    and not self._attended(node)
                    and not self._is_projected(node)
                )
                or node in self.attentions.core
                or "Rnn" in graph.kind(node)
            )

        for node, stopped in graph.after([result], stop):
            projection = graph.contraction(node) if stopped else None
            if projection is not None and projection.kind != "lookup" and node not in projections:
                yield projection

    def _joined(
        self, contraction: Contraction
    ) -> tuple[dict[int, tuple[int, Tensor]], GradientEdge] | None:
        """Return which columns of a weight multiply an attention's result, if only some do.

        In this case, the result is concatenated with another activation, whose edge is returned as
        well. None: all columns multiply the result, or it is concatenated in another way.
        """
        graph, edge = self.graph, contraction.activation
        while edge is not None and graph.kind(edge.node) in SHAPES - {"Cat"}:
            edge = graph.edge(edge.node, 0) if len(edge.node.next_functions) == 1 else None
        if edge is None or graph.kind(edge.node) != "Cat" or not is_plain(graph, contraction):
            return None
        axis = saved_axis(edge.node, len(shape_at(edge)))
        parts = [graph.edge(edge.node, i) for i in range(len(edge.node.next_functions))]
        if axis != len(shape_at(edge)) - 1 or any(part is None for part in parts):
            return None
        sizes = [shape_at(part)[-1] for part in parts if part is not None]
        attended = [part is not None and self._is_attended(part) for part in parts]
        others = [part for part, own in zip(parts, attended, strict=True) if not own]
        (weight,) = contraction.weights
        columns = 1 - output_axis(graph, contraction)
        if len(others) != 1 or others[0] is None or sum(sizes) != weight.alias.shape[columns]:
            return None
        mask = torch.cat([torch.full((n,), own) for n, own in zip(sizes, attended, strict=True)])
        return {id(weight.alias): (columns, mask)}, others[0]

    def _is_attended(self, edge: GradientEdge) -> bool:
        """Return whether an activation comes from an attention without a projection between."""
        graph, core = self.graph, self.attentions.core
        walk = graph.before(edge, lambda n: n in core or graph.contraction(n) is not None)
        return any(node in core for node, _ in walk)

    def _give_joined(
        self, contraction: Contraction, rows: dict[int, tuple[int, Tensor]], other: GradientEdge
    ) -> None:
        """Give a role to the columns that multiply the other activation: `down` or `other`."""
        rest = {key: (axis, ~mask) for key, (axis, mask) in rows.items()}
        ups, between = self.before(other)
        active = any(map(self.activates, between)) and None not in ups
        self.give(contraction, "down" if active else "other", rest)
        for use in contraction.bias:
            self.set(use, "output")
        if active:
            self.read_ups(other, [c for c in ups if c is not None], between)

    def _is_projected(self, sum_: Node) -> bool:
        """Return whether a sum goes only into projections, all of the layer that makes the sum.

        An example is the sum of an attention's result and v, which the output projection o uses in
        o(attention + v).
        """
        graph = self.graph

        def stop(node: Node) -> bool:
            stops = graph.contraction(node) is not None or self.attentions.is_hub(node)
            return stops or node in self.attentions.core

        ends = [graph.contraction(node) for node, stopped in graph.after([sum_], stop) if stopped]
        before = {self.layer_of(use.parameter) for c in self._before_sum(sum_) for use in c.weights}
        after = {self.layer_of(use.parameter) for c in ends if c for use in c.weights}
        return bool(ends) and None not in ends and len(before | after) == 1 and "" not in after

    def _before_sum(self, sum_: Node) -> list[Contraction]:
        """Return the nearest projections before a sum.

        The search passes through attentions, so it also finds the projections that make their
        queries, keys and values.
        """
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or self.attentions.is_hub(node)

        walk = [
            n for p, _ in sum_.next_functions if p is not None for n, _ in graph.before(p, stop)
        ]
        contractions = [graph.contraction(node) for node in walk]
        return [c for c in contractions if c is not None and c.kind != "lookup"]

    def _is_first(self, contraction: Contraction) -> bool:
        """Return whether a projection is the first of a feed-forward network."""
        graph = self.graph

        def stop(node: Node) -> bool:
            stops = graph.contraction(node) is not None or self.attentions.is_hub(node)
            return stops or node in self.attentions.core

        after = list(graph.after([contraction.node], stop))
        passed = [node for node, stopped in after if not stopped and graph.kind(node) != "Mul"]
        ends = [node for node, stopped in after if stopped]
        projected = bool(ends) and all(graph.contraction(node) is not None for node in ends)
        return projected and any(map(self.activates, passed))

    def _is_pooled(self, attention: Attention, contraction: Contraction) -> bool:
        """Return whether a projection's input is pooled: one vector made from several tokens."""
        query, edge = attention.sides.get("query"), contraction.activation
        if query is None or edge is None:
            return False
        shape = shape_at(edge)
        if 0 in shape:  # an expert that gets no tokens
            return False
        if math.prod(shape) >= math.prod(shape_at(GradientEdge(attention.result, 0))):
            return False
        features = 1 if contraction.kind == "convolution" else len(shape) - 1
        last = tuple(n - 1 for axis, n in enumerate(shape) if axis != features)
        seed = one_vector(edge, features, last)
        (grad,) = gradients(edge, [query.edge], seed)
        if grad is None:
            return False
        axis = -2 if query.feature_axis == grad.ndim - 1 else -1
        tokens = grad.ne(0).movedim(axis, 0).flatten(1).any(1)
        return int(tokens.sum()) > 1

    def _attended(self, node: Node) -> bool:
        """Return whether a node is computed only from results or values of attentions."""
        graph = self.graph

        def stop(other: Node) -> bool:
            return other in self.attentions.core or graph.contraction(other) is not None

        for earlier_node, stopped in graph.before(node, stop):
            if not (stopped or not earlier_node.next_functions) or graph.weight_only(earlier_node):
                continue
            if earlier_node in self.attentions.core:
                continue
            contraction = graph.contraction(earlier_node)
            if contraction is None or contraction.activation is None:
                return False
            earlier, _ = self.before(contraction.activation)
            if not all(c is not None and self.is_claimed(c) for c in earlier):
                return False
        return True

    def _rest(self, contraction: Contraction) -> None:
        """Give a contraction without a role the role of its place in the model."""
        graph = self.graph
        uses = [u for u in contraction.weights if u.parameter not in self.claimed]
        if not uses:
            return
        if all(self.roles.get(use.parameter) for use in uses):
            for use in contraction.bias:  # the weight may be shared, as that of a tied decoder
                self.set_bias(use, contraction)
            return
        inside = bool(self.layer_of(uses[0].parameter))
        if contraction.kind == "lookup":
            self.give(
                contraction,
                "position" if graph.is_of_positions(contraction.node) else "embedding",
            )
        elif contraction.kind == "convolution" and not contraction.is_projection:
            self.give(contraction, "conv" if inside else self._outer_convolution(contraction))
        elif contraction.is_of_constants:
            self.give(contraction, "position")
        elif contraction.kind == "convolution" and not inside and self._convolves(contraction):
            self.give(contraction, "conv")
        elif inside:
            self.give(contraction, self._role_inside(contraction))
        elif not self.reaches_attention(contraction.node):
            if self._weighs_tokens(contraction):
                self.pooling.add(contraction.node)
                self.give(contraction, "other")
            elif not self.follows_attention(contraction):  # such as the time in a diffusion model
                self.give(contraction, "other")
            else:
                self.give(contraction, "gate" if self._only_scales(contraction) else "head")
        elif not self.follows_attention(contraction):
            self.give(contraction, "other" if self._only_scales(contraction) else "embedding")
        else:
            self.give(contraction, "other")

    def _role_inside(self, contraction: Contraction) -> str:
        """Return the role of a projection in a layer that is in no attention and no network."""
        if self._chooses(contraction):
            return "router"
        if self._ends_network(contraction):
            return "down"
        return "head" if self._is_exit(contraction) else "other"

    def _ends_network(self, contraction: Contraction) -> bool:
        """Return whether an activation function and a larger convolution come before a 1 × 1 one.

        FastSpeech has such feed-forward networks.
        """
        if contraction.kind != "convolution" or contraction.activation is None:
            return False
        earlier, between = self.before(contraction.activation)
        layer = self.layer_of(contraction.weights[0].parameter)
        return any(map(self.activates, between)) and all(
            c is not None
            and c.kind == "convolution"
            and not c.is_projection
            and self.layer_of(c.weights[0].parameter) == layer
            for c in earlier
        )

    def _is_exit(self, contraction: Contraction) -> bool:
        """Return whether a projection makes an output, and its layer has nothing else.

        This is so for heads in a list that is as long as that of the layers.
        """
        graph, layer = self.graph, self.layer_of(contraction.weights[0].parameter)

        def stop(node: Node) -> bool:
            stops = graph.contraction(node) is not None or self.attentions.is_hub(node)
            return stops or node in self.attentions.core

        if any(stopped for _, stopped in graph.after([contraction.node], stop)):
            return False
        others = {use.parameter for use in graph.trace.uses.values()}
        others -= {use.parameter for use in (*contraction.weights, *contraction.bias)}
        alone = not any(self.layer_of(parameter) == layer for parameter in others)
        return alone and self.follows_attention(contraction)

    def _weighs_tokens(self, contraction: Contraction) -> bool:
        """Return whether a projection makes the weights of a sum, as in attention pooling.

        Its result goes through a softmax into a product with an activation that is not computed
        from it, or it goes only into projections that make such weights.
        """
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None

        after = list(graph.after([contraction.node], stop))
        later = {node for node, stopped in after if stopped}
        softmaxes = [node for node, stopped in after if not stopped and graph.is_softmax(node)]
        if not softmaxes:
            return bool(later) and later <= self.pooling  # the last projections are read first
        own = {contraction.node, *(node for node, _ in after)}
        for node, stopped in graph.after(softmaxes, stop):
            if not stopped and (graph.kind(node) == "Mul" or graph.is_product(node)):
                edges = [graph.edge(node, index) for index in (0, 1)]
                others = [e.node for e in edges if e is not None and e.node not in own]
                if any(not graph.weight_only(other) for other in others):
                    return True
        return False

    def _only_scales(self, contraction: Contraction) -> bool:
        """Return whether a projection only makes factors for other activations."""
        graph = self.graph
        ends: set[bool] = set()

        def stop(node: Node) -> bool:
            later = graph.contraction(node)
            if later is not None:
                known = self.roles.get(later.weights[0].parameter, {})
                ends.add(bool({"other", "gate"} & known.keys()))
                return True
            if graph.kind(node) in ("Mul", "Div") and self.attentions.is_hub(node):
                if self._is_scaled(contraction, node):
                    return False  # such as logits times a mask, or divided by a temperature
                ends.add(not self.gates(node) or self._activated(contraction.node, node))
                return True
            if self.attentions.is_hub(node) or node in self.attentions.core:
                ends.add(False)
                return True
            return False

        for _ in graph.after([contraction.node], stop):
            pass
        return ends == {True}

    def _is_scaled(self, contraction: Contraction, product: Node) -> bool:
        """Return whether a projection's result is scaled in a product, and is not the scale itself.

        The other factor is then computed from the model's inputs alone, or has fewer entries. If
        both factors are single numbers for each token, such as the norms of two vectors, the
        projection's result must be vectors.
        """
        edges = [self.graph.edge(product, index) for index in (0, 1)]
        if any(edge is not None and self.graph.is_given(edge) for edge in edges):
            return True
        sizes = [0 if edge is None else math.prod(shape_at(edge)) for edge in edges]
        if all(edge is not None and shape_at(edge)[-1:] == (1,) for edge in edges):
            return shape_at(GradientEdge(contraction.node, 0))[-1] > 1
        larger = edges[0 if sizes[0] > sizes[1] else 1]
        return sizes[0] != sizes[1] and larger is not None and contraction in self.before(larger)[0]

    def _activated(self, start: Node, end: Node) -> bool:
        """Return whether there is an activation function between two nodes."""
        for edge in (self.graph.edge(end, 0), self.graph.edge(end, 1)):
            if edge is not None:
                nearest, between = self.before(edge)
                if any(c is not None and c.node is start for c in nearest):
                    return any(map(self.activates, between))
        return False

    def _convolves(self, contraction: Contraction) -> bool:
        """Return whether a 1 × 1 convolution is one of several, of which some are larger.

        A larger one comes directly before or after it, or the results of both are added, as in a
        residual block.
        """
        graph = self.graph

        def stop(node: Node) -> bool:
            return (
                graph.contraction(node) is not None
                or node in self.attentions.core
                or self.attentions.is_hub(node)
            )

        near = [node for node, stopped in graph.after([contraction.node], stop) if stopped]
        sums = [node for node in near if graph.kind(node) == "Add"]
        for parent in [parent for node in sums for parent, _ in node.next_functions if parent]:
            near += [node for node, stopped in graph.before(parent, stop) if stopped]
        if contraction.activation is not None:
            walk = graph.before(contraction.activation, stop)
            near += [node for node, stopped in walk if stopped]
        contractions = [graph.contraction(node) for node in near]
        return any(c and c.kind == "convolution" and not c.is_projection for c in contractions)

    def _outer_convolution(self, contraction: Contraction) -> str:
        """Return the role of a convolution outside the layers: embedding, position or conv."""
        graph, activation = self.graph, contraction.activation
        core = self.attentions.core

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or node in core

        after = list(graph.after([contraction.node], stop))
        if activation is None or graph.is_given(activation):
            next_ones = [graph.contraction(node) for node, stopped in after if stopped]
            convolved = any(c is not None and self._is_outer(c) for c in next_ones)
            return "conv" if convolved or not next_ones else "embedding"
        if self.follows_attention(contraction):
            return "conv"
        source: Node = activation.node
        while len(source.next_functions) == 1 and graph.contraction(source) is None:
            if len(graph.consumers.get(source, [])) > 1:
                break
            source = source.next_functions[0][0]
        for node, stopped in after:
            if not stopped and graph.kind(node) == "Add":
                parents = [p for p, _ in node.next_functions if p is not None]
                if any(graph.leads_to(parent, source) for parent in parents):
                    return "position"  # it is added to what it was computed from
        return "conv"

    def _is_outer(self, contraction: Contraction) -> bool:
        """Return whether a contraction is a convolution; in a layer, 1 × 1 ones do not count."""
        outside = not self.layer_of(contraction.weights[0].parameter)
        return not contraction.is_projection or (outside and contraction.kind == "convolution")

    def _chooses(self, contraction: Contraction) -> bool:
        """Return whether a projection chooses among experts."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or self.attentions.is_hub(node)

        after = [node for node, _ in graph.after([contraction.node], stop)]
        after = [node for node in after if node not in self.attentions.core]
        if any(graph.is_product(node) and self._follows_product(node) for node in after):
            return False  # it mixes tokens
        weights = [node for node in after if graph.kind(node) in _WEIGHTS]
        later = [node for node, _ in graph.after(weights, stop)]
        weighs = any(self._takes_parts(node) for node in later)  # one weight for each expert
        return weighs or any(graph.kind(node) in _CHOICES for node in after)

    def _takes_parts(self, node: Node) -> bool:
        """Return whether a node selects routing weights, or multiplies stacked results by them."""
        graph = self.graph
        if graph.kind(node) == "Mul":
            edges = [graph.edge(node, index) for index in (0, 1)]
            return any(edge is not None and graph.kind(edge.node) == "Stack" for edge in edges)
        return graph.kind(node) in _PARTS or node in self.attentions.weighing

    def _follows_product(self, product: Node) -> bool:
        """Return whether an operand of a product is another product."""
        graph = self.graph

        def stop(node: Node) -> bool:
            return graph.contraction(node) is not None or graph.is_product(node)

        edges = [edge for edge in graph.operands(product) if edge is not None]
        return any(graph.is_product(n) for edge in edges for n, _ in graph.before(edge, stop))
