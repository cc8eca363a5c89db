"""Interleaved timing: who goes when, what is found on a simulated clock, and a real A/A.

The simulations go through the real turns, estimator and stop rule; only what a block takes is
made up.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from frostlab.compare import turns
from frostlab.compare.estimating import FEWEST, Ratio, Rule, paired_logs, ratio_of
from frostlab.compare.sides import CONTROL
from frostlab.compare.timing import doubts, time_arms
from frostlab.compare.turns import Clock, Rounds, Spent, orders, places, take_turns
from frostlab.compare.watching import Drift, Watched, drift_of
from frostlab.data import prepare
from frostlab.errors import BadInput
from frostlab.recipe import Recipe
from frostlab.recipe.loading import recipe_from
from frostlab.training.step import EagerStep
from tiny import tiny

CPU = torch.device("cpu")
CALM = Watched(8, 0.1, None, {})
STEADY = Drift(1.0, 0.0)


class FakeClock:
    """Advances only when a step is taken: what it costs, times noise that may be correlated."""

    def __init__(
        self,
        costs: dict[str, float],
        noise: float,
        seed: int,
        correlation: float = 0.0,
        drift: float = 0.0,
    ) -> None:
        self.now, self.costs, self.drift = 0.0, costs, drift
        draw = np.random.default_rng(seed)
        self.noise = self._correlated(draw, noise, correlation)

    @staticmethod
    def _correlated(draw: np.random.Generator, noise: float, rho: float) -> Iterator[float]:
        level = noise * draw.normal()
        while True:
            for fresh in draw.normal(size=256):
                yield level
                level = rho * level + noise * float(np.sqrt(1 - rho**2)) * fresh

    def __call__(self) -> float:
        return self.now

    def block(self, name: str, at: Sequence[int]) -> Spent:
        """One block: its noise is common to its steps."""
        factor = float(np.exp(next(self.noise) + self.drift * self.now))
        spent = len(at) * self.costs[name] * factor
        self.now += spent
        return Spent(spent, spent)


def simulate(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock, seconds: float = 600.0, width: float = 0.01
) -> Rounds:
    monkeypatch.setattr(turns, "perf_counter", clock)
    return take_turns(
        tuple(clock.costs), "all", clock.block, Rule(seconds, width),
        block=4, batches=16, seed=0, say=lambda line: None,
    )  # fmt: skip


def test_each_round_is_followed_by_its_reverse_and_positions_balance() -> None:
    names = ("all", CONTROL, "a", "b", "c")
    seen = list(islice(orders(names, seed=3), 40))
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert second == first[::-1]
        assert sorted(first) == sorted(names)
    middle = (len(names) - 1) / 2
    for name in names:
        assert np.mean([order.index(name) for order in seen]) == middle
    assert len(set(seen)) > 10
    assert seen == list(islice(orders(names, seed=3), 40))
    assert seen != list(islice(orders(names, seed=4), 40))


def test_two_sides_go_abba() -> None:
    for first, second in zip(*[islice(orders(("a", "b"), 0), 8)] * 2, strict=True):
        assert "".join(first + second) in ("abba", "baab")


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 8, 16, 20, 64])
def test_blocks_come_back_to_the_same_batches(block: int) -> None:
    seen = [places(pair, block, 16) for pair in range(40)]
    assert all(len(at) == block and max(at) < 16 for at in seen)
    assert len(set(seen)) <= 4  # so that like is compared with like
    counts = Counter(place for at in seen for place in at)
    assert len(counts) == min(16, 4 * block, block * max(1, 16 // block))


@pytest.mark.parametrize("slower", [0.01, 0.02, 0.05])
def test_known_slowdowns_are_found_on_a_simulated_clock(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """Within the interval in at least as many of 200 timings as 95 % allow, and no bias."""
    held, control, found = 0, 0, []
    for seed in range(200):
        costs = {"all": 0.05, CONTROL: 0.05, "slow": 0.05 * (1 + slower)}
        rounds = simulate(monkeypatch, FakeClock(costs, 0.01, seed, 0.5))
        ratios = rounds.ratios("all")
        held += ratios["slow"].holds(1 + slower)
        control += ratios[CONTROL].holds(1.0)
        found.append(ratios["slow"].estimate - 1)
        assert rounds.stopped_by == "width"
    fewest = binom.ppf(0.001, 200, 0.95)
    assert held >= fewest
    assert control >= fewest
    assert np.mean(found) == pytest.approx(slower, abs=4 * np.std(found) / np.sqrt(200))


@pytest.mark.parametrize("noise", [0.005, 0.012])
def test_false_alarms_of_2000_timings_of_nothing_are_5_percent(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """The second noise is the worst: there, stopping when the interval is narrow costs 0.9 %."""
    alarms = 0
    for seed in range(2000):
        clock = FakeClock({"all": 0.05, CONTROL: 0.05}, noise, seed)
        alarms += not simulate(monkeypatch, clock).ratios("all")[CONTROL].holds(1.0)
    low, high = binom.ppf([0.005, 0.995], 2000, 0.05)
    assert low <= alarms <= high


def spread(monkeypatch: pytest.MonkeyPatch, rho: float, paired: bool) -> tuple[float, float]:
    """Of 300 A/A timings of 20 rounds: the spread of the estimate, and the false alarms."""
    found, alarms = [], 0
    for seed in range(300):
        clock = FakeClock({"all": 0.05, CONTROL: 0.05}, 0.03, seed, rho)
        rounds = simulate(monkeypatch, clock, seconds=8.0, width=0.0)
        arm, base = rounds.device_seconds(CONTROL), rounds.device_seconds("all")
        if not paired:  # one arm after the other, as two runs would be
            both = [clock.block("all", range(4)).device for _ in range(2 * len(arm))]
            arm, base = both[: len(arm)], both[len(arm) :]
        ratio = ratio_of(arm, base)
        found.append(float(np.log(ratio.estimate)))
        alarms += not ratio.holds(1.0)
    return float(np.std(found)), alarms / 300


def test_pairing_helps_where_noise_lasts_longer_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How far: at a correlation of 0.95 from block to block the spread is a fifth or less of
    that of one arm after the other, whose own interval is then wrong most of the time."""
    turn, alarms = spread(monkeypatch, 0.95, paired=True)
    after, wrong = spread(monkeypatch, 0.95, paired=False)
    assert turn < after / 5
    assert alarms <= binom.ppf(0.999, 300, 0.05) / 300
    assert wrong > 0.4
    independent, _ = spread(monkeypatch, 0.0, paired=True)
    assert turn < independent / 2


def test_a_steady_drift_cancels_in_a_round_and_its_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"all": 0.05, CONTROL: 0.05, "slow": 0.051}
    rounds = simulate(monkeypatch, FakeClock(costs, 0.0, 0, drift=0.01))
    ratios = rounds.ratios("all")
    assert ratios[CONTROL].estimate == pytest.approx(1.0, abs=1e-4)
    assert ratios["slow"].estimate == pytest.approx(1.02, abs=1e-4)
    logs = np.log(np.divide(rounds.device_seconds(CONTROL), rounds.device_seconds("all")))
    assert np.abs(logs).max() > 1e-3  # in one round alone it does not
    drift = drift_of(rounds.device_seconds("all"), rounds.began, rounds.starts)
    assert drift.per_minute == pytest.approx(0.6, rel=0.05)
    assert drift.drifted


def test_the_rule_wants_ten_pairs_and_then_five_more() -> None:
    narrow, wide = Ratio(1.0, 0.999, 1.001), Ratio(1.0, 0.98, 1.02)
    rule = Rule(100, 0.01)
    said = [rule.stopped_by(pair, [narrow], 0.0) for pair in range(1, 16)]
    assert said == [None] * (FEWEST + 4) + ["width"]
    assert Rule(100, 0.01).stopped_by(50, [narrow, wide], 0.0) is None
    assert Rule(100, 0.01).stopped_by(3, [wide], 100.0) == "time"
    assert Rule(0, 0.01).stopped_by(1, [], 1.0) is None  # one pair has no interval


def test_the_estimate_by_hand() -> None:
    arm, base = [1.1, 1.2, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0]
    logs = paired_logs(arm, base)
    assert logs == pytest.approx([np.log(1.1 * 1.2) / 2, np.log(1.3) / 2])
    half = 12.7062047 * abs(logs[1] - logs[0]) / 2  # t of one degree of freedom
    found = ratio_of(arm, base)
    assert found.estimate == pytest.approx(np.exp(logs.mean()))
    assert (np.log(found.low), np.log(found.high)) == pytest.approx(
        (logs.mean() - half, logs.mean() + half)
    )


def rounds_of(count: int) -> Rounds:
    return Rounds({}, starts=[0] * count)


def test_what_makes_a_timing_unproven() -> None:
    fine = Ratio(1.001, 0.999, 1.003)
    assert doubts(rounds_of(20), fine, STEADY, CALM) == ()
    (said,) = doubts(rounds_of(20), Ratio(1.01, 1.002, 1.018), STEADY, CALM)
    assert said == "the control differs from the baseline: 1.0100 [1.0020, 1.0180]"
    (said,) = doubts(rounds_of(20), fine, Drift(0.93, 0.0), CALM)
    assert said == "the baseline drifted: its second half took -7.0%"
    assert doubts(rounds_of(18), fine, STEADY, CALM) == ("too few rounds: 18 of 20",)
    (said,) = doubts(rounds_of(20), fine, STEADY, replace(CALM, cores_of_others=0.9))
    assert said == "other processes kept 0.9 of 8 cores busy"
    (said,) = doubts(rounds_of(20), fine, STEADY, replace(CALM, others_on_gpu=2))
    assert said == "other processes on the GPU: 2"


@pytest.mark.parametrize(("change", "drifted"), [(0.03, False), (0.08, True), (-0.08, True)])
def test_drift_compares_blocks_of_the_same_batches(change: float, drifted: bool) -> None:
    """Blocks of other batches may take three times as long: that is no drift."""
    starts = [4 * (pair % 4) for pair in range(10) for _ in range(2)]
    lengths = {0: 1.0, 4: 3.0, 8: 0.5, 12: 2.0}
    draw = np.random.default_rng(0)
    took = [
        lengths[start] * (1 + (change if i >= 10 else 0)) * float(np.exp(0.005 * draw.normal()))
        for i, start in enumerate(starts)
    ]
    found = drift_of(took, list(range(20)), starts)
    assert drift_of([1.0, 1.0, 3.0, 3.0], [0, 1, 2, 3], [0, 0, 4, 4]).halves == 1.0
    assert found.halves == pytest.approx(1 + change, abs=0.01)
    assert found.drifted is drifted


def test_a_clock_waits_and_counts_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 10.25])
    monkeypatch.setattr(turns, "perf_counter", lambda: next(moments))
    assert Clock(CPU).block(lambda: None) == Spent(0.25, 0.25)


def arms() -> dict[str, Recipe]:
    frozen = {"freeze": ["query", "key"]}
    return {"all": recipe_from(tiny()), "qk": recipe_from(tiny(treatment=frozen))}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """What each arm's step is given, in order."""
    given: dict[int, list[bytes]] = {}
    real: Callable[..., Any] = EagerStep.__call__

    def recorded(self: EagerStep, parts: Any, scored: int, rate: float) -> Any:
        ids = b"".join(t.numpy().tobytes() for part in parts for t in part.tensors())
        given.setdefault(id(self), []).append(ids + torch.rand(1).numpy().tobytes())
        return real(self, parts, scored, rate)

    monkeypatch.setattr(EagerStep, "__call__", recorded)
    return given


def test_a_real_timing_is_whole_and_every_arm_sees_the_same(
    seen: dict[int, list[bytes]],
) -> None:
    recipes, lines = arms(), list[str]()
    timing = time_arms(
        recipes, prepare(recipes["all"]), baseline="all", device=CPU,
        seconds=2.0, block=3, say=lines.append,
    )  # fmt: skip
    first, *others = seen.values()
    count = (timing.rounds + 2) * 3  # and the warm-up's blocks
    assert len(others) == 2
    assert all(other[-count:] == first[-count:] for other in others)  # batches and dropout
    assert len(set(first)) == 8  # an epoch's batches, and the same dropout whenever they return
    assert timing.batches == len(set(first[-3 * timing.rounds :]))
    assert set(timing.arms) == {"all", CONTROL, "qk"}
    assert timing.steps_per_block == 3
    assert timing.rounds >= 4
    assert timing.arms["all"].ratio is None
    assert 0.7 < timing.control.estimate < 1.3
    every, frozen = timing.arms["all"], timing.arms["qk"]
    assert len(every.blocks) == len(frozen.blocks) == timing.rounds
    gone = 2 * 2 * (16 * 16 + 16)  # query and key with their biases, in two layers
    assert every.trainable - frozen.trainable == gone
    assert every.checkpoint_bytes - frozen.checkpoint_bytes == 4 * gone
    assert every.optimizer_bytes - frozen.optimizer_bytes == pytest.approx(8 * gone, abs=64)
    assert every.model_bytes == frozen.model_bytes == every.checkpoint_bytes
    assert (every.step, every.peak_bytes) == ("eager", None)
    assert timing.proven == (not timing.reasons)
    written = json.loads(json.dumps(timing.to_dict()))
    assert written["control"] == timing.control.to_dict()
    assert any(line.startswith(f"{CONTROL}: eager steps") for line in lines)


def test_timing_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every block does the same work."""
    kept: list[tuple[EagerStep, list[torch.Tensor]]] = []
    real: Callable[..., None] = EagerStep.__init__

    def watched(self: EagerStep, *given: Any, **more: Any) -> None:
        real(self, *given, **more)
        kept.append((self, [p.detach().clone() for p in self.parameters]))

    monkeypatch.setattr(EagerStep, "__init__", watched)
    recipe = arms()["all"]
    time_arms({"all": recipe}, prepare(recipe), baseline="all", device=CPU, seconds=0.1, block=1)
    assert len(kept) == 2
    for step, before in kept:
        assert all(torch.equal(p, b) for p, b in zip(step.parameters, before, strict=True))
        assert all(state["exp_avg"].any() for state in step.optimizer.state.values())
    both = zip(kept[0][1], kept[1][1], strict=True)
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize(
    ("changes", "baseline", "said"),
    [
        ({}, "al", "baseline al is none of all, other; did you mean `all`?"),
        ({"train__batch": 16}, "all", "train.batch of other is 16, of all 32"),
        ({"seed": 1}, "all", "seed of other is 1, of all 0"),
        ({"data__examples": 128}, "all", "data of other is"),
    ],
)
def test_arms_that_cannot_be_timed_together_are_refused(
    changes: dict[str, Any], baseline: str, said: str
) -> None:
    recipes = {"all": recipe_from(tiny()), "other": recipe_from(tiny(**changes))}
    with pytest.raises(BadInput, match=said.replace("?", r"\?")):
        time_arms(recipes, prepare(recipes["all"]), baseline=baseline, device=CPU)
    named = {"all": recipes["all"], CONTROL: recipes["all"]}
    with pytest.raises(BadInput, match="the control's name"):
        time_arms(named, prepare(recipes["all"]), baseline="all", device=CPU)
