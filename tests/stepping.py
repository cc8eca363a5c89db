"""Steps to take over a little data, and their losses."""

import numpy as np
import torch

from frostlab.training.batches.batch import Batch, collate, epoch_order
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.step.eager import EagerStep, seed_step
from packed import PAD, classifies, tokens


def epochs(name: str, count: int, packed: bool) -> list[list[Batch]]:
    """So many steps over the same sixty examples, whose labels follow from a token."""
    data = tokens(labels=classifies(name))
    if data.labels is not None:
        data.labels[:] = data.ids[data.starts].astype(np.int64) % 3
    made: list[list[Batch]] = []
    while len(made) < count:
        order = epoch_order(data.lengths, 16, 0, len(made), bucket=False)
        shapes = shapes_for(data, order)
        if packed:
            made += [[pack(data, rows, PAD, shapes=shapes)] for rows in order]
        else:
            made += [[collate(data, rows, PAD, limit=32)] for rows in order]
    return made[:count]


def train(step: EagerStep, steps: list[list[Batch]], seed: int = 0) -> list[float]:
    outcomes = []
    for i, parts in enumerate(steps):
        seed_step(seed, i, 0, step.device)
        outcomes.append(step(parts, sum(p.scored for p in parts), 1e-3 * min(1, (i + 1) / 20)))
    return torch.stack([outcome.loss for outcome in outcomes]).tolist()
