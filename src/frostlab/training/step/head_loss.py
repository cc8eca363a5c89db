"""Fused cross-entropy of a language model's head, whose logits may be larger than the memory.

The forward pass computes logits, loss and gradients for one chunk of tokens at a time, in a buffer
that all chunks share; the backward pass only scales the gradients.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from frostlab.devices import memory_bytes, on_gpu, runs_ahead, runs_triton
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.fused.embedding import add_rows
from frostlab.training.batches.batch import IGNORED

# Bytes that a chunk's logits may take. Small chunks are slow, because each chunk reads and writes
# the whole gradient of the head.
CPU_CHUNK = 64 * 2**20
GPU_CHUNK = 1 / 64  # as a fraction of the device's memory
HEAD_COPY = "kept"  # attribute of a head that holds a bf16 copy of its weight while a step uses it
_ALIGNED = 64  # on a GPU, the columns of logits are padded to a multiple of this, for fast products


def _skipped_by_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile of a caller skip a function, as it skips the methods of optimizers.

    Torch's own decorator imports the compiler even if nothing is compiled, which takes a second.
    """
    skipped = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        chosen = skipped if torch.compiler.is_compiling() else function
        return chosen(*arguments, **options)

    return call


@_skipped_by_compiler
def head_loss(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = IGNORED,
    copy: Tensor | None = None,
    tied: "TiedGradient | None" = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of a linear head after one layer, or after each of several.

    `hidden` is the head's input after one layer, (…, width), or a list for several layers;
    `weight` is (vocabulary, width) and `targets` is (…). The first result is the sum of the layers'
    losses, each times its entry of `weights` (1 by default); the second has each layer's loss, not
    differentiable. Tokens with the target `ignore` have no loss. Only tensors that require a
    gradient get one.

    `copy` may hold the weight in the dtype of the products; the weight is then not cast. In the
    backward pass, the weight's gradient is also left in `tied`, so that an embedding with the same
    weight can add its own gradient there.
    """
    layers = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    factors = [1.0] * len(layers) if weights is None else [float(w) for w in weights]
    _check(layers, weight, targets, bias, factors)
    expected = None if on_host(weight) else _expected.get()
    options = _Options(factors, ignore, copy, tied, expected)
    inputs = (weight, bias, *layers)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _HeadLoss.apply(options, targets, *inputs)
    total, losses, _ = _compute(options, targets, weight, bias, layers, [False] * len(inputs))
    return total, losses


@dataclass(frozen=True)
class _Options:
    factors: list[float]  # the weight of each layer's loss in the total
    ignore: int
    copy: Tensor | None
    tied: "TiedGradient | None"
    expected: Tensor | None  # the gradient with which backward will probably be called


_expected: ContextVar[Tensor | None] = ContextVar("_expected", default=None)


@contextmanager
def expect_gradient(gradient: Tensor) -> Iterator[None]:
    """Announce the upstream gradient with which backward of the losses will be called.

    On a GPU, the forward pass already multiplies the gradients by `gradient`, which costs nothing
    in the fused kernel. If backward is then called with this very tensor, the gradients are final;
    if it is called with another one, backward corrects them.
    """
    token = _expected.set(gradient)
    try:
        yield
    finally:
        _expected.reset(token)


def _check(
    layers: list[Tensor], weight: Tensor, targets: Tensor, bias: Tensor | None, factors: list[float]
) -> None:
    """Refuse shapes that do not fit together."""
    if not layers or len(factors) != len(layers):
        raise BadInput(f"head_loss: {len(factors)} weights are given for {len(layers)} layers")
    shapes = {tuple(layer.shape) for layer in layers}
    if shapes != {(*targets.shape, weight.shape[-1])}:
        expected = f"targets of {tuple(targets.shape)} and a head of {tuple(weight.shape)}"
        raise BadInput(f"head_loss: hidden states of {sorted(shapes)} do not fit {expected}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(
            f"head_loss: a bias of {tuple(bias.shape)} does not fit a head of {tuple(weight.shape)}"
        )


class _HeadLoss(torch.autograd.Function):
    """The autograd function of `head_loss`: forward computes gradients, backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *layers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[2:]
        total, losses, gradients = _compute(options, targets, weight, bias, layers, wanted)
        ctx.save_for_backward(*gradients)
        # autograd would cast a gradient of another dtype to a new tensor, which `tied` cannot hold
        is_final = gradients[0] is not None and gradients[0].dtype == weight.dtype
        ctx.tied = options.tied if is_final else None
        ctx.expected = options.expected
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients, in place unless the graph is retained; autograd then casts them."""
        if torch.is_grad_enabled():  # torch's once_differentiable misses some cases
            raise FrostlabError("head_loss has no second derivative: leave out create_graph=True")
        retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if ctx.expected is None:
            is_one = on_host(upstream) and bool(upstream == 1)
        else:  # the gradients are already multiplied by `expected`
            is_one = upstream.data_ptr() == ctx.expected.data_ptr()
            upstream = upstream / ctx.expected
        scaled: list[Tensor | None] = [None, None]
        for gradient in ctx.saved_tensors:
            if gradient is not None and retained:  # a copy, even if it is scaled by 1
                gradient = gradient * upstream
            elif gradient is not None and not is_one:
                gradient.mul_(upstream)
            scaled.append(gradient)
        if ctx.tied is not None:
            ctx.tied.gradient = scaled[2]
        return tuple(scaled)


@dataclass
class TiedGradient:
    """The gradient of a head's weight on its way to the embedding that has the same weight.

    The head's backward pass comes first and leaves its dense gradient here. The embedding adds the
    gradients of the rows that it has read to this one, instead of making a second dense gradient
    that autograd would add to the first.
    """

    gradient: Tensor | None = None

    @contextmanager
    def embedding_of(self, model: nn.Module, weight: Tensor) -> Iterator[None]:
        """Make the model's embedding with this weight add its gradient to `gradient`.

        The forward pass must run inside this context. Nothing changes if there is no such
        embedding, or if its gradient is not a plain sum.
        """
        embeddings = (m for m in model.modules() if type(m) is nn.Embedding and m.weight is weight)
        embedding = next(embeddings, None)
        if embedding is None or not _is_plain(embedding) or not torch.is_grad_enabled():
            yield
            return
        lookup = functools.partial(_TiedEmbedding.apply, self, weight)
        embedding.forward = lookup  # type: ignore[method-assign]
        try:
            yield
        finally:
            del embedding.forward


def _is_plain(embedding: nn.Embedding) -> bool:
    """Return whether an embedding's gradient is a plain sum over the tokens that it has read."""
    unusual = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return embedding.padding_idx is None and not unusual


class _TiedEmbedding(torch.autograd.Function):
    """An embedding whose gradient is added to the gradient in a `TiedGradient`, if there is one."""

    @staticmethod
    def forward(ctx: Any, tied: TiedGradient, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.tied, ctx.rows = tied, len(weight)
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (ids,) = upstream, ctx.saved_tensors
        total, ctx.tied.gradient = ctx.tied.gradient, None
        fitting = total is not None and total.dtype == rows.dtype and total.is_contiguous()
        if not fitting or torch.is_grad_enabled():
            dense = torch.ops.aten.embedding_dense_backward(rows, ids, ctx.rows, -1, False)
            return None, dense, None
        flat = rows.flatten(0, -2)
        if has_kernel(total.device, total.dtype):
            add_rows(total, ids.flatten(), flat)
        elif on_host(total):
            total.index_add_(0, ids.flatten(), flat)
        else:  # adding rows in place would not be deterministic
            total += torch.ops.aten.embedding_dense_backward(rows, ids, ctx.rows, -1, False)
        return None, None, None


@torch.no_grad()
def _compute(
    options: _Options,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layers: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the total, each layer's loss, and gradients.

    `wanted` holds whether weight, bias and each layer get a gradient, in this order.
    """
    chunks = _ChunkedLoss(weight, bias, targets, layers[0].dtype, options, wanted)
    with torch.autocast(weight.device.type, enabled=False):
        results = [
            chunks.layer(layer, factor, learns)
            for layer, factor, learns in zip(layers, options.factors, wanted[2:], strict=True)
        ]
    losses = torch.stack([loss for loss, _ in results])
    weighted = [loss * factor for loss, factor in zip(losses, options.factors, strict=True)]
    gradients = [*chunks.gradients(), *(g for _, g in results)]
    return torch.stack(weighted).sum(), losses, gradients


class _ChunkedLoss:
    """One pass over the tokens of every layer, which accumulates the head's gradients.

    Products are computed in `dtype`, sums in `sum_dtype`. On the CPU, only scored tokens are
    computed. On a GPU, all tokens are computed, and those that are not scored are masked, because
    the host would have to wait for the number of scored tokens.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        hidden_dtype: torch.dtype,
        options: _Options,
        wanted: Sequence[bool],
    ) -> None:
        ignore, copy, self.expected = options.ignore, options.copy, options.expected
        self.on_host = on_host(weight)
        self.dtype = product_dtype(hidden_dtype, weight.device)
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self.in_kernel = has_kernel(weight.device, self.dtype)
        self.weight = weight.to(self.dtype) if copy is None or copy.dtype != self.dtype else copy
        self.bias = None if bias is None else bias.to(self.sum_dtype)
        # the first chunk writes the gradients, and the others add to them
        self.weight_gradient, self.bias_gradient = (
            torch.empty_like(x, dtype=self.sum_dtype) if x is not None and learns else None
            for x, learns in zip((weight, bias), wanted[:2], strict=True)
        )
        self.is_first = True
        labels = targets.reshape(-1)
        self.scored_rows = _scored_rows(labels, ignore, len(weight)) if self.on_host else None
        labels = labels if self.scored_rows is None else labels[self.scored_rows]
        self.scored = labels.ne(ignore)
        self.labels = labels.masked_fill(~self.scored, -1)
        self.any_gradient = any(wanted)
        self.chunk = self._tokens_per_chunk(len(labels))
        self.logits = self._logits_buffer()

    def _tokens_per_chunk(self, tokens: int) -> int:
        """Return the number of tokens per chunk, for chunks of equal size within the byte limit."""
        size, chunk_bytes = self.dtype.itemsize, _chunk_bytes(self.weight.device)
        if not self.in_kernel and not (self.on_host and self.dtype == self.sum_dtype):
            size += self.sum_dtype.itemsize  # log-probabilities or gradients need a second buffer
        most = max(1, chunk_bytes // (size * len(self.weight)))
        return max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))

    def _logits_buffer(self) -> Tensor:
        """Allocate a chunk's logits; on a GPU in `dtype`, to save memory bandwidth."""
        columns = len(self.weight)
        dtype = self.sum_dtype if self.on_host else self.dtype
        padded = columns if self.on_host else -(-columns // _ALIGNED) * _ALIGNED
        buffer = torch.empty(self.chunk, padded, dtype=dtype, device=self.weight.device)
        return buffer[:, :columns]

    def layer(self, hidden: Tensor, factor: float, learns: bool) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a layer, and `factor` times its gradient if it learns."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        gradient = torch.zeros_like(rows) if learns and self.scored_rows is not None else None
        if learns and gradient is None:
            gradient = torch.empty_like(rows)
        loss = torch.zeros((), dtype=self.sum_dtype, device=rows.device)
        for start in range(0, len(self.labels), self.chunk):
            stop = min(start + self.chunk, len(self.labels))
            here = slice(start, stop) if self.scored_rows is None else self.scored_rows[start:stop]
            chunk_loss, by_logits = self._chunk(rows[here], start, stop, factor)
            loss += chunk_loss
            if gradient is None or by_logits is None:
                continue
            if self.scored_rows is None:
                put_product(gradient[here], by_logits, self.weight)
            else:
                gradient[here] = torch.mm(by_logits, self.weight).to(gradient.dtype)
        return loss, None if gradient is None else gradient.view(hidden.shape)

    def _chunk(
        self, rows: Tensor, start: int, stop: int, factor: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return a chunk's loss and its gradient by the logits; add to the head's gradients."""
        scored, labels = self.scored[start:stop], self.labels[start:stop]
        if not self.on_host:  # rows that are not scored may hold anything, NaN included
            rows = rows.masked_fill(~scored[:, None], 0)
        rows = rows.to(self.dtype)
        logits = put_product(self.logits[: len(rows)], rows, self.weight.t())
        if self.bias is not None:
            logits += self.bias
        gradient_factor = factor if self.any_gradient else None
        if self.in_kernel:
            from frostlab.training.step.kernels import cross_entropy_rows

            loss = cross_entropy_rows(logits, labels, gradient_factor, self.expected).sum()
            by_logits = logits if self.any_gradient else None
        else:
            loss, by_logits = self._cross_entropy(logits, labels, gradient_factor)
        if self.weight_gradient is not None and by_logits is not None:
            put = put_product if self.is_first else add_product
            put(self.weight_gradient, by_logits.t(), rows)
        if self.bias_gradient is not None and by_logits is not None:
            total = by_logits.sum(0, dtype=self.sum_dtype)
            self.bias_gradient.copy_(total if self.is_first else self.bias_gradient + total)
        self.is_first = False
        return loss, by_logits

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of weight and bias, after all layers."""
        made = [self.weight_gradient, self.bias_gradient]
        if self.is_first:  # there was no chunk, because no token is scored
            for gradient in made:
                if gradient is not None:
                    gradient.zero_()
        return made

    def _cross_entropy(
        self, logits: Tensor, labels: Tensor, factor: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute loss and gradient as `cross_entropy_rows` does, with torch's operations."""
        scored, column = labels >= 0, labels.clamp(min=0)[:, None]
        # writing over the logits is safe: the CPU's kernel reads a row before it writes it
        out = logits if self.on_host else None
        logs = torch.log_softmax(logits, 1, dtype=self.sum_dtype, out=out)
        loss = -logs.gather(1, column).squeeze(1).masked_fill(~scored, 0).sum()
        if factor is None:
            return loss, None
        by_logits = logs.exp_()
        by_logits.scatter_(1, column, by_logits.gather(1, column) - 1)
        if factor != 1:
            by_logits *= factor
        if self.expected is not None:
            by_logits *= self.expected
        if not self.on_host:
            by_logits.masked_fill_(~scored[:, None], 0)
        return loss, by_logits.to(self.dtype)


def _scored_rows(targets: Tensor, ignore: int, classes: int) -> Tensor | None:
    """Return the indices of scored targets, None if all are scored; refuse an impossible class."""
    scored = targets.ne(ignore)
    wrong = scored & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise BadInput(f"target {int(targets[row])} at position {row} is not in 0…{classes - 1}")
    return scored.nonzero().squeeze(1) if not bool(scored.all()) else None


def _chunk_bytes(device: torch.device) -> int:
    memory = memory_bytes(device)
    return CPU_CHUNK if memory is None else int(GPU_CHUNK * memory)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel computes loss and gradient: on CUDA with triton, not in float64."""
    return runs_triton(device) and dtype != torch.float64


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU, where reading a value neither waits nor fails.

    On a GPU, the host waits for the value, and reading it fails while a graph is captured.
    """
    return not runs_ahead(tensor.device)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: autocast's if it is on, except for float64."""
    if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def put_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Write a matrix product into `out`; on CUDA, a float32 `out` is not rounded to bf16 first."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if on_gpu(a) and out.dtype == torch.float32:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a matrix product to a full-precision total."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif on_gpu(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b))
