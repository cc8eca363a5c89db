"""A language-model head's cross-entropy, a chunk of tokens at a time: the logits are never kept."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from frostlab.errors import BadInput, FrostlabError
from frostlab.training.batches.batch import IGNORED


@dataclass(frozen=True)
class _Options:
    shares: list[float]  # of each layer in the total
    ignore: int


@_disable_dynamo  # as optimizers do: torch.compile of a caller goes around it
def head_loss(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Sequence[float] | None = None,
    ignore: int = IGNORED,
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of a linear head on one or several supervised layers.

    `hidden` is (…, width), or several of that shape that share the head; `weight` is
    (vocabulary, width) and `targets` (…). Returns the sum of the layers' losses, each times its
    weight, and the layers' own losses without gradient. Gradients are made chunk by chunk in the
    forward pass; only what requires one gets one.
    """
    layers = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    shares = [1.0] * len(layers) if weights is None else [float(w) for w in weights]
    _check(layers, weight, targets, bias, shares)
    options = _Options(shares, ignore)
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
    sweep = Sweep(weight, bias, targets, layers[0].dtype, options.ignore, wanted)
    with torch.autocast(weight.device.type, enabled=False):
        found = [
            sweep.layer(layer, share, learns)
            for layer, share, learns in zip(layers, options.shares, wanted[2:], strict=True)
        ]
    each = torch.stack([loss for loss, _ in found])
    total = torch.stack([loss * share for loss, share in zip(each, options.shares, strict=True)])
    return total.sum(), each, [sweep.weight, sweep.bias, *(gradient for _, gradient in found)]


# Bytes a chunk's logits may take; every chunk goes over the head's whole gradient once.
CPU_CHUNK = 64 * 2**20
GPU_SHARE = 1 / 64  # of the device's memory
_ALIGNED = 64  # columns: rows that begin elsewhere are multiplied slowly on a GPU


class Sweep:
    """One pass over every token of every layer, which adds up the head's gradients."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        ignore: int,
        wanted: Sequence[bool],
    ) -> None:
        self.on_host = on_host(weight)
        self.working = working_dtype(dtype, weight.device)
        self.exact = torch.promote_types(self.working, torch.float32)
        self.in_kernel = has_kernel(weight.device, self.working)
        self.matrix = weight.to(self.working)
        self.offset = None if bias is None else bias.to(self.exact)
        self.weight, self.bias = (
            torch.zeros_like(x, dtype=self.exact) if x is not None and learns else None
            for x, learns in zip((weight, bias), wanted[:2], strict=True)
        )
        labels = targets.reshape(-1)
        self.kept = _kept(labels, ignore, len(weight)) if self.on_host else None
        labels = labels if self.kept is None else labels[self.kept]
        self.scored = labels.ne(ignore)
        self.labels = labels.masked_fill(~self.scored, -1)
        self.slopes = any(wanted)
        self.size = self._tokens_a_chunk(len(labels))
        self.buffer = self._make_buffer()

    def _make_buffer(self) -> Tensor:
        """Where the logits of a chunk lie: in half precision on a GPU, which waits for bytes."""
        columns, kind = len(self.matrix), self.exact if self.on_host else self.working
        wide = columns if self.on_host else -(-columns // _ALIGNED) * _ALIGNED
        made = torch.empty(self.size, wide, dtype=kind, device=self.matrix.device)
        return made[:, :columns]

    def layer(self, hidden: Tensor, share: float, learns: bool) -> tuple[Tensor, Tensor | None]:
        """The loss of a layer, and `share` times its gradient."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        gradient = torch.zeros_like(rows) if learns and self.kept is not None else None
        if learns and gradient is None:
            gradient = torch.empty_like(rows)
        loss = torch.zeros((), dtype=self.exact, device=rows.device)
        for start in range(0, len(self.labels), self.size):
            stop = min(start + self.size, len(self.labels))
            here = slice(start, stop) if self.kept is None else self.kept[start:stop]
            added, slope = self._chunk(rows[here], start, stop, share)
            loss += added
            if gradient is None or slope is None:
                continue
            if self.kept is None:
                put_product(gradient[here], slope, self.matrix)
            else:
                gradient[here] = torch.mm(slope, self.matrix).to(gradient.dtype)
        return loss, None if gradient is None else gradient.view(hidden.shape)

    def _chunk(
        self, rows: Tensor, start: int, stop: int, share: float
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of a chunk and its slope by the logits; the head's gradients grow."""
        scored, labels = self.scored[start:stop], self.labels[start:stop]
        if not self.on_host:  # what is not scored may be anything
            rows = rows.masked_fill(~scored[:, None], 0)
        rows = rows.to(self.working)
        logits = put_product(self.buffer[: len(rows)], rows, self.matrix.t())
        if self.offset is not None:
            logits += self.offset
        wanted = share if self.slopes else None
        if self.in_kernel:
            from frostlab.training.step.kernels import cross_entropy_rows

            loss = cross_entropy_rows(logits, labels, wanted).sum()
            slope = logits if self.slopes else None
        else:
            loss, slope = self._plainly(logits, labels, wanted)
        if self.weight is not None and slope is not None:
            add_product(self.weight, slope.t(), rows)
        if self.bias is not None and slope is not None:
            self.bias += slope.sum(0, dtype=self.exact)
        return loss, slope

    def _plainly(
        self, logits: Tensor, labels: Tensor, share: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the kernel does, one operation after another."""
        scored, place = labels >= 0, labels.clamp(min=0)[:, None]
        # the CPU's kernel has read a row before it writes it
        out = logits if self.on_host else None
        logs = torch.log_softmax(logits, 1, dtype=self.exact, out=out)
        loss = -logs.gather(1, place).squeeze(1).masked_fill(~scored, 0).sum()
        if share is None:
            return loss, None
        slope = logs.exp_()
        slope.scatter_(1, place, slope.gather(1, place) - 1)
        if share != 1:
            slope *= share
        if not self.on_host:
            slope.masked_fill_(~scored[:, None], 0)
        return loss, slope.to(self.working)

    def _tokens_a_chunk(self, tokens: int) -> int:
        """As many as stay below the bound, the chunks even."""
        size, bound = self.working.itemsize, _bound(self.matrix.device)
        if not self.in_kernel and not (self.on_host and self.working == self.exact):
            size += self.exact.itemsize  # their logarithms, or their slopes, lie beside them
        most = max(1, bound // (size * len(self.matrix)))
        return max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))


def _bound(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CHUNK
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one kernel does it: on CUDA, where triton is, and not in float64."""
    if device.type != "cuda" or dtype == torch.float64:
        return False
    return importlib.util.find_spec("triton") is not None


def _kept(targets: Tensor, ignore: int, classes: int) -> Tensor | None:
    """The rows that are scored, or None for all of them; a target must be a class."""
    scored = targets.ne(ignore)
    wrong = scored & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise BadInput(f"target {int(targets[row])} at place {row} is not in 0…{classes - 1}")
    return scored.nonzero().squeeze(1) if not bool(scored.all()) else None


def on_host(tensor: Tensor) -> bool:
    """Whether values may be looked at: elsewhere that waits, and no graph can be captured."""
    return tensor.device.type == "cpu"


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in: autocast's choice, which leaves float64 alone."""
    if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def put_product(out: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Their matrix product; of half precision, rounded once, to what `out` is."""
    if out.dtype == one.dtype:
        return torch.mm(one, other, out=out)
    if one.device.type == "cuda" and out.dtype == torch.float32:
        return torch.mm(one, other, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(one, other))


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add their matrix product to a total of full precision."""
    if one.dtype == total.dtype:
        torch.addmm(total, one, other, out=total)
    elif one.device.type == "cuda":
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(one, other))
