"""What a captured step reads: one buffer on the device, filled from buffers on the host in turn."""

from itertools import accumulate

import torch
from torch import Tensor

from frostlab.training.batching import Batch

_ALIGNED = 16  # bytes
_AHEAD = 8  # steps that can be on their way to the device


class Inputs:
    """Everything a graph reads, in one buffer that one copy fills."""

    def __init__(self, parts: list[Batch], device: torch.device) -> None:
        size = _places(parts)[-1] + _ALIGNED
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._slots = [_Slot(parts, size, device) for _ in range(_AHEAD)]
        self._sent = 0

    def views(self, parts: list[Batch]) -> tuple[list[Batch], Tensor]:
        """Where a graph finds its batches, the rate and the number of targets."""
        return _views(self.buffer, parts)

    def send(self, parts: list[Batch], scored: int, rate: float) -> None:
        """Bring a step's batches to the device, without waiting for it."""
        slot = self._slots[self._sent % _AHEAD]
        self._sent += 1
        slot.fill([tensor for part in parts for tensor in part.tensors()], scored, rate)
        self.buffer.copy_(slot.buffer, non_blocking=True)
        slot.sent()


class _Slot:
    """A buffer on the host, with the views it is filled through: to make them takes longer."""

    def __init__(self, parts: list[Batch], size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        views, self._numbers = _views(self.buffer, parts)
        self._views = [view for part in views for view in part.tensors()]
        self._event = torch.cuda.Event() if cuda else None

    def fill(self, tensors: list[Tensor], scored: int, rate: float) -> None:
        """Write what a step reads, once the device has taken what was here before."""
        if self._event is not None:
            self._event.synchronize()
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        self._numbers[0], self._numbers[1] = rate, float(scored)

    def sent(self) -> None:
        """The copy has been asked for."""
        if self._event is not None:
            self._event.record()


def _places(parts: list[Batch]) -> list[int]:
    """Where each tensor of the parts begins in a buffer of bytes, and where the last one ends."""
    sizes = [-(-t.nbytes // _ALIGNED) * _ALIGNED for part in parts for t in part.tensors()]
    return [0, *accumulate(sizes)]


def _views(buffer: Tensor, parts: list[Batch]) -> tuple[list[Batch], Tensor]:
    """Batches whose tensors lie in one buffer; behind them the rate and the number of targets."""
    places = iter(_places(parts))
    made = []
    for part in parts:
        views = []
        for tensor in part.tensors():
            at = next(places)
            views.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        made.append(part.with_tensors(views))
    at = next(places)
    return made, buffer[at : at + 8].view(torch.float32)
