"""Measure the cost of watching every 10th step, and of other ways to inspect gradients.

A BERT step with AdamW is timed in one process, in turn: unwatched; with `fl.watch`; with a
histogram of every gradient (torch.histc); with a loop of `.norm().item()`. All inspect every 10th
step. Each figure is the ratio of whole blocks of steps to the same blocks unwatched; every side has
its own model. A second unwatched side shows how far from 1 is noise.

python benchmarks/flow.py [--small] [--rounds 20] [--batch 32] [--length 128] [--every 10]
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import frostlab as fl
from common import device, device_name, report, timed

SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512,
    "vocab_size": 2000,
}  # fmt: skip


def nothing(model: nn.Module) -> None:
    """Inspect nothing."""


def histograms(model: nn.Module) -> None:
    """Copy a histogram of every gradient to the host, as wandb.watch does."""
    for p in model.parameters():
        if p.grad is not None:
            torch.histc(p.grad.float(), 64).tolist()


def norms(model: nn.Module) -> None:
    """Compute one norm after another and wait for each, as many loops do."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.norm().item()


class Side:
    """A model, its optimizer, and a way to inspect its gradients."""

    def __init__(self, options: argparse.Namespace, inspect: Callable[[nn.Module], None]) -> None:
        torch.manual_seed(0)
        self.where, self.every, self.inspect, self.step = device(), options.every, inspect, 0
        config = transformers.BertConfig(**(SMALL if options.small else {}))
        self.model = transformers.BertForSequenceClassification(config).to(self.where).train()
        fused = self.where.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        shape = (options.batch, options.length)
        self.ids = torch.randint(5, config.vocab_size, shape, device=self.where)
        self.classes = torch.randint(0, 2, (options.batch,), device=self.where)

    def block(self) -> None:
        """Take the steps between two inspections."""
        for _ in range(self.every):
            with torch.autocast(self.where.type, torch.bfloat16, self.where.type == "cuda"):
                loss = self.model(input_ids=self.ids, labels=self.classes).loss
            loss.backward()
            if self.step % self.every == 0:
                self.inspect(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a BERT of four narrow layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    sides = {
        "unwatched": Side(options, nothing),
        "unwatched again": Side(options, nothing),
        "fl.watch": Side(options, nothing),
        "histograms": Side(options, histograms),
        "norm().item()": Side(options, norms),
    }
    watched = sides["fl.watch"]
    flow = fl.watch(watched.model, watched.optimizer, options.every).start()
    for side in sides.values():
        side.block()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for i in range(options.rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn if i % 2 else reversed(turn):
            times[name].append(timed(sides[name].block, watched.where))
    flow.stop()
    assert len(flow.reports) == options.rounds + 1
    assert not flow.frozen_by_accident()
    for name in names[1:]:
        pairs = zip(times[name], times["unwatched"], strict=True)
        ratios = sorted(a / b for a, b in pairs)
        report("flow", {
            "side": name, "every": options.every, "batch": options.batch, "length": options.length,
            "small": options.small, "rounds": options.rounds,
            "step_ms": round(1e3 * statistics.median(times[name]) / options.every, 4),
            "unwatched_ms": round(1e3 * statistics.median(times["unwatched"]) / options.every, 4),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_low": round(ratios[len(ratios) // 10], 4),
            "ratio_high": round(ratios[-1 - len(ratios) // 10], 4),
            "device": device_name(watched.where), "torch": torch.__version__,
        })  # fmt: skip


if __name__ == "__main__":
    main()
