"""Metrics of a model over a split, shared by all processes."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from frostlab.data import Material
from frostlab.training.batching import shared
from frostlab.training.compiled import uncompiled
from frostlab.training.distributed import World
from frostlab.training.examples import Split, examples_of
from frostlab.training.metrics import tally_for
from frostlab.training.objective import Exits, Objective


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
