"""Rewrites of a layer's graph: attention, residual sums, norms, GELU and embeddings are fused.

The compiler takes several kernels for the backward pass of a norm, because its sums run along rows
and along columns; `frostlab.models.fused.residual_norm` takes two for a dropout, a sum and a norm.
The fused operations also compute the gradient of the bias of the linear map before them.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from frostlab.models.fused import draw_seeds, embedding, gelu, joined_attention
from frostlab.models.fused.joined_linear import joined_linear
from frostlab.models.fused.residual_norm import fits, fits_sum, residual_norm, residual_sum
from frostlab.training.step.joining import is_view, share_memory, writes_in_place

_SUMS = (operator.add, torch.add)


@dataclass(frozen=True)
class _Sum:
    """A sum of the residual stream and a branch in a graph."""

    node: Node
    stream: Node
    branch: Node  # the other term of the sum, before its dropout
    dropped: Node | None  # the branch after its dropout, if it has one
    dropout: float


@dataclass(frozen=True)
class _Norm:
    """A layer norm in a graph, with the sum before it if there is one."""

    node: Node
    x: Node  # the residual stream; without a sum, the norm's input
    weight: Node
    shift: Node | None  # the norm's bias
    eps: float
    sum: _Sum | None = None


@dataclass(frozen=True)
class _Attention:
    """An attention in a graph whose queries, keys and values are columns of one linear map."""

    joined: Node  # the map's output, (B, T, 3 · width)
    starts: list[int]  # the first columns of queries, keys and values
    size: int  # columns of a head
    scale: float
    dropout: float
    causal: bool

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.starts, self.size, self.scale, self.dropout, self.causal


def fuse_norms(graph: Graph) -> None:
    """Replace each layer norm, with the sum and dropout before it, by one fused operation."""
    for node in list(graph.nodes):
        norm = _as_norm(node)
        if norm is not None:
            _replace(graph, norm)
    graph.lint()


def fuse_sums(graph: Graph) -> None:
    """Replace each sum of a residual stream and a linear map's output by a fused operation.

    Sums before a norm must have been replaced by `fuse_norms`. Where there is neither a dropout nor
    a trainable bias, the compiler can fuse the sum with what follows, and it stays.
    """
    for node in list(graph.nodes):
        found = _as_sum(node)
        if found is None or found.branch.target is not F.linear or not fits_sum(_value(node)):
            continue
        if found.dropped is not None and any(map(writes_in_place, _between(found.dropped, node))):
            continue
        learning = _detach_bias(graph, found.branch)
        if learning is None and not found.dropout:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(
                residual_sum, (found.stream, found.branch, learning, found.dropout)
            )
        fused.meta |= {"example_value": _value(node), "device": _value(node).device}
        node.replace_all_uses_with(fused)
        for dead in (node, found.dropped):
            if dead is not None:
                graph.erase_node(dead)
    graph.lint()


def fuse_gelus(graph: Graph) -> None:
    """Replace each GELU that follows a linear map by a fused operation."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.gelu or len(node.args) != 1:
            continue
        linear = node.args[0]
        if not isinstance(linear, Node) or linear.target is not F.linear or len(linear.users) > 1:
            continue
        if gelu.fits(_value(linear).dtype):
            learning = _detach_bias(graph, linear)
            approximate = node.kwargs.get("approximate", "none")
            with graph.inserting_before(node):
                fused = graph.call_function(gelu.gelu, (linear, learning, approximate))
            fused.meta["example_value"] = _value(node)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
    graph.lint()


def fuse_attention(graph: Graph) -> None:
    """Replace attention over the columns of one linear map's output by a fused operation.

    The map may be one that `join_linears` has made.
    """
    for node in list(graph.nodes):
        found = _as_attention(node)
        if found is not None:
            _replace_attention(graph, node, found)
    graph.lint()


def fuse_embeddings(graph: Graph) -> None:
    """Replace embeddings whose weight learns by ones with a faster gradient."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.embedding:
            continue
        given: dict[str, Any] = dict(zip((*names, "sparse"), node.args, strict=False))
        given |= dict(node.kwargs)
        unusual = any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        if unusual or not embedding.fits(_value(given["weight"])):
            continue
        rows, skipped = len(_value(given["weight"])), given.get("padding_idx")
        skipped = -1 if skipped is None else skipped % rows
        with graph.inserting_before(node):
            fused = graph.call_function(embedding.embed, (given["input"], given["weight"], skipped))
        fused.meta["example_value"] = _value(node)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
    graph.lint()


def share_seeds(graph: Graph) -> None:
    """Let the fused operations with dropout draw their seeds together, by one kernel."""
    # the place of the probability of dropout among an operation's arguments
    places = {residual_norm: 5, residual_sum: 3, joined_attention.attend: 5}
    nodes = [n for n in graph.nodes if n.target in places and n.args[places[n.target]] > 0]
    if not nodes:
        return
    with graph.inserting_before(nodes[0]):
        seeds = graph.call_function(draw_seeds, (nodes[0].meta["device"], len(nodes)))
        for number, node in enumerate(nodes):
            node.update_kwarg("seed", graph.call_function(operator.getitem, (seeds, number)))
    graph.lint()


def _as_attention(node: Node) -> _Attention | None:
    """Return a node as an attention that the kernels support; None for every other node."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    dropout, scale, causal = given["dropout_p"], given.get("scale"), given["is_causal"]
    # nodes that stand for numbers are not known yet
    fixed = isinstance(dropout, int | float) and isinstance(causal, bool)
    fixed = fixed and (scale is None or (isinstance(scale, int | float) and scale > 0))
    if given["attn_mask"] is not None or given.get("enable_gqa") or not fixed:
        return None
    if _value(node).dim() != 4 or _value(given["query"]).dtype != _value(node).dtype:
        return None
    _, heads, length, size = _value(node).shape
    if not joined_attention.fits(_value(node).dtype, length, size) or not 0 <= dropout < 1:
        return None
    columns = [_columns_of(given[name]) for name in names[:3]]
    width, (joined, _, total) = heads * size, columns[0] or (node, 0, 0)
    starts = [start for other, start, _ in filter(None, columns) if other is joined]
    if sorted(starts) != [0, width, 2 * width] or total != 3 * width:
        return None
    scale = size**-0.5 if scale is None else float(scale)
    return _Attention(joined, starts, size, scale, float(dropout), causal)


def _columns_of(heads: Node) -> tuple[Node, int, int] | None:
    """Find the linear map of which a node (B, heads, T, size) is a view.

    Return the map's output (B, T, columns), the view's first column, and the number of columns. The
    view must have the columns of a head, and the heads, side by side; None if there is no such map.
    """
    value, found, node = _value(heads), None, heads
    if value.dim() != 4:
        return None
    batch, _, length, size = value.shape
    while is_view(node):
        node = node.all_input_nodes[0]
        known = node.meta.get("example_value")
        first = known[0] if isinstance(known, tuple | list) else known
        if not isinstance(first, Tensor) or not share_memory(first, value):
            break
        if first is known and known.dim() == 3 and known.shape[:2] == (batch, length):
            found = node
    if found is None or not _value(found).is_contiguous():
        return None
    source = _value(found)
    width = source.shape[-1]
    if value.stride() != (length * width, size, width, 1):
        return None
    start = int(value.storage_offset()) - int(source.storage_offset())
    joined, offset, total = found.meta.get("columns", (found, 0, width))
    return joined, offset + start, total


def _replace_attention(graph: Graph, node: Node, found: _Attention) -> None:
    with graph.inserting_before(node):
        fused = graph.call_function(joined_attention.attend, (found.joined, [], *found.settings))
        mixed = graph.call_method("transpose", (fused, 1, 2))
    fused.meta |= {"example_value": _value(node).transpose(1, 2), "device": _value(node).device}
    mixed.meta["example_value"] = _value(node)
    node.replace_all_uses_with(mixed)
    _erase_unused(graph, node)
    linear = found.joined
    if linear.target in (F.linear, joined_linear) and len(linear.users) == 1:
        fused.update_arg(1, _detach_biases(graph, linear))


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node that has no users, and then all of its inputs that have no other users."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for other in inputs:
        if not other.users and other.op != "placeholder":
            _erase_unused(graph, other)


def _as_norm(node: Node) -> _Norm | None:
    """Return a node as a layer norm that the kernels support; None for every other node."""
    if node.op != "call_function" or node.target is not F.layer_norm:
        return None
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, weight, shift = given["input"], given.get("weight"), given.get("bias")
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    if not fits(_value(x), _value(weight), shift and _value(shift), given["normalized_shape"]):
        return None
    eps = given.get("eps", 1e-5)
    found = _as_sum(x)
    if found is None or not _can_move(found.dropped or x, x, node):
        return _Norm(node, x, weight, shift, eps)
    return _Norm(node, found.stream, weight, shift, eps, found)


def _as_sum(node: Node) -> _Sum | None:
    """Return a node as the sum of a residual stream in float32 and a branch; None if it is not."""
    if node.op != "call_function" or node.target not in _SUMS or node.kwargs or len(node.args) != 2:
        return None
    terms = [term for term in node.args if isinstance(term, Node)]
    if any(not isinstance(term.meta.get("example_value"), Tensor) for term in terms):
        return None
    if len(terms) < 2 or any(_value(term).shape != _value(node).shape for term in terms):
        return None
    stream, branch = sorted(terms, key=_is_branch)
    if _value(stream).dtype != torch.float32 or stream is branch:
        return None
    inside, dropout = _without_dropout(branch)
    return _Sum(node, stream, inside, None if inside is branch else branch, dropout)


def _can_move(first: Node, total: Node, norm: Node) -> bool:
    """Return whether the nodes from `first` to the sum `total` can be moved to the place of `norm`.

    No node between `first` and `norm` may read the sum or change a tensor in place, and no node at
    all may change the sum in place.
    """
    if any(writes_in_place(user) for user in total.users):
        return False
    nodes = list(_between(first, norm))
    return not any(total in node.all_input_nodes or writes_in_place(node) for node in nodes)


def _between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes after the first and before the last."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value


def _is_branch(node: Node) -> tuple[bool, bool]:
    """Return a sort key that puts the branch of a sum after the residual stream.

    The branch is the term that ends in a dropout or a linear map; if both terms do, or neither
    does, it is the term that is not float32.
    """
    inside, _ = _without_dropout(node)
    return inside is not node or node.target is F.linear, _value(node).dtype != torch.float32


def _without_dropout(node: Node) -> tuple[Node, float]:
    """Return the input and the probability of a dropout.

    For another node, or a dropout that several nodes read, return the node itself and 0.
    """
    if node.op != "call_function" or node.target is not F.dropout or len(node.users) > 1:
        return node, 0.0
    names = ("input", "p", "training", "inplace")
    given: dict[str, Any] = {"p": 0.5, "training": True, "inplace": False}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    # nodes that stand for numbers are not known yet
    known = isinstance(given["p"], int | float) and isinstance(given["training"], bool)
    if not known or given["inplace"] or given["p"] >= 1.0 or not isinstance(given["input"], Node):
        return node, 0.0
    return given["input"], float(given["p"]) if given["training"] else 0.0


def _replace(graph: Graph, norm: _Norm) -> None:
    node, before = norm.node, norm.sum
    learning = None if before is None else _detach_bias(graph, before.branch)
    order = {other: number for number, other in enumerate(graph.nodes)}
    source = norm.x if before is None else before.node
    later = [user for user in source.users if order[user] > order[node]]
    # Without a sum, a later node may change x in place, and the later readers then keep reading x.
    # With a sum, `_can_move` rules this out.
    if any(writes_in_place(user) for user in later):
        later = []
    products = [u for u in node.users if u.target is F.linear and u.args and u.args[0] is node]
    products = [user for user in products if list(user.all_input_nodes).count(node) == 1]
    others = [user for user in node.users if user not in products]
    with graph.inserting_before(node):
        results = graph.call_function(
            residual_norm,
            (
                norm.x, before.branch if before else None, norm.weight, norm.shift, learning,
                before.dropout if before else 0.0, norm.eps, bool(later), bool(others),
                bool(products),
            ),
        )  # fmt: skip
        results.meta["device"] = _value(node).device
        # the sum; the norm for other readers, in float32; the norm for products, perhaps in bf16
        places = [graph.call_function(operator.getitem, (results, i)) for i in range(3)]
    for place, like in zip(places, (source, node, node), strict=True):
        place.meta["example_value"] = _value(like)
    for users, old, new in ((later, source, 0), (others, node, 1), (products, node, 2)):
        for user in users:
            user.replace_input_with(old, places[new])
    sums = () if before is None else (before.node, before.dropped)
    for dead in (node, *sums, *places):
        if dead is not None and not dead.users:
            graph.erase_node(dead)


def _detach_bias(graph: Graph, branch: Node) -> Node | None:
    """Detach the bias of the linear map that ends a branch; return it if it is trainable."""
    if branch.target is not F.linear or len(branch.users) > 1:
        return None
    return next(iter(_detach_biases(graph, branch)), None)


def _detach_biases(graph: Graph, linear: Node) -> list[Node]:
    """Take the trainable biases of a plain or joined linear map out of autograd, and return them.

    A fused operation then computes their gradients. `F.linear` and `joined_linear` both take their
    biases as the third argument.
    """
    biases = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    given = biases if isinstance(biases, list | tuple) else [biases]
    learning = [bias for bias in given if isinstance(bias, Node) and _value(bias).requires_grad]
    for bias in learning:
        with graph.inserting_before(linear):
            detached = graph.call_method("detach", (bias,))
        detached.meta["example_value"] = _value(bias).detach()
        linear.replace_input_with(bias, detached)
    return learning
