"""What makes a timing unproven, clocks and captured steps, and a real A/A."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from frostlab.comparison.timed_arms import CONTROL, doubts, time_arms
from frostlab.data.prepare import prepare
from frostlab.records import telemetry as watching
from frostlab.records.telemetry import Watched
from frostlab.timing import clock
from frostlab.timing.clock import BlockClock
from frostlab.timing.interleave import Drift, Ratio, Rounds, Spent, drift_of
from frostlab.training.step.eager import EagerStep
from tiny import frozen_and_not as arms

CPU = torch.device("cpu")
CALM = Watched(8, 0.1, None, {})
STEADY = Drift(1.0, 0.0)


def rounds_of(count: int) -> Rounds:
    return Rounds({}, starts=[0] * count)


def test_what_makes_a_timing_unproven() -> None:
    fine = Ratio(1.001, 0.999, 1.003)
    assert doubts(rounds_of(16), fine, STEADY, CALM) == ()
    (said,) = doubts(rounds_of(16), Ratio(1.01, 1.002, 1.018), STEADY, CALM)
    assert said == "the control differs from the baseline: 1.0100 [1.0020, 1.0180]"
    (said,) = doubts(rounds_of(16), fine, Drift(0.93, 0.0), CALM)
    assert said == "the baseline drifted: its second half took -7.0%"
    assert doubts(rounds_of(14), fine, STEADY, CALM) == ("too few builds: 7 of 8",)
    (said,) = doubts(rounds_of(16), fine, STEADY, replace(CALM, cores_of_others=0.9))
    assert said == "other processes kept 0.9 of 8 cores busy"
    (said,) = doubts(rounds_of(16), fine, STEADY, replace(CALM, others_on_gpu=2))
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
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    assert BlockClock(CPU).block(lambda: None) == Spent(0.25, 0.25)


def test_a_clock_on_cuda_times_between_events_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            done.append(f"record on {stream}")

        def elapsed_time(self, other: "Event") -> float:
            done.append("read")
            return 40.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    moments = iter([10.0, 10.25])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    spent = BlockClock(torch.device("cuda", 0)).block(lambda: done.append("work"))
    assert spent == Spent(0.04, 0.25)
    record = "record on its stream"
    assert done == ["wait", record, "work", record, "wait", "read"]


def test_others_on_the_gpu_are_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container our process has another number there, so ours is not looked for."""
    assert watching.others_on_gpu("cpu") is None

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    class FakeGpu:
        def __init__(self, wanted: Any) -> None:
            pass

        def ask(self, question: str) -> list[Process]:
            assert question == "nvmlDeviceGetComputeRunningProcesses"
            return [Process(pid) for pid in on_it]

    monkeypatch.setattr(watching, "Gpu", FakeGpu)
    monkeypatch.setattr(watching, "wanted_gpu", lambda device: (0,))
    on_it: list[int] = []
    assert watching.others_on_gpu("cuda:0") == 0
    on_it.append(7)
    assert watching.others_on_gpu("cuda:0") == 0
    on_it += [8, 8]
    assert watching.others_on_gpu("cuda:0") == 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """What each arm's step is given, in order."""
    given: dict[int, list[bytes]] = {}
    kept: list[EagerStep] = []  # so that no step gets the identity of one that is gone
    real: Callable[..., Any] = EagerStep.__call__

    def recorded(self: EagerStep, parts: Any, scored: int, rate: float) -> Any:
        ids = b"".join(t.numpy().tobytes() for part in parts for t in part.tensors())
        kept.append(self)
        given.setdefault(id(self), []).append(ids + torch.rand(1).numpy().tobytes())
        return real(self, parts, scored, rate)

    monkeypatch.setattr(EagerStep, "__call__", recorded)
    return given


def test_a_real_timing_is_whole_and_every_arm_sees_the_same(
    seen: dict[int, list[bytes]],
) -> None:
    recipes, lines = arms(), list[str]()
    found = time_arms(
        recipes, prepare(recipes["all"]), baseline="all", device=CPU,
        seconds=2.0, block=3, say=lines.append,
    )  # fmt: skip
    each, every = 3 * found.rounds // found.builds, list(seen.values())
    assert len(every) == 3 * found.builds
    for build in zip(*[iter(every)] * 3, strict=True):  # batches and dropout
        assert build[0][-each:] == build[1][-each:] == build[2][-each:]
    assert len(set(every[0])) == 8  # an epoch's batches, the same dropout whenever they return
    timed = [given for side in every[::3] for given in side[-each:]]
    assert set(timed) <= set(every[0])
    assert found.batches == len(set(timed))
    assert set(found.arms) == {"all", CONTROL, "qk"}
    assert found.steps_per_block == 3
    assert found.rounds >= 4
    assert found.arms["all"].ratio is None
    assert 0.7 < found.control.estimate < 1.3
    every, frozen = found.arms["all"], found.arms["qk"]
    assert len(every.blocks) == len(frozen.blocks) == found.rounds
    gone = 2 * 2 * (16 * 16 + 16)  # query and key with their biases, in two layers
    assert every.trainable - frozen.trainable == gone
    assert every.checkpoint_bytes - frozen.checkpoint_bytes == 4 * gone
    assert every.optimizer_bytes - frozen.optimizer_bytes == pytest.approx(8 * gone, abs=64)
    assert every.model_bytes == frozen.model_bytes == every.checkpoint_bytes
    assert (every.step, every.peak_bytes) == ("eager", None)
    assert found.proven == (not found.reasons)
    written = json.loads(json.dumps(found.to_dict()))
    assert written["control"] == found.control.to_dict()
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
    assert len(kept) >= 4  # two sides, built twice at least
    for step, before in kept:
        assert all(torch.equal(p, b) for p, b in zip(step.parameters, before, strict=True))
        assert all(state["exp_avg"].any() for state in step.optimizer.state.values())
    for _, before in kept[1:]:
        both = zip(kept[0][1], before, strict=True)
        assert all(torch.equal(one, other) for one, other in both)
