"""The faults that the document shows are those the script plants, and each is named."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script() -> Any:
    place = ROOT / "benchmarks" / "planted_faults.py"
    spec = importlib.util.spec_from_file_location("planted_faults", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_faults"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


PLANTED = script()
LAYER = ("norm", "query", "key", "value", "output", "up", "down")
NAMED: dict[str, tuple[set[str], str, str]] = {
    "detached": ({f"layers[1].{role}" for role in LAYER}, "not learning", "detached from the loss"),
    "rate-zero": ({f"layers[2].{role}" for role in LAYER}, "not learning", "learning rate is 0"),
    "vanishing": ({f"layers.{i}.0" for i in range(30)}, "not learning", "its gradient vanishes"),
    "saturated": ({"layers.1.0"}, "not learning", "output of `layers.1.1` is saturated"),
    "missing": ({"layers[0].down"}, "not learning", "missing from the optimizer"),
    "masked": ({"layers[1].query"}, "moved without a gradient", "gradient is exactly zero"),
}


def shape(text: str) -> str:
    """A text without its numbers and shades, which differ a little between processors."""
    text = re.sub(r"[▁-█0]+(?=\s)", "#", text)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", text))


@pytest.mark.parametrize("fault", PLANTED.FAULTS, ids=lambda fault: fault.name)
def test_each_planted_fault_is_named_and_shown(fault: Any) -> None:
    flow = fault.flow()
    parts, word, why = NAMED[fault.name]
    found = flow.frozen_by_accident()
    assert parts <= set(found)
    assert set(found) - parts <= {f"layers.{i}.0" for i in range(30, 38)}  # of the deep stack
    assert {found[part].word for part in parts} == {word}
    assert all(why in found[part].why for part in parts)
    assert set(fault.show) <= {part.name for part in flow.parts}
    document = (ROOT / "docs" / "gradient-flow.md").read_text()
    assert shape(PLANTED.section(fault, flow)) in shape(document)
    assert (ROOT / "docs" / "images" / f"flow-{fault.name}.png").stat().st_size < 60_000


def test_every_fault_of_the_document_is_there() -> None:
    text = (ROOT / "docs" / "gradient-flow.md").read_text()
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [f.description for f in PLANTED.FAULTS]
    assert {f.name for f in PLANTED.FAULTS} == set(NAMED)
