"""Metrics of a model over a split, shared by all processes."""

import torch
from torch import Tensor, nn

from frostlab.data import Prepared, Tokens
from frostlab.training.batching import collate, evaluation_order, shared, widest
from frostlab.training.compiled import uncompiled
from frostlab.training.distributed import World
from frostlab.training.metrics import Tally


def evaluate(
    objective: nn.Module,
    prepared: Prepared,
    tokens: Tokens,
    batch: int,
    *,
    device: torch.device,
    precision: torch.dtype,
    world: World,
    types: bool = False,
    guesses: Tensor | None = None,
) -> dict[str, float]:
    """Every metric of the task over a split; the model's mode is put back afterwards.

    `guesses`, zeros for every example, get the class each was taken for, counted from 1; every
    process fills in its own.
    """
    tally = Tally(prepared.task, prepared.classes, device)
    training, most = objective.training, widest(tokens, device)
    objective.eval()
    try:
        with torch.no_grad(), uncompiled():
            for rows in evaluation_order(tokens.lengths, batch):
                (part,) = shared(rows, world.rank, world.size, parts=1)
                examples = collate(tokens, part, prepared.pad, types=types, most=most).to(device)
                with torch.autocast(
                    device.type, torch.bfloat16, enabled=precision == torch.bfloat16
                ):
                    logits = objective(examples, want="logits")
                tally.add(logits, examples)
                if guesses is not None and len(part):
                    guesses[torch.from_numpy(part).to(device)] = 1 + logits.argmax(-1)
    finally:
        objective.train(training)
    return tally.metrics(world)
