"""Which rows of which parameters a value depends on, read from where gradients are not zero.

A side of an attention is its query, key or value: a tensor of vectors, whose entries lie along the
feature axis. The gradient of one vector, such as the query of one head at one token, is non-zero
exactly on the rows of the weights that the vector is computed from. Vectors with the same rows form
a head. Which vector is looked at is decided by the seed, an upstream gradient that is zero
elsewhere. `graph.py` explains edges and contractions.

Which of two operands is the query is found in the same way. A softmax runs along the keys, so two
scores whose indices differ only along its axis depend on one query and two keys. The product with
the values must sum along the same axis.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from frostlab.errors import UnknownArchitecture
from frostlab.roles.tracing.graph import (
    Contraction,
    Graph,
    Node,
    device_at,
    dtype_at,
    saved_axis,
    shape_at,
)
from frostlab.roles.tracing.passes.trace import Use

# An alias is a tensor that stands for one use of a parameter (`Use.alias`). Touched maps the id of
# an alias to a mask for each of its axes: the indices at which there is a gradient.
Touched = dict[int, tuple[Tensor, ...]]
Key = tuple[tuple[int, tuple[bytes, ...]], ...]  # a Touched as bytes, for comparisons
# nodes, and the numbers of their operands through which no gradient may go
Blocked = Sequence[tuple[Node, Sequence[int]]]
_MOST_STARTS = 32  # most vectors of a query, key or value from which the search for heads starts
_TRIES = 8  # most indices of scores that are tried
_LONG = 16  # along an axis longer than this, only some vectors are examined


@dataclass(frozen=True)
class Group:
    """Vectors of a query, key or value that are computed from the same rows: a head."""

    vectors: tuple[tuple[int, ...], ...]  # indices of some of them, without the feature axis
    rows: Touched


def touched(
    edge: GradientEdge, uses: Sequence[Use], seed: Tensor | None = None, blocked: Blocked = ()
) -> Touched:
    """Return on which rows of these parameters the value at an edge depends, along each axis.

    With a seed (an upstream gradient), only the entries at which the seed is not zero count.
    """
    seed = _random_seed(edge) if seed is None else seed
    rows = {}
    grads = gradients(edge, [u.alias for u in uses], seed, blocked)
    for use, grad in zip(uses, grads, strict=True):
        if grad is None:
            continue
        mask = grad.ne(0).cpu()
        if mask.any():
            rows[id(use.alias)] = tuple(
                mask.movedim(axis, 0).flatten(1).any(1) if mask.ndim > 1 else mask
                for axis in range(max(mask.ndim, 1))
            )
    return rows


def _touched_outputs(
    graph: Graph, edge: GradientEdge, contractions: Sequence[Contraction], seed: Tensor,
    blocked: Blocked,
) -> Touched:  # fmt: skip
    """Do the same as `touched`, but faster, from the gradients of the outputs of projections.

    The projections are matrix products `x @ operand`. Column r of an output is computed from entry
    r of the bias and from column r of the operand: if the projection is plain (`is_plain`), from
    row r of the weight or, in `x @ weight`, from its column r. So rows are found even if x is 0.
    """
    rows: dict[int, tuple[Tensor, ...]] = {}
    outputs = [GradientEdge(contraction.node, 0) for contraction in contractions]
    grads = gradients(edge, outputs, seed, blocked)
    for contraction, grad in zip(contractions, grads, strict=True):
        if grad is None or not (mask := grad.ne(0).any(0)).any():
            continue
        if not is_plain(graph, contraction):
            operand = GradientEdge(*contraction.node.next_functions[-1])
            rows |= touched(operand, contraction.weights, _random_seed(operand) * mask)
            continue
        (weight,) = contraction.weights
        axes = [torch.ones(n, dtype=torch.bool) for n in weight.alias.shape]
        axes[output_axis(graph, contraction)] = mask.cpu()
        rows[id(weight.alias)] = tuple(axes)
        for use in _plain_bias(graph, contraction):
            rows[id(use.alias)] = (mask.cpu(),)
    return rows


def _is_matrix_product(graph: Graph, contraction: Contraction) -> bool:
    """Return whether a contraction is `x @ operand`, perhaps with a bias."""
    kind, (parent, _) = graph.kind(contraction.node), contraction.node.next_functions[-1]
    return kind in ("Mm", "Addmm") and parent is not None and graph.weight_only(parent)


def is_plain(graph: Graph, contraction: Contraction) -> bool:
    """Return whether a contraction is `x @ weight.T` or `x @ weight`, perhaps with a bias.

    The weight may be multiplied by a constant, such as a mask of pruned entries.
    """
    if graph.kind(contraction.node) not in ("Mm", "Addmm") or len(contraction.weights) != 1:
        return False
    kinds = {"AccumulateGrad", "T", "Transpose", "Mul"}
    return contraction.weights[0].alias.ndim == 2 and _weight_kinds(graph, contraction) <= kinds


def _plain_bias(graph: Graph, contraction: Contraction) -> tuple[Use, ...]:
    """Return the bias, unless it is computed, such as joined from several."""
    shape = (shape_at(GradientEdge(contraction.node, 0))[1],)
    parent = contraction.node.next_functions[0][0]
    given = parent is not None and graph.use(parent) in contraction.bias
    return contraction.bias if given and contraction.bias[0].alias.shape == shape else ()


def _has_padding(contraction: Contraction) -> bool:
    """Return whether some vectors that a plain projection is applied to are zeros."""
    node = contraction.node
    given = getattr(node, "_saved_mat1", None)
    given = getattr(node, "_saved_self", None) if given is None else given
    return isinstance(given, Tensor) and not bool(given.any(-1).all())


def _weight_kinds(graph: Graph, contraction: Contraction) -> set[str]:
    """Return the operations by which the last operand is computed, if it is the weight."""
    parent = contraction.node.next_functions[-1][0]
    if parent is None or not graph.weight_only(parent):
        return {"another operand"}
    return {graph.kind(node) for node, _ in graph.before(parent, lambda n: False)}


def output_axis(graph: Graph, contraction: Contraction) -> int:
    """Return the weight's axis of outputs: 0 in `x @ weight.T`, 1 in `x @ weight`."""
    return 0 if _weight_kinds(graph, contraction) & {"T", "Transpose"} else 1


class _Side:
    """The query, key or value of an attention: its edge, and what it is computed from."""

    def __init__(
        self,
        graph: Graph,
        edge: GradientEdge,
        feature_axis: int,
        contractions: Sequence[Contraction],
        bare: Sequence[Use],
    ) -> None:
        self.graph, self.edge, self.feature_axis = graph, edge, feature_axis
        self.plain = [c for c in contractions if is_plain(graph, c)]
        self.products = [c for c in contractions if _is_matrix_product(graph, c)]
        self.uses = [u for c in contractions if c not in self.products for u in c.weights]
        self.uses += [u for c in contractions if c not in self.plain for u in c.bias]
        self.uses += [u for c in self.plain for u in c.bias if u not in _plain_bias(graph, c)]
        self.uses += bare
        self.lengths = list(shape_at(edge))  # sizes of all axes but the feature axis
        del self.lengths[feature_axis]
        self._known: dict[tuple[int, ...], Touched] = {}
        # A gradient may go through one projection and earlier layers into another projection, e.g.
        # if the values of the first layer are added to those of later layers; or into the rows of
        # earlier layers, if one parameter holds the weights of all layers.
        self.blocked = [activation_operand(c) for c in contractions]

    def rows(self, seed: Tensor) -> Touched:
        """Return the rows that the vectors with a non-zero seed depend on."""
        outputs: Touched = {}
        if self.products:
            outputs = _touched_outputs(self.graph, self.edge, self.products, seed, self.blocked)
        return outputs | (touched(self.edge, self.uses, seed, self.blocked) if self.uses else {})

    def rows_at(self, place: tuple[int, ...]) -> Touched:
        """Return the rows that one vector depends on."""
        if place not in self._known:
            self._known[place] = self.rows(one_vector(self.edge, self.feature_axis, place))
        return self._known[place]

    def first(self) -> tuple[int, ...]:
        """Return the index of the vector to start from: the last, or one that is not padding."""
        last = tuple(length - 1 for length in self.lengths)
        if not any(map(_has_padding, self.plain)):
            return last
        uses = [use for c in self.plain for use in c.weights]

        def reached(place: tuple[int, ...]) -> int:
            return len(touched(self.edge, uses, one_vector(self.edge, self.feature_axis, place)))

        middle = tuple(length // 2 for length in self.lengths)
        return max((last, tuple(0 for _ in last), middle), key=reached)

    def uncovered(self, whole: Touched, known: Sequence[Touched]) -> tuple[int, ...] | None:
        """Return the index of a vector that depends on rows of `whole` outside `known`, or None.

        It is found by bisection, since most vectors may be padding.
        """
        if not _adds(whole, known):
            return None
        seed = _random_seed(self.edge)
        start, stop = 0, math.prod(self.lengths)
        while stop - start > 1:
            middle = (start + stop) // 2
            some = torch.zeros(math.prod(self.lengths), dtype=seed.dtype, device=seed.device)
            some[start:middle] = 1
            part = seed * some.reshape(self.lengths).unsqueeze(self.feature_axis)
            if _adds(self.rows(part), known):
                stop = middle
            else:
                start = middle
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(start), self.lengths))

    def neighbours(self, base: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield a vector's index, and the indices that differ from it along one axis.

        Along a long axis, only some indices are tried. If five of them depend on the same rows, as
        the tokens of a sequence do, these five are enough. Windows and heads may share one axis, so
        that rows repeat along it: then the first 16 indices and a few later ones are enough.
        """
        yield base
        for axis, length in enumerate(self.lengths):
            places = [(*base[:axis], index, *base[axis + 1 :]) for index in range(length)]
            if length > _LONG:
                few = [places[i] for i in (0, 1, 2, length // 2, length - 1)]
                first = places[:_LONG]
                spread = [places[i * (length - 1) // 7] for i in range(1, 8)]
                if len(self._rows_of(few)) == 1:
                    places = few
                elif length > 2 * _LONG and self._rows_of(spread) <= self._rows_of(first):
                    places = [*first, *spread]
            yield from places

    def _rows_of(self, places: Sequence[tuple[int, ...]]) -> set[Key]:
        return {_key(self.rows_at(place)) for place in places}


def activation_operand(contraction: Contraction) -> tuple[Node, list[int]]:
    """Return the node of a contraction, and which of its operands is the activation."""
    edge = contraction.activation
    given = None if edge is None else (edge.node, edge.output_nr)
    operands = list(contraction.node.next_functions)
    return contraction.node, [i for i, operand in enumerate(operands) if operand == given]


def find_groups(
    graph: Graph,
    edge: GradientEdge,
    feature_axis: int,
    contractions: Sequence[Contraction],
    bare: Sequence[Use],
) -> Iterator[Group]:
    """Yield the heads of a side of an attention: vectors that depend on the same rows.

    Args:
        edge: where the side enters the attention.
        feature_axis: the axis of the entries of one vector.
        contractions: the projections that the side is computed from.
        bare: further parameters that are added or multiplied.
    """
    side = _Side(graph, edge, feature_axis, contractions, bare)
    whole = side.rows(_random_seed(edge)) if side.uses or side.products else {}
    if not whole:
        return
    heads: dict[Key, list[tuple[int, ...]]] = {}
    rows_of: dict[Key, Touched] = {}
    seen: set[tuple[int, ...]] = set()
    base: tuple[int, ...] | None = side.first()
    for _ in range(_MOST_STARTS):
        if base is None:
            break
        for place in side.neighbours(base):
            rows = {} if place in seen else side.rows_at(place)
            seen.add(place)
            if rows:
                heads.setdefault(_key(rows), []).append(place)
                rows_of[_key(rows)] = rows
        base = side.uncovered(whole, list(rows_of.values()))
    else:
        raise UnknownArchitecture(
            "the query, key or value of an attention depends on rows for which no head is found"
        )
    order = sorted(heads, key=lambda key: min(heads[key]))
    for key in order:
        yield Group(tuple(sorted(heads[key])), rows_of[key])


def one_vector(edge: GradientEdge, feature_axis: int, place: tuple[int, ...]) -> Tensor:
    """Return a seed: random values for one vector of the value at an edge, zeros elsewhere."""
    shape = shape_at(edge)
    values = torch.randn(shape[feature_axis], generator=torch.Generator().manual_seed(0))
    seed = torch.zeros(shape, dtype=dtype_at(edge), device=device_at(edge))
    index: list[Any] = list(place)
    index.insert(feature_axis, slice(None))
    seed[tuple(index)] = values.to(seed)
    return seed


def _key(rows: Touched) -> Key:
    return tuple(
        sorted((use, tuple(bytes(a.numpy(force=True)) for a in at)) for use, at in rows.items())
    )


def _adds(rows: Touched, known: Sequence[Touched]) -> bool:
    """Return whether `rows` has rows that `known` does not have."""
    for key, axes in rows.items():
        for axis, mask in enumerate(axes):
            new = mask.clone()
            for other in known:
                if key in other:
                    new &= ~other[key][axis]
            if bool(new.any()):
                return True
    return False


def _random_seed(edge: GradientEdge) -> Tensor:
    """Return random values in the shape of the value at an edge."""
    seed = torch.randn(shape_at(edge), generator=torch.Generator().manual_seed(0))
    return seed.to(device_at(edge), dtype_at(edge))


def gradients(
    edge: GradientEdge, inputs: Sequence[Any], seed: Tensor, blocked: Blocked = ()
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the value at an edge, with `seed` as the upstream gradient.

    They do not go through the `blocked` operands, e.g. into the layer before.
    """
    handles = [_block(node, operands) for node, operands in blocked]
    try:
        return torch.autograd.grad(
            [edge], list(inputs), [seed], retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()


def _block(node: Node, operands: Sequence[int]) -> Any:
    """Let no gradient through some operands of a node."""

    def hook(grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(grad) if index in operands and grad is not None else grad
            for index, grad in enumerate(grads)
        )

    return node.register_hook(hook)


# ---- the query, from the axis of the softmax ----


def query_operand(
    graph: Graph, softmax: Node, product: Node, others: Sequence[Node] = ()
) -> int | None:
    """Return which operand (0 or 1) of the product that makes scores is the query.

    Return None if this cannot be decided.

    Args:
        others: the other products, if scores are a sum of several, e.g. of those of two layers.
    """
    blocked = [(other, (0, 1, 2)) for other in others]
    start = graph.edge(softmax, 0)
    edges = [edge for edge in graph.operands(product) if edge is not None]
    assert start is not None
    shape = shape_at(start)
    axis = saved_axis(softmax, len(shape))
    for place in _places(softmax, shape):
        same = _unchanged(softmax, start, edges, place, axis, blocked)
        if same is not None and same[0] != same[1]:
            return 0 if same[0] else 1
        for other in range(len(shape)):  # perhaps scores of two queries and one key
            same = (
                None if other == axis else _unchanged(softmax, start, edges, place, other, blocked)
            )
            if same is not None and same[0] != same[1]:
                return 1 if same[0] else 0
    between = {graph.kind(n) for n, _ in graph.after([product], lambda n: n is softmax)}
    if between & {"Transpose", "Permute"}:
        return None
    return 0 if axis == len(shape) - 1 else 1


def sums_along(softmax: Node, product: Node) -> bool:
    """Return whether the product with the values sums along the axis of the softmax."""
    weights, edge = GradientEdge(softmax, 0), GradientEdge(product, 0)
    axis = saved_axis(softmax, len(shape_at(weights)))
    generator = torch.Generator().manual_seed(0)
    elsewhere = False
    for attempt in range(_TRIES):
        seed = torch.zeros(shape_at(edge), dtype=dtype_at(edge), device=device_at(edge))
        place = [int(torch.randint(size, (), generator=generator)) for size in seed.shape]
        seed[tuple(place if attempt else [-1] * seed.ndim)] = 1
        (grad,) = gradients(edge, [weights], seed)
        if grad is None:
            continue
        mask = grad.ne(0)
        counts = [int(mask.movedim(a, 0).flatten(1).any(1).sum()) for a in range(mask.ndim)]
        if counts[axis] > 1:
            return True
        elsewhere = elsewhere or max(counts) > 1
    return not elsewhere


def mixes_vectors(graph: Graph, node: Node) -> bool:
    """Return whether one entry of a node's result depends on entries of several vectors.

    The indices of these entries then differ along two axes or more, as in an attention. A norm or
    an activation function works along one axis.
    """
    result = GradientEdge(node, 0)
    seed = torch.zeros(shape_at(result), dtype=dtype_at(result), device=device_at(result))
    seed[tuple([-1] * seed.ndim)] = 1
    try:
        grads = gradients(result, graph.activations_of(node), seed)
    except Exception:  # its backward pass works only in training
        return False
    for grad in grads:
        places: Any = [] if grad is None else grad.nonzero().T
        if sum(len(indices.unique()) > 1 for indices in places) > 1:
            return True
    return False


def _places(softmax: Node, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield indices of scores that are not masked: the last one, then others."""
    weights = softmax._saved_result.flatten()
    unmasked = weights.nonzero().flatten().tolist() or [len(weights) - 1]
    chosen = [unmasked[-1 - attempt * (len(unmasked) - 1) // _TRIES] for attempt in range(_TRIES)]
    for index in dict.fromkeys(chosen):
        yield tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))


def _unchanged(
    softmax: Node,
    start: GradientEdge,
    edges: list[GradientEdge],
    place: tuple[int, ...],
    axis: int,
    blocked: Blocked,
) -> tuple[bool, bool] | None:
    """Return, for each operand, whether two scores are computed from the same vector of it.

    The indices of the two scores differ only along `axis`; elsewhere they are those of `place`.
    Return None if fewer than two of these scores are not masked, or if one of the two does not
    depend on both operands.
    """
    line: list[Any] = list(place)
    line[axis] = slice(None)
    others = softmax._saved_result[tuple(line)].nonzero().flatten().tolist()
    if len(others) < 2:
        return None
    touched: list[list[Tensor]] = []
    for other in others[:2]:
        seed = torch.zeros(shape_at(start), dtype=dtype_at(start), device=device_at(start))
        seed[(*place[:axis], other, *place[axis + 1 :])] = 1
        grads = gradients(start, edges, seed, blocked)
        masks = [g.ne(0).any(-1 if i == 0 else -2) for i, g in enumerate(grads) if g is not None]
        if len(masks) < 2 or not all(bool(mask.any()) for mask in masks):
            return None
        touched.append(masks)
    return (
        torch.equal(touched[0][0], touched[1][0]),
        torch.equal(touched[0][1], touched[1][1]),
    )
