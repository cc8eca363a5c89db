"""Disturbances of a simulated machine that a simpler timing takes for a difference."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import slow_unless

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMINGS = 40


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        place = BENCHMARKS / "simulated_timing.py"
        spec = importlib.util.spec_from_file_location("simulated_timing", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["simulated_timing"] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.mark.parametrize(
    ("name", "wrong"),
    slow_unless(
        [
            ("one block in five is preempted", "unproven"),
            ("carry-over of 10 % after a heavy arm", "interval_excludes_truth"),
        ],
        [
            ("drift of 10 % a minute", "unproven"),
            ("one block in five is preempted", "unproven"),
            ("first block of an arm +2.5 %", "interval_excludes_truth"),
            ("carry-over of 10 % after a heavy arm", "interval_excludes_truth"),
            ("offset of 0.3 % per copy, 5 arms", "interval_excludes_truth"),
        ],
    ),
)
def test_a_disturbance_fools_the_simpler_timing_only(script: Any, name: str, wrong: str) -> None:
    scenario = script.SCENARIOS[name]
    simple, ours = (
        script.figures(scenario, time, TIMINGS)
        for time in (script.time_simply, script.time_with_package)
    )
    assert simple[wrong] > 50
    assert ours["unproven"] <= 15  # 5 expected at most
    assert ours["interval_excludes_truth"] <= 5  # 1 expected at most


def test_a_slowdown_of_one_percent_is_found_on_a_quiet_machine(script: Any) -> None:
    found = script.figures(
        script.SCENARIOS["1 % slower, as on an H200"], script.time_with_package, TIMINGS
    )
    assert found["found"] > 85
    assert found["seconds"] < 65


def test_an_untimed_step_takes_up_what_a_heavy_arm_leaves(script: Any) -> None:
    scenario = replace(script.SCENARIOS["carry-over of 10 % after a heavy arm"], noise=0, memory=0)
    machine = script.Machine(scenario, ("baseline", *scenario.names), seed=0)
    alone = machine.block("baseline", 8, untimed_step=False).device
    for untimed, slower in ((False, 0.1 / 8), (True, 0.0)):
        machine.block(scenario.names[0], 8, untimed_step=False)
        after = machine.block("baseline", 8, untimed_step=untimed).device
        assert after / alone - 1 == pytest.approx(slower)
