"""The autograd graph of a watched forward pass (`trace.py`): what was computed from what.

A node is an operation; its edges lead to the operations that made its inputs. A leaf is a node
without such edges: it stands for one use of a parameter, or for an input of the model. A value
without a history, such as a mask, has no node.

An activation is a value that is not computed from parameters alone. A contraction is a matrix
product, a convolution or a lookup (an embedding) in which one operand is computed from parameters
alone. A product is a matrix product of two activations, as in attention.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from frostlab.roles.tracing.passes.trace import PRODUCTS, PROJECTIONS, Record, Trace, Use

Node = Any  # a node of autograd's graph
# operation → which of its inputs are multiplied
_MATRIX = {"Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Mv": (0, 1),
           "Dot": (0, 1), "GroupedMm": (0, 1), "Addbmm": (1, 2)}  # fmt: skip
_LOOP = 3  # fewer joined results than this are not taken for the states of a loop
_SOFTMAXES = ("Softmax", "SafeSoftmax")
_DISTANCES = ("Cdist", "EuclideanDist")
_SCRIPTED = "DifferentiableGraph"  # the node of a function that TorchScript has compiled
# Functions of single entries whose derivative may vanish, although the result depends on the entry.
_FLAT = {
    "Relu", "Hardtanh", "Hardsigmoid", "Hardswish", "Clamp", "ClampMin", "ClampMax", "Threshold",
    "Round", "Floor", "Ceil", "Trunc", "Sign", "Gelu", "Silu", "Elu", "Softplus", "Sigmoid", "Tanh",
}  # fmt: skip
CHECKPOINT = "CheckpointFunction"  # a node that computes layers again in the backward pass
# Operations that may stand between a softmax and its product with the values, if only one of their
# inputs is an activation.
_ONE_SIDED = {"Mul", "Div", "Add", "Sub", "MaskedFill", "Where", "NativeDropout", "Addcmul"}
SHAPES = {  # operations that move, copy, select or mask entries
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Expand", "Squeeze",
    "Unsqueeze", "Slice", "Select", "Split", "SplitWithSizes", "UnsafeSplit", "Unbind", "Cat",
    "Stack", "Clone", "ToCopy", "Alias", "Repeat", "Index", "IndexSelect", "Gather", "Roll", "Flip",
    "Unfold", "AsStrided", "ConstantPadNd", "CopySlices", "Copy", "MaskedFill", "Where", "Scatter",
    "IndexPut", "Tril", "Triu", "SliceScatter",
}  # fmt: skip
ContractionKind = Literal["matrix", "convolution", "lookup"]


@dataclass(frozen=True, eq=False)
class Contraction:
    """An operation in which parameters meet an activation."""

    node: Node
    kind: ContractionKind
    weights: tuple[Use, ...]  # several if the weight is computed from several parameters
    bias: tuple[Use, ...]
    activation: GradientEdge | None  # None: no history, as of a constant or of indices

    @property
    def is_projection(self) -> bool:
        """Whether it acts on each token by itself."""
        if self.kind == "convolution":
            return all(size == 1 for size in self.weights[0].alias.shape[2:])
        return self.kind == "matrix"

    @property
    def is_of_constants(self) -> bool:
        """Whether it is a convolution of a constant: the same values for all samples."""
        given = getattr(self.node, "_saved_input", None)
        if self.kind != "convolution" or self.activation is not None:
            return False
        return isinstance(given, Tensor) and bool((given == given[:1]).all())


class Graph:
    """The graph of a watched pass, with the nodes that use the result of each node."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._inputs = {id(tensor) for tensor in trace.inputs}
        self._starts = [record.first for record in trace.records]
        self.nodes: dict[Node, str] = {}
        # node → the nodes that use its result, and as which of their inputs
        self.consumers: dict[Node, list[tuple[Node, int]]] = {}
        self._weight_only: dict[Node, bool] = {}
        self.outputs = {tensor.grad_fn for tensor in trace.outputs}
        pending: list[Node] = [tensor.grad_fn for tensor in trace.outputs]
        while pending:
            node = pending.pop()
            if node in self.nodes:
                continue
            self.nodes[node] = node.name().rpartition("::")[2].removesuffix("0").removesuffix("1")
            for index, (parent, _) in enumerate(node.next_functions):
                if parent is not None:
                    self.consumers.setdefault(parent, []).append((node, index))
                    pending.append(parent)
        self.order = sorted(self.nodes, key=lambda n: n._sequence_nr())
        self._contractions: dict[Node, Contraction | None] = {}
        self._straight = [True]  # whether gradients go straight through functions in `_FLAT`
        for node in self.order:
            if self.kind(node) in _FLAT:
                node.register_hook(partial(_straight_through, self._straight))

    @contextmanager
    def true_gradients(self) -> Iterator[None]:
        """Meanwhile, let gradients vanish where functions such as a ReLU do not change."""
        self._straight[0] = False
        try:
            yield
        finally:
            self._straight[0] = True

    def kind(self, node: Node) -> str:
        """Return the operation of a node, such as Mm or Softmax."""
        return self.nodes[node].removesuffix("Backward")

    def edge(self, node: Node, index: int) -> GradientEdge | None:
        """Return the edge to an input of a node; None if the input has no history."""
        parent, number = node.next_functions[index]
        return None if parent is None else GradientEdge(parent, number)

    def use(self, node: Node) -> Use | None:
        """Return the use of a parameter (`trace.Use`) that a leaf stands for, or None."""
        variable = getattr(node, "variable", None)
        return None if variable is None else self.trace.uses.get(id(variable))

    def unseen(self, node: Node) -> list[nn.Parameter]:
        """Return the parameters that a node takes themselves, not by an alias that stands for them.

        Functions of autograd that are written in Python, and functions of TorchScript, do so. What
        they do with a parameter is not seen.
        """
        given = [getattr(parent, "variable", None) for parent, _ in node.next_functions]
        given += node.saved_tensors if isinstance(node, BackwardCFunction) else []
        found = {id(p): p for p in given if isinstance(p, nn.Parameter)}
        return list(found.values())

    def is_input(self, node: Node) -> bool:
        """Return whether a leaf of the graph is an input of the model."""
        return id(getattr(node, "variable", None)) in self._inputs

    def call(self, node: Node) -> int:
        """Return the number of the call of a torch function that made a node."""
        return bisect_right(self._starts, node._sequence_nr()) - 1

    def module(self, node: Node) -> str:
        """Return the path of the module that made a node."""
        return self.trace.records[self.call(node)].module

    def where(self, node: Node) -> str:
        """Return the module that made a node, as the subject of a sentence."""
        return self.module(node) or "its forward pass"

    def weight_only(self, node: Node) -> bool:
        """Return whether a node is computed from parameters alone.

        The result of a matrix product, convolution, lookup or softmax never counts, even if all of
        its operands are parameters.
        """
        known = self._weight_only.get(node)
        if known is not None:
            return known
        stack = [node]
        while stack:
            current = stack[-1]
            if current in self._weight_only:
                stack.pop()
                continue
            if not current.next_functions:
                self._weight_only[current] = self.use(current) is not None
                stack.pop()
                continue
            parents = [p for p, _ in current.next_functions if p is not None]
            unknown = [p for p in parents if p not in self._weight_only]
            if unknown:
                stack += unknown
                continue
            name = self.kind(current)
            computes = name in _MATRIX or name in ("Convolution", "Embedding", *_SOFTMAXES)
            self._weight_only[current] = (
                not computes and bool(parents) and all(self._weight_only[p] for p in parents)
            )
            stack.pop()
        return self._weight_only[node]

    def uses_below(self, node: Node) -> tuple[Use, ...]:
        """Return the uses of parameters that a node is computed from."""
        uses: dict[int, Use] = {}
        seen, pending = set(), [node]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            use = self.use(current)
            if use is not None:
                uses[id(use.alias)] = use
            pending += [p for p, _ in current.next_functions if p is not None]
        return tuple(uses.values())

    def reached(self) -> set[int]:
        """Return ids of parameters that the outputs are computed from."""
        return {use.parameter for node in self.nodes if (use := self.use(node)) is not None}

    def without_history(self) -> set[int]:
        """Return ids of parameters of operations that are detached or run without gradients."""
        trace = self.trace
        parameters = {
            use.parameter
            for use in trace.uses.values()
            if trace.records[use.call].name in PROJECTIONS | PRODUCTS
            and trace.records[use.call].node is None
        }
        for node in trace.cut:
            for leaf, _ in self.before(node, lambda n: n in self.nodes):
                use = self.use(leaf)
                parameters |= set() if use is None else {use.parameter}
        return parameters

    def contraction(self, node: Node) -> Contraction | None:
        """Return a node as a contraction, or None if no operand is made of parameters alone."""
        if node not in self._contractions:
            self._contractions[node] = self._read_contraction(node)
        return self._contractions[node]

    def _read_contraction(self, node: Node) -> Contraction | None:
        name = self.kind(node)
        parents = [p for p, _ in node.next_functions]
        if name == "Embedding" or name == "EmbeddingBag":
            if parents[0] is None or not self.weight_only(parents[0]):
                return None
            return Contraction(node, "lookup", self.uses_below(parents[0]), (), None)
        if name == "Convolution":
            if parents[1] is None or not self.weight_only(parents[1]):
                return None
            bias = parents[2] if len(parents) > 2 else None
            return Contraction(
                node, "convolution", self.uses_below(parents[1]),
                () if bias is None else self.uses_below(bias), self.edge(node, 0),
            )  # fmt: skip
        if name not in _MATRIX:
            return None
        left, right = _MATRIX[name]
        for weight, other in ((right, left), (left, right)):
            if parents[weight] is not None and self.weight_only(parents[weight]):
                bias = parents[0] if left == 1 else None
                uses = () if bias is None or not self.weight_only(bias) else self.uses_below(bias)
                return Contraction(
                    node, "matrix", self.uses_below(parents[weight]), uses, self.edge(node, other)
                )
        return None

    def is_of_positions(self, node: Node) -> bool:
        """Return whether a node looks up embeddings of positions."""
        contraction = self.contraction(node)
        looked_up = contraction is not None and contraction.kind == "lookup"
        return looked_up and counts_up(self.trace.records[self.call(node)])

    def parameters_alone(self, product: Node) -> list[Use]:
        """Return the parameters of a product with constants, such as a table times one-hot rows.

        The list is empty if the product depends on the model's inputs, too.
        """
        uses = []
        for node, _ in self.before(product, lambda n: False):
            contraction = self.contraction(node)
            looked_up = contraction is not None and contraction.kind == "lookup"
            if looked_up or self.is_softmax(node) or self.is_fused_attention(node):
                return []
            use = self.use(node)
            if use is not None:
                uses.append(use)
            elif not node.next_functions:
                return []
        return uses

    def is_recurrent(self, node: Node) -> bool:
        """Return whether a node joins the results of a loop in which each state makes the next.

        Every result then depends on more multiplications than the one before, without a projection
        between them.
        """
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if self.kind(node) not in ("Stack", "Cat") or len(parents) < _LOOP:
            return False

        def stop(other: Node) -> bool:
            return self.contraction(other) is not None

        steps = [{n for n, _ in self.before(parent, stop)} for parent in parents[:_LOOP]]
        products = [{n for n in nodes if self.kind(n) == "Mul"} for nodes in steps]
        return all(earlier and earlier & later and len(earlier) < len(later)
                   for earlier, later in pairwise(products))  # fmt: skip

    def activations(self, node: Node) -> int:
        """Count the inputs of a node that are not made of parameters alone."""
        return len(self.activations_of(node))

    def activations_of(self, node: Node) -> list[GradientEdge]:
        """Return the edges to the inputs of a node that are not made of parameters alone.

        Edges to parameters that a function takes themselves (`unseen`) are left out, too.
        """
        edges = [self.edge(node, index) for index in range(len(node.next_functions))]
        return [
            edge for edge in edges if edge is not None and not self.weight_only(edge.node)
            and (not self.is_custom(node) or edge.node.next_functions or self.is_input(edge.node))
        ]  # fmt: skip

    def is_of_pairs(self, node: Node) -> bool:
        """Return whether a node combines every vector of one activation with each of another."""
        if self.kind(node) in _DISTANCES:
            return True
        if self.kind(node) not in ("Mul", "Add", "Sub") or self.activations(node) < 2:
            return False
        edges = [self.edge(node, index) for index in (0, 1)]
        shapes = [shape_at(edge) for edge in edges if edge is not None]
        if len(shapes) < 2 or len(shapes[0]) != len(shapes[1]):
            return False
        sizes = list(zip(*shapes, strict=True))
        return any(a == 1 < b for a, b in sizes) and any(b == 1 < a for a, b in sizes)

    def meets_others(self, softmax: Node) -> bool:
        """Return whether anything after a softmax uses a second activation or a weight."""
        return any(
            self.activations(node) > 1 or self.contraction(node) is not None
            for node, _ in self.after([softmax], lambda n: False)
        )

    def is_custom(self, node: Node) -> bool:
        """Return whether a node is a function written in Python, or compiled by TorchScript."""
        return isinstance(node, BackwardCFunction) or self.is_scripted(node)

    def is_scripted(self, node: Node) -> bool:
        """Return whether a node is a function that TorchScript has compiled."""
        return self.kind(node) == _SCRIPTED

    def is_product(self, node: Node) -> bool:
        """Return whether a node multiplies two activations as matrices."""
        return self.kind(node) in _MATRIX and self.contraction(node) is None

    def operands(self, node: Node) -> tuple[GradientEdge | None, GradientEdge | None]:
        """Return the edges of a product's two operands."""
        left, right = _MATRIX[self.kind(node)]
        return self.edge(node, left), self.edge(node, right)

    def is_softmax(self, node: Node) -> bool:
        """Return whether a node is a softmax."""
        return self.kind(node) in _SOFTMAXES

    def is_fused_attention(self, node: Node) -> bool:
        """Return whether a node is torch's scaled dot-product attention."""
        return self.kind(node).startswith("ScaledDotProduct")

    def is_mixing(self, node: Node) -> bool:
        """Return whether a node may be a step of an attention, or is a whole fused one."""
        return self.is_softmax(node) or self.is_fused_attention(node) or self.is_product(node)

    def products_after(self, softmax: Node) -> list[tuple[Node, int]]:
        """Return the products with a softmax's probabilities, and which operand these are."""
        uses, seen = [], set()
        pending = list(self.consumers.get(softmax, []))
        while pending:
            node, index = pending.pop()
            if (node, index) in seen:
                continue
            seen.add((node, index))
            if self.is_product(node):
                left = self.operands(node)[0]
                operand = 0 if left is not None and self._comes_from(left.node, softmax) else 1
                uses.append((node, operand))
            elif self.passes(node):
                pending += self.consumers.get(node, [])
        return uses

    def _comes_from(self, node: Node, softmax: Node) -> bool:
        for passed, _ in self.before(node, lambda n: n is not softmax and not self.passes(n)):
            if passed is softmax:
                return True
        return False

    def passes(self, node: Node) -> bool:
        """Return whether a node only changes the shape, the mask or the scale of one activation."""
        kind = self.kind(node)
        if kind in SHAPES:
            return True
        return kind in _ONE_SIDED and self.activations(node) <= 1

    def products_before(self, softmax: Node) -> list[Node]:
        """Return the products that a softmax's scores are made of."""
        start = self.edge(softmax, 0)
        if start is None:
            return []

        def stop(node: Node) -> bool:
            return self.is_mixing(node) or self.contraction(node) is not None

        return [n for n, stopped in self.before(start, stop) if stopped and self.is_product(n)]

    def is_given(self, edge: GradientEdge) -> bool:
        """Return whether an activation is computed from inputs alone, without a contraction."""
        walk = self.before(edge, lambda n: self.contraction(n) is not None)
        return all(self.is_input(n) for n, stopped in walk if stopped or not n.next_functions)

    def leads_to(self, node: Node, source: Node) -> bool:
        """Return whether a node is `source`, or follows from it by operations with one input."""
        while node is not source:
            parents = [p for p, _ in node.next_functions if p is not None]
            if len(parents) != 1 or self.contraction(node) is not None:
                return False
            node = parents[0]
        return True

    def before(
        self, start: GradientEdge | Node, stop: Callable[[Node], bool]
    ) -> Iterator[tuple[Node, bool]]:
        """Walk back from an edge; yield each node and whether the walk stopped there."""
        first = start.node if isinstance(start, GradientEdge) else start
        return _walk(
            [first], stop, lambda node: [p for p, _ in node.next_functions if p is not None]
        )

    def after(
        self, starts: Iterable[Node], stop: Callable[[Node], bool]
    ) -> Iterator[tuple[Node, bool]]:
        """Walk forward from nodes; yield each later node and whether the walk stopped there."""

        def following(node: Node) -> list[Node]:
            return [consumer for consumer, _ in self.consumers.get(node, [])]

        return _walk([n for start in starts for n in following(start)], stop, following)


def _straight_through(
    straight: Sequence[bool], given: Sequence[Any], upstream: Sequence[Any]
) -> tuple[Any, ...] | None:
    """Let a gradient through a function of single entries, as if its derivative were 1.

    Where the derivative is 0, as for a ReLU that is off, gradients would show no dependence.
    """
    if not straight[0] or given[0] is None or given[0].shape != upstream[0].shape:
        return None
    return (upstream[0], *given[1:])


def _walk(
    pending: list[Node], stop: Callable[[Node], bool], following: Callable[[Node], list[Node]]
) -> Iterator[tuple[Node, bool]]:
    """Yield these nodes and those that follow them, each once, and whether the walk stopped there.

    Nothing that follows a node where the walk stops is visited from there.
    """
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        stopped = stop(node)
        yield node, stopped
        if not stopped:
            pending += following(node)


def counts_up(record: Record) -> bool:
    """Return whether an embedding is looked up at positions: 0, 1, 2, …"""
    indices = record.indices
    if indices is None or record.given or indices.numel() < 2 or indices.ndim > 2:
        return False
    rows = indices.reshape(-1, indices.shape[-1])
    if rows.shape[-1] < 3 or not bool((rows == rows[0]).all()):
        return False
    steps = rows[0].diff().abs()
    return float((steps == 1).float().mean()) > 0.6  # padding may come first or last


def saved_axis(node: Node, axes: int) -> int:
    """Return the axis along which a node, such as a softmax, works, as a non-negative index."""
    dim = getattr(node, "_saved_dim", -1)
    return int(dim - 2**64 if dim >= 2**63 else dim) % axes


def shape_at(edge: GradientEdge) -> tuple[int, ...]:
    """Return the shape of the value at an edge."""
    return tuple(edge.node._input_metadata[edge.output_nr].shape)


def dtype_at(edge: GradientEdge) -> Any:
    """Return the dtype of the value at an edge."""
    return edge.node._input_metadata[edge.output_nr].dtype


def device_at(edge: GradientEdge) -> Any:
    """Return the device of the value at an edge."""
    return edge.node._input_metadata[edge.output_nr].device
