"""Compare what a reader found with the truth: one line for each disagreement."""

from collections.abc import Iterable, Sequence

from torch import nn

from frostlab.roles.parts import Part
from labelled.truth import Label


def disagreements(labels: Sequence[Label], parts: Iterable[Part], model: nn.Module) -> list[str]:
    """Return what is wrong with the parts, each line beginning with its kind.

    `missing` and `role` are of rows; `axis`, `heads`, `cross`, `stack` and `layers` of parts whose
    roles are right. A query, key or value that says nothing of its heads is not wrong.
    """
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        for name in (part.name, *(tie.name for tie in part.ties)):
            by_name.setdefault(name, []).append(part)
    found: list[str] = []
    for label in labels:
        truth = set(label_rows(label, model))
        overlapping = [
            (part, truth & set(part_rows(part, label, model)))
            for part in by_name.get(label.name, [])
        ]
        covered = set().union(*(rows for _, rows in overlapping)) if overlapping else set()
        if truth - covered:
            found.append(f"missing: {label.name} [{label.role}], {len(truth - covered)} rows")
        for part, rows in overlapping:
            if rows and part.role not in (label.role, *label.also):
                found.append(f"role: {label.name}, {len(rows)} rows of {label.role}: {part.role}")
            elif rows and part.role == label.role:
                found += _details(label, part, model)
    return found


def label_rows(label: Label, model: nn.Module) -> list[int]:
    """Return the rows of a label."""
    return _rows(label.rows, label.axis, label.name, model)


def part_rows(part: Part, label: Label, model: nn.Module) -> list[int]:
    """Return the rows of a part of the label's parameter."""
    ranges = None if part.rows is None else tuple(part.rows.ranges())
    return _rows(ranges, label.axis if ranges is None else part.axis, label.name, model)


def _rows(
    ranges: tuple[tuple[int, int], ...] | None, axis: int, name: str, model: nn.Module
) -> list[int]:
    shape = model.get_parameter(name).shape
    whole = ((0, shape[axis] if shape else 1),)
    return [row for start, stop in ranges or whole for row in range(start, stop)]


def _details(label: Label, part: Part, model: nn.Module) -> list[str]:
    """Return what is wrong with a part of the right role."""
    found = []
    if (label.rows is not None or part.rows is not None) and part.axis != label.axis:
        found.append(f"axis: {label.name}: {part.axis}, not {label.axis}")
    if part.heads is not None:
        rows = sorted(part_rows(part, label, model))
        count = part.heads.of(part.role)
        size = len(rows) // count
        said = tuple(tuple(rows[h * size : (h + 1) * size]) for h in range(count))
        if said != label.by_head:
            found.append(
                f"heads: {label.name} [{label.role}]: {count} of {size} rows, one after another, "
                f"not {label.heads or 0} of {label.size or 0}"
            )
    for word, known, said_of, true_of in (
        ("cross", label.cross is not None, part.place.cross, label.cross),
        ("stack", label.placed, part.stack, label.stack),
        ("layers", label.placed, part.layers, label.layers),
    ):
        if known and said_of != true_of:
            found.append(f"{word}: {label.name} [{label.role}]: {said_of!r}, not {true_of!r}")
    return found
