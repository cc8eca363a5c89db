"""Where a run is: all that a checkpoint must hold beside weights, and who is told about it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from frostlab.training.patience import Best


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
