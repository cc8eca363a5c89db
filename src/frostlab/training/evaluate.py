"""Metrics of a model over a split, computed from sums over all processes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from frostlab.data.prepare import PreparedData, as_token_data
from frostlab.devices import attention_without_plans, exact_dtype, release_cached_memory, to_device
from frostlab.errors import BadInput, check_registration, nearest, same_function
from frostlab.recipe.settings import METRICS, MetricFacts, all_metrics
from frostlab.training.batches.batch import IGNORED, Batch, Split, micro_batches
from frostlab.training.distributed import Compute, World
from frostlab.training.state import Tally, Task
from frostlab.training.step.compiled import uncompiled
from frostlab.training.step.envelope_loss import EnvelopeObjective, pearson
from frostlab.training.step.objective import Exits, Objective, summed_loss
from frostlab.training.treatment import wants_types


def evaluate(
    task: Task,
    objective: Objective,
    prepared: PreparedData,
    split: Split,
    batch: int,
    compute: Compute,
    *,
    classes: Tensor | None = None,
    layers: Sequence[int] = (),
    most: int | None = None,
) -> dict[str, Any]:
    """Return every metric of the task over a split, or over its first batches if `most` is given.

    If a batch does not fit into a GPU's memory (CUDA graphs of training steps may occupy a part of
    it), all examples are evaluated again in smaller batches. With several processes, or if `batch`
    is 1, the error is raised.

    Args:
        batch: how many of the longest examples fill a batch.
        classes: a tensor with a zero for each example. Each process writes 1 + the predicted class
            of its own examples into it, so that the sum over processes holds all predictions.
        layers: numbers of layers, from 1. The model is also measured as if it ended after each of
            them; the result holds these metrics by layer number, under the key `layers`.
        most: the largest number of batches to evaluate; None: all batches.
    """
    try:
        return _evaluate(task, objective, prepared, split, batch, compute, classes, layers, most)
    except torch.OutOfMemoryError:
        if compute.world.size > 1 or batch == 1:  # other processes would not start again
            raise
    release_cached_memory()
    return evaluate(
        task, objective, prepared, split, max(1, batch // 4), compute,
        classes=classes, layers=layers, most=most and 4 * most,
    )  # fmt: skip


def _evaluate(
    task: Task,
    objective: Objective,
    prepared: PreparedData,
    split: Split,
    batch: int,
    compute: Compute,
    classes: Tensor | None,
    layers: Sequence[int],
    most: int | None,
) -> dict[str, Any]:
    device, world = compute.device, compute.world
    lower = [number for number in layers if number != objective.depth]  # all but the last layer
    # one tally for the whole model, and one for each lower layer
    tally, *others = (task.tally(objective, prepared, device) for _ in (0, *lower))
    tallies = dict(zip(lower, others, strict=True))
    training = objective.training
    examples = task.examples(prepared, split, device, wants_types(objective.model))

    def add_layer(number: int, logits: Tensor) -> None:
        tallies[number].add(logits, inputs)  # `inputs` is the batch of the loop below

    want: Literal["logits"] | Exits = Exits(lower, add_layer) if lower else "logits"
    objective.eval()
    try:
        with torch.no_grad(), uncompiled(), attention_without_plans(device):
            for rows in islice(examples.evaluation_order(batch), most):
                (own_rows,) = micro_batches(rows, world.rank, world.size, count=1)
                inputs = examples.collate(own_rows).to(device)
                with compute.autocast():
                    logits = objective(inputs, want=want)
                tally.add(logits, inputs)
                if classes is not None and len(own_rows):
                    places = to_device(torch.from_numpy(own_rows), device)
                    classes[places] = 1 + logits.argmax(-1)
    finally:
        objective.train(training)
    metrics = tally.metrics(world)
    if not layers:
        return metrics
    by_layer = {number: tallies[number].metrics(world) for number in lower}
    return {**metrics, "layers": {str(number): by_layer.get(number, metrics) for number in layers}}


@dataclass(frozen=True)
class Totals:
    """The totals over all processes from which the metrics of a text task are computed.

    A scored target is a class or a next token with a loss.
    """

    loss: float  # mean over the scored targets
    count: int  # scored targets
    correct: int  # targets that were predicted correctly
    confusion: list[list[int]]  # true classes × predicted classes; empty for language modelling


def _perplexity(totals: Totals) -> float:
    return math.exp(totals.loss) if totals.loss < 700 else math.inf  # exp overflows above 709


def _macro_f1(totals: Totals) -> float:
    """Return the mean F1 over the classes that occur or were predicted."""
    scores = []
    for i, row in enumerate(totals.confusion):
        true_and_predicted = sum(row) + sum(other[i] for other in totals.confusion)
        if true_and_predicted:
            scores.append(2 * row[i] / true_and_predicted)
    return sum(scores) / len(scores)


# The metrics of each text task; recipe/settings.py says, for example, which are better if lower.
COMPUTED: dict[str, dict[str, Callable[[Totals], float]]] = {
    "classification": {
        "loss": lambda totals: totals.loss,
        "accuracy": lambda totals: totals.correct / totals.count,
        "macro_f1": _macro_f1,
    },
    "language": {
        "loss": lambda totals: totals.loss,
        "perplexity": _perplexity,
        "token_accuracy": lambda totals: totals.correct / totals.count,
    },
}


def register_metric(
    name: str,
    compute: Callable[[Totals], float],
    *,
    task: Literal["classification", "language"] = "classification",
    lower_is_better: bool = False,
    ratio: bool = False,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Register a metric: every evaluation of the task computes it, and recipes can name it.

    Args:
        name: a name that no other metric has.
        compute: a function that takes the `Totals` of a split and returns a number.
        task: `classification` or `language`.
        lower_is_better: whether a lower value is better.
        ratio: whether a comparison of two arms (trained variants) takes the ratio of their values,
            which must be positive, instead of the difference.
        bounds: the least and the largest possible value, at which charts cut intervals off.

    A name can be registered again only with a function of the same module and name, as when a
    notebook cell runs again.
    """
    check_registration("register_metric", name, compute)
    if task not in COMPUTED:
        hint = nearest(str(task), COMPUTED)
        raise BadInput(
            f"register_metric: task {task!r} should be one of {', '.join(COMPUTED)}{hint}"
        )
    if name in all_metrics() and not same_function(COMPUTED[task].get(name), compute):
        raise BadInput(f"register_metric: the name {name} is taken; choose another")
    if not bounds[0] < bounds[1]:
        raise BadInput(f"register_metric: bounds {bounds} should be a smaller and a larger number")
    compared_by: Literal["ratio", "difference"] = "ratio" if ratio else "difference"
    METRICS[task][name] = MetricFacts(lower_is_better, compared_by, bounds=bounds)
    COMPUTED[task][name] = compute


@dataclass
class TextTally:
    """Sums of losses and predictions on the device, read in one transfer for all metrics."""

    task: str
    classes: int
    device: torch.device
    # loss, scored targets, and the confusion matrix (classification) or correct predictions
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        cells = self.classes**2 if self.task == "classification" else 1
        self.sums = torch.zeros(2 + cells, dtype=exact_dtype(self.device), device=self.device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Add a batch's loss, its number of targets and its predictions to the sums."""
        targets = batch.targets.flatten()
        predicted = logits.flatten(0, -2).argmax(-1)
        self.sums[0] += summed_loss(logits, batch.targets)
        self.sums[1] += batch.scored
        scored = targets != IGNORED
        if self.task == "classification":
            # unlike torch.bincount, this does not wait for the device
            pairs = targets.clamp(min=0) * self.classes + predicted
            self.sums[2:].index_add_(0, pairs, scored.to(self.sums.dtype))
        else:
            self.sums[2] += (predicted.eq(targets) & scored).sum()

    def metrics(self, world: World) -> dict[str, float]:
        """Return every metric of the task, over all processes."""
        loss, *counts = world.total(self.sums).tolist()
        count, *cells = map(int, counts)
        if not count:
            return {}
        confusion: list[list[int]] = []
        correct = cells[0]
        if self.task == "classification":
            width = self.classes
            confusion = [cells[i : i + width] for i in range(0, len(cells), width)]
            correct = sum(confusion[i][i] for i in range(width))
        totals = Totals(loss / count, count, correct, confusion)
        return {name: compute(totals) for name, compute in COMPUTED[self.task].items()}


@dataclass
class EnvelopeTally:
    """Sums of loss and of Pearson's r of predicted and true envelope, over pieces of recordings.

    Whole recordings are scored by `frostlab.training.eeg_report`.
    """

    objective: EnvelopeObjective
    device: torch.device
    sums: Tensor = field(init=False)  # loss, number of pieces (windows), Pearson's r

    def __post_init__(self) -> None:
        self.sums = torch.zeros(3, dtype=exact_dtype(self.device), device=self.device)

    def add(self, prediction: Tensor, batch: Batch) -> None:
        """Add a batch to the sums, unless it is the placeholder for an empty batch."""
        if batch.scored:
            self.sums[0] += self.objective.loss_of(prediction, batch)
            self.sums[1] += batch.scored
            self.sums[2] += pearson(prediction, batch.targets).sum()

    def metrics(self, world: World) -> dict[str, float]:
        """Return the mean loss and the mean r over the windows of all processes."""
        loss, count, correlation = world.total(self.sums).tolist()
        return {"loss": loss / count, "pearson": correlation / count} if count else {}


def text_tally(objective: Objective, prepared: PreparedData, device: torch.device) -> Tally:
    """Create the sums for classification or language modelling."""
    return TextTally(prepared.task, as_token_data(prepared).classes, device)


def envelope_tally(objective: Objective, prepared: PreparedData, device: torch.device) -> Tally:
    """Create the sums for decoded envelopes."""
    assert isinstance(objective, EnvelopeObjective)
    return EnvelopeTally(objective, device)
