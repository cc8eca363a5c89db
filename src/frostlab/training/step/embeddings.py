"""Gradients of small embedding tables on a GPU: one matrix product instead of sorting the ids.

The gradient of a table row is the sum of the gradients of the tokens that read it. Torch sorts the
ids and sums in about twenty kernels, whatever the size of the table. For positions and token types,
multiplying by a matrix of zeros and ones is faster, and as deterministic.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.training.distributed import blocks

MOST_ROWS = 1024  # of a table whose gradient is computed by a product


def small_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Return the embeddings on a GPU whose gradient can be computed by a product.

    Embeddings inside layers are left out, because layers may be compiled; and so are all embeddings
    of a model whose layers are unknown, because such a model is compiled as a whole.
    """
    in_layers = {module for block in blocks(model) for module in block.modules()}
    return [
        module
        for module in (model.modules() if in_layers else ())
        if type(module) is nn.Embedding
        and module not in in_layers
        and module.weight.is_cuda
        and module.num_embeddings <= MOST_ROWS
        and has_plain_gradient(module)
    ]


def has_plain_gradient(embedding: nn.Embedding) -> bool:
    """Return whether the gradient of each row is the sum of its tokens' gradients."""
    unusual = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return embedding.padding_idx is None and not unusual


@contextmanager
def gradients_by_products(embeddings: Iterable[nn.Embedding]) -> Iterator[None]:
    """Compute the gradients of these embeddings by products, if they are read in this context."""
    patched = [e for e in embeddings if e.weight.requires_grad and "forward" not in vars(e)]
    for embedding in patched:
        lookup = functools.partial(_look_up, embedding)
        embedding.forward = lookup  # type: ignore[method-assign]
    try:
        yield
    finally:
        for embedding in patched:
            del embedding.forward


def _look_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    # the weight is read here, because FSDP replaces it while a model runs
    vectors: Tensor = EmbeddingByProduct.apply(embedding.weight, ids)
    return vectors


class EmbeddingByProduct(torch.autograd.Function):
    """An embedding whose backward pass is a matrix product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.rows = len(weight)
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (ids,) = upstream, ctx.saved_tensors
        numbers = torch.arange(ctx.rows, device=ids.device)
        reads = (ids.flatten() == numbers[:, None]).to(gradient.dtype)  # (rows, tokens)
        return reads @ gradient.flatten(0, -2), None
