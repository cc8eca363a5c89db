"""Results as a table, the ceiling beside each figure."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_COLUMNS = (
    "benchmark",
    "ours ms",
    "theirs ms",
    "ours ÷ theirs",
    "faster",
    "to reach",
    "per s",
    "ceiling ms",
    "of ceiling",
    "MFU",
    "peak MB, ours / theirs",
)


def table(results: Sequence[dict[str, Any]]) -> Group:
    """Set what was measured in columns, then say what was not, and why."""
    shown = Table(
        title="ours ÷ theirs: times, below 1 ours is faster; [10th, 90th percentile of rounds]"
    )
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "benchmark" else "right")
    measured = [result for result in results if result["status"] == "measured"]
    for result in measured:
        shown.add_row(*_row(result))
    lines = [
        Text(f"{r['benchmark']}: {r['status']}: {r['reason']}")
        for r in results
        if r not in measured
    ]
    notes = [
        Text(f"{r['benchmark']} {r['case']}: {r['ours_step']} step ({r['ours_step_reason']}); "
             + "; ".join(r["notes"]))
        for r in measured
    ]  # fmt: skip
    return Group(*([shown] if measured else []), *notes, *lines)


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the table, as wide as it needs to be where nobody watches."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table(results))


def _row(result: dict[str, Any]) -> list[str]:
    low, high = result["ratio_p10"], result["ratio_p90"]
    peaks = [result["ours_peak_bytes"], result["theirs_peak_bytes"]]
    mark = {True: " ✓", False: " ✗", None: ""}[result["reached"]]
    bound = result.get("flop_bound")
    faster = (
        f"{result['faster']:.3g}×" if bound is None else f"{result['faster']:.3f}× of {bound:.3f}×"
    )
    return [
        f"{result['benchmark']} {result['case']}",
        f"{result['ours_ms']:.4g}",
        f"{result['theirs_ms']:.4g}",
        f"{result['ratio']:.3g} [{low:.3g}, {high:.3g}]",
        faster,
        result["target"] + mark,
        f"{result['ours_per_s']:,.0f} {result['unit']}",
        f"{result['ceiling_ms']:.3g}",
        f"{result['of_ceiling']:.0%}",
        f"{result['mfu']:.0%}",
        "–" if None in peaks else " / ".join(f"{peak / 1e6:,.0f}" for peak in peaks),
    ]
