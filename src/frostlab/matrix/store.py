"""The folder of a matrix inside the folder of runs: plan, state, requests, logs and the lock.

A matrix named N has the folder `matrices/N` next to its runs. Its plan, `matrix.json`, is written
first and says which runs there are; `state.json` says what its driver, the process that works
through the queue, does now; other programs leave files in `requests` for the driver. One driver at
a time holds the lock of the folder of runs. Nothing here imports torch or pydantic, so that
`frostlab status` is fast.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.storage import Lock, digest_of, finite, is_locked, read_json, write_whole
from frostlab.typed import check_schema, read

SCHEMA = 1  # version of matrix.json and state.json
MATRICES = "matrices"
EVERYTHING = "*"  # in a request to stop, stands for the whole matrix
LEFT_OUT = "left out"  # state of a run that the driver's command does not train
_PLAN, _STATE, _REQUESTS, _LOGS, _LOCK, _HOLDER = (
    "matrix.json", "state.json", "requests", "logs", "driver.lock", "driver.json",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRun:
    """One run of a matrix."""

    name: str  # of its folder
    id: str  # the experiment's id, or the recipe's name with its settings
    phase: str  # the group, or the matrix's name
    data: str  # name of its data
    method: str  # the treatment
    seed: int  # the seed of its recipe
    metric: str  # the metric that selects its checkpoint
    recipe: int  # index in `MatrixPlan.recipes`
    optional: bool = False  # whether the published studies only suggest it
    baseline: str | None = None  # name of the run that it is compared with; null: none
    missing: str | None = None  # what it lacks, so that it cannot run


@dataclass(frozen=True)
class MatrixPlan:
    """The content of matrix.json."""

    schema: int  # `SCHEMA` when it was written
    name: str  # name of the matrix
    source: str  # the group or file that it was made from
    planned: float  # s since 1970
    data_dir: str | None  # folder of the data sets; null: the default
    runs: list[PlannedRun]  # in the order of the queue
    recipes: list[dict[str, Any]]  # without their seeds

    @property
    def digest(self) -> str:
        """A digest of the runs and recipes."""
        return digest_of([[asdict(run) for run in self.runs], self.recipes])

    def run(self, name: str) -> PlannedRun | None:
        """Return the run of this name."""
        return next((run for run in self.runs if run.name == name), None)


@dataclass(frozen=True)
class RunState:
    """What only the driver knows about a run; the run's own record does not have it."""

    state: str  # running, pending, failed, stopped, crashed, refused, missing or left out
    place: str | None = None  # device, node or job
    began: float | None = None  # s since 1970
    attempts: int = 1  # how often the driver began it
    error: str | None = None  # why it failed, in one line; null if it did not


@dataclass(frozen=True)
class DriverState:
    """The content of state.json."""

    schema: int  # `SCHEMA` when it was written
    status: str  # running, waiting (for a disk), stopping, stopped or finished
    pid: int  # id of the driver's process
    host: str  # name of its machine
    began: float  # s since 1970
    updated: float  # s since 1970
    places: str  # the devices, or the cluster
    at_once: int  # the most runs at the same time
    # by name; without runs that wait for their turn, and without finished and diverged ones
    runs: dict[str, RunState] = field(default_factory=dict)
    note: str | None = None  # why no run is started, such as a full disk


class MatrixFolder:
    """The folder of one matrix."""

    def __init__(self, runs: Path, name: str) -> None:
        self.runs, self.name = runs, name
        self.path = runs / MATRICES / name

    @property
    def logs(self) -> Path:
        """The folder of logs, one file per run."""
        return self.path / _LOGS

    @property
    def log(self) -> Path:
        """The log of the driver itself."""
        return self.path / "driver.log"

    @property
    def plan_path(self) -> Path:
        """The path of the plan; a comparison's plan has another name, plan.json."""
        return self.path / _PLAN

    def plan(self) -> MatrixPlan:
        """Return the stored plan."""
        return read_plan(self.plan_path)

    def has_plan(self) -> bool:
        """Return whether a plan is stored."""
        return self.plan_path.exists()

    def write_plan(self, plan: MatrixPlan) -> None:
        """Store a plan."""
        self.logs.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / _PLAN, json.dumps(finite(asdict(plan)), indent=1) + "\n")

    def keep_changed_plan(self) -> Path:
        """Rename a plan that another program has changed, and return its new path."""
        path = self.path / f"changed-{int(time.time())}.json"
        os.replace(self.path / _PLAN, path)
        return path

    def state(self) -> DriverState | None:
        """Return what the driver last wrote; None if it has written nothing readable.

        If the driver has ended without finishing the matrix, the status is `stopped`.
        """
        path = self.path / _STATE
        try:
            state = read(DriverState, check_schema(read_json(path), SCHEMA, path), path)
        except (OSError, BadInput):
            return None
        if state.status != "finished" and not self.is_live(state):
            return replace(state, status="stopped", runs=_without_live(state.runs))
        return state

    def is_live(self, state: DriverState) -> bool:
        """Return whether the driver that wrote a state still runs."""
        holder = holder_of(self.runs)
        return holder is not None and (holder.name, holder.pid) == (self.name, state.pid)

    def silence(self, state: DriverState) -> float:
        """Return for how many seconds the driver of this machine has not written its state."""
        here = state.host == socket.gethostname()  # clocks of other machines may differ
        return time.time() - state.updated if here and self.is_live(state) else 0.0

    def write_state(self, state: DriverState) -> None:
        """Store the driver's state."""
        write_whole(self.path / _STATE, json.dumps(finite(asdict(state)), indent=1) + "\n")

    def request(self, **values: Any) -> None:
        """Leave a request for the driver: `stop` with a run's name, or `add` with a plan."""
        folder = self.path / _REQUESTS
        name = f"{time.time_ns():020}-{secrets.token_hex(4)}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, json.dumps(finite(values)) + "\n")
        except OSError as error:
            raise BadInput(
                f"{folder} cannot be written ({error.strerror}), so the request cannot reach "
                f"{self.name}"
            ) from error

    def requests(self) -> Iterator[dict[str, Any]]:
        """Remove the requests, oldest first, and yield each of them.

        A request is removed before it is answered, because the answer may be to end at once.
        """
        for path in self._request_paths():
            values = _request_in(path)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if values is not None:
                yield values

    def is_asked_to_add(self) -> bool:
        """Return whether there is a request to add runs."""
        return any("add" in (_request_in(path) or {}) for path in self._request_paths())

    def forget_stops(self) -> None:
        """Remove requests to stop that were meant for an earlier driver, which has ended."""
        for path in self._request_paths():
            if "stop" in (_request_in(path) or {}):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _request_paths(self) -> list[Path]:
        return sorted((self.path / _REQUESTS).glob("[0-9]*.json"))


def _request_in(path: Path) -> dict[str, Any] | None:
    """Return the content of a request; None if it cannot be read."""
    with suppress(OSError, BadInput):
        values = read_json(path)
        return values if isinstance(values, dict) else None
    return None


def _without_live(runs: dict[str, RunState]) -> dict[str, RunState]:
    """Return the states without those of runs that were running or pending."""
    return {name: run for name, run in runs.items() if run.state not in ("running", "pending")}


def read_plan(path: Path) -> MatrixPlan:
    """Read a matrix.json; refuse one that another version wrote."""
    try:
        values = read_json(path)
    except FileNotFoundError:
        raise BadInput(f"{path.parent} holds no matrix: it has no {path.name}") from None
    plan = read(MatrixPlan, check_schema(values, SCHEMA, path), path)
    if any(not 0 <= run.recipe < len(plan.recipes) for run in plan.runs):
        raise BadInput(f"{path}: a run names a recipe that is not in the list")
    return plan


def matrix_names(runs: Path) -> list[str]:
    """Return the names of the matrices in a folder of runs, the newest last."""
    paths = (runs / MATRICES).glob(f"*/{_PLAN}")
    return [path.parent.name for path in sorted(paths, key=_modified)]


def find_matrix(runs: Path, name: str | None = None) -> MatrixFolder | None:
    """Return a matrix by name; None: the live one, or else the newest, if there is any."""
    names = matrix_names(runs)
    if name is None:
        holder = holder_of(runs)
        if holder is not None and holder.name in names:
            return MatrixFolder(runs, holder.name)
        return MatrixFolder(runs, names[-1]) if names else None
    if name not in names:
        raise BadInput(f"no matrix {name!r:.80} in {runs}{nearest(name, names)}")
    return MatrixFolder(runs, name)


def find_log(runs: Path, name: str, wait: bool) -> Path:
    """Return the path of a run's newest log, by the run's name or an unambiguous beginning of it.

    With `wait`, the path is also returned if a matrix plans the run but has not written a log yet.
    """
    logs = sorted((runs / MATRICES).glob(f"*/{_LOGS}/*.log"), key=_modified)
    paths, planned = {path.stem: path for path in logs}, dict[str, Path]()
    for folder in (MatrixFolder(runs, matrix) for matrix in matrix_names(runs)):
        with suppress(OSError, BadInput):
            planned |= {run.name: folder.logs / f"{run.name}.log" for run in folder.plan().runs}
    if name in planned and name not in paths and not wait:
        raise BadInput(f"{name} has written nothing yet; see `frostlab status`")
    for known in (paths, planned if wait else {}):
        matches = [name] if name in known else [k for k in known if k.startswith(name)]
        if len(matches) == 1 and (matches[0] == name or name not in planned):
            return known[matches[0]]
        if len(matches) > 1:
            raise BadInput(f"run {name!r:.80} could be {', '.join(sorted(matches)[:5])}")
    hint = nearest(name, {**planned, **paths}) or "; `frostlab show` shows a run's record"
    raise BadInput(f"no matrix in {runs} has a log of {name!r:.80}{hint}")


def _modified(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


# The lock of a folder of runs


@dataclass(frozen=True)
class Holder:
    """The driver that holds the lock of a folder of runs."""

    name: str  # of its matrix
    pid: int  # id of its process
    host: str  # name of its machine


def holder_of(runs: Path) -> Holder | None:
    """Return the driver that works on a folder of runs now; None if none does."""
    if not is_locked(runs / MATRICES / _LOCK):
        return None
    with suppress(OSError, BadInput):
        path = runs / MATRICES / _HOLDER
        return read(Holder, read_json(path), path)
    return None


@contextmanager
def driving(folder: MatrixFolder) -> Iterator[Callable[[], None]]:
    """Hold the lock of a folder of runs; raise BadInput if another matrix runs there.

    Yield a function that releases the lock before the context ends.
    """
    parent = folder.runs / MATRICES
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(parent / _LOCK)
        locked = lock.acquire(seconds=0.5)  # a program that checks the lock holds it for a moment
    except OSError as error:
        raise BadInput(f"{parent} cannot be written ({error.strerror})") from None
    if not locked:
        holder = holder_of(folder.runs)
        name = "another matrix" if holder is None else f"the matrix {holder.name}"
        raise BadInput(
            f"{name} runs in {folder.runs} already; see `frostlab status`, add runs to it with "
            "--add, or choose another folder with --runs"
        )
    try:
        holder = Holder(folder.name, os.getpid(), socket.gethostname())
        try:
            write_whole(parent / _HOLDER, json.dumps(asdict(holder)) + "\n")
        except OSError as error:
            raise BadInput(f"{parent} cannot be written ({error.strerror})") from None
        yield lock.release
    finally:
        lock.release()
