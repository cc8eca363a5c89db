"""Two sides in turn: a few steps of one, then of the other, who goes first alternating."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from frostlab.training.stopwatch import Meter, synchronize

Step = Callable[[], object]
After = Callable[[], bool]  # called after each step; True: enough
Driver = Callable[[After], object]  # takes steps of its own accord, as a Trainer does
_FEWEST = 3  # rounds, however few seconds there are


@dataclass
class Times:
    """What was measured: seconds a step of each round, and what it took to get there."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_prepare_s: float = 0.0
    theirs_prepare_s: float = 0.0
    ours_peak_bytes: int | None = None
    theirs_peak_bytes: int | None = None
    steps_per_round: int = 1

    def to_dict(self, whole: bool = False) -> dict[str, Any]:
        """Milliseconds a step and their ratio: medians, or means where the whole work counts."""
        middle = np.mean if whole else np.median
        ours, theirs = (round(1e3 * float(middle(side)), 5) for side in (self.ours, self.theirs))
        ratios = np.array(self.ours) / np.array(self.theirs)
        memory = None
        if self.ours_peak_bytes is not None and self.theirs_peak_bytes:
            memory = self.ours_peak_bytes / self.theirs_peak_bytes
        return {
            "ours_ms": ours,
            "theirs_ms": theirs,
            "statistic": "mean of rounds" if whole else "median of rounds",
            "ratio": ours / theirs,
            "ratio_paired_median": float(np.median(ratios)),
            "ratio_p10": float(np.quantile(ratios, 0.1)),
            "ratio_p90": float(np.quantile(ratios, 0.9)),
            "ratio_is": "our time over theirs; below 1 ours is faster",
            "faster": theirs / ours,
            "rounds": len(ratios),
            "steps_per_round": self.steps_per_round,
            "ours_prepare_s": round(self.ours_prepare_s, 3),
            "theirs_prepare_s": round(self.theirs_prepare_s, 3),
            "ours_peak_bytes": self.ours_peak_bytes,
            "theirs_peak_bytes": self.theirs_peak_bytes,
            "memory_ratio": memory,
        }


def looped(step: Step) -> Driver:
    """A plain step as a driver."""

    def drive(after: After) -> None:
        step()
        while not after():
            step()

    return drive


def schedule(rounds: int) -> Iterator[str]:
    """Who goes when: theirs first in even rounds, ours first in odd ones."""
    for number in range(rounds):
        yield from ("theirs", "ours") if number % 2 == 0 else ("ours", "theirs")


class Turns:
    """Follows a driver step by step and takes our steps whenever it is our turn."""

    def __init__(
        self,
        ours: Step,
        times: Times,
        device: torch.device,
        *,
        rounds: int,
        warm: int,
        seconds: float | None,
        warmed: Callable[[], object],
    ) -> None:
        self.ours, self.times, self.device = ours, times, device
        self.every, self.left, self.warmed = times.steps_per_round, warm, warmed
        self.plan, self.seconds = list(schedule(rounds)), seconds
        self.place, self.warming, self.began, self.start = 0, True, 0.0, 0.0

    def after(self) -> bool:
        """Count a step of theirs; when their turn is over take ours. True: all is measured."""
        self.left -= 1
        if self.left > 0:
            return False
        now = self._now()
        if self.warming:
            self.warming, self.start = False, now
            self.warmed()
        else:
            self.times.theirs.append((now - self.began) / self.every)
            self.place += 1
        while not self._over() and self.plan[self.place] == "ours":
            began = self._now()
            for _ in range(self.every):
                self.ours()
            self.times.ours.append((self._now() - began) / self.every)
            self.place += 1
        if self._over():
            return True
        self.left, self.began = self.every, self._now()
        return False

    def _over(self) -> bool:
        if self.place == len(self.plan):
            return True
        late = self.seconds is not None and self._now() - self.start > self.seconds
        return late and self.place % 2 == 0 and self.place >= 2 * _FEWEST

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def interleave(
    ours: Callable[[], Step],
    theirs: Callable[[], Driver],
    device: torch.device,
    *,
    rounds: int,
    every: int,
    warm: int = 3,
    seconds: float | None = None,
) -> Times:
    """Build and warm up our side, then theirs, then time both in turn.

    A side's peak memory is that of building, warming up (a graph is captured there) and nothing
    of the other side.
    """
    times = Times(steps_per_round=every)
    meter = Meter(device)
    step = ours()
    for _ in range(warm):
        step()
    times.ours_prepare_s, times.ours_peak_bytes = meter.read()
    meter = Meter(device)

    def warmed() -> None:
        times.theirs_prepare_s, times.theirs_peak_bytes = meter.read()

    turns = Turns(
        step, times, device, rounds=rounds, warm=warm, seconds=seconds, warmed=warmed
    )  # fmt: skip
    theirs()(turns.after)
    return times
