"""Metrics of a model over a split, shared by all processes."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from frostlab.data import Prepared, Tokens
from frostlab.training.batching import collate, evaluation_order, shared, widest
from frostlab.training.compiled import uncompiled
from frostlab.training.distributed import World
from frostlab.training.metrics import Tally
from frostlab.training.objective import Exits, Objective


def evaluate(
    objective: Objective,
    prepared: Prepared,
    tokens: Tokens,
    batch: int,
    *,
    device: torch.device,
    precision: torch.dtype,
    world: World,
    types: bool = False,
    guesses: Tensor | None = None,
    layers: Sequence[int] = (),
) -> dict[str, Any]:
    """Every metric of the task over a split; the model's mode is put back afterwards.

    `guesses`, zeros for every example, get the class each was taken for, counted from 1; every
    process fills in its own. `layers`, counted from 1, are measured too, each as if the model
    ended there, in the same pass: theirs are under `layers`, by number.
    """
    below = [number for number in layers if number != objective.depth]
    tally, *others = (Tally(prepared.task, prepared.classes, device) for _ in (0, *below))
    tallies = dict(zip(below, others, strict=True))
    training, most = objective.training, widest(tokens, device)

    def see(number: int, logits: Tensor) -> None:
        tallies[number].add(logits, examples)

    want: Literal["logits"] | Exits = Exits(below, see) if below else "logits"
    objective.eval()
    try:
        with torch.no_grad(), uncompiled():
            for rows in evaluation_order(tokens.lengths, batch):
                (part,) = shared(rows, world.rank, world.size, parts=1)
                examples = collate(tokens, part, prepared.pad, types=types, most=most).to(device)
                with torch.autocast(
                    device.type, torch.bfloat16, enabled=precision == torch.bfloat16
                ):
                    logits = objective(examples, want=want)
                tally.add(logits, examples)
                if guesses is not None and len(part):
                    guesses[torch.from_numpy(part).to(device)] = 1 + logits.argmax(-1)
    finally:
        objective.train(training)
    metrics = tally.metrics(world)
    if not layers:
        return metrics
    each = {number: tallies[number].metrics(world) for number in below}
    return {**metrics, "layers": {str(number): each.get(number, metrics) for number in layers}}
