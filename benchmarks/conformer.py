"""A training step of the Conformer, captured against eager: 64 windows of 640 × 64, 8 × 256 layers.

Both sides take a run's own steps over the same drawn windows; making batches is in them. On a CPU
nothing is captured, and the ratio says only how much noise there is.

    python benchmarks/conformer.py [--rounds 20] [--small]
"""

import argparse

import numpy as np
import torch

from common import device, interleaved, repeated, report
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.recipe.conformer import EnvelopeLoss
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.batching import Batch
from frostlab.training.choosing import build_step
from frostlab.training.devices import choose_precision
from frostlab.training.distributed import World
from frostlab.training.envelopes import EnvelopeObjective
from frostlab.training.step import seed_step

PUBLISHED = Optim(lr=1e-4, betas=(0.9, 0.98), eps=1e-9, decay=0.0, clip=None)
STEPS = 10**5


class Side:
    """Steps over windows of one long recording, cut when they are asked for."""

    def __init__(self, kind: StepKind, config: ConformerConfig, batch: int, length: int) -> None:
        torch.manual_seed(0)
        where, train = device(), Train(step=kind)
        objective = EnvelopeObjective(Conformer(config), EnvelopeLoss()).to(where).train()
        self.step = build_step(
            objective, PUBLISHED, train, choose_precision(train, where), where, World(),
            steps=STEPS,
        )  # fmt: skip
        draw = np.random.default_rng(0)
        self.eeg = draw.standard_normal((20 * length, config.channels), dtype=np.float32)
        self.envelope = draw.standard_normal(20 * length, dtype=np.float32)
        self.batch, self.length, self.subjects, self.taken = batch, length, config.subjects, 0

    def __call__(self) -> None:
        draw = np.random.default_rng(self.taken)
        starts = draw.integers(len(self.envelope) - self.length, size=self.batch)
        places = starts[:, None] + np.arange(self.length)
        subjects = torch.from_numpy(draw.integers(self.subjects, size=self.batch))
        inputs = {"eeg": torch.from_numpy(self.eeg[places]), "subject": subjects}
        targets = torch.from_numpy(self.envelope[places])
        made = Batch(inputs, targets, self.batch, self.batch * self.length, self.batch)
        seed_step(0, self.taken, 0, self.step.device)
        self.taken += 1
        self.step([made], made.scored, PUBLISHED.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="2 layers of 16, 4 windows of 32")
    options = parser.parse_args()
    where, small = device(), options.small
    config = ConformerConfig(width=16, layers=2, hidden=32) if small else ConformerConfig()
    batch, length = (4, 32) if small else (64, 640)
    captured = Side("captured", config, batch, length)
    eager = Side("eager", config, batch, length)
    for side in (captured, eager):
        repeated(side, 4)()  # seen, captured, replayed
    times = 5 if where.type == "cuda" else 1
    rounds = min(options.rounds, 3) if small else options.rounds
    result = interleaved(repeated(captured, times), repeated(eager, times), rounds, where)
    for key in ("ours_ms", "theirs_ms"):
        result[key] = round(result[key] / times, 4)
    report("conformer", {
        "case": f"{config.layers} layers of {config.width}, {batch} × {length} × {config.channels}",
        "ours": f"captured: {captured.step.kind}, {captured.step.reason}",
        "theirs": eager.step.kind,
        "precision": str(captured.step.precision),
        "faster": round(1 / result["ratio"], 3),
    } | result)  # fmt: skip


if __name__ == "__main__":
    main()
