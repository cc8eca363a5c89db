"""Arms built for timing: captured, long enough for the clock, anew, and refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from frostlab.comparison import timed_arms as sides
from frostlab.comparison import timed_arms as timing
from frostlab.comparison.timed_arms import CONTROL, time_arms
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput
from frostlab.recipe.load import recipe_from
from frostlab.timing.clock import BlockClock
from frostlab.timing.interleave import Rule, Spent
from frostlab.training import setup
from frostlab.training.distributed import Compute
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.optimizer import build_optimizer
from tiny import frozen_and_not as arms
from tiny import tiny

CPU = torch.device("cpu")


def test_captured_steps_are_captured_before_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for graphs does its work anew; a later arm's treatment must not undo them."""
    captures: list[str] = []

    def again(work: Callable[[], None]) -> Callable[[], None]:
        captures.append("one")
        return work

    def captured(objective: Any, optim: Any, *rest: Any, **more: Any) -> CapturedStep:
        optimizer = build_optimizer(objective.model, optim, fused=True)
        compute = Compute(CPU, torch.float32)
        return CapturedStep(objective, optimizer, compute, optim.clip, compiles=False, record=again)

    monkeypatch.setattr(setup, "build_step", captured)
    recipes = arms()
    monkeypatch.setattr(timing, "block_for", lambda *given: captures.append("built") or 3)
    found = time_arms(recipes, prepare(recipes["all"]), baseline="all", device=CPU, seconds=0.1)
    builds = ["one"] * 3  # all batches have one shape
    assert captures == [*builds, "built", *builds * (found.builds - 1)]
    assert found.builds >= 2
    assert {arm.step for arm in found.arms.values()} == {"captured"}


@pytest.mark.parametrize(
    ("device", "step_ms", "block"),
    [("cpu", 300, 1), ("cpu", 120, 2), ("cpu", 13, 16), ("cpu", 7, 32), ("cuda", 7, 8)],
)
def test_a_block_is_long_enough_for_the_clock(device: str, step_ms: float, block: int) -> None:
    """0.2 s on the CPU, 0.05 s on CUDA, for the fastest arm; whole passes where it is long."""

    class Taken(BlockClock):
        def block(self, work: Callable[[], object]) -> Spent:
            return Spent(0.0, float(str(work())))

    class Fixed(sides.TimedArm):
        def __init__(self, ms: float) -> None:
            self.order, self.ms = [np.arange(2)] * 16, ms

        def take(self, places: Any) -> Any:
            return len(places) * self.ms / 1e3

    both: dict[str, sides.TimedArm] = {"fast": Fixed(step_ms), "slow": Fixed(3 * step_ms)}
    assert sides.block_for(both, Taken(torch.device(device))) == block


def test_slow_steps_are_timed_on_fewer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**6, 2))  # two seconds a look
    monkeypatch.setattr(sides, "perf_counter", lambda: next(ticks))
    recipe = arms()["all"]
    prepared = prepare(recipe)
    treated = sides.build_arms({"all": recipe}, prepared, "all")
    found = sides.place_arms(treated, prepared, CPU)
    assert [len(side.order) for side in found.values()] == [5, 5]


def test_sides_are_built_anew_in_another_order_and_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, places, kept = list[tuple[str, ...]](), list[int](), list[sides.TimedArm]()
    real = timing.place_arms

    def watched(arms: Any, *given: Any, **more: Any) -> Any:
        made = real(arms, *given, **more)
        names.append(tuple(arms))
        kept.append(made["all"])  # so that its memory is not given to the next
        places.append(next(made["all"].model.parameters()).data_ptr())
        return made

    class Four(Rule):
        def stopped_by(self, builds: int, *ratios: Any) -> str | None:
            return "time" if builds == 4 else None

    monkeypatch.setattr(timing, "place_arms", watched)
    monkeypatch.setattr(timing, "Rule", Four)
    recipes = arms()
    found = time_arms(recipes, prepare(recipes["all"]), baseline="all", device=CPU, block=1)
    assert len(names) == found.builds == 4
    assert {tuple(sorted(each)) for each in names} == {tuple(sorted(("all", CONTROL, "qk")))}
    assert len(set(names)) > 1
    assert len(set(places)) == found.builds


@pytest.mark.parametrize(
    "treatment", ["oelm", "head", {"peft": {"method": "lora", "r": 2, "select": ["up"]}}]
)
def test_a_sides_copy_is_the_treated_model(treatment: Any) -> None:
    recipe = recipe_from(tiny(treatment=treatment))
    prepared = prepare(recipe)
    (name, arm), *_ = sides.build_arms({"all": recipe}, prepared, "all").items()
    side = sides.place_arms({name: arm}, prepared, CPU)[name]
    theirs = dict(arm.built.model.named_parameters())
    for key, p in side.model.named_parameters():
        assert torch.equal(p, theirs[key])
        assert p.requires_grad == theirs[key].requires_grad
        assert p is not theirs[key]
    assert side.model.state_dict().keys() == arm.built.model.state_dict().keys()


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
