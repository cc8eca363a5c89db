"""The state of a matrix as a table of runs for the terminal, and the overview in Markdown.

The overview has a row for each experiment or arm, with the mean over its seeds.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frostlab.matrix.status import ENDED, FAILED, MatrixStatus, RunStatus
from frostlab.text import NONE, counted, hms, markdown, number, plain

if TYPE_CHECKING:
    from rich.console import Group

_UNTREATED = ("none", "baseline")  # names of the treatment that changes nothing
HEAD = ("phase", "id", "data", "method", "total", "step", "gap to baseline", "status")
_STYLES = {
    "running": "cyan", "pending": "dim", "finished": "green", "waiting": "dim", "stopped": "yellow",
    **dict.fromkeys((*FAILED, "diverged"), "red"),
}  # fmt: skip
_ORDER = ("running", *FAILED, "diverged", "stopped", "interrupted", "pending", "waiting",
          "finished")  # fmt: skip


@dataclass(frozen=True)
class OverviewRow:
    """One experiment or arm; without results, it has not been run yet."""

    phase: str  # the group of experiments, or the comparison
    id: str  # of the experiment; else the arm's name
    data: str
    method: str  # name of the treatment
    total_seconds: float | None = None  # mean over whole runs
    # of steps that the arms took in turn; if there are none, of the steps of whole runs
    step_seconds: float | None = None
    gap: str | None = None  # effect on the metric with its interval and verdict, or `baseline`
    status: str = "not run"

    def cells(self) -> list[str]:
        """Return the row as texts, in the order of `HEAD`; totals are h:mm:ss, steps are in ms."""
        step = NONE if self.step_seconds is None else f"{number(1e3 * self.step_seconds)} ms"
        return [self.phase, self.id, self.data, self.method, hms(self.total_seconds), step,
                self.gap or NONE, self.status]  # fmt: skip


def overview_table(rows: Iterable[OverviewRow]) -> str:
    """Return the overview in Markdown."""
    return markdown(HEAD, [row.cells() for row in rows])


def overview_rows(status: MatrixStatus) -> list[OverviewRow]:
    """Return one row for every experiment of a matrix, over its seeds.

    Times are the means of finished runs that had their device to themselves. If there are none, the
    times are None, and the status says so if a run shared its device.
    """
    by_name = {row.name: row for row in status.runs}
    baselines = {row.baseline for row in status.runs}
    by_id: dict[str, list[RunStatus]] = {}
    for row in status.runs:
        by_id.setdefault(row.id, []).append(row)
    return [
        OverviewRow(
            phase=runs[0].phase or NONE,
            id=name,
            data=runs[0].data,
            method=runs[0].method,
            total_seconds=_mean(row.total_seconds for row in _alone(runs)),
            step_seconds=_mean(row.step_ms and row.step_ms / 1e3 for row in _alone(runs)),
            gap=_gap(runs, by_name, baselines),
            status=_status(runs),
        )
        for name, runs in by_id.items()
    ]


def _alone(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """Return the finished runs that shared their device with no other run."""
    return [row for row in runs if row.state == "finished" and (row.runs_at_once or 1) == 1]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _gap(
    runs: Sequence[RunStatus], by_name: Mapping[str, RunStatus], baselines: Collection[str | None]
) -> str | None:
    """Return the mean difference from the baseline of the same seed, without a verdict.

    `baselines` are the names of all baselines of the matrix.
    """
    if all(row.baseline is None for row in runs):
        is_baseline = any(row.method in _UNTREATED or row.name in baselines for row in runs)
        return "baseline" if is_baseline else None
    gaps, relative = [], []
    for row in runs:
        base = by_name.get(row.baseline or "")
        if base is None or base.state != "finished" or row.state != "finished":
            continue
        if row.value is not None and base.value is not None:
            gaps.append(row.value - base.value)
            relative += [(row.value - base.value) / base.value] if base.value else []
    if not gaps:
        return None
    mean_share = _mean(relative)
    share = "" if mean_share is None else f" ({100 * mean_share:+.1f} %)"
    seeds = f", {len(gaps)} seeds" if len(gaps) > 1 else ""
    return f"{runs[0].metric} {sum(gaps) / len(gaps):+.4g}{share}{seeds}"


def _status(runs: Sequence[RunStatus]) -> str:
    states = [row.state for row in runs]
    if len(set(states)) == 1:
        status = states[0] if len(runs) == 1 else f"{states[0]}, {len(runs)} seeds"
    else:
        counts = [f"{states.count(state)} {state}" for state in _ORDER if state in states]
        status = ", ".join(counts)
    shared = any((row.runs_at_once or 1) > 1 for row in runs)
    return f"{status}; shared a device, so not timed" if shared and not _alone(runs) else status


def terminal_table(status: MatrixStatus, most: int | None = None) -> "Group":
    """Return a table for rich, with a line of totals.

    `most` is the largest number of rows; running and failed runs are preferred to others.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = status.runs
    if most is not None and len(rows) > most:
        ranked = sorted(rows, key=lambda row: _ORDER.index(row.state) if row.state in _ORDER else 0)
        chosen = {row.name for row in ranked[:most]}
        rows = [row for row in rows if row.name in chosen]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "device"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("step", "loss or metric", "steps/s", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, row.state, row.place or "", _steps(row), _result(row),
                 "" if row.steps_per_second is None else f"{row.steps_per_second:.1f}",
                 "" if row.seconds_left is None else hms(row.seconds_left)]  # fmt: skip
        style = _STYLES.get(row.state, "")
        table.add_row(*(Text(plain(cell), style if i == 1 else "") for i, cell in enumerate(cells)))
    problems = [
        Text(plain(f"{row.name}: {row.error}"), "red")
        for row in rows if row.error and row.state in (*FAILED, "diverged")
    ]  # fmt: skip
    lines = [Text(plain(line)) for line in _totals(status, len(status.runs) - len(rows))]
    return Group(table, *problems, *lines) if rows else Group(*lines)


def _steps(row: RunStatus) -> str:
    if row.step is None:
        return ""
    return f"{row.step:,}" if row.steps is None else f"{row.step:,} of {row.steps:,}"


def _result(row: RunStatus) -> str:
    if row.state == "running" and row.loss is not None:
        return f"loss {row.loss:.4f}"
    return f"{row.metric} {number(row.value)}" if row.value is not None else ""


def _totals(status: MatrixStatus, hidden: int) -> list[str]:
    """Return the lines below a table: counts, the expected end, GPUs, and why nothing starts."""
    more = [f"… {hidden:,} more runs; --all shows them"] if hidden else []
    counts = ", ".join(
        f"{status.counts[state]:,} {state}" for state in _ORDER if status.counts.get(state)
    )
    name = "" if status.name is None else f"{status.name} ({status.status}): "
    total = f"{name}{counted(len(status.runs), 'runs')}: {counts}"
    if not status.runs:
        total = f"{name}no runs yet"
    if status.expected_end is not None:
        end = time.strftime("%a %H:%M", time.localtime(status.expected_end))
        total += f"; about {hms(status.seconds_left)} left, until {end}"
    lines = [*more, total, *cautions(status)]
    if status.places is not None:
        lines.append(f"on {status.places}")
    for gpu in status.gpus:
        used = f"{gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB"
        lines.append(f"{gpu.device}: {used}, {gpu.utilisation:.0f} % busy")
    return lines + ([f"waiting: {status.note}"] if status.note else [])


def cautions(status: MatrixStatus) -> list[str]:
    """Return the warnings about the numbers of runs, such as a reduced scale, each once."""
    found = dict.fromkeys(row.caution for row in status.runs if row.caution)
    return [f"caution: {caution}" for caution in found]


def ended(status: MatrixStatus) -> bool:
    """Return whether no run is running, and no driver is at work."""
    live = status.status in ("running", "waiting", "stopping")
    return not live and not any(row.state == "running" for row in status.runs)


def as_json(status: MatrixStatus) -> dict[str, Any]:
    """Return plain values for JSON, with the numbers of runs that have ended and of all runs."""
    done = sum(status.counts.get(state, 0) for state in ENDED)
    return {**status.to_dict(), "done": done, "total": len(status.runs)}
