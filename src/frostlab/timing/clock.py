"""Clocks that do not stall what they time, and the peak of device memory.

Each step lies between two marks. On CUDA they are events, read when their block of steps is long
over; elsewhere they are readings of the clock. Phases (data, validation, checkpoints) are timed on
the host. A phase that does not wait for a GPU runs while the GPU still works on earlier steps: its
seconds are counted as overlapped and are not taken off the training time. Building a step is timed
apart from the total, because the first step of a process is far more expensive to build.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

Lap = tuple[Any, Any]  # the marks at the beginning and at the end of a step
OVERLAPPED = "overlapped"  # host work while the device works; part of the training time
SETUP = "setup"  # building steps; no part of the total


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Stopwatch:
    """Times steps on the device and phases on the host."""

    def __init__(self, device: torch.device, seconds: dict[str, float] | None = None) -> None:
        self._cuda = device.type == "cuda"
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
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, laps: Sequence[Lap]) -> list[float]:
        """How long each step took; waits for the last one on a GPU."""
        if self._cuda and laps:
            laps[-1][1].synchronize()
            return [began.elapsed_time(ended) for began, ended in laps]
        return [1e3 * (ended - began) for began, ended in laps]

    @contextmanager
    def phase(self, name: str, device: bool = False) -> Iterator[None]:
        """Time a phase on the host; `device` waits for the device's work before and after."""
        if device:
            self.wait_for_device()
        elif self._device.type != "cpu":
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
        self.device, self.before = device, 0
        if device.type == "cuda":
            one = torch.ones(1, 1, device=device, requires_grad=True)
            F.linear(one, one, one[0]).sum().backward()  # cuBLAS takes workspaces once a process
            del one
            gc.collect()
            self.before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.began = time.perf_counter()

    def read(self) -> tuple[float, int | None]:
        """Seconds, and bytes on CUDA."""
        synchronize(self.device)
        return time.perf_counter() - self.began, self.peak_bytes()

    def peak_bytes(self) -> int | None:
        """The most memory allocated at once, on CUDA."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) - self.before
