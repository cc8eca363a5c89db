"""Blocks of steps in turn: a random order, then its reverse, all on one clock, build by build."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from frostlab.compare.estimating import FEWEST, Ratio, Rule, ratio_of
from frostlab.training.stopwatch import synchronize

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
        synchronize(self.device)
        began = perf_counter()
        if cuda:
            stream = torch.cuda.current_stream(self.device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
        work()
        if cuda:
            last.record(stream)
        synchronize(self.device)
        host = perf_counter() - began
        return Spent(first.elapsed_time(last) / 1e3 if cuda else host, host)


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
    build_anew: Callable[[], None],
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
            build_anew()
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
