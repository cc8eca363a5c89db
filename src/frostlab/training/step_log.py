"""The log of steps: it reads losses from the device in blocks, so that no step waits for them.

`clocks` summarises the logged steps and the seconds of a run for `result.json`, and `wall_record`
the time of the whole process.
"""

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from frostlab.devices import Readback, runs_ahead
from frostlab.flow.measurements import report_event
from frostlab.records.folder import RunFolder
from frostlab.records.schema import (
    Clocks,
    EpochEvent,
    EvaluationEvent,
    Event,
    StepEvent,
    SteppingEvent,
    StepTimes,
)
from frostlab.records.schema import WallClock as WallRecord
from frostlab.timing.clock import (
    OVERLAPPED,
    SETUP,
    TURN,
    Lap,
    Stopwatch,
    WallClock,
    training_seconds,
)
from frostlab.training.distributed import World
from frostlab.training.step.eager import Diverged, EagerStep, Outcome, is_clipped

_BLOCK = 50  # steps per event; a flush can write fewer or more
WARMUP = 5  # first steps of each stage or resumed run; their times are reported separately


@dataclass(frozen=True)
class Entry:
    """One step: its outcome, learning rate, size and time."""

    step: int
    outcome: Outcome
    rate: float
    tokens: int  # tokens that all processes read, without padding; for EEG, samples
    padded: int  # tokens of this process's batches, padding included
    examples: int  # examples of all processes
    lap: Lap
    order: str  # digest of the examples of every step up to this one
    new_shape: bool = False  # whether the step compiled or captured a new batch shape


class StepLog:
    """A log that writes steps in blocks, and raises `Diverged` for a gradient that is not finite.

    On the CPU, `Diverged` is raised at once; on other devices, when the step's block is written.
    """

    def __init__(
        self, step: EagerStep, clock: Stopwatch, world: World, folder: RunFolder | None
    ) -> None:
        self._step, self._clock, self._world, self._folder = step, clock, world, folder
        self._runs_ahead = runs_ahead(step.device)
        self._entries: list[Entry] = []
        self._first: int | None = None  # the first logged step
        self._loss: float | None = None  # the last loss of the last written block
        self._readback = Readback(step.device)

    def add(self, entry: Entry) -> None:
        """Log a step, and write a block if enough steps have been logged."""
        if self._first is None:
            self._first = entry.step
        self._entries.append(entry)
        self._write_flow()
        if self._runs_ahead:
            if len(self._entries) >= 2 * _BLOCK:
                self._write(_BLOCK)
        elif len(self._entries) >= _BLOCK or int(entry.outcome.broken) >= 0:
            self._write(len(self._entries))

    def latest_loss(self) -> float | None:
        """Return this process's newest known loss, for the progress bar.

        CUDA runs behind the host: this call requests the loss, and a later call returns it.
        """
        if not self._entries:
            return self._loss
        latest = self._readback.latest(self._entries[-1].outcome.loss)
        return self._loss if latest is None else latest

    def flush(self) -> None:
        """Write every step that is not written yet."""
        if self._entries:
            self._write(len(self._entries))

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *trace: object) -> None:
        """Flush and stop measuring gradient flow; after an error, ignore further errors.

        After an error in a run of several processes, do nothing: a flush sums losses over all
        processes, and the others may have ended.
        """
        if error is None:
            self._close()
        elif self._world.size == 1:
            with suppress(Exception):  # a failed device may be unreadable, or the disk full
                self._close()

    def _close(self) -> None:
        try:
            self.flush()
        finally:
            if self._step.flow is not None:
                self._step.flow.stop()

    def _write(self, count: int) -> None:
        block = self._entries[:count]
        outcomes = [entry.outcome for entry in block]
        values = torch.stack([outcome.values for outcome in outcomes])
        # float32 holds whole numbers exactly up to 2**24
        padded_counts = values.new_tensor([entry.padded for entry in block])
        losses, padded = self._world.total(torch.stack([values[:, 0], padded_counts])).tolist()
        values = values.cpu()
        _, norms, broken = values.T.tolist()
        clipped = is_clipped(values[:, 1], self._step.clip) & (values[:, 2] < 0)
        self._loss = losses[-1]
        assert self._first is not None
        times = self._clock.milliseconds([entry.lap for entry in block])
        for entry, ms in zip(block, times, strict=True):
            kind = "new_shapes" if entry.new_shape else "steps"
            self._clock.count_step("first_steps" if entry.step == self._first else kind, ms)
        self._write_flow()
        if self._folder is not None:
            self._folder.event(
                "step",
                block[-1].step,
                first=block[0].step,
                loss=[_short(value) for value in losses],
                norm=[_short(value) for value in norms],
                ms=[round(value, 4) for value in times],
                rate=block[-1].rate,
                tokens=sum(entry.tokens for entry in block),
                padded=round(sum(padded)),
                examples=sum(entry.examples for entry in block),
                warmup=max(0, min(count, self._first + WARMUP - block[0].step)),
                clipped=int(clipped.sum()),
                order=block[-1].order,
            )
        del self._entries[:count]
        for entry, index, loss in zip(block, broken, losses, strict=True):
            if index >= 0:
                raise Diverged(
                    entry.step, f"the gradient of {self._step.name_of(int(index))}", loss
                )

    def _write_flow(self) -> None:
        """Write finished reports of gradient flow, one per measured step, if there is a folder."""
        if self._step.flow is None:
            return
        for report in self._step.flow.take():
            if self._folder is not None:
                event = report_event(report, self._step.flow.parts)
                self._folder.event("flow", report.step, **event)


def _short(value: float) -> float | None:
    """Round to 7 significant digits; return None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def wall_record(wall: WallClock, clock: Stopwatch) -> WallRecord:
    """Return how this process spent its time."""
    parts, phases, steps = wall.seconds, clock.phases, clock.steps
    seconds = {
        "starting": parts["starting"],
        "data": parts.get("data", 0.0) + phases.get("data", 0.0),
        "building": parts.get("building", 0.0),
        "setup": phases.get(SETUP, 0.0),
        "first_steps": steps.get("first_steps", 0.0),
        "new_shapes": steps.get("new_shapes", 0.0),
        "steps": steps.get("steps", 0.0),
        "validation": phases.get("validation", 0.0),
        "checkpoints": phases.get("checkpoint", 0.0),
        "report": parts.get("report", 0.0),
        "turn": phases.get(TURN, 0.0),
    }
    total, rounded = round(wall.total, 4), {key: round(s, 4) for key, s in seconds.items()}
    return WallRecord(total=total, **rounded, other=round(total - sum(rounded.values()), 4))


def clocks(events: list[Event], seconds: dict[str, float], wall: WallRecord) -> Clocks:
    """Return a run's total times, step times and throughput; `step_ms` excludes warm-up steps."""
    blocks = [event for event in events if isinstance(event, StepEvent)]
    training = training_seconds(seconds)
    data, overlapped = seconds.get("data", 0.0), seconds.get(OVERLAPPED, 0.0)
    real, padded = sum(block.tokens for block in blocks), sum(block.padded for block in blocks)
    packed = any(event.packed for event in events if isinstance(event, SteppingEvent))
    examples = sum(block.examples for block in blocks)
    return Clocks(
        total_seconds=round(seconds.get("total", 0.0), 4),
        train_seconds=round(training, 4),
        validation_seconds=round(seconds.get("validation", 0.0), 4),
        evaluation_seconds=[
            event.seconds
            for event in events
            if isinstance(event, EvaluationEvent) and event.checkpoint is None
        ],
        data_seconds=round(data + overlapped, 4),
        data_overlapped_seconds=round(overlapped, 4),
        checkpoint_seconds=round(seconds.get("checkpoint", 0.0), 4),
        setup_seconds=round(seconds.get(SETUP, 0.0), 4),
        epoch_seconds=[event.seconds for event in events if isinstance(event, EpochEvent)],
        step_ms=step_times([ms for block in blocks for ms in block.ms[block.warmup :]]),
        warmup_ms=[ms for block in blocks for ms in block.ms[: block.warmup]],
        tokens=real,
        tokens_per_second=round(real / training, 1) if training > 0 else None,
        examples_per_second=round(examples / training, 2) if training > 0 else None,
        padding_share=round(1 - real / padded, 4) if padded else None,
        packing_efficiency=round(real / padded, 4) if packed and padded else None,
        wall=wall,
    )


def step_times(times: list[float]) -> StepTimes | None:
    """Summarise step times in milliseconds."""
    if not times:
        return None
    mean = statistics.fmean(times)
    ordered = sorted(times)
    return StepTimes(
        count=len(times),
        median=round(statistics.median(times), 4),
        mean=round(mean, 4),
        p95=round(ordered[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)], 4),
        cv=round(statistics.pstdev(times) / mean, 4) if mean else 0.0,
    )
