"""What each stage of the arms came to, seeds averaged: before a layer was added, and after."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from frostlab.compare.words import markdown
from frostlab.recipe import LOWER_IS_BETTER
from frostlab.records.words import number

_HEAD = ["arm", "stage", "trainable", "best on the tune split", "best epoch", "seconds", "change"]


def stages_table(evidence: dict[str, Any]) -> str:
    """A row a stage of every arm that has several; nothing where none has."""
    rows: list[list[str]] = []
    for name, arm in evidence["arms"].items():
        runs = [run["stages"] for run in arm["runs"] if run["status"] == "finished"]
        if runs and len(runs[0]) > 1:
            rows += _rows(name, runs)
    if not rows:
        return ""
    said = (
        "Means over seeds. Change: of the best value against that of the stage before, positive "
        "where it is better."
    )
    return f"## Stages\n\n{markdown(_HEAD, rows)}\n\n{said}"


def _rows(name: str, runs: Sequence[list[dict[str, Any]]]) -> list[list[str]]:
    rows, before = [], None
    for stages in zip(*runs, strict=True):  # the same one of every seed
        best = fmean(stage["best"]["value"] for stage in stages)
        rows.append([
            name if before is None else "",
            stages[0]["name"],
            f"{stages[0]['trainable']:,} of {stages[0]['total']:,}",
            number(best),
            number(fmean(stage["best"]["epoch"] for stage in stages)),
            number(fmean(stage["seconds"] for stage in stages)),
            "" if before is None else f"{_better(before, best, stages[0]['best']['metric']):+.2%}",
        ])  # fmt: skip
        before = best
    return rows


def _better(before: float, after: float, metric: str) -> float:
    change = after / before - 1
    return -change if metric in LOWER_IS_BETTER else change
