"""Which operand of an attention's scores is the query, found from the axis of the softmax.

A softmax runs along the keys. So two scores whose indices differ only along its axis belong to one
query and two keys. The product with the values sums along the same axis.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from frostlab.roles.tracing.dependence import gradients
from frostlab.roles.tracing.graph import Graph, Node, device_at, dtype_at, saved_axis, shape_at

_TRIES = 8  # most indices of scores that are tried


def query_operand(graph: Graph, softmax: Node, product: Node) -> int | None:
    """Return which operand (0 or 1) of the product that makes scores is the query.

    Return None if this cannot be decided.
    """
    start = graph.edge(softmax, 0)
    edges = [edge for edge in graph.operands(product) if edge is not None]
    assert start is not None
    shape = shape_at(start)
    axis = saved_axis(softmax, len(shape))
    for place in _places(softmax, shape):
        same = _unchanged(softmax, start, edges, place, axis)
        if same is not None and same[0] != same[1]:
            return 0 if same[0] else 1
        for other in range(len(shape)):  # perhaps scores of two queries and one key
            same = None if other == axis else _unchanged(softmax, start, edges, place, other)
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
        grads = gradients(start, edges, seed)
        masks = [g.ne(0).any(-1 if i == 0 else -2) for i, g in enumerate(grads) if g is not None]
        if len(masks) < 2 or not all(bool(mask.any()) for mask in masks):
            return None
        touched.append(masks)
    return (
        torch.equal(touched[0][0], touched[1][0]),
        torch.equal(touched[0][1], touched[1][1]),
    )
