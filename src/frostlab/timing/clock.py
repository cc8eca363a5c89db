"""Clocks for steps, phases and blocks of steps, and a meter for device memory.

`Stopwatch` times a run without stalling it. Each step lies between two marks. On CUDA, the marks
are events that are read later; on other devices, they are readings of the host's clock. Phases
(data, validation, checkpoints) are timed on the host. A phase that does not wait for a GPU runs
while the GPU still works on earlier steps, so its seconds count as overlapped and are not
subtracted from the training time. The setup of a step (its building and warm-up) is timed
separately, outside the total, because the first setup of a process takes far longer than others.

`WallClock` times the parts of a whole program, from its start. `BlockClock` times a block of steps;
the device is idle before and after the block. `Meter` measures the seconds and the peak memory
since its construction.
"""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F

from frostlab.devices import (
    allocated_bytes,
    has_events,
    peak_bytes,
    prepares_kernels,
    reset_peak,
    runs_ahead,
    synchronize,
)

Lap = tuple[Any, Any]  # marks at the beginning and the end of a step
OVERLAPPED = "overlapped"  # phase: host work while the device works, part of the training time
SETUP = "setup"  # phase: building steps, not part of the total
TURN = "turn"  # phase: waiting until other runs leave the device, not part of the total


def process_began() -> float:
    """Return when this process started, as a reading of `time.perf_counter`."""
    with suppress(OSError, ValueError, IndexError, AttributeError):  # only Linux has this file
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # s since the machine started
        return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


class WallClock:
    """The seconds of the parts of a program, one after another without a gap.

    `began` is a reading of `time.perf_counter`; the time from there to the construction of the
    clock is the part `starting`.
    """

    def __init__(self, began: float | None = None) -> None:
        self._last = time.perf_counter()
        self._began = self._last if began is None else began
        self.seconds = {"starting": self._last - self._began}

    def end_part(self, name: str) -> None:
        """Count the time since the last part ended, or since the construction, as this part."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """The seconds since the beginning."""
        return time.perf_counter() - self._began


class Stopwatch:
    """A stopwatch for steps on the device and phases on the host.

    The argument `seconds` holds the seconds by phase that a resumed run had counted before. The
    property `seconds` includes them.
    """

    def __init__(self, device: torch.device, seconds: dict[str, float] | None = None) -> None:
        self._events = has_events(device)
        self._device = device
        self._before = dict(seconds or {})
        self._phases: dict[str, float] = {}
        self.steps: dict[str, float] = {}  # kind of step → seconds of this process's steps
        self._total = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Start counting time, once the device is idle."""
        self.wait_for_device()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop counting time until the next start, once the device is idle."""
        self.wait_for_device()
        assert self._started is not None, "the clock runs"
        self._total += time.perf_counter() - self._started
        self._started = None

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Count the time inside this context as setup, outside the total."""
        with self.outside(SETUP):
            yield

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Count the time inside this context as a phase that is not part of the total."""
        self.stop()
        with self.phase(name, device=True):
            yield
        self.start()

    def mark(self) -> Any:
        """Return a mark of the current time: a CUDA event, or the host's time on other devices."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, laps: Sequence[Lap]) -> list[float]:
        """Return the milliseconds of each step; on CUDA, wait for the last step."""
        if self._events and laps:
            laps[-1][1].synchronize()
            return [began.elapsed_time(ended) for began, ended in laps]
        return [1e3 * (ended - began) for began, ended in laps]

    @contextmanager
    def phase(self, name: str, device: bool = False) -> Iterator[None]:
        """Time a phase on the host; with `device`, wait for the device before and after it."""
        if device:
            self.wait_for_device()
        elif runs_ahead(self._device):
            name = OVERLAPPED
        began = time.perf_counter()
        try:
            yield
        finally:
            if device:
                self.wait_for_device()
            elapsed = time.perf_counter() - began
            self._phases[name] = self._phases.get(name, 0.0) + elapsed

    @property
    def phases(self) -> dict[str, float]:
        """The seconds by phase, without the earlier parts of a resumed run."""
        return dict(self._phases)

    def count_step(self, kind: str, milliseconds: float) -> None:
        """Add the time of a step to the total of its kind."""
        self.steps[kind] = self.steps.get(kind, 0.0) + milliseconds / 1e3

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by phase and in total, including the earlier parts of a resumed run."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        names = {"total", *self._before, *self._phases}
        current = {**self._phases, "total": self._total + running}
        return {
            name: self._before.get(name, 0.0) + current.get(name, 0.0) for name in sorted(names)
        }

    def training_seconds(self) -> float:
        """Return the seconds of training so far."""
        return training_seconds(self.seconds)

    def wait_for_device(self) -> None:
        """Wait until the device has finished its work."""
        synchronize(self._device)


def training_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of training: the total without the phases that training waited for."""
    left_out = ("total", OVERLAPPED, SETUP, TURN)
    waited = sum(spent for name, spent in seconds.items() if name not in left_out)
    return seconds.get("total", 0.0) - waited


class Meter:
    """A meter of the seconds and of the peak of newly allocated memory since its construction."""

    def __init__(self, device: torch.device) -> None:
        synchronize(device)
        self.device = device
        if prepares_kernels(device):
            # cuBLAS allocates its workspaces in this matmul, before memory is measured
            weight = torch.ones(1, 1, device=device, requires_grad=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that autograd's thread has no CUDA context yet
                F.linear(weight, weight, weight[0]).sum().backward()
            del weight
            gc.collect()
        self.before = allocated_bytes(device)
        reset_peak(device)
        self.began = time.perf_counter()

    def read(self) -> tuple[float, int | None]:
        """Return the seconds and, on CUDA, the peak memory in bytes."""
        synchronize(self.device)
        return time.perf_counter() - self.began, self.peak_bytes()

    def peak_bytes(self) -> int | None:
        """Return the peak of newly allocated memory on CUDA, and None on other devices."""
        peak = peak_bytes(self.device)
        return None if peak is None else peak - self.before


@dataclass(frozen=True)
class BlockSeconds:
    """The seconds of a block on the clocks of the device and of the host; equal without CUDA."""

    device: float
    host: float


class BlockClock:
    """A clock for a block of work; the device is idle before and after the block."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, work: Callable[[], object]) -> BlockSeconds:
        """Time a function and all the work that it launches on the device."""
        events = has_events(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        if events:
            stream = torch.cuda.current_stream(self.device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
        work()
        if events:
            last.record(stream)
        synchronize(self.device)
        host = time.perf_counter() - began
        return BlockSeconds(first.elapsed_time(last) / 1e3 if events else host, host)
