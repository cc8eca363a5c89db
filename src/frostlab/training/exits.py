"""Early exit: what a language model's head makes of every layer, and what stopping there costs."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from frostlab.anatomy import anatomy
from frostlab.anatomy.savings import forward_flops
from frostlab.data import Prepared, prepare, text_of
from frostlab.errors import BadInput
from frostlab.records.folder import RunFolder
from frostlab.records.record import RunRecord
from frostlab.training.best import best_model, recipe_of
from frostlab.training.devices import choose_device, choose_precision
from frostlab.training.distributed import World
from frostlab.training.evaluation import evaluate
from frostlab.training.objective import Objective
from frostlab.training.packing import row_lengths
from frostlab.training.supervision import language_stack
from frostlab.training.treating import count_parameters, wants_types


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
    recipe = recipe_of(record)
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
        "checkpoint": record.result["checkpoint"],
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
