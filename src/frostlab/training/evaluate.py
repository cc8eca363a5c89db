"""Metrics of a model over a split, shared by all processes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from frostlab.data.eeg.recordings import Material, text_of
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import BadInput
from frostlab.recipe.data import Task
from frostlab.records.folder import RunFolder, RunRecord
from frostlab.roles.read import anatomy
from frostlab.timing.flops import forward_flops
from frostlab.training.batches.batch import IGNORED, Batch, Split, examples_of, row_lengths, shared
from frostlab.training.distributed import World
from frostlab.training.setup import best_model, choose_device, choose_precision
from frostlab.training.step.compiled import uncompiled
from frostlab.training.step.envelope_loss import EnvelopeObjective, pearson
from frostlab.training.step.objective import Exits, Objective, language_stack, summed_loss
from frostlab.training.treatment import count_parameters, wants_types


def evaluate(
    objective: Objective,
    prepared: Material,
    split: Split,
    batch: int,
    *,
    device: torch.device,
    precision: torch.dtype,
    world: World,
    types: bool = False,
    guesses: Tensor | None = None,
    layers: Sequence[int] = (),
    most: int | None = None,
) -> dict[str, Any]:
    """Every metric of the task over a split; the model's mode is put back afterwards.

    `guesses`, zeros for every example, get the class each was taken for, counted from 1; every
    process fills in its own. `layers`, counted from 1, are measured too, each as if the model
    ended there, in the same pass: theirs are under `layers`, by number. `most` batches are read,
    if not all.
    """
    below = [number for number in layers if number != objective.depth]
    tally, *others = (tally_for(objective, prepared, device) for _ in (0, *below))
    tallies = dict(zip(below, others, strict=True))
    training, examples = objective.training, examples_of(prepared, split, device, types)

    def see(number: int, logits: Tensor) -> None:
        tallies[number].add(logits, seen)

    want: Literal["logits"] | Exits = Exits(below, see) if below else "logits"
    objective.eval()
    try:
        with torch.no_grad(), uncompiled():
            for rows in islice(examples.sweep(batch), most):
                (part,) = shared(rows, world.rank, world.size, parts=1)
                seen = examples.collate(part).to(device)
                with torch.autocast(
                    device.type, torch.bfloat16, enabled=precision == torch.bfloat16
                ):
                    logits = objective(seen, want=want)
                tally.add(logits, seen)
                if guesses is not None and len(part):
                    guesses[torch.from_numpy(part).to(device)] = 1 + logits.argmax(-1)
    finally:
        objective.train(training)
    metrics = tally.metrics(world)
    if not layers:
        return metrics
    each = {number: tallies[number].metrics(world) for number in below}
    return {**metrics, "layers": {str(number): each.get(number, metrics) for number in layers}}


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


@dataclass(frozen=True)
class Exit:
    """A model that ends after a layer, counted from 1."""

    layer: int
    loss: float
    perplexity: float
    token_accuracy: float
    flops: float  # matmul operations a token of the forward pass, head included
    share: float  # of the whole model's
    parameters: int  # embedding, the layers so far, final norm and head


def early_exits(
    run: RunRecord | str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
) -> tuple[Exit, ...]:
    """Measure a finished run's best weights at every layer, on the split that was reported.

    One pass over the split; what it finds is also written to the run's folder, as `exits.json`.
    """
    record = run if isinstance(run, RunRecord) else RunRecord(Path(run))
    if record.status != "finished":
        raise BadInput(f"{record.folder} is {record.status}; early exits need a finished run")
    recipe = record.recipe
    if recipe.data.task != "language":
        raise BadInput(f"{record.folder} is a run for {recipe.data.task}; early exits for language")
    where = choose_device(device or recipe.train.device)
    precision = choose_precision(recipe.train, where)
    prepared = text_of(prepare(recipe, None if data_dir is None else Path(data_dir)))
    model = best_model(record, recipe, prepared).to(where)
    batch = recipe.evaluate.batch or recipe.train.batch // recipe.train.accumulate
    found = measure_exits(model, prepared, batch, where, precision)
    RunFolder(record.folder).write("exits.json", {
        "split": "report",
        "checkpoint": record.result.checkpoint,
        "length": _length(prepared),
        "device": str(where),
        "precision": str(precision).removeprefix("torch."),
        "exits": [asdict(each) for each in found],
    })  # fmt: skip
    return found


def measure_exits(
    model: torch.nn.Module,
    prepared: Prepared,
    batch: int,
    device: torch.device,
    precision: torch.dtype,
) -> tuple[Exit, ...]:
    """Every layer's metrics on the reporting split in one pass, and what each costs."""
    blocks = language_stack(model, "an early exit").layers
    layers = range(1, len(blocks) + 1)
    metrics = evaluate(
        Objective(model), prepared, prepared.splits["report"], batch, device=device,
        precision=precision, world=World(), types=wants_types(model), layers=layers,
    )["layers"]  # fmt: skip
    each, rest = forward_flops(anatomy(model), _length(prepared), causal=True)
    costs = [rest + sum(each[:number]) for number in layers]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    total = count_parameters(model)["total"]
    return tuple(
        Exit(
            layer=number,
            loss=metrics[str(number)]["loss"],
            perplexity=metrics[str(number)]["perplexity"],
            token_accuracy=metrics[str(number)]["token_accuracy"],
            flops=cost,
            share=cost / costs[-1],
            parameters=total - sum(sizes[number:]),
        )
        for number, cost in zip(layers, costs, strict=True)
    )


def exits_table(exits: tuple[Exit, ...]) -> str:
    """Set exits in aligned columns."""
    head = [
        "layer",
        "loss",
        "perplexity",
        "token accuracy",
        "MFLOPs a token",
        "share",
        "parameters",
    ]
    rows = [
        [str(e.layer), f"{e.loss:.4f}", f"{e.perplexity:.2f}", f"{e.token_accuracy:.2%}",
         f"{e.flops / 1e6:.4g}", f"{e.share:.1%}", f"{e.parameters:,}"]
        for e in exits
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    )


def _length(prepared: Prepared) -> int:
    """How many tokens of the longest example are read."""
    return int(row_lengths(prepared.splits["report"]).max())
