"""A trial's targets: does the front learn, and does the decoder follow the envelope?"""

import math
from dataclasses import dataclass
from typing import Any

from frostlab.flow.diagnosis import Diagnosis
from frostlab.flow.front import WANTED

_NAMES = {
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "pearson": "validation pearson",
}


@dataclass(frozen=True)
class Target:
    """What was measured, and what more than was wanted; None where it could not be measured."""

    name: str
    value: float | None
    wanted: float

    @property
    def reached(self) -> bool:
        """Whether it was measured and is above."""
        return self.value is not None and self.value > self.wanted

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "reached": self.reached}


def targets_of(found: Diagnosis) -> tuple[Target, ...]:
    """The targets of a run's last stage."""
    ends = list(found.flows.values())[-1].ends()
    values = {
        "front_ratio": ends.front_ratio,
        "weight_change": ends.weight_change,
        found.metric: found.value,
    }
    known = {name: v for name, v in values.items() if v is not None and math.isfinite(v)}
    return tuple(Target(name, known.get(name), wanted) for name, wanted in WANTED.items())


def targets_table(targets: tuple[Target, ...]) -> str:
    """A line a target, under pass or fail."""
    rows = [
        (_NAMES[t.name], "–" if t.value is None else f"{t.value:.4g}", f"wanted > {t.wanted:g}",
         "pass" if t.reached else "fail")
        for t in targets
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    said = "pass" if all(t.reached for t in targets) else "fail"
    return "\n  ".join([f"trial: {said}", *(line.rstrip() for line in lines)])
