"""The whole step as one CUDA graph: forward, backward, clipping and update in one launch.

Every shape of a batch has a graph of its own, and where gradient flow is watched another one for
the steps that are measured. A graph reads its batch, the learning rate and the number of targets
from one buffer, filled by one copy, and leaves three numbers. Dropout still follows the generator's
seed: a graph reads it when it is replayed.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from frostlab.errors import first_line
from frostlab.training.batches.batch import Batch
from frostlab.training.step.compiled import CompiledStep, shape_of
from frostlab.training.step.eager import Outcome

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


_MOST = 64  # shapes: a graph keeps memory for its inputs, and its kernels' arguments
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True)
class _Captured:
    """One graph: where it reads, where it writes, and how it is run."""

    inputs: Inputs
    outputs: Tensor
    replay: Callable[[], None]
    tables: list[Tensor]  # that its optimizer reads


class CapturedStep(CompiledStep):
    """Replays a graph; what cannot be captured runs without one, and says why."""

    kind = "captured"

    def __init__(self, *settings: Any, record: Record | None = None, **options: Any) -> None:
        super().__init__(*settings, **options)
        scales = {group.get("lr_scale", 1.0) for group in self.optimizer.param_groups}
        self._rates = {  # the optimizer reads them
            scale: torch.zeros((), device=self.device) for scale in sorted(scales)
        }
        self._graphs: dict[Any, _Captured] = {}
        self._seen: set[Any] = set()
        self._record = record or _Recorder(self.device)
        self._captures = self._captures_measured = True
        self._recording: bool | None = None  # whether the graph being recorded measures

    def __call__(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        """Replay the graph of this shape; the first time, take the step without one."""
        if self._look_for_changes():
            self._graphs, self._seen = {}, set()
        if self.copies is not None:
            self.copies.refresh()
        shape, measured = shape_of(parts), self.flow is not None and self.flow.is_due()
        graph = self._graphs.get((shape, measured))
        if graph is None and self._captures and shape in self._seen:
            graph = self._capture(parts, shape, measured)
        if graph is None:
            self._seen.add(shape)
            return self._without(parts, scored, rate)
        graph.inputs.send(parts, scored, rate)
        graph.replay()
        if self.flow is not None:
            self.flow.count(measured)
        return Outcome(graph.outputs.clone())

    def _without(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        for scale, lr in self._rates.items():
            lr.fill_(rate * scale)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rates[group.get("lr_scale", 1.0)]
        return Outcome(self.work([part.to(self.device) for part in parts], scored))

    def _capture(self, parts: list[Batch], shape: Any, measured: bool) -> _Captured | None:
        """Record the step for a shape, or find out that it cannot be."""
        if measured and not self._captures_measured:
            return None
        if sum(also == measured for _, also in self._graphs) >= _MOST:
            self.reason = f"more than {_MOST} shapes of batches: the others run without a graph"
            return None
        inputs = Inputs(parts, self.device)
        outputs = torch.zeros(3, device=self.device)

        def step() -> None:
            mine, numbers = inputs.views(parts)
            for scale, lr in self._rates.items():
                lr.copy_(numbers[0] if scale == 1 else numbers[0] * scale)
            self._recording = measured
            try:
                outputs.copy_(self.work(mine, numbers[1]))
            finally:
                self._recording = None

        fill_in: Callable[[], list[Tensor]] = getattr(self.optimizer, "fill_in", list)
        if self.flow is not None and measured:
            self.flow.refresh()  # what a probe keeps must not be the graph's
        try:
            replay = self._record(step)
            tables = fill_in()
        except Exception as error:  # whatever a model does that a graph cannot hold
            fill_in()
            self.optimizer.zero_grad(set_to_none=True)
            self._give_up(first_line(error), measured)
            return None
        self.optimizer.zero_grad(set_to_none=True)
        self._graphs[shape, measured] = _Captured(inputs, outputs, replay, tables)
        return self._graphs[shape, measured]

    def _give_up(self, problem: str, measured: bool) -> None:
        """Go on without graphs; if measured steps alone have none, the others keep theirs."""
        if measured:
            self._captures_measured = False
            self.reason = f"measured steps run without a graph: {problem}"
        else:
            self._captures = False
            self.fall_back(f"capturing failed: {problem}")

    def _before_step(self, clip_factor: Tensor) -> None:
        if self._recording is None:
            super()._before_step(clip_factor)
        elif self._recording and self.flow is not None:
            self.flow.probe.before_step(clip_factor)

    def _after_step(self) -> None:
        if self._recording is None:
            super()._after_step()
        elif self._recording and self.flow is not None:
            self.flow.probe.after_step()

    def fall_back(self, reason: str) -> None:
        """Without a graph the layers may still be compiled, and without compiling captured."""
        if not self._captures:
            self.kind = "compiled" if self.compiles else "eager"
        self.reason = reason


class _Recorder:
    """Records work into CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self.alive:  # a pool dies with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index]
        before = generator.clone_state()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                work()
        except Exception as error:
            generator.graphsafe_set_state(before)  # the other one waits for a graph's end
            raise (error.__context__ or error) from None  # what came first
        self.alive.add(graph)
        return graph.replay
