"""Ctrl-C and termination: the first asks the run to stop at its next step, the second insists."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from frostlab.training.distributed import World

_SECONDS = 2.0  # between looks at whether any of several processes was asked to stop
_STEPS = 50


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Within this, signals are remembered; yields whether one has come."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def remember(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopLook:
    """Whether to stop after a step; several processes agree, every few seconds at most."""

    def __init__(self, asked: Callable[[], bool], world: World, device: torch.device) -> None:
        self._asked, self._world, self._device = asked, world, device
        self._next, self._last, self._at = 1, 0, time.monotonic()

    def __call__(self, step: int) -> bool:
        if self._world.size == 1:
            return self._asked()
        if step < self._next:
            return False
        now = time.monotonic()
        pace = (now - self._at) / max(step - self._last, 1) if self._world.writes else 0.0
        said = torch.tensor([float(self._asked()), pace], device=self._device)
        asked, pace = self._world.total(said).tolist()
        self._next = step + max(1, min(_STEPS, int(_SECONDS / max(pace, 1e-9))))
        self._last, self._at = step, now
        return asked > 0
