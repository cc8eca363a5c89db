"""The arithmetic of a split projection: one forward matmul, gradients for trainable rows alone."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frostlab.anatomy import Rows, join


@dataclass(frozen=True)
class Plan:
    """The static table of a split: which rows are frozen, of the weight and of the bias."""

    axis: int  # of the weight's rows: 0 for (out, in), 1 for Conv1D's (in, out)
    weight: Rows | None  # None: no row is frozen
    bias: Rows | None

    learning: Rows | None = field(init=False)  # the trainable rows; None: all
    learning_bias: Rows | None = field(init=False)

    def __post_init__(self) -> None:
        rest = [None if rows is None else rows.rest() for rows in (self.weight, self.bias)]
        object.__setattr__(self, "learning", rest[0])
        object.__setattr__(self, "learning_bias", rest[1])


class Kept:
    """A fused tensor kept between steps, its frozen rows in place.

    It costs one fused tensor of memory a projection, and saves a step the assembly of it. It is
    only ever written in place, so that a captured graph goes on reading what is true. Frozen
    rows written through `.data`, which torch does not count as a change, are not noticed.
    """

    def __init__(
        self,
        frozen_rows: Rows,
        axis: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.frozen_rows, self.learning, self.axis = frozen_rows, frozen_rows.rest(), axis
        self.whole = torch.empty(shape, dtype=dtype, device=device)
        self.stamp: tuple[int, int] | None = None  # of the frozen rows that are in
        self.filled: tuple[int, int] | None = None  # of the trainable rows that are in
        self.run: Tensor | None = None  # the trainable rows, where they are one run
        if self.learning.repeats == len(self.learning.spans) == 1:
            start, stop = self.learning.spans[0]
            self.run = self.whole.narrow(axis, start, stop - start)

    def fill(self, trainable: Tensor, frozen: Tensor) -> None:
        """Copy the trainable rows in, and the frozen ones if they are others than before."""
        stamp = (frozen.data_ptr(), frozen._version)
        if stamp != self.stamp:
            self.frozen_rows.put(self.whole, frozen.detach(), self.axis)
            self.stamp = stamp
        self.filled = (trainable.data_ptr(), trainable._version)
        if self.run is not None:
            self.run.copy_(trainable.detach())
        else:
            self.learning.put(self.whole, trainable.detach(), self.axis)


def assemble(
    trainable: Tensor | None, frozen: Tensor | None, rows: Rows | None, axis: int
) -> Tensor:
    """Assemble a tensor from its two parts, in one copy where there are two."""
    if rows is None or frozen is None:
        assert trainable is not None
        return trainable
    return frozen if trainable is None else join(rows, frozen, trainable, axis)


class Project(torch.autograd.Function):
    """x · Wᵀ + b over all rows; gradients of W and b for the trainable rows alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        trainable: Tensor | None,
        trainable_bias: Tensor | None,
        frozen: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        kept: Kept | None,
    ) -> Tensor:
        return F.linear(x, weight.t() if plan.axis else weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, trainable, trainable_bias, frozen, _, _, plan, kept = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, trainable, frozen)
        ctx.plan, ctx.kept = plan, kept
        ctx.filled = None if kept is None else kept.filled
        ctx.bias_dtype = None if trainable_bias is None else trainable_bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, trainable, frozen = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # What is kept serves if it still holds the rows of this forward; a second
            # derivative must reach the rows themselves.
            if ctx.kept is None or ctx.kept.filled != ctx.filled or torch.is_grad_enabled():
                weight = assemble(trainable, frozen, plan.weight, plan.axis).to(grad.dtype)
            else:
                weight = ctx.kept.whole
            grad_x = grad @ (weight.t() if plan.axis else weight)
        flat = grad.reshape(-1, grad.shape[-1])  # (N, out)
        parts = _columns(flat, plan.learning)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])  # (N, in)
            grad_weight = _as(_weight_gradient(parts, inputs, plan.axis), trainable.dtype)
        if ctx.needs_input_grad[2]:
            if plan.learning_bias != plan.learning:
                parts = _columns(flat, plan.learning_bias)
            sums = [part.sum(0) for part in parts]  # each (span,) or (repeats, span)
            joined = sums[0] if len(sums) == 1 else torch.cat(sums, -1)
            grad_bias = _as(joined.flatten() if joined.dim() > 1 else joined, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _columns(grad: Tensor, rows: Rows | None) -> list[Tensor]:
    """The trainable columns of (N, out), a view a span: (N, span), or (N, repeats, span).

    Interleaved columns are gathered for float32, where one matmul over the copy beats a batched
    one over the view; for halves on a GPU it is the other way round.
    """
    if rows is None:
        return [grad]
    if rows.repeats == 1:
        return [grad[:, start:stop] for start, stop in rows.spans]
    if grad.is_cuda and grad.element_size() == 2:
        return rows.pieces(grad, 1)
    return [rows.take(grad, 1)]


def _weight_gradient(parts: list[Tensor], inputs: Tensor, axis: int) -> Tensor:
    """The gradient of the trainable rows: a matmul a span of them, batched over repeats."""
    if parts[0].dim() == 2:
        blocks = [inputs.t() @ part if axis else part.t() @ inputs for part in parts]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, axis)
    repeated = inputs.expand(parts[0].shape[1], -1, -1)  # (repeats, N, in)
    heads = [torch.bmm(part.permute(1, 2, 0), repeated) for part in parts]
    whole = (heads[0] if len(heads) == 1 else torch.cat(heads, 1)).flatten(0, 1)  # (rows, in)
    return whole.t() if axis else whole
