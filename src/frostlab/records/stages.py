"""The stages of a run as a table."""

from typing import Any

from frostlab.records.index import part, typed
from frostlab.records.words import number, plain

_STAGE_COLUMNS = ("stage", "trainable", "of", "steps", "epochs", "best at", "best", "seconds", "ended")


def stages_table(stages: Any) -> list[str]:
    """A line a stage, under a line of names; nothing where there is only one."""
    known = [stage for stage in typed(stages, list) or [] if isinstance(stage, dict)]
    if len(known) < 2:
        return []
    rows = [list(_STAGE_COLUMNS), *map(_stage_row, known)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _stage_row(stage: dict[str, Any]) -> list[str]:
    best = part(stage, "best")
    counts = (typed(stage.get(key), int) for key in ("trainable", "total"))
    return [
        plain(stage.get("name")),
        *(plain(None) if count is None else f"{count:,}" for count in counts),
        plain(stage.get("steps")),
        number(stage.get("epochs")),
        f"epoch {number(best.get('epoch'))}",
        f"{plain(best.get('metric'))} {number(best.get('value'))}",
        number(stage.get("seconds")),
        "early" if stage.get("stopped_early") else "",
    ]


def _cells(row: list[str], widths: list[int]) -> list[str]:
    words = ("stage", "best at", "best", "ended")
    return [
        cell.ljust(width) if name in words else cell.rjust(width)
        for name, cell, width in zip(_STAGE_COLUMNS, row, widths, strict=True)
    ]
