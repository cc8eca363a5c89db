"""Simulate interleaved timings whose truth is known, and count how often their verdict is wrong.

Only the durations are simulated: the order of the blocks, the estimator, the stop rule and the
verdict are the package's. Each line also has the same figures for a simpler rule: one control, no
untimed round or step, a t interval over the builds alone, and no verdict where the baseline drifts
or other processes are busy.

python benchmarks/simulated_timing.py [--timings 1000] [--only A/A]
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from common import report
from frostlab.comparison.plan import TIME_SHARE
from frostlab.comparison.timed_arms import CONTROLS, reasons_unproven
from frostlab.timing import interleave
from frostlab.timing.clock import BlockSeconds
from frostlab.timing.interleave import (
    Blocks,
    Ratio,
    Rounds,
    StopRule,
    drift_of,
    interleave_arms,
    plan_build,
    ratio_of,
    round_orders,
)

BASELINE = "baseline"
ALPHA = 0.05 * TIME_SHARE  # over all arms
SECONDS, WIDTH = 60.0, 0.01  # the defaults of a comparison
SIMPLE_BUILDS = 8  # the fewest builds of the simpler rule


@dataclass(frozen=True)
class Scenario:
    """A machine and the arms on it; all effects are relative to the time of a block or step."""

    arms: tuple[float, ...] = (0.0,)  # slowdown of each arm
    step: float = 0.05  # seconds of the baseline's step
    steps: int = 4  # per block
    build: float = 0.1  # seconds to build an arm
    noise: float = 0.02  # standard deviation of a block
    memory: float = 0.003  # standard deviation of an arm's effect in each build
    offset: float = 0.0  # standard deviation of an arm's effect in all builds
    drift: float = 0.0  # change per minute
    preempted: float = 0.0  # chance that a block is preempted; it then takes up to twice as long
    first_block: float = 0.0  # effect on the first block of each arm that is not a copy
    carry_over: float = 0.0  # effect of the first arm on the first step of whoever comes next
    seconds: float = SECONDS
    width: float = WIDTH

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arms besides the baseline and its controls."""
        return tuple(f"arm {number}" for number in range(1, len(self.arms) + 1))


CPU = Scenario()
H200 = Scenario(step=0.008, steps=8, build=0.7, noise=0.003, memory=0.0015)
FIVE = (0.0,) * 5
SCENARIOS = {
    "A/A": CPU,
    "A/A, 5 arms": replace(CPU, arms=FIVE),
    "A/A, 20 s": replace(CPU, seconds=20.0),
    "A/A, 9 s": replace(CPU, seconds=9.0),
    "A/A, as on an H200": H200,
    "A/A, 5 arms, as on an H200": replace(H200, arms=FIVE),
    "drift of 10 % a minute": replace(CPU, drift=0.1),
    "one block in five is preempted": replace(CPU, preempted=0.2),
    "one block in five is preempted, 5 arms": replace(CPU, preempted=0.2, arms=FIVE),
    "first block of an arm +2.5 %": replace(H200, first_block=0.025),
    "first block of an arm +10 %": replace(H200, first_block=0.1),
    "carry-over of 10 % after a heavy arm": replace(H200, arms=(1.0, 0.0), carry_over=0.1),
    "offset of 0.3 % per copy": replace(H200, offset=0.003),
    "offset of 0.3 % per copy, 5 arms": replace(H200, offset=0.003, arms=FIVE),
    "offset of 1 % per copy": replace(H200, offset=0.01),
    "1 % slower": replace(CPU, arms=(0.01,)),
    "2 % slower": replace(CPU, arms=(0.02,)),
    "5 % slower": replace(CPU, arms=(0.05,)),
    "1 % slower, as on an H200": replace(H200, arms=(0.01,)),
    "2 % slower, as on an H200": replace(H200, arms=(0.02,)),
    "5 % slower, as on an H200": replace(H200, arms=(0.05,)),
}


class Machine:
    """A simulated machine, whose clock advances only when an arm is built or takes a step."""

    def __init__(self, scenario: Scenario, names: Sequence[str], seed: int) -> None:
        self.scenario, self.names, self.now = scenario, tuple(names), 0.0
        self.random = np.random.default_rng(seed)
        self.noise = self._noise()
        slower = dict(zip(scenario.names, scenario.arms, strict=True))
        self.always = {
            name: scenario.step * (1 + slower.get(name, 0.0)) * np.exp(offset)
            for name, offset in self._draw(scenario.offset).items()
        }
        self.last, self.fresh, self.memory = "", set(names), self._draw(scenario.memory)

    def _draw(self, spread: float) -> dict[str, float]:
        return dict(zip(self.names, spread * self.random.normal(size=len(self.names)), strict=True))

    def _noise(self) -> Iterator[float]:
        """Yield the factor of each block."""
        scenario = self.scenario
        while True:
            factors = np.exp(scenario.noise * self.random.normal(size=512))
            hit = self.random.random(512) < scenario.preempted
            yield from factors * (1 + hit * self.random.random(512))

    def clock(self) -> float:
        return self.now

    def rebuild(self) -> None:
        self.now += self.scenario.build * len(self.names)
        self.last, self.fresh, self.memory = "", set(self.names), self._draw(self.scenario.memory)

    def block(self, name: str, steps: int, untimed_step: bool) -> BlockSeconds:
        """Take a block of steps, after an untimed one if wanted."""
        scenario = self.scenario
        step = self.always[name] * np.exp(self.memory[name] + scenario.drift * self.now / 60)
        first = step
        if self.last == scenario.names[0] != name:
            first *= 1 + scenario.carry_over
        if untimed_step:
            self.now += first
            first = step
        seconds = (first + (steps - 1) * step) * next(self.noise)
        if name in self.fresh and name in scenario.names:
            seconds *= 1 + scenario.first_block
        self.fresh.discard(name)
        self.now += seconds
        self.last = name
        return BlockSeconds(seconds, seconds)


@dataclass(frozen=True)
class Outcome:
    """The verdict of one simulated timing."""

    proven: bool
    ratios: dict[str, Ratio]  # by arm
    seconds: float
    builds: int


def time_with_package(scenario: Scenario, seed: int) -> Outcome:
    """Time the arms as `time_arms` does."""
    names = (BASELINE, *CONTROLS, *scenario.names)
    machine = Machine(scenario, names, seed)
    slower = sum(scenario.arms) + len(names)
    steps, pairs = plan_build(
        scenario.seconds, scenario.steps, slower * scenario.step, scenario.build * len(names)
    )

    def measure(name: str, batches: Sequence[int]) -> BlockSeconds:
        return machine.block(name, len(batches), untimed_step=True)

    interleave.perf_counter = machine.clock
    try:
        rounds = interleave_arms(
            names, measure, machine.rebuild, StopRule(scenario.seconds, scenario.width),
            controls=CONTROLS, blocks=Blocks(steps, 16), pairs=pairs, seed=seed,
            say=lambda line: None,
        )  # fmt: skip
    finally:
        interleave.perf_counter = perf_counter
    controls = {name: rounds.ratios()[name] for name in CONTROLS}
    ratios = rounds.ratios(ALPHA)
    return Outcome(
        not reasons_unproven(rounds.builds, controls),
        {name: ratios[name] for name in scenario.names},
        rounds.seconds,
        rounds.builds,
    )


def time_simply(scenario: Scenario, seed: int) -> Outcome:
    """Time the arms by the simpler rule."""
    control = CONTROLS[0]
    names = (BASELINE, control, *scenario.names)
    machine, rule = Machine(scenario, names, seed), StopRule(scenario.seconds, scenario.width)
    round_seconds = (sum(scenario.arms) + len(names)) * scenario.step * scenario.steps
    pairs = int(2 / 3 * scenario.seconds / (SIMPLE_BUILDS * 2 * round_seconds))
    pairs = max(1, min(4, pairs))
    rounds = Rounds(BASELINE, (control,), {name: [] for name in names}, pairs)
    orders = round_orders(names, seed)
    while not rounds.stopped_by:
        if rounds.starts:
            machine.rebuild()
        for number in range(2 * pairs):
            for name in next(orders):
                if name == BASELINE:
                    rounds.began.append(machine.now)
                block = machine.block(name, scenario.steps, untimed_step=False)
                rounds.blocks[name].append(block)
            rounds.starts.append(number // 2)
        base = rounds.device_seconds(BASELINE)
        ratios = {}
        if rounds.builds > 1:
            for name in names[1:]:
                level = 0.05 if name == control else ALPHA / len(scenario.arms)
                times = rounds.device_seconds(name)
                ratios[name] = ratio_of(times, [base], pairs, level)
        widths = rounds.widths() if rounds.builds > 1 else []
        rounds.stopped_by = rule.stopped_by(rounds.builds, widths, machine.now) or ""
    calm = scenario.preempted == 0 and not drift_of(base, rounds.began, rounds.starts).drifted
    return Outcome(
        calm and ratios.pop(control).holds(1.0) and rounds.builds >= SIMPLE_BUILDS,
        {name: ratios[name] for name in scenario.names},
        machine.now,
        rounds.builds,
    )


def figures(
    scenario: Scenario, time: Callable[[Scenario, int], Outcome], timings: int
) -> dict[str, Any]:
    """Return percentages of the timings, and means."""
    outcomes = [time(scenario, seed) for seed in range(timings)]
    truth = {n: 1 + slower for n, slower in zip(scenario.names, scenario.arms, strict=True)}
    apart = [{n for n, r in outcome.ratios.items() if not r.holds(1.0)} for outcome in outcomes]
    equal = {name for name, ratio in truth.items() if ratio == 1}
    missed = [
        any(not ratio.holds(truth[name]) for name, ratio in outcome.ratios.items())
        for outcome in outcomes
    ]

    def percent(hits: Sequence[object]) -> float:
        return round(100 * sum(map(bool, hits)) / timings, 2)

    judged = [names if o.proven else set() for o, names in zip(outcomes, apart, strict=True)]
    return {
        "unproven": percent([not outcome.proven for outcome in outcomes]),
        "false": percent([names & equal for names in judged]),
        "interval_excludes_truth": percent(missed),
        "found": percent([names - equal for names in judged]) if equal != set(truth) else None,
        "half_width_percent": round(
            float(np.mean([50 * r.width for o in outcomes for r in o.ratios.values()])), 3
        ),
        "seconds": round(float(np.mean([outcome.seconds for outcome in outcomes])), 1),
        "builds": round(float(np.mean([outcome.builds for outcome in outcomes])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=int, default=1000)
    parser.add_argument("--only", help="simulate the scenarios whose name contains this")
    options = parser.parse_args()
    for name, scenario in SCENARIOS.items():
        if options.only is None or options.only in name:
            report("simulated_timing", {
                "scenario": name, "timings": options.timings, "level_percent": 100 * ALPHA,
                "simple": figures(scenario, time_simply, options.timings),
                "package": figures(scenario, time_with_package, options.timings),
            })  # fmt: skip


if __name__ == "__main__":
    main()
