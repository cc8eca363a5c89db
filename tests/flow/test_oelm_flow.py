"""The comparison of gradients under frozen queries and keys reads what it says it reads."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from frostlab.recipe.load import recipe_from
from tiny import tiny

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("oelm_flow", BENCHMARKS / "oelm_flow.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(scope="module")
def flows(study: Any) -> dict[str, fl.Flow]:
    arms = ("none", "oelm-k", "frozen-qk")
    return {arm: study.train(recipe_from(tiny(treatment=arm)), 7, 2, None)[0] for arm in arms}


def test_a_role_is_all_its_layers_together(study: Any, flows: dict[str, fl.Flow]) -> None:
    flow = flows["none"]
    layers = [f"layers[{i}].value" for i in range(2)]
    for quantity in ("gradient", "ratio", "distance"):
        series = study.role_series(flow, "value", quantity)
        own = [list(flow.series(name, quantity).values()) for name in layers]
        assert len(series) == 4
        if quantity == "gradient":
            both = [(a**2 + b**2) ** 0.5 for a, b in zip(*own, strict=True)]
            assert series == pytest.approx(both)
        else:  # between those of its layers
            for joined, *each in zip(series, *own, strict=True):
                assert min(each) <= joined <= max(each)


def test_what_is_frozen_has_no_number(study: Any, flows: dict[str, fl.Flow]) -> None:
    made = study.summary(flows["oelm-k"])
    assert set(made["gradient"]) == {"query", "value", "output", "up", "down"}
    assert set(study.summary(flows["frozen-qk"])["ratio"]) == {"value", "output", "up", "down"}
    first = [flow.series("layers[0].value", "weight")[1] for flow in flows.values()]
    assert first == [first[0]] * 3  # the same weights, but for the surgery


def test_ratios_are_to_the_baseline_of_the_same_seed(study: Any) -> None:
    def runs(*numbers: float) -> list[dict[str, Any]]:
        return [{"summary": {"gradient": dict.fromkeys(study.ROLES[2:], n)}} for n in numbers]

    text = study.table({"baseline": runs(1.0, 10.0), "oelm": runs(2.0, 80.0)}, "gradient")
    assert "| gradient norm | oelm |" in text
    assert "| query | frozen |" in text
    assert "| value | 4.00 (2.00–8.00) |" in text
