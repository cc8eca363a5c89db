"""Cost of watching every 10th of frostlab's own steps: a BERT step, captured on CUDA.

Three sides, interleaved in one process, each with its own model: unwatched, unwatched again (to
show how far from 1 is noise), and watched as in a run. Each figure is the ratio of blocks of steps
to the same blocks of the first side.

python benchmarks/flow_step.py [--small] [--rounds 20] [--batch 32] [--length 128] [--every 10]
"""

import argparse
import statistics

import torch
import transformers

import frostlab as fl
from common import device, device_name, report, timed
from flow import SMALL
from frostlab.bench.workloads import random_tokens
from frostlab.devices import choose_device
from frostlab.flow.probe import own_gradient
from frostlab.recipe.settings import Optim, Train
from frostlab.timing.clock import Meter
from frostlab.training.batches.batch import collate
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import seed_step
from frostlab.training.step.objective import Objective


class Side:
    """A model and the step that a run would take with it."""

    def __init__(self, options: argparse.Namespace, watched: bool) -> None:
        torch.manual_seed(0)
        self.every, self.where, self.taken = options.every, choose_device("auto"), 0
        config = transformers.BertConfig(**(SMALL if options.small else {}))
        model = transformers.BertForSequenceClassification(config).to(self.where).train()
        precision = torch.bfloat16 if self.where.type == "cuda" else torch.float32
        self.step = build_step(Objective(model), Optim(lr=1e-5), Train(step="auto"),
                               Compute(self.where, precision), steps=options.steps)  # fmt: skip
        tokens = random_tokens(options.batch, options.length, config.vocab_size, 2)
        self.batch = collate(tokens, range(options.batch), 0)
        if watched:
            copies = self.step.copies
            gradient = own_gradient if copies is None else copies.gradient
            flow = fl.watch(model, self.step.optimizer, self.every, verify=False, gradient=gradient)
            self.step.flow = flow.start(hooks=False)

    def block(self) -> None:
        """Take the steps from one report to the next."""
        for _ in range(self.every):
            seed_step(0, self.taken, 0, self.where)
            self.step([self.batch], self.batch.scored, 1e-5)
            self.taken += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a BERT of four narrow layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument(
        "--steps",
        type=int,
        default=10_000,
        help="length of the run, which decides whether the step is compiled",
    )
    options = parser.parse_args()
    sides: dict[str, Side] = {}
    memory: dict[str, int | None] = {}
    for name in ("unwatched", "unwatched again", "watched"):
        meter = Meter(device())
        sides[name] = Side(options, name == "watched")
        for _ in range(3):  # see the shape, capture it both ways, replay it
            sides[name].block()
        memory[name] = meter.read()[1]
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for i in range(options.rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn if i % 2 else reversed(turn):
            times[name].append(timed(sides[name].block, device()))
    flow = sides["watched"].step.flow
    assert flow is not None
    flow.stop()
    assert len(flow.reports) == options.rounds + 3
    assert not flow.frozen_by_accident()
    for name in names[1:]:
        ratios = sorted(a / b for a, b in zip(times[name], times["unwatched"], strict=True))
        report("flow_step", {
            "side": name, "step": sides[name].step.kind, "every": options.every,
            "batch": options.batch, "length": options.length, "small": options.small,
            "rounds": options.rounds, "peak_bytes": memory[name],
            "step_ms": round(1e3 * statistics.median(times[name]) / options.every, 4),
            "unwatched_ms": round(1e3 * statistics.median(times["unwatched"]) / options.every, 4),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_low": round(ratios[len(ratios) // 10], 4),
            "ratio_high": round(ratios[-1 - len(ratios) // 10], 4),
            "device": device_name(device()), "torch": torch.__version__,
        })  # fmt: skip


if __name__ == "__main__":
    main()
