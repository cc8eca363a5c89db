"""Blocks of steps in turn: every round a random order, then its reverse, all on one clock."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from frostlab.bench.ceilings import synchronize
from frostlab.compare.estimating import Ratio, Rule, ratio_of

BATCHES = 16  # different batches at most: each shape of them must have been met before
_STARTS = 4  # places in the list of batches where blocks begin
_SAYS = 10.0  # seconds
Measure = Callable[[str, Sequence[int]], "Spent"]


@dataclass(frozen=True)
class Spent:
    """Seconds of a block, on the device's own clock and on the host's."""

    device: float
    host: float


class Clock:
    """Times a block from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def block(self, work: Callable[[], object]) -> Spent:
        """Time some work, and all that it leaves to the device."""
        cuda = self.device.type == "cuda"
        self._wait()
        began = perf_counter()
        if cuda:
            stream = torch.cuda.current_stream(self.device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
        work()
        if cuda:
            last.record(stream)
        self._wait()
        host = perf_counter() - began
        return Spent(first.elapsed_time(last) / 1e3 if cuda else host, host)

    def _wait(self) -> None:
        if self.device.type == "mps":
            torch.mps.synchronize()
        synchronize(self.device)


@dataclass
class Rounds:
    """What was measured, one block an arm and round."""

    spent: dict[str, list[Spent]]
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
        return {n: ratio_of(self.device_seconds(n), base) for n in self.spent if n != baseline}


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


def take_turns(
    names: Sequence[str],
    baseline: str,
    measure: Measure,
    rule: Rule,
    *,
    block: int,
    batches: int,
    seed: int,
    say: Callable[[str], None],
) -> Rounds:
    """Measure pairs of rounds until the rule ends it; `measure` takes one arm's block."""
    rounds = Rounds({name: [] for name in names})
    order, start = orders(names, seed), perf_counter()
    said, pair = start, 0
    while not rounds.stopped_by:
        batch_places = places(pair, block, batches)
        for _ in range(2):
            for name in next(order):
                if name == baseline:
                    rounds.began.append(perf_counter() - start)
                rounds.spent[name].append(measure(name, batch_places))
            rounds.starts.append(batch_places[0])
        pair += 1
        rounds.seconds = perf_counter() - start
        ratios = rounds.ratios(baseline).values() if pair > 1 else ()
        rounds.stopped_by = rule.stopped_by(pair, ratios, rounds.seconds) or ""
        if perf_counter() - said >= _SAYS and ratios:
            said, widest = perf_counter(), max(ratio.width for ratio in ratios)
            say(f"{2 * pair} rounds, {rounds.seconds:.0f} s: intervals within {widest:.2%}")
    return rounds
