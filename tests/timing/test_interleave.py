"""Interleaved timing: the order of blocks, the interval, the stop rule, drift, a benchmark's pair.

The simulations use the real orders, estimator and stop rule; only the duration of a block is made
up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
import torch
from scipy.stats import binom

from cases import slow_unless
from frostlab.timing import interleave
from frostlab.timing.clock import BlockSeconds
from frostlab.timing.interleave import (
    FEWEST_BUILDS,
    Blocks,
    Rounds,
    StopRule,
    as_driver,
    batches_to_keep,
    build_logs,
    drift_of,
    interleave_arms,
    interleave_pair,
    plan_build,
    ratio_of,
    round_orders,
)

CPU = torch.device("cpu")
CONTROL = "again"
CONTROLS = (CONTROL, "again 2", "again 3", "again 4")
COPIES = dict.fromkeys(("all", *CONTROLS), 0.05)


class FakeClock:
    """Advance only when a step is taken: by its cost, times noise that may be correlated."""

    def __init__(
        self,
        costs: dict[str, float],
        noise: float,
        seed: int,
        correlation: float = 0.0,
        drift: float = 0.0,
        memory: float = 0.0,
        offset: float = 0.0,
    ) -> None:
        self.now, self.drift, self.memory = 0.0, drift, memory
        self.draw = np.random.default_rng(seed)
        offsets = self.draw.normal(size=len(costs)) if offset else np.zeros(len(costs))
        self.costs = {
            name: cost * float(np.exp(offset * own))
            for (name, cost), own in zip(costs.items(), offsets, strict=True)
        }
        self.noise = self._correlated(self.draw, noise, correlation)
        self.rebuild()

    def rebuild(self) -> None:
        """Draw each arm's memory, which makes all its blocks faster or slower."""
        self.memory_effect = {name: float(self.memory * self.draw.normal()) for name in self.costs}

    @staticmethod
    def _correlated(draw: np.random.Generator, noise: float, rho: float) -> Iterator[float]:
        level = noise * draw.normal()
        while True:
            for fresh in draw.normal(size=256):
                yield level
                level = rho * level + noise * float(np.sqrt(1 - rho**2)) * fresh

    def __call__(self) -> float:
        return self.now

    def block(self, name: str, batches: Sequence[int]) -> BlockSeconds:
        """Take one block; its steps share their noise."""
        factor = float(np.exp(next(self.noise) + self.memory_effect[name] + self.drift * self.now))
        spent = len(batches) * self.costs[name] * factor
        self.now += spent
        return BlockSeconds(spent, spent)


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    clock: FakeClock,
    seconds: float = 600.0,
    width: float = 0.01,
    pairs: int = 4,
) -> Rounds:
    monkeypatch.setattr(interleave, "perf_counter", clock)
    return interleave_arms(
        tuple(clock.costs), clock.block, clock.rebuild, StopRule(seconds, width),
        controls=[name for name in clock.costs if name in CONTROLS],
        blocks=Blocks(steps=4, batches=16), pairs=pairs, seed=0, say=lambda line: None,
    )  # fmt: skip


def test_each_round_is_followed_by_its_reverse_and_positions_balance() -> None:
    names = ("all", CONTROL, "a", "b", "c")
    seen = list(islice(round_orders(names, seed=3), 40))
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert second == first[::-1]
        assert sorted(first) == sorted(names)
    middle = (len(names) - 1) / 2
    for name in names:
        assert np.mean([order.index(name) for order in seen]) == middle
    assert len(set(seen)) > 10
    assert seen == list(islice(round_orders(names, seed=3), 40))
    assert seen != list(islice(round_orders(names, seed=4), 40))


def test_two_arms_go_abba() -> None:
    for first, second in zip(*[islice(round_orders(("a", "b"), 0), 8)] * 2, strict=True):
        assert "".join(first + second) in ("abba", "baab")


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 8, 16, 20, 64])
def test_blocks_come_back_to_the_same_batches(block: int) -> None:
    seen = [Blocks(block, 16).of_pair(pair) for pair in range(40)]
    assert all(len(batches) == block and max(batches) < 16 for batches in seen)
    assert len(set(seen)) <= 4  # so that like is compared with like
    counts = Counter(index for batches in seen for index in batches)
    assert len(counts) == min(16, 4 * block, block * max(1, 16 // block))


@pytest.mark.parametrize("slower", slow_unless([0.01], [0.01, 0.02, 0.05]))
def test_known_slowdowns_are_found_on_a_simulated_clock(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """Within the interval in at least as many of 200 timings as 95 % allow, and no bias."""
    held, controls, found, estimates = 0, 0, 0, []
    for seed in range(200):
        costs = COPIES | {"slow": 0.05 * (1 + slower)}
        rounds = simulate(monkeypatch, FakeClock(costs, 0.01, seed, 0.5))
        ratios = rounds.ratios()
        held += ratios["slow"].holds(1 + slower)
        found += ratios["slow"].low > 1
        controls += all(ratios[name].holds(1.0) for name in CONTROLS)
        estimates.append(ratios["slow"].estimate - 1)
        assert rounds.stopped_by == "width"
    fewest = binom.ppf(0.001, 200, 0.95)
    assert held >= fewest
    assert controls >= fewest
    assert found > 190
    assert np.mean(estimates) == pytest.approx(slower, abs=4 * np.std(estimates) / np.sqrt(200))


@pytest.mark.parametrize(
    ("noise", "memory", "offset", "pairs", "timings"),
    [
        (0.003, 0.0025, 0.0, 4, 60),
        (0.003, 0.0, 0.003, 4, 60),
        pytest.param(0.003, 0.0025, 0.0, 4, 500, marks=pytest.mark.slow),
        pytest.param(0.003, 0.0, 0.003, 4, 500, marks=pytest.mark.slow),
        pytest.param(0.019, 0.0, 0.0, 4, 500, marks=pytest.mark.slow),
        pytest.param(0.003, 0.0, 0.001, 4, 500, marks=pytest.mark.slow),
        pytest.param(0.011, 0.0, 0.0, 1, 500, marks=pytest.mark.slow),
    ],
)
def test_false_alarms_of_timings_of_nothing_are_at_most_5_percent(
    monkeypatch: pytest.MonkeyPatch,
    noise: float,
    memory: float,
    offset: float,
    pairs: int,
    timings: int,
) -> None:
    """Whether arms differ in every build anew, or one copy is slower than another in all builds."""
    arms, controls, alone = 0, 0, 0
    for seed in range(timings):
        costs = COPIES | {"one": 0.05, "two": 0.05}
        clock = FakeClock(costs, noise, seed, memory=memory, offset=offset)
        rounds = simulate(monkeypatch, clock, pairs=pairs)
        ratios = rounds.ratios()
        arms += not (ratios["one"].holds(1.0) and ratios["two"].holds(1.0))
        controls += not all(ratios[name].holds(1.0) for name in CONTROLS)
        one, base = (rounds.device_seconds(name) for name in ("one", "all"))
        alone += not ratio_of(one, [base], pairs).holds(1.0)
    most = binom.ppf(0.995, timings, 0.05)
    assert arms <= most
    assert controls <= most
    assert (alone > 0.3 * timings) is (offset > 0)  # builds alone do not show which copy is slower


def test_copies_in_other_memory_differ_however_many_rounds_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Had the arms been built once, most timings of nothing would have found a difference."""
    alarms = 0
    for seed in range(100):
        clock = FakeClock({"all": 0.05, CONTROL: 0.05}, 0.003, seed, memory=0.0025)
        once = simulate(monkeypatch, clock, seconds=0.0, pairs=20)
        arm, base = (once.device_seconds(name)[:40] for name in (CONTROL, "all"))
        alarms += not ratio_of(arm, [base]).holds(1.0)
    assert alarms > 50


def spread(monkeypatch: pytest.MonkeyPatch, rho: float, paired: bool) -> tuple[float, float]:
    """Return the spread of the estimate and the rate of false alarms in 300 A/A timings."""
    estimates, alarms = [], 0
    for seed in range(300):
        clock = FakeClock({"all": 0.05, CONTROL: 0.05}, 0.03, seed, rho)
        rounds = simulate(monkeypatch, clock, seconds=8.0, width=0.0, pairs=1)
        arm, base = rounds.device_seconds(CONTROL), rounds.device_seconds("all")
        if not paired:  # one arm after the other, as two runs would be
            both = [clock.block("all", range(4)).device for _ in range(2 * len(arm))]
            arm, base = both[: len(arm)], both[len(arm) :]
        ratio = ratio_of(arm, [base])
        estimates.append(float(np.log(ratio.estimate)))
        alarms += not ratio.holds(1.0)
    return float(np.std(estimates)), alarms / 300


def test_pairing_helps_where_noise_lasts_longer_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a correlation of 0.95 from block to block, the spread is at most a fifth of the spread of
    timing one arm after the other, and the latter's interval is wrong most of the time."""
    interleaved, alarms = spread(monkeypatch, 0.95, paired=True)
    sequential, wrong = spread(monkeypatch, 0.95, paired=False)
    assert interleaved < sequential / 5
    assert alarms <= binom.ppf(0.999, 300, 0.05) / 300
    assert wrong > 0.4
    independent, _ = spread(monkeypatch, 0.0, paired=True)
    assert interleaved < independent / 2


def test_a_steady_drift_cancels_in_a_round_and_its_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"all": 0.05, CONTROL: 0.05, "slow": 0.051}
    rounds = simulate(monkeypatch, FakeClock(costs, 0.0, 0, drift=0.01))
    ratios = rounds.ratios()
    assert ratios[CONTROL].estimate == pytest.approx(1.0, abs=1e-4)
    assert ratios["slow"].estimate == pytest.approx(1.02, abs=1e-4)
    logs = np.log(np.divide(rounds.device_seconds(CONTROL), rounds.device_seconds("all")))
    assert np.abs(logs).max() > 1e-3  # in one round alone it does not
    drift = drift_of(rounds.device_seconds("all"), rounds.began, rounds.starts)
    assert drift.per_minute == pytest.approx(0.6, rel=0.05)
    assert drift.drifted


def test_the_rule_wants_eight_builds_and_then_four_more() -> None:
    narrow, wide = 0.002, 0.04
    rule = StopRule(100, 0.01)
    stops = [rule.stopped_by(build, [narrow], 0.0) for build in range(1, 13)]
    assert stops == [None] * 11 + ["width"]
    assert StopRule(100, 0.01).stopped_by(50, [narrow, wide], 0.0) is None
    assert StopRule(100, 0.01).stopped_by(4, [wide], 100.0) == "time"
    assert StopRule(100, 0.01).stopped_by(3, [wide], 199.0) is None  # so that it can be proven
    assert StopRule(100, 0.01).stopped_by(3, [wide], 200.0) == "time"
    assert StopRule(0, 0.01).stopped_by(1, [], 1.0) is None  # one build has no interval


def test_the_first_round_after_a_build_does_not_count() -> None:
    """The first block after a build takes ten times as long, of which no time is kept."""
    fresh, taken = set(COPIES), list[tuple[str, tuple[int, ...]]]()

    def measure(name: str, batches: Sequence[int]) -> BlockSeconds:
        seconds = 10.0 if name in fresh else 1.0
        fresh.discard(name)
        taken.append((name, tuple(batches)))
        return BlockSeconds(seconds, seconds)

    class ThreeBuilds(StopRule):
        def stopped_by(self, builds: int, *widths: object) -> str | None:
            return "time" if builds == 3 else None

    rounds = interleave_arms(
        tuple(COPIES), measure, lambda: fresh.update(COPIES), ThreeBuilds(0, 0),
        controls=CONTROLS, blocks=Blocks(2, 16), pairs=2, seed=0, say=lambda line: None,
    )  # fmt: skip
    assert all(rounds.device_seconds(name) == [1.0] * 12 for name in COPIES)
    assert len(taken) == 3 * 5 * len(COPIES)
    build = 5 * len(COPIES)
    for first in range(0, len(taken), build):  # on the batches that are timed next
        assert len({batches for _, batches in taken[first : first + 3 * len(COPIES)]}) == 1


@pytest.mark.parametrize(
    ("seconds", "steps", "step", "build", "plan"),
    [
        (60.0, 4, 0.1, 0.2, (4, 4)),
        (60.0, 4, 0.4, 0.6, (4, 1)),
        (60.0, 4, 0.3, 0.6, (4, 2)),
        (20.0, 4, 0.4, 0.6, (1, 1)),  # blocks are shortened first
        (20.0, 4, 0.25, 0.6, (2, 1)),
        (60.0, 48, 0.1, 0.5, (16, 2)),
        (1.0, 4, 5.0, 3.0, (1, 1)),
        (60.0, 8, 0.07, 8.0, (8, 2)),  # half as long in rounds as in building
        (60.0, 8, 0.07, 10.5, (8, 3)),  # as long in rounds as four builds permit
        (60.0, 8, 0.07, 14.9, (1, 1)),
    ],
)
def test_the_planned_builds_fit_into_the_time(
    seconds: float, steps: int, step: float, build: float, plan: tuple[int, int]
) -> None:
    assert plan_build(seconds, steps, step, build) == plan
    block, pairs = plan
    builds = 6 if 6 * build < seconds / 2 else FEWEST_BUILDS
    if seconds > 1 and (plan != (1, 1) or builds == 6):
        assert builds * (build + (2 * pairs + 1) * (block + 1) * step) <= seconds


@pytest.mark.parametrize(
    ("seconds", "build", "batches"),
    [(60.0, 0.5, 16), (60.0, 5.0, 16), (60.0, 10.0, 8), (60.0, 15.0, 5), (60.0, 100.0, 4)],
)
def test_fewer_batches_are_kept_if_building_is_slow(
    seconds: float, build: float, batches: int
) -> None:
    assert batches_to_keep(seconds, build) == batches


def test_the_estimate_of_two_builds() -> None:
    arm, base = [1.1, 1.2, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0]
    logs = build_logs(arm)
    assert logs == pytest.approx([np.log(1.1 * 1.2) / 2, np.log(1.3) / 2])
    half = 12.7062047 * abs(logs[1] - logs[0]) / 2  # t of one degree of freedom
    ratio = ratio_of(arm, [base])
    assert ratio.estimate == pytest.approx(np.exp(logs.mean()))
    assert (np.log(ratio.low), np.log(ratio.high)) == pytest.approx(
        (logs.mean() - half, logs.mean() + half)
    )


def test_copies_that_differ_widen_the_interval() -> None:
    """An arm between copies of the baseline is no faster, however exact the builds are."""
    copies = [[time] * 6 for time in (1.0, 1.01, 0.99)]
    ratio = ratio_of([1.005] * 6, copies)
    logs = np.log([1.0, 1.01, 0.99])
    half = 4.30265273 * logs.std(ddof=1) * np.sqrt(4 / 3)  # t of two degrees of freedom
    assert np.log(ratio.estimate) == pytest.approx(np.log(1.005) - logs.mean())
    assert np.log(ratio.high / ratio.estimate) == pytest.approx(half)
    assert ratio_of([1.005] * 6, copies[:1]).low > 1
    equal = [1.0, 1.02, 1.0, 1.02, 1.01, 1.01]
    builds = ratio_of([1.0, 1.0, 1.1, 1.1, 1.0, 1.0], [equal] * 3)
    assert builds == ratio_of([1.0, 1.0, 1.1, 1.1, 1.0, 1.0], [equal])  # the wider of the two


def test_intervals_hold_together() -> None:
    draw = np.random.default_rng(0)
    names = (*COPIES, "one", "two")
    times = {name: np.exp(0.01 * draw.normal(size=8)).tolist() for name in names}
    blocks = {name: [BlockSeconds(t, t) for t in own] for name, own in times.items()}
    ratios = Rounds("all", CONTROLS, blocks).ratios(alpha=0.01)
    assert ratios["one"] == ratio_of(times["one"], [times[name] for name in COPIES], 1, 0.005)
    others = [times[name] for name in COPIES if name != CONTROL]
    assert ratios[CONTROL] == ratio_of(times[CONTROL], others, 1, 0.01 / 4)


def test_the_pairs_of_a_build_count_once() -> None:
    arm, base = [1.1, 1.2, 1.0, 1.3, 1.1, 1.1, 1.4, 1.0], [1.0] * 8
    logs = build_logs(arm, pairs=2)
    assert logs == pytest.approx([np.log(arm[:4]).mean(), np.log(arm[4:]).mean()])
    assert ratio_of(arm, [base], pairs=2).estimate == pytest.approx(np.exp(np.log(arm).mean()))


@pytest.mark.parametrize(("change", "drifted"), [(0.03, False), (0.08, True), (-0.08, True)])
def test_drift_compares_blocks_of_the_same_batches(change: float, drifted: bool) -> None:
    """Blocks of other batches may take three times as long, which is no drift."""
    starts = [4 * (pair % 4) for pair in range(10) for _ in range(2)]
    lengths = {0: 1.0, 4: 3.0, 8: 0.5, 12: 2.0}
    draw = np.random.default_rng(0)
    seconds = [
        lengths[start] * (1 + (change if i >= 10 else 0)) * float(np.exp(0.005 * draw.normal()))
        for i, start in enumerate(starts)
    ]
    drift = drift_of(seconds, list(range(20)), starts)
    assert drift_of([1.0, 1.0, 3.0, 3.0], [0, 1, 2, 3], [0, 0, 4, 4]).halves == 1.0
    assert drift.halves == pytest.approx(1 + change, abs=0.01)
    assert drift.drifted is drifted


def test_the_sides_of_a_pair_alternate_and_take_as_many_steps() -> None:
    log: list[str] = []

    def step(name: str) -> Callable[[], object]:
        return lambda: log.append(name)

    times = interleave_pair(
        lambda: step("o"), lambda: as_driver(step("t")), CPU,
        rounds=4, steps_per_round=3, warm_up=2,
    )  # fmt: skip
    assert "".join(log) == "oo" + "tt" + "tttooo" + "ooottt" + "tttooo" + "ooottt"
    assert len(times.ours.seconds) == len(times.theirs.seconds) == 4
    assert times.loop is None
    assert "loop_ms" not in times.to_dict()


def test_a_third_side_takes_its_turn_in_every_round() -> None:
    log: list[str] = []

    def step(name: str) -> Callable[[], object]:
        return lambda: log.append(name)

    times = interleave_pair(
        lambda: step("o"), lambda: as_driver(step("t")), CPU,
        rounds=3, steps_per_round=2, warm_up=1, loop=lambda: step("l"),
    )  # fmt: skip
    assert "".join(log) == "o" + "l" + "t" + "ttooll" + "lloott" + "ttooll"
    assert times.loop is not None
    assert len(times.ours.seconds) == len(times.theirs.seconds) == len(times.loop.seconds) == 3
    times.ours.seconds, times.loop.seconds = [2.0, 1.0, 4.0], [3.0, 3.0, 3.0]
    facts = times.to_dict()
    assert (facts["ours_ms"], facts["loop_ms"], facts["faster_than_loop"]) == (2e3, 3e3, 1.5)
    assert facts["faster_than_loop_p10"] == pytest.approx(np.quantile([1.5, 3.0, 0.75], 0.1))


def test_seconds_end_the_rounds_of_a_pair_but_not_before_three() -> None:
    times = interleave_pair(
        lambda: lambda: None, lambda: as_driver(lambda: None), CPU,
        rounds=500, steps_per_round=1, seconds=0.0,
    )  # fmt: skip
    assert len(times.ours.seconds) == len(times.theirs.seconds) == 3
