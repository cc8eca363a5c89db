"""Timed arms: built, warmed up, refused; reasons why a timing is unproven; a real A/A timing."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from frostlab.comparison import timed_arms
from frostlab.comparison.timed_arms import (
    CONTROLS,
    TimedArm,
    Timing,
    build_arms,
    choose_block,
    judge_time,
    place_arms,
    reasons_unproven,
    time_arms,
    timing_notes,
)
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput
from frostlab.recipe.load import recipe_from
from frostlab.records.telemetry import Watched
from frostlab.timing.clock import BlockClock, BlockSeconds
from frostlab.timing.interleave import Drift, Ratio, StopRule
from frostlab.training import setup
from frostlab.training.batches.batch import collate
from frostlab.training.distributed import Compute
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.optimizer import build_optimizer
from tiny import frozen_and_not as arms
from tiny import tiny

CPU = torch.device("cpu")
CALM = Watched(8, 0.1, None, {})
STEADY = Drift(1.0, 0.0)


COPIES = len(CONTROLS) + 1
FINE = dict.fromkeys(CONTROLS, Ratio(1.001, 0.999, 1.003))


def test_controls_and_builds_make_a_timing_unproven() -> None:
    assert reasons_unproven(4, FINE) == ()
    assert reasons_unproven(3, FINE) == (
        "the models were built too few times: 3 of at least 4 (raise clock.seconds)",
    )
    (reason,) = reasons_unproven(4, FINE | {CONTROLS[1]: Ratio(1.01, 1.002, 1.018)})
    assert reason == (
        "the time of baseline again 2, a copy of the baseline, is not that of the others: "
        "1.0100 [1.0020, 1.0180]"
    )


def test_drift_and_other_processes_are_notes() -> None:
    assert timing_notes(STEADY, CALM) == ()
    (note,) = timing_notes(Drift(0.93, 0.0), CALM)
    assert note == "the baseline drifted: its time changed by -7.0% in the second half"
    busy = replace(CALM, cores_of_others=0.9, others_on_gpu=2)
    assert timing_notes(STEADY, busy) == (
        "other processes kept 0.9 of 8 cores busy", "other processes on the GPU: 2",
    )  # fmt: skip
    (note,) = timing_notes(STEADY, replace(CALM, cores=128, cores_of_others=0.9))
    assert note == "other processes kept 0.9 of 128 cores busy"  # cores count, not their share


@pytest.mark.parametrize(
    ("ratio", "word", "end"),
    [
        (Ratio(0.99, 0.98, 0.999), "better", "faster: a step takes 0.9900 [0.9800, 0.9990] of the "
         "baseline's time."),
        (Ratio(1.02, 1.01, 1.03), "worse", "slower: a step takes 1.0200 [1.0100, 1.0300] of the "
         "baseline's time."),
        (Ratio(1.003, 0.9806, 1.026), "no difference found", "of the baseline's time; a "
         "difference of more than 2.60 % is excluded."),
    ],
)  # fmt: skip
def test_the_interval_decides_the_word(timed: Timing, ratio: Ratio, word: str, end: str) -> None:
    """A drift and the load of other processes do not change it."""
    noisy = replace(timed, proven=True, reasons=(), notes=("the baseline drifted",))
    said, sentence = judge_time(ratio, None, noisy)
    assert said == word
    assert sentence.endswith(end)
    unproven = replace(timed, proven=False, reasons=("too few builds: 3 of at least 4",))
    assert judge_time(ratio, None, unproven)[0] == "unproven"


@pytest.fixture(scope="module")
def timed() -> Timing:
    """A real timing of a baseline alone."""
    recipe = arms()["all"]
    return time_arms(
        {"all": recipe}, prepare(recipe), baseline="all", device=CPU, seconds=0.01, block=1
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """Record the inputs of each arm's steps, in order."""
    inputs: dict[int, list[bytes]] = {}
    kept: list[EagerStep] = []  # so that no step gets the id of one that is gone
    real: Callable[..., Any] = EagerStep.__call__

    def recorded(self: EagerStep, parts: Any, scored: int, rate: float) -> Any:
        ids = b"".join(t.numpy().tobytes() for part in parts for t in part.tensors())
        kept.append(self)
        inputs.setdefault(id(self), []).append(ids + torch.rand(1).numpy().tobytes())
        return real(self, parts, scored, rate)

    monkeypatch.setattr(EagerStep, "__call__", recorded)
    return inputs


@pytest.mark.slow
def test_a_real_timing_is_complete_and_every_arm_sees_the_same_batches(
    seen: dict[int, list[bytes]],
) -> None:
    recipes, lines = arms(), list[str]()
    timing = time_arms(
        recipes, prepare(recipes["all"]), baseline="all", device=CPU,
        seconds=2.0, block=3, say=lines.append,
    )  # fmt: skip
    inputs, width = list(seen.values()), COPIES + 1
    steps = 4 * timing.rounds // timing.builds  # per build, with an untimed one before each block
    assert len(inputs) == width * (timing.builds + 1)  # one build chooses the length of a block
    for build in zip(*[iter(inputs[width:])] * width, strict=True):  # batches and dropout
        assert all(arm == build[0] for arm in build)
        assert len(build[0]) == 4 + steps  # the first round does not count
        assert all(build[0][i] == build[0][i + 1] for i in range(0, 4 + steps, 4))
    assert len(set(inputs[0])) == 8  # an epoch's batches, the same dropout whenever they return
    counted = [step for arm in inputs[width::width] for step in arm[4:]]
    assert set(counted) <= set(inputs[0])
    assert timing.batches == len(set(counted))
    assert set(timing.arms) == {"all", *CONTROLS, "qk"}
    assert timing.steps_per_block == 3
    assert timing.rounds >= 4
    assert timing.arms["all"].ratio is None
    ratios = {name: timing.arms[name].ratio for name in CONTROLS}
    assert all(ratio is not None and ratio.holds(ratio.estimate) for ratio in ratios.values())
    furthest = max(ratios, key=lambda name: abs(np.log(ratios[name].estimate)))  # type: ignore[union-attr]
    assert timing.control == furthest
    trained, frozen = timing.arms["all"], timing.arms["qk"]
    assert len(trained.blocks) == len(frozen.blocks) == timing.rounds
    frozen_parameters = 2 * 2 * (16 * 16 + 16)  # query and key with their biases, in two layers
    assert trained.trainable - frozen.trainable == frozen_parameters
    assert trained.checkpoint_bytes - frozen.checkpoint_bytes == 4 * frozen_parameters
    assert trained.optimizer_bytes - frozen.optimizer_bytes == pytest.approx(
        8 * frozen_parameters, abs=64
    )
    assert trained.model_bytes == frozen.model_bytes == trained.checkpoint_bytes
    assert (trained.step, trained.peak_bytes) == ("eager", None)
    assert timing.proven == (not timing.reasons)
    written = json.loads(json.dumps(timing.to_dict()))
    assert written["arms"]["all"]["blocks"] == list(trained.blocks)
    assert any(line.startswith(f"{CONTROLS[0]}: eager steps") for line in lines)


def test_timing_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every block does the same work."""
    kept: list[tuple[EagerStep, list[torch.Tensor]]] = []
    real: Callable[..., None] = EagerStep.__init__

    def recorded(self: EagerStep, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        kept.append((self, [p.detach().clone() for p in self.parameters]))

    monkeypatch.setattr(EagerStep, "__init__", recorded)
    recipe = arms()["all"]
    time_arms({"all": recipe}, prepare(recipe), baseline="all", device=CPU, seconds=0.1, block=1)
    assert len(kept) >= 3 * COPIES  # built three times at least
    for step, before in kept:
        assert all(torch.equal(p, b) for p, b in zip(step.parameters, before, strict=True))
        assert all(state["exp_avg"].any() for state in step.optimizer.state.values())
    for _, before in kept[1:]:
        both = zip(kept[0][1], before, strict=True)
        assert all(torch.equal(first, later) for first, later in both)


def test_arms_are_timed_although_the_caller_turned_gradients_off() -> None:
    recipe = arms()["all"]
    with torch.no_grad():
        timing = time_arms(
            {"all": recipe}, prepare(recipe), baseline="all", device=CPU, seconds=0.1, block=1
        )
    assert timing.arms


def test_captured_steps_are_captured_before_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replaced by plain functions; a later arm's treatment must not undo a capture."""
    captures: list[str] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        captures.append("captured")
        return work

    def captured(objective: Any, optim: Any, *rest: Any, **more: Any) -> CapturedStep:
        optimizer = build_optimizer(objective.model, optim, fused=True)
        compute = Compute(CPU, torch.float32)
        return CapturedStep(
            objective, optimizer, compute, optim.clip, compiles=False, record=record
        )

    monkeypatch.setattr(setup, "build_step", captured)
    recipes = arms()
    monkeypatch.setattr(
        timed_arms, "choose_block", lambda *args: captures.append("built") or (3, 0.001)
    )
    timing = time_arms(recipes, prepare(recipes["all"]), baseline="all", device=CPU, seconds=0.1)
    builds = ["captured"] * (COPIES + 1)  # all batches have one shape
    # building takes most of the 0.1 s, so all arms are built once more, on fewer batches
    assert captures == [*builds, "built", *builds * (timing.builds + 1)]
    assert timing.batches <= 4
    assert timing.builds >= 2
    assert {arm.step for arm in timing.arms.values()} == {"captured"}


@pytest.mark.parametrize(
    ("device", "step_ms", "block"),
    [("cpu", 300, 1), ("cpu", 120, 2), ("cpu", 13, 16), ("cpu", 7, 32), ("cuda", 7, 8)],
)
def test_a_block_is_long_enough_for_the_clock(device: str, step_ms: float, block: int) -> None:
    """0.2 s on the CPU, 0.05 s on CUDA, for the fastest arm; whole passes where it is long."""

    class SimulatedClock(BlockClock):
        def time(self, work: Callable[[], object]) -> BlockSeconds:
            return BlockSeconds(0.0, float(str(work())))

    class SimulatedArm(TimedArm):
        def __init__(self, ms: float) -> None:
            self.order, self.ms = [np.arange(2)] * 16, ms

        def take(self, batches: Any) -> Any:
            return len(batches) * self.ms / 1e3

    both: dict[str, TimedArm] = {"fast": SimulatedArm(step_ms), "slow": SimulatedArm(3 * step_ms)}
    steps, seconds = choose_block(both, SimulatedClock(torch.device(device)))
    assert steps == block
    assert seconds == pytest.approx(4 * step_ms / 1e3)  # of one step of each arm


def test_slow_steps_are_timed_on_fewer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**6, 2))  # the clock advances by two seconds at each reading
    monkeypatch.setattr(timed_arms, "perf_counter", lambda: next(ticks))
    recipe = arms()["all"]
    prepared = prepare(recipe)
    built = build_arms({"all": recipe}, prepared, "all")
    timed = place_arms(built, prepared, CPU)
    assert [len(arm.order) for arm in timed.values()] == [5] * COPIES


def test_every_metered_eager_arm_takes_two_steps_on_the_largest_batch(
    seen: dict[int, list[bytes]],
) -> None:
    """So that the peak memory of all arms has the activations and the optimizer's state."""
    recipe = arms()["all"]
    prepared = prepare(recipe)
    built = build_arms({"all": recipe}, prepared, "all")
    order = [np.arange(size) for size in (2, 5, 3)]
    place_arms(built, prepared, CPU, order=order)
    (steps, *others) = seen.values()
    assert len(others) == len(CONTROLS)
    assert all(inputs == steps for inputs in others)
    examples = prepared.splits["train"]
    largest = collate(examples, order[1], 0).tensors()
    content = b"".join(t.numpy().tobytes() for t in largest)
    assert [inputs.startswith(content) for inputs in steps] == [True, True]
    seen.clear()
    place_arms(built, prepared, CPU, order=order, metered=False)
    assert not seen


def test_arms_are_built_again_in_another_order_and_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, addresses, kept = list[tuple[str, ...]](), list[int](), list[TimedArm]()
    real = timed_arms.place_arms

    def recorded(arms: Any, *args: Any, **kwargs: Any) -> Any:
        timed = real(arms, *args, **kwargs)
        names.append(tuple(arms))
        kept.append(timed["all"])  # so that its memory is not given to the next
        addresses.append(next(timed["all"].model.parameters()).data_ptr())
        return timed

    class TwoBuilds(StopRule):
        def stopped_by(self, builds: int, *ratios: Any) -> str | None:
            return "time" if builds == 2 else None

    monkeypatch.setattr(timed_arms, "place_arms", recorded)
    monkeypatch.setattr(timed_arms, "StopRule", TwoBuilds)
    recipes = arms()
    timing = time_arms(recipes, prepare(recipes["all"]), baseline="all", device=CPU, block=1)
    assert len(names) == timing.builds + 1 == 3
    assert {tuple(sorted(order)) for order in names} == {tuple(sorted(("all", *CONTROLS, "qk")))}
    assert len(set(names)) > 1
    assert len(set(addresses)) == len(names)


@pytest.mark.parametrize(
    "treatment", ["oelm", "head", {"peft": {"method": "lora", "r": 2, "select": ["up"]}}]
)
def test_a_timed_arm_copies_the_treated_model(treatment: Any) -> None:
    recipe = recipe_from(tiny(treatment=treatment))
    prepared = prepare(recipe)
    (name, arm), *_ = build_arms({"all": recipe}, prepared, "all").items()
    timed = place_arms({name: arm}, prepared, CPU)[name]
    originals = dict(arm.built.model.named_parameters())
    for key, p in timed.model.named_parameters():
        assert torch.equal(p, originals[key])
        assert p.requires_grad == originals[key].requires_grad
        assert p is not originals[key]
    assert timed.model.state_dict().keys() == arm.built.model.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "baseline", "message"),
    [
        ({}, "al", "unknown baseline al; choose from: all, other; did you mean `all`?"),
        ({"train__batch": 16}, "all", "train.batch is 16 in other but 32 in all"),
        ({"seed": 1}, "all", "seed is 1 in other but 0 in all"),
        ({"data__examples": 128}, "all", "data is .* in other but"),
    ],
)
def test_arms_that_cannot_be_timed_together_are_refused(
    changes: dict[str, Any], baseline: str, message: str
) -> None:
    recipes = {"all": recipe_from(tiny()), "other": recipe_from(tiny(**changes))}
    with pytest.raises(BadInput, match=message.replace("?", r"\?")):
        time_arms(recipes, prepare(recipes["all"]), baseline=baseline, device=CPU)
    named = {"all": recipes["all"], CONTROLS[-1]: recipes["all"]}
    with pytest.raises(BadInput, match="`baseline again 4`, because it is a control's name"):
        time_arms(named, prepare(recipes["all"]), baseline="all", device=CPU)


def test_savings_are_those_against_the_baseline() -> None:
    """If the baseline itself freezes, an arm that freezes the same saves nothing more."""
    recipes = {
        "frozen": recipe_from(tiny() | {"treatment": "oelm"}),
        "same": recipe_from(tiny() | {"treatment": {"freeze": ["query", "key"]}}),
        "all": recipe_from(tiny()),
    }
    arms = build_arms(recipes, prepare(recipes["all"]), "frozen")
    speed = {name: arm.savings.speed_up for name, arm in arms.items() if arm.savings}
    assert speed["frozen"] == speed["same"] == 1.0
    assert speed["all"] < 1.0
    other = build_arms(recipes, prepare(recipes["all"]), "all")
    assert other["frozen"].savings is not None
    assert other["frozen"].savings.speed_up == pytest.approx(1 / speed["all"])
