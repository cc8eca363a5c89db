"""The state of a matrix as a table of runs for the terminal, and the overview in Markdown.

The overview has a row for each experiment or arm, with the mean over its seeds.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frostlab.matrix.status import ENDED, FAILED, MatrixStatus, RunStatus
from frostlab.matrix.store import LEFT_OUT
from frostlab.text import (
    NONE,
    Rows,
    aligned,
    counted,
    fitted,
    hms,
    markdown,
    number,
    plain,
    short,
    wrapped,
)

if TYPE_CHECKING:
    from rich.text import Text

_UNTREATED = ("none", "baseline")  # names of the treatment that changes nothing
HEAD = ("phase", "id", "data", "method", "total", "step", "gap to baseline", "status")
_STYLES = {
    "running": "cyan", "pending": "dim", "finished": "green", "waiting": "dim", "stopped": "yellow",
    LEFT_OUT: "dim", **dict.fromkeys((*FAILED, "diverged"), "red"),
}  # fmt: skip
_ORDER = ("running", *FAILED, "diverged", "stopped", "interrupted", "pending", "waiting",
          LEFT_OUT, "finished")  # fmt: skip


@dataclass(frozen=True)
class OverviewRow:
    """One experiment or arm; by default, one that has not been run."""

    phase: str  # the group of experiments, or the comparison
    id: str  # the experiment's id, or the arm's name
    data: str
    method: str  # name of the treatment
    total_seconds: float | None = None  # mean over whole runs
    # time of a step while the arms took steps in turn; if that was not measured, in whole runs
    step_seconds: float | None = None
    # "baseline", or the difference from the baseline in the metric; a comparison adds its interval
    # and verdict
    gap: str | None = None
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
    times are None, and the status says whether a run shared its device.
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


def terminal_table(
    status: MatrixStatus,
    width: int | None = None,
    *,
    height: int | None = None,
    most: int | None = None,
) -> "Text":
    """Return a table for rich, with lines of totals.

    If there is no room for all runs, running ones are preferred, then those that failed.

    Args:
        width: characters of a line; None: any number.
        height: the most lines of the text; None: any number.
        most: the most runs; None: any number.
    """
    from rich.text import Text

    totals, details, room = _totals(status, width), _details(status), None
    if height is None:
        totals += [line for detail in details for line in wrapped(plain(detail), width)]
    else:
        details = [plain(detail) for detail in details[: max(0, height // 3 - len(totals))]]
        totals += [short(detail, width) if width else detail for detail in details]
        # there is also the head, a line about the names, and one about runs that are not shown
        room = max(0, height - len(totals) - 3)
    rows = _preferred(status.runs, room, most)
    names, lines = _table(rows, width) if rows else ([], [])
    text = Text(no_wrap=True, overflow="crop")
    for line in names:
        text.append(f"{line}\n")
    for row, cells in zip([None, *rows], lines, strict=False):
        line = "  ".join(cells).rstrip()
        begins = len(text) + len(cells[0]) + 2
        text.append(f"{line}\n", None if row else "bold")
        if row and row.state in _STYLES:
            text.stylize(_STYLES[row.state], begins, begins + len(row.state))
    for row in rows:
        if _has_problem(row):
            problem = plain(f"{row.name}: {row.error}")
            problem = short(problem, width) if width and height else problem
            text.append("".join(f"{line}\n" for line in wrapped(problem, width)), "red")
    hidden = Counter(row.state for row in status.runs) - Counter(row.state for row in rows)
    if hidden and rows:
        hint = "; --all shows them" if height is None else ""
        text.append(f"… {_listed(hidden)}{hint}\n")
    text.append("\n".join(totals))
    return text


def _preferred(
    rows: Sequence[RunStatus], room: int | None, most: int | None
) -> Sequence[RunStatus]:
    """Return the rows for which there is room, in their order; a problem takes one more line."""
    ranked = sorted(rows, key=lambda row: _ORDER.index(row.state) if row.state in _ORDER else 0)
    chosen, lines = set[str](), 0
    for row in ranked[:most]:
        lines += 1 + _has_problem(row)
        if room is not None and lines > room:
            break
        chosen.add(row.name)
    return [row for row in rows if row.name in chosen]


def _has_problem(row: RunStatus) -> bool:
    return bool(row.error) and row.state in (*FAILED, "diverged")


def _table(rows: Sequence[RunStatus], width: int | None) -> tuple[list[str], list[list[str]]]:
    """Return lines about what was cut from names, and aligned cells of a table that fits a width.

    Empty columns are left out. If there is no room, the table lacks the speed, then the device,
    then the metric's name, and then the other columns, the last one first.
    """
    metrics = {row.metric for row in rows if row.state != "running" and row.value is not None}
    named = len(metrics) != 1
    whole = [("run", "state", "step", "loss or metric", "left", "device", "steps/s")]
    brief = [(*whole[0][:3], "loss or metric" if named else plain(*metrics), "left")]
    for row in rows:
        speed = "" if row.steps_per_second is None else f"{row.steps_per_second:.1f}"
        left = "" if row.seconds_left is None else hms(row.seconds_left)
        cells = (row.name, plain(row.state), _steps(row))
        whole.append((*cells, plain(_result(row)), left, plain(row.place or ""), speed))
        brief.append((*cells, plain(_result(row, named)), left))
    tables = [_some_columns(whole, count) for count in (7, 6, 5)]
    tables += [_some_columns(brief, count) for count in (5, 4, 3, 2)]
    fit, lines = fitted(tables, width, keep=4)
    right = [index for index, name in enumerate(fit[0]) if name not in ("run", "state", "device")]
    return lines, aligned(fit, right)


def _some_columns(rows: Rows, count: int) -> Rows:
    """Return the first columns of a table without those that are empty."""
    used = [index for index in range(count) if any(row[index] for row in rows[1:])]
    return [[row[index] for index in used] for row in rows]


def _steps(row: RunStatus) -> str:
    if row.step is None:
        return ""
    return f"{row.step:,}" if row.steps is None else f"{row.step:,} of {row.steps:,}"


def _result(row: RunStatus, named: bool = True) -> str:
    """Return the loss of a running run, or else the value of the metric, with its name if asked."""
    if row.state == "running" and row.loss is not None:
        return f"loss {row.loss:.4f}"
    if row.value is None:
        return ""
    return f"{row.metric} {number(row.value)}" if named else number(row.value)


def _listed(counts: Mapping[str, int]) -> str:
    """Return "2 running, 1 failed"."""
    return ", ".join(f"{counts[state]:,} {state}" for state in _ORDER if counts.get(state))


def _totals(status: MatrixStatus, width: int | None) -> list[str]:
    """Return the counts of all runs and the expected end, in lines of a width."""
    name = "" if status.name is None else f"{status.name} ({status.status}): "
    total = f"{name}{counted(len(status.runs), 'runs')}: {_listed(status.counts)}"
    if not status.runs:
        total = f"{name}no runs yet"
    if status.expected_end is not None:
        end = time.strftime("%a %H:%M", time.localtime(status.expected_end))
        total += f"; about {hms(status.seconds_left)} left, until {end}"
    return wrapped(plain(total), width)


def _details(status: MatrixStatus) -> list[str]:
    """Return lines: why no run starts, the GPUs' load, the devices or cluster, and warnings."""
    lines = [f"waiting: {status.note}"] if status.note else []
    for gpu in status.gpus:
        used = f"{gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB"
        lines.append(f"{gpu.device}: {used}, {gpu.utilisation:.0f} % busy")
    lines += [f"on {status.places}"] if status.places is not None else []
    return lines + cautions(status)


def cautions(status: MatrixStatus) -> list[str]:
    """Return the warnings about the numbers of runs, such as a reduced scale, each once."""
    warnings = dict.fromkeys(row.caution for row in status.runs if row.caution)
    return [f"caution: {caution}" for caution in warnings]


def ended(status: MatrixStatus) -> bool:
    """Return whether no run is running, and no driver is at work."""
    live = status.status in ("running", "waiting", "stopping")
    return not live and not any(row.state == "running" for row in status.runs)


def as_json(status: MatrixStatus) -> dict[str, Any]:
    """Return plain values for JSON, with the numbers of runs that have ended and of all runs."""
    done = sum(status.counts.get(state, 0) for state in ENDED)
    return {**status.to_dict(), "done": done, "total": len(status.runs)}
