"""Metrics, summed over examples, batches and processes before they are divided."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frostlab.recipe.data import Task
from frostlab.training.batching import IGNORED, Batch
from frostlab.training.distributed import World
from frostlab.training.objective import summed_loss


@dataclass
class Tally:
    """What has been counted so far, on the device: one transfer gives every metric."""

    task: Task
    classes: int
    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        cells = self.classes**2 if self.task == "classification" else 1
        # MPS has no float64; counts above 2**24 would lose ones there
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        self.sums = torch.zeros(2 + cells, dtype=exact, device=self.device)

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


def _macro_f1(matrix: list[list[float]]) -> float:
    """The mean F1 over the classes that occur or were guessed; rows are true classes."""
    scores = []
    for i, row in enumerate(matrix):
        both = sum(row) + sum(other[i] for other in matrix)
        if both:
            scores.append(2 * row[i] / both)
    return sum(scores) / len(scores)
