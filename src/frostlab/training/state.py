"""All that the loop works with."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from frostlab.data.eeg.recordings import Material
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import LOWER_IS_BETTER, Metric
from frostlab.records.folder import RunFolder
from frostlab.surgery.audit import Audit
from frostlab.training.distributed import World
from frostlab.training.stages import Entered, Stage
from frostlab.training.step.objective import Objective


@dataclass
class Best:
    """The best value of a metric; `since` counts evaluations that did not improve on it."""

    metric: Metric
    value: float | None = None
    step: int | None = None
    since: int = 0

    def see(self, value: float, step: int) -> bool:
        """Take in an evaluation; say whether it is the best so far. NaN never is."""
        better = self.value is None or reaches(self.metric, value, self.value, strictly=True)
        if math.isnan(value) or not better:
            self.since += 1
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations have passed without improvement."""
        return patience is not None and self.since >= patience


def reaches(metric: Metric, value: float, target: float, strictly: bool = False) -> bool:
    """Whether a value is as good as a target, or strictly better."""
    if strictly and value == target:
        return False
    return value <= target if metric in LOWER_IS_BETTER else value >= target


@dataclass
class Progress:
    """The state of a run between two steps; everything else follows from recipe and data."""

    best: Best  # of this stage
    step: int = 0
    stopped_early: bool = False  # this stage, by its patience
    seconds: dict[str, float] = field(default_factory=dict)
    epoch_seconds: float = 0.0
    order: str = ""  # digest of the order of examples of the epochs before this one
    target: dict[str, float] | None = None  # step and seconds at which it was reached
    last: dict[str, float] = field(default_factory=dict)  # the last evaluation
    ended: list[dict[str, Any]] = field(default_factory=list)  # the stages before this one
    began: float = 0.0  # seconds, in total, when this stage began
    metrics: dict[str, float] = field(default_factory=dict)  # the best evaluation of this stage
    frozen: dict[str, str] = field(default_factory=dict)  # digests, renewed at a boundary

    @property
    def stage(self) -> int:
        """The number of the stage it is in, from 0."""
        return len(self.ended)

    @property
    def lengths(self) -> list[int]:
        """How many steps the stages took that have ended."""
        return [stage["steps"] for stage in self.ended]

    @property
    def place(self) -> int:
        """How many steps this stage has taken."""
        return self.step - sum(self.lengths)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        return cls(**{**values, "best": Best(**values["best"])})


class Display(Protocol):
    """Who is shown how a run goes; frostlab itself prints nothing."""

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None: ...
    def say(self, line: str) -> None: ...
    def stage(self, line: str, step: int, steps: int) -> None: ...
    def advance(self, step: int, loss: float | None) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Say nothing."""

    def say(self, line: str) -> None:
        """Say nothing."""

    def stage(self, line: str, step: int, steps: int) -> None:
        """Say nothing."""

    def advance(self, step: int, loss: float | None) -> None:
        """Say nothing."""

    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


@dataclass
class Setting:
    """All that the loop works with; a boundary between stages changes the model."""

    recipe: Recipe
    prepared: Material
    model: nn.Module  # on its device, treated, not wrapped
    objective: Objective  # the model with its loss
    stages: tuple[Stage, ...]
    device: torch.device
    precision: torch.dtype
    world: World
    folder: RunFolder | None  # None in processes that do not write
    frozen: Audit | None
    display: Display
    asked_to_stop: Callable[[], bool]
    path: Path  # the run's folder, for all processes to read
    entered: Entered = field(default_factory=Entered)  # the stage that the model is in
