"""Time a whole step with a loss at every layer against a loss at the last: a decoder of 4 layers.

Published sizes: vocabulary 69,830, width 64, 64 × 32 tokens. The steps are those of a run, captured
on CUDA. `ratio` compares times, `flop_ratio` matmuls. Memory (CUDA) is the peak while each side
alone is built and takes its first steps.

    python benchmarks/supervision.py [--rounds 40] [--small]
"""

import argparse

import torch

from common import device, interleaved, repeated, report
from frostlab.bench.cases import PRETRAINING
from frostlab.bench.peers import reset_torch
from frostlab.bench.supervision import decoder_config, deep_work, supervised
from frostlab.bench.workloads import random_feed
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.settings import Supervise, Train
from frostlab.timing.flops import step_work
from frostlab.training.distributed import Compute
from frostlab.training.setup import choose_precision
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective

DEEP, STANDARD = Supervise(layers="all"), Supervise()


class Side:
    """Steps over random batches, one after another."""

    def __init__(self, layers: Supervise, config: DecoderConfig, batch: int, length: int) -> None:
        where = device()
        objective = supervised(Objective, config, layers).to(where).train()
        self.step: EagerStep = build_step(
            objective, PRETRAINING, Train(), Compute(where, choose_precision(Train(), where)),
            steps=10**5,
        )  # fmt: skip
        self.feed, self.taken = random_feed(batch, length + 1, config.vocabulary, 0), 0

    def __call__(self) -> None:
        batch = self.feed(self.taken)
        self.taken += 1
        self.step([batch], batch.scored, PRETRAINING.lr)


def peak(layers: Supervise, config: DecoderConfig, batch: int, length: int) -> int:
    """Return the peak memory in bytes while a side is built and takes its first steps."""
    reset_torch()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    repeated(Side(layers, config, batch, length), 4)()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="vocabulary 400, width 16, 4 × 8")
    options = parser.parse_args()
    where, config = device(), decoder_config(options.small)
    batch, length = (4, 8) if options.small else (64, 32)
    cuda = where.type == "cuda"
    used = [peak(layers, config, batch, length) for layers in (DEEP, STANDARD)] if cuda else []
    reset_torch()
    deep, standard = (Side(layers, config, batch, length) for layers in (DEEP, STANDARD))
    for side in (deep, standard):
        repeated(side, 4)()  # see the shape, capture it, replay it
    times = 10 if cuda else 1
    rounds = min(options.rounds, 5) if options.small else options.rounds
    result = interleaved(repeated(deep, times), repeated(standard, times), rounds, where)
    for key in ("ours_ms", "theirs_ms"):
        result[key] = round(result[key] / times, 4)
    tokens = batch * length
    plain = step_work(Decoder(config), length, tokens).flops
    flops = deep_work(config, length, tokens).flops / plain
    report("supervision", {
        "case": f"{config.layers} layers, V {config.vocabulary}, {batch} × {length} tokens",
        "width": config.width,
        "ours": "deep supervision",
        "theirs": "standard",
        "step": [deep.step.kind, standard.step.kind],
        "flop_ratio": round(flops, 4),
        "ratio_over_flops": round(result["ratio"] / flops, 4),
        "ours_mib": round(used[0] / 2**20, 1) if used else None,
        "theirs_mib": round(used[1] / 2**20, 1) if used else None,
        "memory_ratio": round(used[0] / used[1], 4) if used else None,
    } | result)  # fmt: skip


if __name__ == "__main__":
    main()
