"""Many runs as a table."""

from collections.abc import Iterable

from frostlab.records.index import Summary
from frostlab.records.words import hms, number, plain, short

WIDTH = 100
_RUN_COLUMNS = ("name", "status", "treatment", "seed", "steps", "best", "report", "step ms", "total")
_NUMBERS = ("seed", "steps", "step ms", "total")
_MARKS = "*†‡§"


def runs_table(summaries: Iterable[Summary]) -> str:
    """Set runs in aligned columns, within 100 characters where names allow it, with footnotes."""
    runs = list(summaries)
    if not runs:
        return "no runs"
    cautions = list(dict.fromkeys(run.caution for run in runs if run.caution))
    marks = {text: _MARKS[i] if i < 4 else f"[{i + 1}]" for i, text in enumerate(cautions)}
    rows = [_run_row(run, marks.get(run.caution or "", "")) for run in runs]
    lines = _aligned([list(_RUN_COLUMNS), *rows])
    lines += [f"{mark} {plain(text)}" for text, mark in marks.items()]
    wrong = [run for run in runs if run.error]
    lines += [short(plain(f"{run.name}: {run.error}"), WIDTH) for run in wrong[:10]]
    lines += [f"and {len(wrong) - 10} more with an error"] * (len(wrong) > 10)
    return "\n".join(lines)


def _run_row(run: Summary, mark: str) -> list[str]:
    best = f"{run.metric}={number(run.value)}{mark}" if run.metric else None
    value = (run.report or {}).get(run.metric or "")
    report = None if value is None else number(value) + mark
    shown = (run.name, run.status, run.treatment, run.seed, run.steps, best, report)
    return [*map(plain, shown), number(run.step_ms), hms(run.total_seconds)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    widths[2] = max(min(widths[2], 10), widths[2] - max(0, over))  # the name is needed whole
    lines = []
    for row in rows:
        cells = zip(_RUN_COLUMNS, map(short, row, widths), widths, strict=True)
        text = (c.rjust(w) if name in _NUMBERS else c.ljust(w) for name, c, w in cells)
        lines.append("  ".join(text).rstrip())
    return lines
