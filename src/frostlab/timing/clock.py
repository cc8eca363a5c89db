"""Clocks that do not stall what they time, and the peak of device memory.

Each step lies between two marks. On CUDA they are events, read when their block of steps is long
over; elsewhere they are readings of the clock. Phases (data, validation, checkpoints) are timed on
the host. A phase that does not wait for a GPU runs while the GPU still works on earlier steps: its
seconds are counted as overlapped and are not taken off the training time. Building a step is timed
apart from the total, because the first step of a process is far more expensive to build.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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

Lap = tuple[Any, Any]  # the marks at the beginning and at the end of a step
OVERLAPPED = "overlapped"  # host work while the device works; part of the training time
SETUP = "setup"  # building steps; no part of the total


class Stopwatch:
    """Times steps on the device and phases on the host."""

    def __init__(self, device: torch.device, seconds: dict[str, float] | None = None) -> None:
        self._events = has_events(device)
        self._device = device
        self._before = dict(seconds or {})
        self._phases: dict[str, float] = {}
        self._total = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Count time from now on."""
        self.wait_for_device()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Count no time until the next start."""
        self.wait_for_device()
        assert self._started is not None, "the clock runs"
        self._total += time.perf_counter() - self._started
        self._started = None

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Count what happens within this as set-up, and not into the total."""
        self.stop()
        with self.phase(SETUP, device=True):
            yield
        self.start()

    def mark(self) -> Any:
        """A moment on the device's own clock."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, laps: Sequence[Lap]) -> list[float]:
        """How long each step took; waits for the last one on a GPU."""
        if self._events and laps:
            laps[-1][1].synchronize()
            return [began.elapsed_time(ended) for began, ended in laps]
        return [1e3 * (ended - began) for began, ended in laps]

    @contextmanager
    def phase(self, name: str, device: bool = False) -> Iterator[None]:
        """Time a phase on the host; `device` waits for the device's work before and after."""
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
            spent = time.perf_counter() - began
            self._phases[name] = self._phases.get(name, 0.0) + spent

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase and in total, with those of a run's earlier parts."""
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        names = {"total", *self._before, *self._phases}
        spent = {**self._phases, "total": self._total + now}
        return {name: self._before.get(name, 0.0) + spent.get(name, 0.0) for name in sorted(names)}

    def training_seconds(self) -> float:
        """Seconds so far in which nothing but training happened."""
        return training_seconds(self.seconds)

    def wait_for_device(self) -> None:
        """Wait until the device has done what it was asked to do."""
        synchronize(self._device)


def training_seconds(seconds: dict[str, float]) -> float:
    """The total without the phases that training had to wait for."""
    apart = {n: spent for n, spent in seconds.items() if n not in ("total", OVERLAPPED, SETUP)}
    return seconds.get("total", 0.0) - sum(apart.values())


class Meter:
    """Seconds and peak memory from here on, the memory of what was there before left out."""

    def __init__(self, device: torch.device) -> None:
        synchronize(device)
        self.device = device
        if prepares_kernels(device):
            weight = torch.ones(1, 1, device=device, requires_grad=True)
            F.linear(weight, weight, weight[0]).sum().backward()  # cuBLAS takes its workspaces
            del weight
            gc.collect()
        self.before = allocated_bytes(device)
        reset_peak(device)
        self.began = time.perf_counter()

    def read(self) -> tuple[float, int | None]:
        """Seconds, and bytes on CUDA."""
        synchronize(self.device)
        return time.perf_counter() - self.began, self.peak_bytes()

    def peak_bytes(self) -> int | None:
        """The most memory allocated at once, on CUDA."""
        peak = peak_bytes(self.device)
        return None if peak is None else peak - self.before


@dataclass(frozen=True)
class Spent:
    """Seconds of a block, on the device's own clock and on the host's."""

    device: float
    host: float


class BlockClock:
    """Times a block from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def block(self, work: Callable[[], object]) -> Spent:
        """Time some work, and all that it leaves to the device."""
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
        return Spent(first.elapsed_time(last) / 1e3 if events else host, host)
