"""Blocks of steps in turn: a random order, then its reverse, all on one clock, build by build."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from frostlab.devices import synchronize
from frostlab.timing.clock import Meter, Spent

FEWEST = 8  # builds
_MORE = 4  # builds after the width is reached: a calm spell must not be all that counts
_LEVEL = 0.95
_DRIFTED = 0.05  # of the time of a block, between the halves of a measurement


@dataclass(frozen=True)
class Ratio:
    """An arm's time over the baseline's: below 1 the arm is faster."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The interval's full width, relative to the estimate."""
        return (self.high - self.low) / self.estimate

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def paired_logs(arm: Sequence[float], base: Sequence[float], pairs: int = 1) -> NDArray[np.float64]:
    """One value a build: the mean of log(arm / baseline) over its pairs of rounds."""
    logs = np.log(np.asarray(arm, float) / np.asarray(base, float))
    return logs.reshape(-1, 2 * pairs).mean(axis=1)


def ratio_of(arm: Sequence[float], base: Sequence[float], pairs: int = 1) -> Ratio:
    """The paired ratio with its 95 % interval, from at least two builds of some pairs each."""
    logs = paired_logs(arm, base, pairs)
    middle = float(logs.mean())
    half = _quantile(len(logs)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@cache
def _quantile(builds: int) -> float:
    return float(stats.t.ppf((1 + _LEVEL) / 2, builds - 1))


class Rule:
    """When to stop: all intervals are narrow enough, and have been for a while, or time is up."""

    def __init__(self, seconds: float, width: float) -> None:
        self.seconds, self.width = seconds, width
        self._left: int | None = None  # builds still to time once the width is reached

    def stopped_by(self, builds: int, ratios: Iterable[Ratio], elapsed: float) -> str | None:
        """What ends the timing after a build, or None; never before the second."""
        if builds < 2:
            return None
        if self._left is not None:
            self._left -= 1
        elif builds >= FEWEST and all(ratio.width < self.width for ratio in ratios):
            self._left = _MORE
        if self._left == 0:
            return "width"
        return "time" if elapsed >= self.seconds else None


BATCHES = 16  # different batches at most: each shape of them must have been met before
_STARTS = 4  # places in the list of batches where blocks begin
_SAYS = 10.0  # seconds
Measure = Callable[[str, Sequence[int]], Spent]


@dataclass
class Rounds:
    """What was measured, one block an arm and round."""

    spent: dict[str, list[Spent]]
    pairs: int = 1  # of rounds, before the arms are built anew
    began: list[float] = field(default_factory=list)  # of the baseline's blocks, since the first
    starts: list[int] = field(default_factory=list)  # where each round's batches begin
    seconds: float = 0.0
    stopped_by: str = ""

    def device_seconds(self, name: str) -> list[float]:
        """An arm's seconds a block on the device's clock."""
        return [spent.device for spent in self.spent[name]]

    def ratios(self, baseline: str) -> dict[str, Ratio]:
        """Every other arm's time over the baseline's."""
        base = self.device_seconds(baseline)
        others = (name for name in self.spent if name != baseline)
        return {name: ratio_of(self.device_seconds(name), base, self.pairs) for name in others}

    @property
    def builds(self) -> int:
        """How often the arms were built, and timed."""
        return len(self.starts) // (2 * self.pairs)


def orders(names: Sequence[str], seed: int) -> Iterator[tuple[str, ...]]:
    """Who goes when, round by round; each random order is followed by its reverse."""
    draw = np.random.default_rng(seed)
    while True:
        order = tuple(names[i] for i in draw.permutation(len(names)))
        yield order
        yield order[::-1]


def different(block: int) -> int:
    """How many different blocks there are: few, so that they come back soon."""
    return max(1, min(_STARTS, BATCHES // block))


def places(pair: int, block: int, batches: int) -> tuple[int, ...]:
    """Which batches both rounds of a pair see."""
    first = (pair % different(block)) * block
    return tuple((first + i) % batches for i in range(block))


def pairs_for(seconds: float, round_seconds: float) -> int:
    """Pairs of rounds a build, so that the fewest builds fit; a third is left for building."""
    return max(1, min(_STARTS, int(2 / 3 * seconds / (FEWEST * 2 * round_seconds))))


def take_turns(
    names: Sequence[str],
    baseline: str,
    measure: Measure,
    rule: Rule,
    *,
    pairs: int,
    rebuild: Callable[[], None],
    block: int,
    batches: int,
    seed: int,
    say: Callable[[str], None],
) -> Rounds:
    """Measure build after build, pairs of rounds each, until the rule ends it.

    `measure` takes one arm's block.
    """
    rounds = Rounds({name: [] for name in names}, pairs)
    order, start = orders(names, seed), perf_counter()
    said = start
    while not rounds.stopped_by:
        if rounds.starts:
            rebuild()
        for pair in range(rounds.builds * pairs, (rounds.builds + 1) * pairs):
            batch_places = places(pair, block, batches)
            for _ in range(2):
                for name in next(order):
                    if name == baseline:
                        rounds.began.append(perf_counter() - start)
                    rounds.spent[name].append(measure(name, batch_places))
                rounds.starts.append(batch_places[0])
        rounds.seconds = perf_counter() - start
        ratios = rounds.ratios(baseline).values() if rounds.builds > 1 else ()
        rounds.stopped_by = rule.stopped_by(rounds.builds, ratios, rounds.seconds) or ""
        if perf_counter() - said >= _SAYS and ratios:
            said, widest = perf_counter(), max(ratio.width for ratio in ratios)
            done = f"{rounds.builds} builds, {len(rounds.starts)} rounds, {rounds.seconds:.0f} s"
            say(f"{done}: intervals within {widest:.2%}")
    return rounds


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


@dataclass(frozen=True)
class Drift:
    """How the baseline's blocks changed while time passed, like compared with like."""

    halves: float  # the second half's time over the first's
    per_minute: float  # the change of the log, from a regression on time

    @property
    def drifted(self) -> bool:
        """Whether the baseline drifted during the measurement."""
        return abs(self.halves - 1) > _DRIFTED


def drift_of(seconds: Sequence[float], when: Sequence[float], starts: Sequence[int]) -> Drift:
    """Compare halves, and regress on time, each block only with those of the same batches."""
    logs, times = np.log(np.asarray(seconds, float)), np.asarray(when, float)
    kinds, late = np.asarray(starts), np.arange(len(logs)) >= len(logs) // 2
    steps: list[float] = []
    for kind in np.unique(kinds):
        same = kinds == kind
        if (same & late).any() and (same & ~late).any():
            steps.append(float(np.median(logs[same & late]) - np.median(logs[same & ~late])))
        logs[same] -= logs[same].mean()
        times[same] -= times[same].mean()
    spread = float(times @ times)
    slope = float(times @ logs) / spread if spread else 0.0
    return Drift(float(np.exp(np.mean(steps))) if steps else 1.0, 60 * slope)
