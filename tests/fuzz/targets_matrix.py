"""Fuzz targets: the file of a matrix, its stored plan, the driver's state, and its requests."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from frostlab.matrix.plan import matrix_plan, merged, recipes_of, tasks_of
from frostlab.matrix.show import overview_rows, overview_table, terminal_table
from frostlab.matrix.status import read_status
from frostlab.matrix.store import (
    SCHEMA,
    DriverState,
    MatrixFolder,
    MatrixPlan,
    PlannedRun,
    RunState,
    read_plan,
)
from frostlab.recipe.load import recipe_from
from fuzz.mutate import Target
from tiny import tiny

_FILES = (
    b"about: x\nrecipes: [docstrings-gpt, majority-gpt]\ntreatments: [baseline, oelm]\n"
    b"settings: {optim.lr: [1e-3, 3e-3]}\nset: {train.steps: 3}\nseeds: 2\n",
    b"recipes: docstrings-gpt\nsettings:\n  - {optim.lr: 1e-3, train.batch: 8}\nseeds: [3, 1]\n",
)


def _plan() -> MatrixPlan:
    recipe = {key: value for key, value in recipe_from(tiny()).to_dict().items() if key != "seed"}
    base = PlannedRun("a-none-s0", "a", "m", "majority", "none", 0, "accuracy", 0)
    other = PlannedRun("a-oelm-s0", "b", "m", "majority", "oelm", 0, "accuracy", 0, True, base.name)
    return MatrixPlan(SCHEMA, "m", "m.yaml", 1.5, None, [base, other], [recipe])


def _state() -> DriverState:
    runs = {
        "a-none-s0": RunState("running", "cuda:0", 1.0, 1),
        "a-oelm-s0": RunState("failed", None, None, 2, "out of memory"),
    }
    return DriverState(SCHEMA, "running", 1, "x", 1.0, 2.0, "cuda:0", 1, runs, "a full disk")


def _json(value: object) -> bytes:
    return json.dumps(asdict(value)).encode()  # type: ignore[call-overload]


def _file(data: bytes, folder: Path) -> None:
    (folder / "m.yaml").write_bytes(data)
    plan = matrix_plan(str(folder / "m.yaml"))
    assert tasks_of(plan, folder)[:3] is not None
    assert len(recipes_of(plan)) == len(plan.recipes)


def _shown(runs: Path) -> None:
    """Show a status in every way."""
    status = read_status(runs)
    json.dumps(status.to_dict())
    terminal_table(status, most=1)
    terminal_table(status, 60, height=9)
    overview_table(overview_rows(status))


def _stored(data: bytes, folder: Path) -> None:
    matrix = MatrixFolder(folder / "runs", "m")
    matrix.write_plan(_plan())
    matrix.plan_path.write_bytes(data)
    plan = read_plan(matrix.plan_path)
    merged(_plan(), plan)
    _shown(folder / "runs")
    tasks_of(plan, folder)


def _driver(data: bytes, folder: Path) -> None:
    matrix = MatrixFolder(folder / "runs", "m")
    matrix.write_plan(_plan())
    (matrix.path / "state.json").write_bytes(data)
    _shown(folder / "runs")


def _request(data: bytes, folder: Path) -> None:
    matrix = MatrixFolder(folder / "runs", "m")
    matrix.request(stop="x")
    (matrix.path / "requests" / f"{time.time_ns():020}-0.json").write_bytes(data)
    assert all(isinstance(request, dict) for request in matrix.requests())
    assert list(matrix.requests()) == []


TARGETS: dict[str, Target] = {
    "matrix-file": Target(lambda: list(_FILES), _file, "yaml"),
    "matrix-plan": Target(lambda: [_json(_plan())], _stored, "json"),
    "matrix-state": Target(lambda: [_json(_state())], _driver, "json"),
    "matrix-request": Target(lambda: [b'{"stop": "a-none-s0"}'], _request, "json"),
}
