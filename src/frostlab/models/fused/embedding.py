"""An embedding whose gradient is computed by Triton kernels, in a fixed order of sums.

Torch's kernels for this gradient sort the ids in eight passes and then run a dozen small kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab import devices
from frostlab.devices import runs_triton
from frostlab.models import fused
from frostlab.models.fused.residual_norm import is_hooked

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels add in float32


def fits(weight: Tensor) -> bool:
    """Return whether the kernels may compute the gradient of this weight."""
    learns = weight.requires_grad and weight.dim() == 2
    return devices.HAS_TRITON and learns and weight.dtype in _DTYPES


def look_up(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Return a module's embedding of the ids, with the faster gradient where it can be used.

    While a module is compiled, `frostlab.training.step.fusion` replaces torch's operation.
    """
    changed = type(module) is not nn.Embedding or is_hooked(module)
    unusual = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    fitting = fits(module.weight) and runs_triton(ids.device)
    if changed or unusual or not fitting or torch.compiler.is_compiling():
        return module(ids)
    return embed(ids, module.weight, -1 if module.padding_idx is None else module.padding_idx)


def embed(ids: Tensor, weight: Tensor, skipped: int) -> Tensor:
    """Return the rows of the weight that the ids name; the id `skipped` yields no gradient."""
    out: Tensor = _Embedding.apply(ids, weight, skipped)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, skipped: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.skipped = len(weight), skipped
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        operation = fused.chosen(differentiate, _DIFFERENTIATE, upstream)
        return None, operation(upstream, *ctx.saved_tensors, ctx.rows, ctx.skipped), None


@fused.starts_kernels
def differentiate(upstream: Tensor, ids: Tensor, rows: int, skipped: int) -> Tensor:
    """Return the gradient of the weight, which has this number of rows."""
    from frostlab.models.fused import embedding_kernels

    table = upstream.new_zeros(rows, upstream.shape[-1])
    values = upstream.reshape(-1, upstream.shape[-1]).contiguous()
    embedding_kernels.add_rows(table, ids.flatten().contiguous(), values, skipped, False)
    return table


_DIFFERENTIATE = torch.library.custom_op(
    "frostlab::embedding_backward", differentiate, mutates_args=()
)


@_DIFFERENTIATE.register_fake
def _(upstream: Tensor, ids: Any, rows: int, skipped: int) -> Tensor:
    return upstream.new_empty(rows, upstream.shape[-1])


@fused.starts_kernels
def add_rows(table: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add each of the values' rows to the row of a contiguous table that its id names, on CUDA."""
    from frostlab.models.fused import embedding_kernels

    embedding_kernels.add_rows(table, ids.contiguous(), values.contiguous(), -1, True)
