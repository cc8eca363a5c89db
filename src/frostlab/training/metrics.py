"""Metrics, summed over examples, batches and processes before they are divided."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frostlab.data import Material, text_of
from frostlab.recipe.data import Task
from frostlab.training.batching import IGNORED, Batch
from frostlab.training.distributed import World
from frostlab.training.envelopes import EnvelopeObjective
from frostlab.training.objective import Objective, summed_loss
from frostlab.training.signal_losses import pearson


@dataclass
class Tally:
    """What has been counted so far, on the device: one transfer gives every metric."""

    task: Task
    classes: int
    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        cells = self.classes**2 if self.task == "classification" else 1
        self.sums = torch.zeros(2 + cells, dtype=_exact(self.device), device=self.device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count a batch: loss, how many, and which class was taken for which."""
        targets = batch.targets.flatten()
        guesses = logits.flatten(0, -2).argmax(-1)
        self.sums[0] += summed_loss(logits, batch.targets)
        self.sums[1] += batch.scored
        counted = targets != IGNORED
        if self.task == "classification":
            pairs = (targets * self.classes + guesses)[counted]
            self.sums[2:] += torch.bincount(pairs, minlength=self.classes**2)
        else:
            self.sums[2] += (guesses.eq(targets) & counted).sum()

    def metrics(self, world: World) -> dict[str, float]:
        """Every metric of the task, over all processes."""
        loss, count, *cells = world.total(self.sums).tolist()
        if not count:
            return {}
        mean = loss / count
        if self.task == "language":
            return {
                "loss": mean,
                "perplexity": math.exp(mean) if mean < 700 else math.inf,
                "token_accuracy": cells[0] / count,
            }
        matrix = [cells[i : i + self.classes] for i in range(0, len(cells), self.classes)]
        right = sum(matrix[i][i] for i in range(self.classes))
        return {"loss": mean, "accuracy": right / count, "macro_f1": _macro_f1(matrix)}


@dataclass
class EnvelopeTally:
    """The loss and Pearson's r of every window, added up: a quick look, not the report."""

    objective: EnvelopeObjective
    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(3, dtype=_exact(self.device), device=self.device)

    def add(self, prediction: Tensor, batch: Batch) -> None:
        """Count a batch; one that stands in for no windows counts for nothing."""
        if batch.scored:
            self.sums[0] += self.objective.loss_of(prediction, batch)
            self.sums[1] += batch.scored
            self.sums[2] += pearson(prediction, batch.targets).sum()

    def metrics(self, world: World) -> dict[str, float]:
        """Means over the windows of all processes."""
        loss, count, together = world.total(self.sums).tolist()
        return {"loss": loss / count, "pearson": together / count} if count else {}


def tally_for(
    objective: Objective, prepared: Material, device: torch.device
) -> Tally | EnvelopeTally:
    """What adds up the metrics of a task."""
    if isinstance(objective, EnvelopeObjective):
        return EnvelopeTally(objective, device)
    return Tally(prepared.task, text_of(prepared).classes, device)


def _exact(device: torch.device) -> torch.dtype:
    """MPS has no float64; counts above 2**24 would lose ones there."""
    return torch.float32 if device.type == "mps" else torch.float64


def _macro_f1(matrix: list[list[float]]) -> float:
    """The mean F1 over the classes that occur or were guessed; rows are true classes."""
    scores = []
    for i, row in enumerate(matrix):
        both = sum(row) + sum(other[i] for other in matrix)
        if both:
            scores.append(2 * row[i] / both)
    return sum(scores) / len(scores)
