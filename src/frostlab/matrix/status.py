"""Where the runs of a matrix, or of a folder of runs, stand.

Most facts come from a run's own record. Others, such as the device, and why a run failed before it
had a record, come from state.json, which the driver (the process that works through the queue)
writes. This module does not import torch, so that `frostlab status` is fast.
"""

import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.matrix.store import (
    LEFT_OUT,
    DriverState,
    MatrixFolder,
    PlannedRun,
    RunState,
    find_matrix,
)
from frostlab.records.finding.index import EVENTS, Summary, list_runs
from frostlab.storage import open_regular
from frostlab.text import joined

ENDED = ("finished", "diverged")
FAILED = ("failed", "crashed", "refused", "missing", "damaged")
_LONGEST_SILENCE = 20.0  # seconds; a driver that can write writes its state every 5 s
_LOG_BYTES = 1 << 16  # bytes that are read from the end of a log


@dataclass(frozen=True)
class RunStatus:
    """Where one run stands; None marks unknown values."""

    name: str  # this field and the next ones are explained in `PlannedRun`
    id: str
    phase: str
    data: str
    method: str
    seed: int | None
    # waiting, pending, running, stopped, interrupted, left out, or one of `ENDED` or `FAILED`
    state: str
    baseline: str | None = None  # name of the run that it is compared with
    optional: bool = False
    place: str | None = None  # device, node or job
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    metric: str | None = None
    # of the final evaluation, on the report split; of an unfinished run, the best so far
    value: float | None = None
    steps_per_second: float | None = None
    seconds_left: float | None = None
    total_seconds: float | None = None
    step_ms: float | None = None
    runs_at_once: int | None = None  # most runs that could share the device
    error: str | None = None
    caution: str | None = None  # a warning about its numbers


@dataclass(frozen=True)
class GpuStatus:
    """The load of one GPU."""

    device: str
    memory_used: int  # bytes
    memory_total: int
    utilisation: float  # percent


@dataclass(frozen=True)
class MatrixStatus:
    """Where a matrix stands, or the runs of a folder without one."""

    name: str | None  # None: the folder has no matrix
    status: str  # the driver's, such as "running"; "not started" or, without a matrix, "no matrix"
    places: str | None  # the devices, or the cluster
    note: str | None  # why no run is started, such as a full disk
    runs: list[RunStatus]
    counts: dict[str, int]  # state → number of runs
    gpus: list[GpuStatus]
    seconds_left: float | None
    expected_end: float | None  # s since 1970

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        # With thousands of runs, `asdict`, which copies every value, takes longer than all else.
        return {
            **vars(self),
            "runs": [dict(vars(row)) for row in self.runs],
            "gpus": [dict(vars(gpu)) for gpu in self.gpus],
        }


def read_status(runs: Path, name: str | None = None) -> MatrixStatus:
    """Return where the matrix `name` stands; None: the live matrix, or else the newest.

    If the folder has no matrix, the status of all its runs is returned.
    """
    matrix = find_matrix(runs, name)
    summaries = {run.name: run for run in (list_runs(runs) if runs.is_dir() else ())}
    if matrix is None:
        rows = [_with_progress(_unplanned(run), runs) for run in summaries.values()]
        return _whole(None, None, rows)
    plan, state = matrix.plan(), matrix.state()
    known = {} if state is None else state.runs
    rows = []
    for run in plan.runs:
        row = _planned(run, summaries.get(run.name))
        row = _with_driver(row, known.get(run.name), state)
        if row.state in FAILED and row.state != "missing":
            last = last_line(matrix, run.name)
            # of a crashed run, the driver knows only how its process ended
            log = last and f"its log ends in: {last}" if row.state == "crashed" else None
            row = replace(row, error=joined((row.error, log)) or last)
        rows.append(_with_progress(row, runs))
    return _whole(matrix, state, rows)


def _planned(run: PlannedRun, record: Summary | None) -> RunStatus:
    return _row(run, record, "waiting")


def _unplanned(record: Summary) -> RunStatus:
    data, method = record.data or "", record.treatment or ""
    seed, metric = record.seed or 0, record.metric or ""
    run = PlannedRun(record.name, record.name, "", data, method, seed, metric, recipe=0)
    return _row(run, record, "interrupted")


def _row(run: PlannedRun, record: Summary | None, if_interrupted: str) -> RunStatus:
    """Return what the plan and the record say; `if_interrupted` is an interrupted run's state."""
    planned = (run.name, run.id, run.phase, run.data, run.method, run.seed)
    if record is None:
        return RunStatus(*planned, "waiting", run.baseline, run.optional, metric=run.metric)
    metric = record.metric or run.metric
    reported = (record.report or {}).get(metric)
    return RunStatus(
        *planned,
        if_interrupted if record.status == "interrupted" else record.status,
        run.baseline,
        run.optional,
        step=record.steps,
        steps=record.steps if record.status in ENDED else None,
        metric=metric,
        value=record.value if reported is None else reported,
        total_seconds=record.total_seconds,
        step_ms=record.step_ms,
        runs_at_once=record.runs_at_once,
        error=record.error,
        caution=record.caution,
    )


def _with_driver(row: RunStatus, known: RunState | None, state: DriverState | None) -> RunStatus:
    """Add what the driver knows about a run that has not ended."""
    if row.state in ENDED:
        return row
    live = state is not None and state.status in ("running", "waiting", "stopping")
    if known is None:
        # The driver tries runs again that were stopped or failed in an earlier call.
        again = live and row.state in ("stopped", "failed")
        return replace(row, state="waiting", error=None) if again else row
    if known.state == LEFT_OUT and row.state != "waiting":
        return row  # as an earlier call left it
    return replace(row, state=known.state, place=known.place, error=known.error)


def _with_progress(row: RunStatus, runs: Path) -> RunStatus:
    """Add the last step, loss, speed and time left of a run that is running."""
    if row.state != "running":
        return row
    try:
        step, steps, loss, speed = _progress(runs / row.name / EVENTS)
    except (OSError, BadInput):
        return row
    left = None
    if steps is not None and step is not None and speed and steps >= step:
        left = (steps - step) / speed
    return replace(
        row, step=step, steps=steps, loss=loss, steps_per_second=speed, seconds_left=left
    )


def _progress(path: Path) -> tuple[int | None, int | None, float | None, float | None]:
    """Return a run's last step, the most steps it may take, its last loss and steps per second."""
    from frostlab.records.events import LatestEvents  # here, because most runs have ended
    from frostlab.records.schema import ResumeEvent, StageEvent, StepEvent

    step = loss = speed = None
    latest = LatestEvents(path)
    while (event := latest.next(StepEvent, ResumeEvent, StageEvent)) is not None:
        step = event.step if step is None else step
        if isinstance(event, StepEvent):
            loss = event.loss[-1] if event.loss else None
            median = sorted(event.ms)[len(event.ms) // 2] if event.ms else 0.0
            speed = 1e3 / median if median > 0 else None
        if isinstance(event, StageEvent) or loss is not None:
            break
    # From here on, only the stage is looked for, so that a long run's many steps are not parsed.
    stage = event if isinstance(event, StageEvent) else latest.next(StageEvent)
    return step, None if stage is None else stage.step + stage.steps, loss, speed


def last_line(matrix: MatrixFolder, name: str) -> str | None:
    """Return the last line of a run's log that is not empty."""
    with suppress(OSError, BadInput), open_regular(matrix.logs / f"{name}.log") as file:
        file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)
    return None


def _whole(
    matrix: MatrixFolder | None, state: DriverState | None, rows: list[RunStatus]
) -> MatrixStatus:
    at_once = 1 if state is None else max(1, state.at_once)
    live = state is not None and state.status in ("running", "waiting", "stopping")
    note = _note(matrix, state)
    # nobody knows when a disk will have room
    left = _seconds_left(rows, at_once) if live and note is None else None
    here = state is None or state.host == socket.gethostname()
    status = "no matrix" if matrix is None else "not started" if state is None else state.status
    return MatrixStatus(
        name=None if matrix is None else matrix.name,
        status=status,
        places=None if state is None else state.places,
        note=note,
        runs=rows,
        counts=dict(Counter(row.state for row in rows)),
        gpus=_gpus(rows) if here else [],
        seconds_left=left,
        expected_end=None if left is None else time.time() + left,
    )


def _note(matrix: MatrixFolder | None, state: DriverState | None) -> str | None:
    """Return why no run is started, or a warning that the driver no longer writes its state."""
    if matrix is None or state is None:
        return None
    silence = matrix.silence(state)
    if silence < _LONGEST_SILENCE:
        return state.note
    return (
        f"what is shown is {silence:.0f} s old: process {state.pid} cannot write {matrix.path} "
        "(is the disk full?), or hangs"
    )


def _seconds_left(rows: Sequence[RunStatus], at_once: int) -> float | None:
    """Estimate the seconds left for all runs.

    A run that waits is expected to take the mean time of the runs that have ended or are running.
    """
    durations = [row.total_seconds for row in rows if row.state in ENDED and row.total_seconds]
    running = [row for row in rows if row.state == "running"]
    for row in running:
        if row.steps and row.steps_per_second:
            durations.append(row.steps / row.steps_per_second)
    waiting = sum(row.state in ("waiting", "pending") for row in rows)
    if not durations:
        return None
    if any(row.state == "pending" for row in rows):  # a cluster has no room for more at once
        at_once = max(1, len(running))
    mean = sum(durations) / len(durations)
    rest = sum(mean if row.seconds_left is None else row.seconds_left for row in running)
    return (rest + waiting * mean) / at_once


def _gpus(rows: Iterable[RunStatus]) -> list[GpuStatus]:
    """Return the load of the GPUs on which runs train here."""
    places = {row.place for row in rows if row.state == "running" and row.place}
    devices = sorted(place for place in places if place.startswith("cuda"))
    if not devices:
        return []
    from frostlab.records.telemetry import Gpu, wanted_gpu  # slow to import, and rarely needed

    gpus = []
    for device in devices:
        with suppress(Exception):  # NVML's errors have their own class, which needs an extra
            gpu = Gpu(wanted_gpu(device))
            memory = gpu.ask("nvmlDeviceGetMemoryInfo")
            used, total = int(memory.used), int(memory.total)
            gpus.append(GpuStatus(device, used, total, gpu.utilisation()))
    return gpus
