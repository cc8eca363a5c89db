"""Early exits: a trained language model measured as if it ended after each of its layers."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from frostlab.data.prepare import as_token_data, prepare
from frostlab.data.tokens import Prepared
from frostlab.devices import choose_device
from frostlab.errors import BadInput
from frostlab.records.folder import RunFolder, RunRecord
from frostlab.roles.read import anatomy
from frostlab.text import columns
from frostlab.timing.flops import forward_flops
from frostlab.training.batches.batch import row_lengths
from frostlab.training.distributed import Compute
from frostlab.training.evaluate import evaluate
from frostlab.training.restore import best_model, check_same_data
from frostlab.training.setup import choose_precision, modes_of
from frostlab.training.state import evaluation_batch
from frostlab.training.step.objective import Objective, language_stack
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import count_parameters


@dataclass(frozen=True)
class Exit:
    """The metrics and cost of a model that ends after one of its layers."""

    layer: int  # number of the layer, counted from 1
    loss: float
    perplexity: float
    token_accuracy: float
    # matmul FLOPs per token of a forward pass over the longest input, those of the head included
    flops: float
    share: float  # `flops` as a fraction of the whole model's FLOPs
    parameters: int  # in the embedding, the layers up to this one, the final norm and the head


def early_exits(
    run: RunRecord | str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
) -> tuple[Exit, ...]:
    """Evaluate a finished run's best weights as if the model ended after each layer.

    This takes one pass over the `report` split. The results are also written to `exits.json` in the
    run's folder.
    """
    record = run if isinstance(run, RunRecord) else RunRecord(Path(run))
    if record.status != "finished":
        raise BadInput(f"{record.folder} is {record.status}; early exits need a finished run")
    recipe = record.recipe
    if recipe.data.task != "language":
        does = "decodes EEG" if recipe.data.task == "envelope" else "classifies texts"
        raise BadInput(f"{record.folder} {does}; early exits need a language model")
    chosen = choose_device(device or recipe.train.device)
    compute = Compute(chosen, choose_precision(recipe.train, chosen))
    prepared = as_token_data(prepare(recipe, None if data_dir is None else Path(data_dir)))
    check_same_data(record, prepared)
    model = best_model(record).to(chosen)
    with modes_of(recipe, chosen):
        exits = measure_exits(model, prepared, evaluation_batch(recipe, model), compute)
    RunFolder(record.folder).write("exits.json", {
        "split": "report",
        "caution": prepared.caution,
        "checkpoint": record.result.checkpoint,
        "length": _length(prepared),
        "device": str(chosen),
        "precision": str(compute.precision).removeprefix("torch."),
        "exits": [asdict(layer) for layer in exits],
    })  # fmt: skip
    return exits


def measure_exits(
    model: torch.nn.Module, prepared: Prepared, batch: int, compute: Compute
) -> tuple[Exit, ...]:
    """Return the metrics on the `report` split and the cost of an exit after each layer."""
    blocks = language_stack(model, "an early exit").layers
    layers = range(1, len(blocks) + 1)
    metrics = evaluate(
        TASKS["language"], Objective(model), prepared, prepared.splits["report"], batch, compute,
        layers=layers,
    )["layers"]  # fmt: skip
    layer_flops, other_flops = forward_flops(anatomy(model), _length(prepared), causal=True)
    costs = [other_flops + sum(layer_flops[:number]) for number in layers]
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
    """Return the exits as an aligned table."""
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
    return "\n".join(columns([head, *rows], right=range(len(head))))


def _length(prepared: Prepared) -> int:
    """Return the length in tokens of the longest input in the `report` split."""
    return int(row_lengths(prepared.splits["report"]).max())
