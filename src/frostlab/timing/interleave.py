"""Interleaved timing: competitors take blocks of steps in turn, in one process, on one clock.

Noise that lasts much longer than a block affects all competitors alike and cancels in their ratio.

`interleave_arms` times the arms (variants of one recipe) of a comparison. One round takes the arms
in random order, and the next round takes them in reverse; these two are a pair. The arms are
rebuilt after a few pairs, because the memory addresses of one build can make all its steps faster
or slower. The confidence interval therefore treats each build as one observation. The first round
after a build is slower than later ones and is not counted.

The baseline has several copies, its controls. A copy can be a little faster or slower in all its
builds, and so can an arm. The interval of an arm is therefore never narrower than the prediction
interval for one more copy of the baseline.

`interleave_pair` times the two sides of a benchmark: ours, which is a step of frostlab, and theirs,
which may be a training loop that cannot be called step by step, such as the Hugging Face Trainer.
Some benchmarks also time the step of a third side, called `loop`, such as a plain PyTorch loop.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from frostlab.devices import synchronize
from frostlab.timing.clock import BlockSeconds, Meter

FEWEST_BUILDS = 4  # with fewer builds, the timing is unproven: it cannot be trusted
_PLANNED_BUILDS = 6  # builds that should fit into the time
_BUILDS_BEFORE_WIDTH = 8  # builds before narrow intervals may end the timing
MOST_BATCHES = 16  # the most distinct batches; the step is warmed up on the shape of each
_BUILDS_AFTER_WIDTH = 4  # further builds once intervals are narrow, because that may be chance
_MOST_BLOCKS = 4  # the most distinct blocks, and also the most pairs of rounds per build
_PROGRESS_EVERY = 10.0  # seconds between progress messages
_FEWEST_ROUNDS = 3  # rounds of a benchmark before its time limit counts
_DRIFT = 0.05  # allowed change of the baseline's time between the halves of a measurement


@dataclass(frozen=True)
class Ratio:
    """An arm's time divided by the baseline's, with its interval; below 1, the arm is faster."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The full width of the interval, relative to the estimate."""
        return (self.high - self.low) / self.estimate

    def holds(self, value: float) -> bool:
        """Return whether a value lies in the interval."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def ratio_of(
    arm: ArrayLike,
    copies: Sequence[ArrayLike],
    pairs: int = 1,
    alpha: float = 0.05,
) -> Ratio:
    """Estimate the ratio of an arm's time to the baseline's, with confidence 1 − alpha.

    The baseline's time is the geometric mean over its copies. Two intervals have the same centre,
    and the wider one is returned: the t interval over the builds, and the prediction interval for
    the mean of one more copy, with one degree of freedom less than there are copies.

    Args:
        arm: the seconds of each round, from at least two builds.
        copies: the same for each copy of the baseline; with one copy there is no second interval.
        pairs: pairs of rounds per build.
    """
    base = np.array([build_logs(copy, pairs) for copy in copies])  # (copies, builds)
    logs = build_logs(arm, pairs) - base.mean(axis=0)
    middle, builds, count = float(logs.mean()), len(logs), len(copies)
    half = _t_quantile(builds - 1, alpha) * float(logs.std(ddof=1)) / math.sqrt(builds)
    if count > 1:
        spread = float(base.mean(axis=1).std(ddof=1)) * math.sqrt(1 + 1 / count)
        half = max(half, _t_quantile(count - 1, alpha) * spread)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def build_logs(seconds: ArrayLike, pairs: int = 1) -> NDArray[np.float64]:
    """Return the mean log time of each build's rounds."""
    return np.log(np.asarray(seconds, float)).reshape(-1, 2 * pairs).mean(axis=1)


@cache
def _t_quantile(degrees: int, alpha: float) -> float:
    return float(stats.t.ppf(1 - alpha / 2, degrees))


# The arms of a comparison.


class StopRule:
    """A rule that ends timing a few builds after all intervals are narrow, or when time is up.

    Up to twice the time is allowed for `FEWEST_BUILDS` builds; at least two builds are timed.

    Args:
        seconds: the time limit.
        width: the relative width below which an interval is narrow.
    """

    def __init__(self, seconds: float, width: float) -> None:
        self.seconds, self.width = seconds, width
        self._builds_left: int | None = None  # set once the width is reached

    def stopped_by(self, builds: int, widths: Iterable[float], elapsed: float) -> str | None:
        """Return `width` or `time` if the timing ends after this build, else None."""
        if builds < 2:  # an interval needs two builds
            return None
        if self._builds_left is not None:
            self._builds_left -= 1
        elif builds >= _BUILDS_BEFORE_WIDTH and all(width < self.width for width in widths):
            self._builds_left = _BUILDS_AFTER_WIDTH
        if self._builds_left == 0:
            return "width"
        limit = self.seconds if builds >= FEWEST_BUILDS else 2 * self.seconds
        return "time" if elapsed >= limit else None


@dataclass(frozen=True)
class Blocks:
    """The batches of each block of steps; a few distinct blocks recur in a cycle.

    The cycle is short, so that the drift of the baseline's time can be estimated from repetitions
    of the same block.
    """

    steps: int  # per block
    batches: int  # number of batches to choose from

    @property
    def different(self) -> int:
        """The number of blocks in a cycle; some are equal if there are few batches."""
        return max(1, min(_MOST_BLOCKS, MOST_BATCHES // self.steps))

    def of_pair(self, pair: int) -> tuple[int, ...]:
        """Return the indices of the batches that both rounds of a pair use."""
        first = (pair % self.different) * self.steps
        return tuple((first + step) % self.batches for step in range(self.steps))


def plan_build(
    seconds: float, steps: int, step_seconds: float, build_seconds: float
) -> tuple[int, int]:
    """Return the steps per block and the pairs of rounds per build.

    Shorten blocks, down to one step, until `_PLANNED_BUILDS` builds fit into the time; then take as
    many pairs of rounds per build as fit, up to `_MOST_BLOCKS`. If the rounds of a build would take
    less than half as long as building, plan fewer builds, down to `FEWEST_BUILDS`, so that
    the rounds get half the time of building.

    Args:
        seconds: the time limit.
        steps: the wanted steps per block.
        step_seconds: the sum of the times of one step of each arm.
        build_seconds: the time to build all arms.
    """
    left = max(
        seconds / _PLANNED_BUILDS - build_seconds,
        min(build_seconds / 2, seconds / FEWEST_BUILDS - build_seconds),
    )

    def pairs_that_fit() -> int:
        round_seconds = (steps + 1) * step_seconds  # plus an untimed step that refills caches
        return int((left / round_seconds - 1) / 2)  # the first round is not counted

    while steps > 1 and pairs_that_fit() < 1:
        steps = 1 << ((steps - 1).bit_length() - 1)  # the next lower power of 2
    return steps, max(1, min(_MOST_BLOCKS, pairs_that_fit()))


def batches_to_keep(seconds: float, build_seconds: float) -> int:
    """Return the number of batches that steps are warmed up on, so that building stays short.

    With all `MOST_BATCHES`, building all arms takes `build_seconds`. It should take at most half of
    `seconds / _PLANNED_BUILDS`, the time for one build and its rounds; a few batches are kept in
    any case.
    """
    share = seconds / _PLANNED_BUILDS / 2 / build_seconds
    return min(MOST_BATCHES, max(_MOST_BLOCKS, int(MOST_BATCHES * share)))


def round_orders(names: Sequence[str], seed: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of the arms in each round: a random order, its reverse, and so on."""
    draw = np.random.default_rng(seed)
    while True:
        order = tuple(names[i] for i in draw.permutation(len(names)))
        yield order
        yield order[::-1]


@dataclass
class Rounds:
    """The measured times: one block for each arm and round."""

    baseline: str
    controls: tuple[str, ...]  # further copies of the baseline
    blocks: dict[str, list[BlockSeconds]]  # arm, baseline or control → its blocks
    pairs: int = 1  # pairs of rounds per build
    began: list[float] = field(default_factory=list)  # when each baseline block started, in s
    starts: list[int] = field(default_factory=list)  # index of the first batch of each round
    seconds: float = 0.0  # duration of the whole measurement
    stopped_by: str = ""  # `width` or `time`

    def device_seconds(self, name: str) -> list[float]:
        """Return the seconds of an arm's blocks on the device's clock."""
        return [block.device for block in self.blocks[name]]

    def ratios(self, alpha: float = 0.05) -> dict[str, Ratio]:
        """Return the ratio of every arm's time to the baseline's.

        The intervals of all arms hold simultaneously with confidence 1 − alpha, and so do those of
        all controls.
        """
        arms = [name for name in self.blocks if name not in (self.baseline, *self.controls)]
        return {
            name: ratio_of(
                self.device_seconds(name), self._copies_for(name), self.pairs, alpha / len(names)
            )
            for names in (self.controls, arms)
            for name in names
        }

    def widths(self) -> list[float]:
        """Return the relative width of every 95 % interval, from the spread between builds alone.

        The interval from the spread between copies is left out, because more builds do not make it
        narrower.
        """
        widths = []
        for name in self.blocks:
            if name != self.baseline:
                # the copies' mean, taken for one copy
                base = np.exp(np.log(self._copies_for(name)).mean(axis=0))
                widths.append(ratio_of(self.device_seconds(name), [base], self.pairs).width)
        return widths

    def _copies_for(self, name: str) -> list[list[float]]:
        """Return the times of the copies that an arm or a control is compared with."""
        copies = (self.baseline, *self.controls)
        return [self.device_seconds(copy) for copy in copies if copy != name]

    @property
    def builds(self) -> int:
        """The number of times that the arms were built and timed."""
        return len(self.starts) // (2 * self.pairs)


def interleave_arms(
    names: Sequence[str],
    measure: Callable[[str, Sequence[int]], BlockSeconds],
    rebuild: Callable[[], object],
    rule: StopRule,
    *,
    controls: Sequence[str],
    blocks: Blocks,
    pairs: int,
    seed: int,
    say: Callable[[str], None],
) -> Rounds:
    """Time rounds until the rule ends the timing; rebuild all arms after `pairs` pairs of rounds.

    Args:
        names: names of the arms, the baseline first, including the controls.
        measure: a function that times one block of an arm on the batches with these indices.
        rebuild: a function that builds all arms again.
        controls: names of the further copies of the baseline.
        pairs: pairs of rounds per build.
        seed: random seed for the order of the arms in each round.
        say: a function that gets progress messages.
    """
    baseline = names[0]
    rounds = Rounds(baseline, tuple(controls), {name: [] for name in names}, pairs)
    orders, start = round_orders(names, seed), perf_counter()
    last_progress = start
    while not rounds.stopped_by:
        if rounds.starts:
            rebuild()
        first_pair = rounds.builds * pairs
        for name in names:  # the first block after a build is slower, and does not count
            measure(name, blocks.of_pair(first_pair))
        for pair in range(first_pair, first_pair + pairs):
            batches = blocks.of_pair(pair)
            for _ in range(2):
                for name in next(orders):
                    if name == baseline:
                        rounds.began.append(perf_counter() - start)
                    rounds.blocks[name].append(measure(name, batches))
                rounds.starts.append(batches[0])
        rounds.seconds = perf_counter() - start
        widths = rounds.widths() if rounds.builds > 1 else []
        rounds.stopped_by = rule.stopped_by(rounds.builds, widths, rounds.seconds) or ""
        if perf_counter() - last_progress >= _PROGRESS_EVERY and widths:
            last_progress, widest = perf_counter(), max(widths)
            done = f"{rounds.builds} builds, {len(rounds.starts)} rounds, {rounds.seconds:.0f} s"
            say(f"{done}: widest interval {widest:.2%} of its ratio")
    return rounds


@dataclass(frozen=True)
class Drift:
    """The change of the baseline's time during the measurement."""

    halves: float  # time of a block in the second half, divided by that in the first half
    per_minute: float  # relative change, from a linear regression of log times

    @property
    def drifted(self) -> bool:
        """Whether the baseline's time changed by more than 5 % between the halves."""
        return abs(self.halves - 1) > _DRIFT


def drift_of(seconds: Sequence[float], began: Sequence[float], starts: Sequence[int]) -> Drift:
    """Estimate the drift of the baseline from the seconds and start times of its blocks.

    Only blocks of the same batches are compared; `starts` holds the index of each first batch.
    """
    logs, times = np.log(np.asarray(seconds, float)), np.asarray(began, float)
    first_batches, late = np.asarray(starts), np.arange(len(logs)) >= len(logs) // 2
    changes: list[float] = []
    for first_batch in np.unique(first_batches):
        same = first_batches == first_batch
        if (same & late).any() and (same & ~late).any():
            changes.append(float(np.median(logs[same & late]) - np.median(logs[same & ~late])))
        logs[same] -= logs[same].mean()
        times[same] -= times[same].mean()
    spread = float(times @ times)
    slope = float(times @ logs) / spread if spread else 0.0
    return Drift(float(np.exp(np.mean(changes))) if changes else 1.0, 60 * slope)


# The sides of a benchmark.

Step = Callable[[], object]
AfterStep = Callable[[], bool]  # called after each step; True ends the loop
Driver = Callable[[AfterStep], object]  # a loop that takes its own steps, like a Trainer


@dataclass
class SideTimes:
    """The seconds per step of one side by round, and the cost of preparing it."""

    seconds: list[float] = field(default_factory=list)
    prepare_s: float = 0.0
    peak_bytes: int | None = None


@dataclass
class PairTimes:
    """The times of our side, of their side and, in some benchmarks, of the third side, `loop`."""

    ours: SideTimes = field(default_factory=SideTimes)
    theirs: SideTimes = field(default_factory=SideTimes)
    loop: SideTimes | None = None
    steps_per_round: int = 1

    def to_dict(self, *, mean: bool = False) -> dict[str, Any]:
        """Return the results for JSON; times are medians of the rounds or, with `mean`, means.

        Use means if steps differ in length, so that every step counts.
        """
        average = np.mean if mean else np.median
        sides = {"ours": self.ours, "theirs": self.theirs}
        if self.loop is not None:
            sides["loop"] = self.loop
        ms = {name: round(1e3 * float(average(side.seconds)), 5) for name, side in sides.items()}
        ratios = np.array(self.ours.seconds) / np.array(self.theirs.seconds)
        memory = None
        if self.ours.peak_bytes is not None and self.theirs.peak_bytes:
            memory = self.ours.peak_bytes / self.theirs.peak_bytes
        result = {
            **{f"{name}_ms": value for name, value in ms.items()},
            "statistic": "mean of rounds" if mean else "median of rounds",
            "ratio": ms["ours"] / ms["theirs"],
            "ratio_paired_median": float(np.median(ratios)),
            "ratio_p10": float(np.quantile(ratios, 0.1)),
            "ratio_p90": float(np.quantile(ratios, 0.9)),
            "ratio_is": "our time over theirs; below 1 ours is faster",
            "faster": ms["theirs"] / ms["ours"],
            "rounds": len(ratios),
            "steps_per_round": self.steps_per_round,
            **{f"{name}_prepare_s": round(side.prepare_s, 3) for name, side in sides.items()},
            **{f"{name}_peak_bytes": side.peak_bytes for name, side in sides.items()},
            "memory_ratio": memory,
        }
        if self.loop is not None:
            to_loop = np.array(self.loop.seconds) / np.array(self.ours.seconds)
            result |= {
                "faster_than_loop": ms["loop"] / ms["ours"],
                "faster_than_loop_p10": float(np.quantile(to_loop, 0.1)),
                "faster_than_loop_p90": float(np.quantile(to_loop, 0.9)),
            }
        return result


def interleave_pair(
    ours: Callable[[], Step],
    theirs: Callable[[], Driver],
    device: torch.device,
    *,
    rounds: int,
    steps_per_round: int,
    warm_up: int = 3,
    seconds: float | None = None,
    loop: Callable[[], Step] | None = None,
) -> PairTimes:
    """Build and warm up our side, then `loop` if there is one, then their side; time all in turn.

    The peak memory of a side covers its build and its warm-up, with the capture of a CUDA graph if
    it has one. `seconds` limits the time of the timed rounds, of which there are at least three if
    `rounds` allows.
    """
    times = PairTimes(steps_per_round=steps_per_round)
    timed = [(_warmed(ours, times.ours, device, warm_up), times.ours)]
    if loop is not None:
        times.loop = SideTimes()
        timed.append((_warmed(loop, times.loop, device, warm_up), times.loop))
    meter = Meter(device)

    def on_warm() -> None:
        times.theirs.prepare_s, times.theirs.peak_bytes = meter.read()

    timer = _PairTimer(
        timed, times, device, rounds=rounds, warm_up=warm_up, seconds=seconds, on_warm=on_warm
    )  # fmt: skip
    theirs()(timer.after_step)
    return times


def _warmed(
    build: Callable[[], Step], times: SideTimes, device: torch.device, warm_up: int
) -> Step:
    """Build a side, take its warm-up steps, and write down what that cost."""
    meter = Meter(device)
    step = build()
    for _ in range(warm_up):
        step()
    times.prepare_s, times.peak_bytes = meter.read()
    return step


def as_driver(step: Step) -> Driver:
    """Turn a single step into a loop that repeats it until `after_step` returns True."""

    def drive(after_step: AfterStep) -> None:
        step()
        while not after_step():
            step()

    return drive


def side_order(rounds: int, sides: int) -> Iterator[int]:
    """Yield the side of each timed block: 0, 1, … in even rounds, the reverse in odd rounds."""
    for number in range(rounds):
        yield from range(sides) if number % 2 == 0 else reversed(range(sides))


class _PairTimer:
    """A timer that their loop calls after each step; it takes the other sides' blocks in turn."""

    def __init__(
        self,
        others: Sequence[tuple[Step, SideTimes]],
        times: PairTimes,
        device: torch.device,
        *,
        rounds: int,
        warm_up: int,
        seconds: float | None,
        on_warm: Callable[[], object],
    ) -> None:
        self.others, self.theirs, self.device = others, times.theirs, device
        self.block, self.seconds = times.steps_per_round, seconds  # steps per block, time limit
        self.sides = 1 + len(others)
        self.order = list(side_order(rounds, self.sides))  # their side is 0
        self.steps_left, self.on_warm, self.warming = warm_up, on_warm, True
        self.done = 0  # timed blocks of all sides
        self.start = self.block_began = 0.0

    def after_step(self) -> bool:
        """Count one of their steps, and take the others' next blocks; return True at the end."""
        self.steps_left -= 1
        if self.steps_left > 0:
            return False
        now = self._now()
        if self.warming:
            self.warming, self.start = False, now
            self.on_warm()
        else:
            self.theirs.seconds.append((now - self.block_began) / self.block)
            self.done += 1
        while not self._over() and self.order[self.done] > 0:
            step, times = self.others[self.order[self.done] - 1]
            began = self._now()
            for _ in range(self.block):
                step()
            times.seconds.append((self._now() - began) / self.block)
            self.done += 1
        if self._over():
            return True
        self.steps_left, self.block_began = self.block, self._now()
        return False

    def _over(self) -> bool:
        """Return whether all rounds are done, or the time is up at the end of a round."""
        if self.done == len(self.order):
            return True
        late = self.seconds is not None and self._now() - self.start > self.seconds
        return late and self.done % self.sides == 0 and self.done >= self.sides * _FEWEST_ROUNDS

    def _now(self) -> float:
        synchronize(self.device)
        return perf_counter()
