"""The whole step as one CUDA graph: forward, backward, clipping and update in one launch.

A batch shape has one graph, and a second one for steps in which gradient flow (norms of gradients
and updates) is measured. The first step of a shape, and shapes past the 64th, run without a graph.
A graph reads the batch, the learning rate and the number of scored targets from one static buffer,
which a single copy fills, and writes the three values of the step's `Outcome`. Dropout masks still
differ from step to step, because a replay reads the current state of the random generator.

With several processes, a graph also records the all-reduce of gradients (`GradientSum`). With NCCL,
all processes must record and replay this all-reduce at the same steps, so their batches must all
have one shape.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from frostlab.devices import has_events
from frostlab.errors import first_line
from frostlab.training.batches.batch import Batch
from frostlab.training.step.compiled import CompiledStep, shape_key
from frostlab.training.step.eager import Outcome

_ALIGNED = 16  # bytes; alignment of each tensor in the input buffer
_AHEAD = 8  # steps whose inputs may be in transit to the device at once
_MAX_GRAPHS = 64  # the most graphs of measured steps, and also the most of the other steps
# A function that records the kernels of another function, and returns a function to replay them.
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph with the tensors that every replay reads and writes."""

    inputs: "StaticInputs"
    outputs: Tensor
    replay: Callable[[], None]
    address_tables: list[Tensor]  # read by the optimizer's kernels, so they must stay alive


class CapturedStep(CompiledStep):
    """A step that replays one graph per batch shape; it runs without graphs if capturing fails."""

    kind = "captured"

    def __init__(self, *settings: Any, record: Record | None = None, **options: Any) -> None:
        super().__init__(*settings, **options)
        scales = {group.get("lr_scale", 1.0) for group in self.optimizer.param_groups}
        self._rates = {  # `lr_scale` → learning rate, on the device, where graphs read it
            scale: torch.zeros((), device=self.device) for scale in sorted(scales)
        }
        self._graphs: dict[Any, _CapturedGraph] = {}
        self._seen_shapes: set[Any] = set()
        self._record = record or _Recorder(self.device, reduces=self.gradient_sum is not None)
        # whether steps are captured at all, and whether measured ones are; False after a failure
        self._captures = self._captures_measured = True
        # while a graph is recorded: whether it is for measured steps; otherwise None
        self._recording: bool | None = None

    def __call__(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        """Replay the graph of this batch shape, or run without one if there is none yet."""
        if self._recompile_if_changed():
            self._graphs, self._seen_shapes = {}, set()
        if self.copies is not None:
            self.copies.refresh()
        shape, measured = shape_key(parts), self.flow is not None and self.flow.is_due()
        graph = self._graphs.get((shape, measured))
        if graph is None and self._captures and shape in self._seen_shapes:
            graph = self._capture(parts, shape, measured)
        if graph is None:
            self._seen_shapes.add(shape)
            return self._without_graph(parts, scored, rate)
        graph.inputs.send(parts, scored, rate)
        graph.replay()
        if self.flow is not None:
            self.flow.count(measured)
        return Outcome(graph.outputs.clone())

    @property
    def prepared_shapes(self) -> int:
        return super().prepared_shapes + len(self._seen_shapes) + len(self._graphs)

    def _without_graph(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        for scale, lr in self._rates.items():
            lr.fill_(rate * scale)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rates[group.get("lr_scale", 1.0)]
        return Outcome(self.work([part.to(self.device) for part in parts], scored))

    def _capture(self, parts: list[Batch], shape: Any, measured: bool) -> _CapturedGraph | None:
        """Record the graph of a batch shape; return None if that is impossible."""
        if measured and not self._captures_measured:
            return None
        if sum(also_measured == measured for _, also_measured in self._graphs) >= _MAX_GRAPHS:
            self.reason = f"more than {_MAX_GRAPHS} batch shapes: the others run without a graph"
            return None
        inputs = StaticInputs(parts, self.device)
        outputs = torch.zeros(3, device=self.device)

        def step() -> None:
            static_parts, numbers = inputs.views(parts)
            for scale, lr in self._rates.items():
                lr.copy_(numbers[0] if scale == 1 else numbers[0] * scale)
            self._recording = measured
            try:
                outputs.copy_(self.work(static_parts, numbers[1]))
            finally:
                self._recording = None

        fill_tables: Callable[[], list[Tensor]]
        fill_tables = getattr(self.optimizer, "fill_address_tables", list)
        if self.flow is not None and measured:
            self.flow.refresh()  # may allocate tensors, which must not belong to the graph
        graph, problem = None, "another process failed"
        try:
            replay = self._record(step)
            graph = _CapturedGraph(inputs, outputs, replay, fill_tables())
        except Exception as error:  # models fail to be captured in many ways
            fill_tables()
            problem = first_line(error)
        self.optimizer.zero_grad(set_to_none=True)
        # a process must not replay an all-reduce that another process did not record
        if not self.compute.world.same(graph is not None) or graph is None:
            self._give_up(problem, measured)
            return None
        self._graphs[shape, measured] = graph
        return graph

    def _give_up(self, problem: str, measured: bool) -> None:
        """Stop capturing measured steps if a measured step failed, else stop capturing any step."""
        if measured:
            self._captures_measured = False
            self.reason = f"measured steps run without a graph: {problem}"
        else:
            self._captures = False
            self.fall_back(f"capturing failed: {problem}")

    def _before_step(self, clip_factor: Tensor) -> None:
        """Measure gradient flow before the update, if this step is measured.

        While a graph is recorded, this calls only the flow's `Probe`, which measures. The step is
        not counted, because `__call__` counts it each time the graph is replayed.
        """
        if self._recording is None:
            super()._before_step(clip_factor)
        elif self._recording and self.flow is not None:
            self.flow.probe.before_step(clip_factor)

    def _after_step(self) -> None:
        if self._recording is None:
            super()._after_step()
        elif self._recording and self.flow is not None:
            self.flow.probe.after_step()

    def close(self) -> None:
        """Free the graphs: NCCL ends its group only when those with an all-reduce are freed."""
        self._graphs, self._seen_shapes = {}, set()
        if isinstance(self._record, _Recorder):
            self._record.free()

    def fall_back(self, reason: str) -> None:
        """Continue without graphs if capturing failed, or with eager layers if compiling failed."""
        if not self._captures:
            self.kind = "compiled" if self.compiles else "eager"
        self.reason = reason


class _Recorder:
    """A recorder of CUDA graphs that share one memory pool.

    `reduces`: whether the graphs hold an all-reduce. A thread of torch's process group may then
    query NCCL's events at any time, which must not break the recording.
    """

    def __init__(self, device: torch.device, reduces: bool = False) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.mode = "thread_local" if reduces else "global"
        self.alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self.alive:  # a memory pool is freed with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index]
        state = generator.clone_state()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode=self.mode
            ):
                work()
        except Exception as error:
            # a failed capture leaves the generator in capture mode
            generator.graphsafe_set_state(state)
            # ending a failed capture raises its own error, which hides the original one
            raise (error.__context__ or error) from None
        self.alive.add(graph)
        return graph.replay

    def free(self) -> None:
        """Free all graphs, even those that a traceback refers to."""
        with suppress(RuntimeError):  # raised if the device has failed before
            torch.cuda.synchronize(self.device)  # a graph may still be running
            for graph in list(self.alive):
                graph.reset()
        self.alive.clear()


class StaticInputs:
    """The inputs of a graph in one buffer on the device, which a single copy fills."""

    def __init__(self, parts: list[Batch], device: torch.device) -> None:
        size = _offsets(parts)[-1] + _ALIGNED
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._slots = [_HostBuffer(parts, size, device) for _ in range(_AHEAD)]
        self._sent = 0

    def views(self, parts: list[Batch]) -> tuple[list[Batch], Tensor]:
        """Return views of the buffer: the batches, and the learning rate and number of targets."""
        return _views(self.buffer, parts)

    def send(self, parts: list[Batch], scored: int, rate: float) -> None:
        """Copy a step's inputs to the device without waiting for the copy."""
        slot = self._slots[self._sent % _AHEAD]
        self._sent += 1
        slot.fill([tensor for part in parts for tensor in part.tensors()], scored, rate)
        self.buffer.copy_(slot.buffer, non_blocking=True)
        slot.mark_sent()


class _HostBuffer:
    """A pinned buffer on the host and its views; both are reused, because creating them is slow."""

    def __init__(self, parts: list[Batch], size: int, device: torch.device) -> None:
        asynchronous = has_events(device)
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=asynchronous)
        views, self._numbers = _views(self.buffer, parts)
        self._views = [view for part in views for view in part.tensors()]
        self._event = torch.cuda.Event() if asynchronous else None

    def fill(self, tensors: list[Tensor], scored: int, rate: float) -> None:
        """Write a step's inputs after this buffer's last copy to the device has finished."""
        if self._event is not None:
            self._event.synchronize()
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        self._numbers[0], self._numbers[1] = rate, float(scored)

    def mark_sent(self) -> None:
        """Record an event after the enqueued copy, so that `fill` can wait for it."""
        if self._event is not None:
            self._event.record()


def _offsets(parts: list[Batch]) -> list[int]:
    """Return the byte offset of each tensor in a buffer, and the offset after the last tensor."""
    sizes = [-(-t.nbytes // _ALIGNED) * _ALIGNED for part in parts for t in part.tensors()]
    return [0, *accumulate(sizes)]


def _views(buffer: Tensor, parts: list[Batch]) -> tuple[list[Batch], Tensor]:
    """Return batches that are views of a buffer, and a view of the two numbers after them."""
    offsets = iter(_offsets(parts))
    batches = []
    for part in parts:
        views = []
        for tensor in part.tensors():
            at = next(offsets)
            views.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        batches.append(part.with_tensors(views))
    at = next(offsets)
    return batches, buffer[at : at + 8].view(torch.float32)
