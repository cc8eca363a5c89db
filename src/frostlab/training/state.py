"""The state of a run: its progress, the model of the current stage, and its fixed context.

A stage is a sequence of steps that train the same weights; most runs have one.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frostlab.data.prepare import PreparedData
from frostlab.flow.probe import Gradient
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Metric, metric_facts
from frostlab.records.checkpoint import FrozenWeights
from frostlab.records.folder import RunFolder
from frostlab.records.schema import Metrics
from frostlab.records.schema import Stage as StageRecord
from frostlab.storage import BackgroundWriter, finite
from frostlab.surgery.audit import Audit
from frostlab.training.batches.batch import Batch, Examples, Split
from frostlab.training.distributed import Compute, World, blocks
from frostlab.training.progress import Display
from frostlab.training.stages import Entered, Stage, in_epochs, steps_per_epoch
from frostlab.training.step.objective import Objective
from frostlab.training.treatment import count_parameters
from frostlab.typed import read


@dataclass
class Best:
    """The best value of a metric so far; `since` counts the evaluations after the best one."""

    metric: Metric
    value: float | None = None
    step: int | None = None
    since: int = 0

    def see(self, value: float, step: int) -> bool:
        """Count an evaluation; return whether it is the best so far. NaN and inf never are."""
        better = self.value is None or reaches(self.metric, value, self.value, strictly=True)
        if not math.isfinite(value) or not better:
            self.since += 1
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def exhausted(self, patience: int | None) -> bool:
        """Return whether `patience` evaluations have passed without improvement."""
        return patience is not None and self.since >= patience


def reaches(metric: Metric, value: float, target: float, strictly: bool = False) -> bool:
    """Return whether a value is at least as good as a target, or better if `strictly`."""
    if strictly and value == target:
        return False
    return value <= target if metric_facts(metric).lower_is_better else value >= target


@dataclass
class Progress:
    """The progress of a run, which checkpoints save with the weights and the optimizer state."""

    best: Best  # the best evaluation of this stage
    step: int = 0
    stopped_early: bool = False  # whether this stage ran out of patience
    seconds: dict[str, float] = field(default_factory=dict)  # seconds by phase, and in total
    epoch_seconds: float = 0.0  # training time in the current epoch
    order: str = ""  # digest of the examples of every step so far, in order
    # step, epoch and seconds at which evaluate.target was reached; None: not yet, or no target
    target: dict[str, float] | None = None
    last: Metrics = field(default_factory=dict)  # metrics of the last evaluation
    ended: list[StageRecord] = field(default_factory=list)  # records of past stages
    began: float = 0.0  # total seconds of the run when this stage began
    metrics: Metrics = field(default_factory=dict)  # metrics of this stage's best evaluation
    # digests of this stage's frozen weights; the first stage's are in digests.json
    frozen: dict[str, str] = field(default_factory=dict)
    flow_start: str | None = None  # sha256 of the file with the weights at this stage's start

    @property
    def stage(self) -> int:
        """Return the index of the current stage."""
        return len(self.ended)

    @property
    def lengths(self) -> list[int]:
        """Return how many steps each ended stage took."""
        return [stage.steps for stage in self.ended]

    @property
    def stage_step(self) -> int:
        """Return how many steps the current stage has taken."""
        return self.step - sum(self.lengths)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object, where: object) -> "Progress":
        """Read the values that `to_dict` returned; an error message begins with `where`."""
        return read(cls, values, where)


@dataclass(frozen=True)
class StageModel:
    """The model of one stage, on its device and with its loss; the next stage replaces it."""

    index: int
    stage: Stage
    entered: Entered  # the layers that were added last, in this stage or an earlier one
    objective: Objective  # the model with its loss
    audit: Audit | None = None  # digests of the frozen weights
    # the folder that stores this stage's frozen weights; None: each checkpoint stores them itself,
    # or the stage has no checkpoint yet
    frozen: FrozenWeights | None = None

    @property
    def model(self) -> nn.Module:
        """Return the model itself, without a DDP or FSDP wrapper."""
        return self.objective.model


class Tally(Protocol):
    """The running sums, on the device, from which the metrics of a task are computed."""

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Add a batch to the sums."""

    def metrics(self, world: World) -> dict[str, float]:
        """Return every metric of the task, over all processes."""


# The metrics of the `report` (test) split, and the scores for result.json (None except for EEG).
Report = tuple[dict[str, float], dict[str, Any] | None]


@dataclass(frozen=True)
class Task:
    """The functions that differ between tasks; `training/tasks.py` has the table of tasks."""

    # returns a split's examples; the bool asks for token types
    examples: Callable[[PreparedData, Split, torch.device, bool], Examples]
    # adds the loss to a model
    objective: Callable[[nn.Module, Recipe], Objective]
    # creates the sums for an evaluation
    tally: Callable[[Objective, PreparedData, torch.device], Tally]
    predicts_classes: bool = False  # whether the record keeps each example's predicted class
    # may extend the metrics of the `report` split
    report: Callable[["RunContext", dict[str, float]], Report] = lambda context, metrics: (
        metrics,
        None,
    )
    # refuses data that the task cannot use
    check: Callable[[PreparedData], object] = lambda prepared: None


@dataclass
class RunContext:
    """Everything that the training loop needs; only `current` is replaced during a run."""

    recipe: Recipe
    prepared: PreparedData
    task: Task
    stages: tuple[Stage, ...]
    compute: Compute
    path: Path  # the run's folder, for all processes to read
    folder: RunFolder | None  # None in processes other than rank 0
    display: Display
    asked_to_stop: Callable[[], bool]  # whether this process got SIGINT or SIGTERM
    current: StageModel  # replaced when a stage begins
    # writes histograms of weights and gradients at a step; None: no histograms are written
    histograms: Callable[[int, nn.Module, Gradient], None] | None = None
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)  # of checkpoints

    @property
    def model(self) -> nn.Module:
        """Return the current stage's model."""
        return self.current.model

    @property
    def objective(self) -> Objective:
        """Return the current stage's model with its loss."""
        return self.current.objective

    @property
    def world(self) -> World:
        """Return this process's rank and the number of processes."""
        return self.compute.world

    @property
    def evaluation_batch(self) -> int:
        """Return how many of the longest examples fill a batch of an evaluation."""
        return evaluation_batch(self.recipe, self.model)


def evaluation_batch(recipe: Recipe, model: nn.Module) -> int:
    """Return how many of the longest examples fill a batch of an evaluation.

    A training step keeps the activations of every layer that learns; an evaluation keeps one
    layer's activations at a time. A classifier is therefore evaluated on larger batches than it is
    trained on, with no more memory. The logits of a language model take too much memory for that.
    """
    if recipe.evaluate.batch is not None:
        return recipe.evaluate.batch
    batch = recipe.train.batch // recipe.train.accumulate
    if recipe.data.task != "classification":
        return batch
    learn = sum(any(p.requires_grad for p in block.parameters()) for block in blocks(model))
    return batch * max(1, learn)


def stage_facts(context: RunContext, progress: Progress) -> StageRecord:
    """Return the record of the current stage; epochs are counted from the stage's beginning."""
    best, counts = progress.best, count_parameters(context.model)
    per_epoch = steps_per_epoch(len(context.prepared.splits["train"]), context.recipe.train)
    began = sum(progress.lengths)
    values = {
        "name": context.stages[progress.stage].name,
        "steps": progress.stage_step,
        "epochs": in_epochs(progress.stage_step, per_epoch),
        "stopped_early": progress.stopped_early,
        "best": {
            "metric": best.metric,
            "value": best.value,
            "step": best.step,
            "epoch": None if best.step is None else in_epochs(best.step - began, per_epoch),
        },
        "metrics": progress.metrics,
        "seconds": round(progress.seconds.get("total", 0.0) - progress.began, 4),
        "trainable": counts["trainable"],
        "total": counts["total"],
    }
    return read(StageRecord, finite(values), "the record of a stage")
