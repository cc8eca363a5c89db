"""The pass of the fused loss over its tokens, a chunk at a time."""

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from frostlab.errors import BadInput
from frostlab.training.products import add_product, on_host, put_product, working_dtype

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
            from frostlab.training.kernels import cross_entropy_rows

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
