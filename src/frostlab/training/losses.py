"""A language-model head's cross-entropy, a chunk of tokens at a time: the logits are never kept."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from frostlab.errors import BadInput, FrostlabError
from frostlab.training.batching import IGNORED
from frostlab.training.products import add_product, on_host, product, working_dtype

# Bytes a chunk's logits may take; every chunk goes over the head's whole gradient once.
_CPU_CHUNK = 64 * 2**20
_GPU_CHUNK = 512 * 2**20

_Pair = tuple[Tensor, Tensor | None]  # a loss and a gradient
_Part = Callable[[Tensor, Tensor, Tensor, torch.dtype | None], _Pair]


@dataclass(frozen=True)
class _Options:
    shares: list[float]  # of each layer in the total
    ignore: int
    compiled: bool


@_disable_dynamo  # as optimizers do: torch.compile of a caller goes around it
def head_loss(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = IGNORED,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of a linear head on one or several supervised layers.

    `hidden` is (…, width), or several of that shape that share the head; `weight` is
    (vocabulary, width) and `targets` (…). Returns the sum of the layers' losses, each times its
    weight, and the layers' own losses without gradient. Gradients are made chunk by chunk in the
    forward pass; only what requires one gets one. `compiled` fuses the softmax of a chunk.
    """
    layers = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    shares = [1.0] * len(layers) if weights is None else [float(w) for w in weights]
    _check(layers, weight, targets, bias, shares)
    options = _Options(shares, ignore, compiled)
    given = (weight, bias, *layers)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return _HeadLoss.apply(options, targets, *given)
    total, each, _ = _sweep(options, targets, weight, bias, layers, [False] * len(given))
    return total, each


def _check(
    layers: list[Tensor], weight: Tensor, targets: Tensor, bias: Tensor | None, shares: list[float]
) -> None:
    """Refuse what does not fit together."""
    if not layers or len(shares) != len(layers):
        raise BadInput(f"{len(shares)} weights for {len(layers)} supervised layers")
    shapes = {tuple(layer.shape) for layer in layers}
    if shapes != {(*targets.shape, weight.shape[-1])}:
        others = f"targets of {tuple(targets.shape)} and a head of {tuple(weight.shape)}"
        raise BadInput(f"hidden states of {sorted(shapes)} do not fit {others}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"a bias of {tuple(bias.shape)} for a head of {tuple(weight.shape)}")


def _softmax_part(
    logits: Tensor, labels: Tensor, scored: Tensor, dtype: torch.dtype | None
) -> _Pair:
    """A chunk's summed loss and, in `dtype`, its slope by the logits, maybe in their place."""
    place = labels[:, None]
    slope, exact = None, torch.promote_types(logits.dtype, torch.float32)
    if torch.compiler.is_compiling():  # this fuses into few passes; the other way is in place
        wide = logits.to(exact)
        top = wide.amax(1, keepdim=True)
        powers = (wide - top).exp()
        total = powers.sum(1, keepdim=True)
        losses = total.log() + top - wide.gather(1, place)
        if dtype is not None:
            columns = torch.arange(logits.shape[1], device=logits.device)
            slope = powers / total - (columns == place).to(powers.dtype)
            slope = logits.copy_(slope) if dtype == logits.dtype else slope.to(dtype)
    else:
        # the CPU's kernel has read a row before it writes it
        out = logits if on_host(logits) else None
        logs = torch.log_softmax(logits, 1, dtype=exact, out=out)
        losses = -logs.gather(1, place)
        if dtype is not None:
            slope = logs.exp_()
            slope = slope.scatter_(1, place, slope.gather(1, place) - 1).to(dtype)
    return losses.squeeze(1).masked_fill(~scored, 0).sum(), slope


@functools.cache
def _compiled_part() -> _Part:
    """One for all: the chunks of a call have one shape, and a second shape makes it dynamic."""
    return torch.compile(_softmax_part)


class _HeadLoss(torch.autograd.Function):
    """The total with its gradients ready: the backward pass has only to scale them."""

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
        total, each, made = _sweep(options, targets, weight, bias, layers, wanted)
        ctx.save_for_backward(*made)
        ctx.mark_non_differentiable(each)
        return total, each

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """In place, unless the graph is kept for another; autograd turns to the inputs' dtypes."""
        if torch.is_grad_enabled():  # once_differentiable would only speak up now and then
            raise FrostlabError("head_loss has no second derivative: leave out create_graph=True")
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        one = on_host(upstream) and bool(upstream == 1)
        scaled: list[Tensor | None] = [None, None]
        for gradient in ctx.saved_tensors:
            if gradient is not None and kept:
                gradient = gradient * upstream
            elif gradient is not None and not one:
                gradient.mul_(upstream)
            scaled.append(gradient)
        return tuple(scaled)


@torch.no_grad()
def _sweep(
    options: _Options,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layers: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The total, each layer's loss, and the wanted gradients of weight, bias and layers."""
    sweep = _Sweep(weight, bias, targets, layers[0].dtype, options, wanted)
    with torch.autocast(weight.device.type, enabled=False):
        found = [
            sweep.layer(layer, share, learns)
            for layer, share, learns in zip(layers, options.shares, wanted[2:], strict=True)
        ]
    each = torch.stack([loss for loss, _ in found])
    total = torch.stack([loss * share for loss, share in zip(each, options.shares, strict=True)])
    return total.sum(), each, [sweep.weight, sweep.bias, *(gradient for _, gradient in found)]


class _Sweep:
    """One pass over every token of every layer, which adds up the head's gradients."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        options: _Options,
        wanted: Sequence[bool],
    ) -> None:
        self.on_host, self.compiled = on_host(weight), options.compiled
        self.working = working_dtype(dtype, weight.device)
        self.exact = torch.promote_types(self.working, torch.float32)
        self.matrix = weight.to(self.working)
        self.offset = None if bias is None else bias.to(self.exact)
        self.weight, self.bias = (
            torch.zeros_like(x, dtype=self.exact) if x is not None and learns else None
            for x, learns in zip((weight, bias), wanted[:2], strict=True)
        )
        labels = targets.reshape(-1)
        self.kept = _kept(labels, options.ignore, len(weight)) if self.on_host else None
        labels = labels if self.kept is None else labels[self.kept]
        self.scored = labels.ne(options.ignore)
        self.labels = labels.masked_fill(~self.scored, 0)
        self.size = self._tokens_a_chunk(targets.numel() if options.compiled else len(labels))
        buffered = (self.size if self.on_host else 0, len(weight))
        self.buffer = torch.empty(buffered, dtype=self.exact, device=weight.device)
        self.part: _Part = _compiled_part() if options.compiled else _softmax_part
        self.slope = self.working if any(wanted) else None

    def layer(self, hidden: Tensor, share: float, learns: bool) -> _Pair:
        """The loss of a layer, and `share` times its gradient."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        gradient = torch.zeros_like(rows) if learns else None
        loss = torch.zeros((), dtype=self.exact, device=rows.device)
        for start in range(0, len(self.labels), self.size):
            stop = min(start + self.size, len(self.labels))
            here = slice(start, stop) if self.kept is None else self.kept[start:stop]
            added, slope = self._chunk(rows[here], start, stop, share)
            loss += added
            if gradient is not None and slope is not None:
                made = product(slope, self.matrix)[: stop - start] * share
                made.masked_fill_(~self.scored[start:stop, None], 0)
                gradient[here] = made.to(gradient.dtype)
            del slope
        return loss, None if gradient is None else gradient.view(hidden.shape)

    def _chunk(self, rows: Tensor, start: int, stop: int, share: float) -> _Pair:
        """The loss of a chunk and its slope by the logits; the head's gradients grow."""
        scored, labels = self.scored[start:stop], self.labels[start:stop]
        rows = rows.masked_fill(~scored[:, None], 0)  # what is not scored may be anything
        if self.compiled:  # to one shape
            extra = self.size - len(rows)
            rows = F.pad(rows, (0, 0, 0, extra))
            scored, labels = F.pad(scored, (0, extra)), F.pad(labels, (0, extra))
        rows = rows.to(self.working)
        if self.on_host:
            logits = product(rows, self.matrix.t(), self.buffer[: len(rows)])
        else:  # in half precision as autocast would have them: a GPU waits for their bytes
            logits = torch.mm(rows, self.matrix.t())
        if self.offset is not None:
            logits += self.offset
        loss, slope = self.part(logits, labels, scored, self.slope)
        del logits
        if self.weight is not None and slope is not None:
            add_product(self.weight, slope.t(), (rows * share).to(self.working))
        if self.bias is not None and slope is not None:
            shares = (scored * share).to(self.working)
            add_product(self.bias[:, None], slope.t(), shares[:, None])
        return loss, slope

    def _tokens_a_chunk(self, tokens: int) -> int:
        """As many as stay below the bound, the chunks even."""
        size, bound = self.working.itemsize, _GPU_CHUNK
        if self.on_host:
            size = self.exact.itemsize + (size if self.working != self.exact else 0)
            bound = _CPU_CHUNK
        elif not self.compiled:  # their logarithms lie beside them
            size += self.exact.itemsize
        most = max(1, bound // (size * len(self.matrix)))
        return max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))


def _kept(targets: Tensor, ignore: int, classes: int) -> Tensor | None:
    """The rows that are scored, or None for all of them; a target must be a class."""
    scored = targets.ne(ignore)
    wrong = scored & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise BadInput(f"target {int(targets[row])} at place {row} is not in 0…{classes - 1}")
    return scored.nonzero().squeeze(1) if not bool(scored.all()) else None
