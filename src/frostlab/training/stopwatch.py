"""Clocks that do not stall what they time.

Each step lies between two marks. On CUDA they are events, read when their block of steps is long
over; elsewhere they are readings of the clock. Phases (data, validation, checkpoints) are timed on
the host, after waiting for the device where it works ahead.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Times steps on the device and phases on the host."""

    def __init__(self, device: torch.device, seconds: dict[str, float] | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        self._before = dict(seconds or {})
        self._phases: dict[str, float] = {}
        self._started: float | None = None
        self._stopped: float | None = None

    def start(self) -> None:
        """The first step begins now."""
        self.wait_for_device()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The last step is over: what comes now is not counted."""
        self.wait_for_device()
        self._stopped = time.perf_counter()

    def mark(self) -> Any:
        """A moment on the device's own clock."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, began: Any) -> None:
        """A step that began at `began` ends now."""
        self._marks.append((began, self.mark()))

    def laps(self, count: int) -> list[float]:
        """The milliseconds of the oldest `count` steps not yet read."""
        done, self._marks = self._marks[:count], self._marks[count:]
        if self._cuda and done:
            done[-1][1].synchronize()
            return [began.elapsed_time(ended) for began, ended in done]
        return [1e3 * (ended - began) for began, ended in done]

    @contextmanager
    def phase(self, name: str, device: bool = False) -> Iterator[None]:
        """Time a phase on the host; `device` waits for the device's work before and after."""
        if device:
            self.wait_for_device()
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
        """Seconds by phase, and in total since the first step, earlier parts of a run included."""
        end = time.perf_counter() if self._stopped is None else self._stopped
        now = 0.0 if self._started is None else end - self._started
        names = {"total", *self._before, *self._phases}
        spent = {**self._phases, "total": now}
        return {name: self._before.get(name, 0.0) + spent.get(name, 0.0) for name in sorted(names)}

    def training_seconds(self) -> float:
        """Seconds so far in which nothing but training happened."""
        seconds = self.seconds
        return seconds.pop("total") - sum(seconds.values())

    def wait_for_device(self) -> None:
        """Wait until the device has done what it was asked to do."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
