"""The differences between two runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from frostlab.errors import BadInput
from frostlab.records.finding.diff import difference
from run_made import RESULT, SHAPE, START, step_event, write_events

DIGESTS = {
    "data": "data-1", "source": None, "revision": None, "weights": {"a": "1", "b": "2"},
    "touched": [], "frozen": {},
}  # fmt: skip
ENVIRONMENT = {"versions": {"torch": "2.0"}, "code": {"commit": "c1", "digest": "d1"}}


def write_run(folder: Path, losses: list[float | None], recipe: str = "", **files: Any) -> Path:
    folder.mkdir()
    result = RESULT | files.pop("result", {})
    start = START | files.pop("start", {}) | {"seed": result["seed"]}
    blocks = [step_event(i, loss=[loss]) for i, loss in enumerate(losses, 1)]
    write_events(folder, start, *(block | files.get("block", {}) for block in blocks))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "recipe.yaml").write_text(recipe or "optim: {lr: 0.1, decay: 0.5}\nseed: 3\n")
    (folder / "digests.json").write_text(json.dumps(DIGESTS | files.get("digests", {})))
    environment = files.get("environment", ENVIRONMENT)
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def test_equal_runs(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, [1.0, None, 0.5]) for name in ("one", "two"))
    found = difference(one, two)
    assert (found.settings, found.inputs, found.environment) == ({}, {}, {})
    assert found.metrics["report accuracy"] == (0.0, 0.0)
    assert found.losses.first is None
    lines = found.text(80).splitlines()
    assert lines[1:4] == [
        "settings: all are equal",
        "data and initial weights: all digests are equal",
        "code and environment: all recorded facts are equal",
    ]
    assert lines[-1] == "losses: equal in all 3 steps that both runs took"


def test_everything_that_differs_is_named(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [1.0, 0.5, 0.25])
    two = write_run(
        tmp_path / "two",
        [1.0, 0.5000001, 0.25, 0.125],
        "optim: {lr: 0.2, decay: 0.5}\nwatch: {every_n_steps: 3}\nseed: 4\n",
        result={"seed": 4, "report": {"accuracy": 0.5, "loss": 0.5}},
        start=SHAPE | {"threads": 2},
        digests={"data": "data-2", "weights": {"a": "1", "b": "3", "c": "4"}},
        environment={"versions": {"torch": "2.1"}, "code": {"commit": "c2", "digest": "d1"}},
        block={"order": "other"},
    )
    found = difference(one, two)
    assert found.settings == {
        "optim.lr": (0.1, 0.2), "watch.every_n_steps": (None, 3), "seed": (3, 4)
    }  # fmt: skip
    assert found.inputs == {"data": ("data-1", "data-2"), "2 of 3 initial weights": ("2", "3")}
    assert found.environment == {"threads": (1, 2), "commit": ("c1", "c2"), "torch": ("2.0", "2.1")}
    assert found.metrics["report accuracy"] == (0.0, 0.5)
    assert found.metrics["report loss"] == (0.5, 0.5), "equal metrics are shown, too"
    assert (found.losses.steps, found.losses.first, found.losses.order) == (3, 2, 1)
    text = found.text(60)
    assert max(map(len, text.splitlines())) <= 60
    assert "losses: first differ at step 2 (0.5 and 0.5000001)" in text
    assert "examples: different, or in a different order, by step 1" in text
    assert json.dumps(found.to_dict())


def test_missing_files_and_damage(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, [1.0]) for name in ("one", "two"))
    for name in ("digests.json", "environment.json", "recipe.yaml"):
        (two / name).unlink()
    found = difference(one, two)
    assert found.inputs["data"] == ("data-1", None)
    assert found.settings["optim.lr"] == (0.1, None)
    assert found.environment["torch"] == ("2.0", None)
    (two / "result.json").write_text("{")
    with pytest.raises(BadInput, match="two is damaged: result.json is not a JSON object"):
        difference(one, two)
