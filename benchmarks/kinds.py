"""Time the kinds of step in turn: eager, captured, captured with compiled layers; CUDA only.

`faster` is the eager time over the step's time of the same round: median, smallest, largest.

`prepare_s` covers building the step and its first six steps, with capturing and with compiling from
an empty cache.

    python benchmarks/kinds.py [--rounds 10] [--case bert]
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from common import device_name, report, timed
from frostlab.models.conformer import Conformer, ConformerConfig, Variant
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.model import EnvelopeLoss
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.envelope_loss import EnvelopeObjective
from frostlab.training.step.objective import Objective

CUDA = torch.device("cuda", 0)
MANY_STEPS = 10**6  # so many that compiling pays
KINDS: dict[str, tuple[StepKind, int, torch.dtype]] = {
    "eager": ("eager", 1, torch.bfloat16),
    "eager in float32": ("eager", 1, torch.float32),
    "captured": ("captured", 1, torch.bfloat16),
    "compiled and captured": ("captured", MANY_STEPS, torch.bfloat16),
}


def bert() -> Objective:
    return Objective(BertForSequenceClassification(BertConfig(num_labels=2)))


def gpt(classes: int) -> Objective:
    return Objective(GPT(GPTConfig(50304, dropout=0.0, classes=classes, causal=not classes)))


def conformer(variant: Variant = "frostlab") -> Objective:
    return EnvelopeObjective(Conformer(ConformerConfig(variant=variant)), EnvelopeLoss())


def texts(rows: int, length: int, language: bool = False) -> Batch:
    ids = torch.randint(5, 30000, (rows, length + language))
    targets = ids[:, 1:].contiguous() if language else torch.randint(2, (rows,))
    inputs = ids[:, :-1].contiguous() if language else ids
    return Batch({"input_ids": inputs}, targets, rows, inputs.numel(), targets.numel())


def signals(rows: int, length: int) -> Batch:
    config = ConformerConfig()
    eeg, subject = (
        torch.randn(rows, length, config.channels),
        torch.randint(config.subjects, (rows,)),
    )
    inputs = {"eeg": eeg, "subject": subject}
    return Batch(inputs, torch.randn(rows, length), rows, rows * length, rows)


sentences = functools.partial(texts, language=True)
CASES: dict[str, tuple[Callable[[], Objective], Callable[[int, int], Batch], tuple[int, int]]] = {
    "bert": (bert, texts, (32, 128)),
    "gpt classifies": (lambda: gpt(2), texts, (16, 512)),
    "gpt language 8": (lambda: gpt(0), sentences, (8, 512)),
    "gpt language 64": (lambda: gpt(0), sentences, (64, 512)),
    "conformer": (conformer, signals, (64, 640)),
    "conformer published": (lambda: conformer("published"), signals, (64, 640)),
}


def prepare(
    build: Callable[[], Objective],
    batch: Batch,
    kind: StepKind = "captured",
    steps: int = MANY_STEPS,
    precision: torch.dtype = torch.bfloat16,
) -> EagerStep:
    torch.manual_seed(0)
    torch.compiler.reset()
    objective = build().to(CUDA).train()
    with tempfile.TemporaryDirectory() as empty_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty_cache
        step = build_step(
            objective, Optim(), Train(step=kind), Compute(CUDA, precision), steps=steps
        )
        take(step, batch, 6)
    return step


def take(step: EagerStep, batch: Batch, times: int) -> None:
    for _ in range(times):
        step([batch], batch.scored, 1e-5)
    torch.cuda.synchronize()


def compare(case: str, rounds: int) -> None:
    build, draw, shape = CASES[case]
    batch = draw(*shape)
    sides: dict[str, EagerStep] = {}
    prepared, times = {}, {name: list[float]() for name in KINDS}
    for name, way in KINDS.items():
        began = time.perf_counter()
        sides[name] = prepare(build, batch, *way)
        prepared[name] = time.perf_counter() - began
    for _ in range(rounds):
        for name, step in sides.items():
            times[name].append(100 * timed(functools.partial(take, step, batch, 10), CUDA))
    for name, step in sides.items():
        faster = [eager / this for eager, this in zip(times["eager"], times[name], strict=True)]
        facts: dict[str, Any] = {
            "case": case,
            "shape": shape,
            "way": name,
            "became": step.kind,
            "ms": round(statistics.median(times[name]), 3),
            "low": round(min(times[name]), 3),
            "high": round(max(times[name]), 3),
            "faster": [round(f(faster), 3) for f in (statistics.median, min, max)],
            "prepare_s": round(prepared[name], 2),
        }
        report("kinds", facts | {"device": device_name(CUDA), "torch": torch.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    for case in options.case or CASES:
        compare(case, options.rounds)


if __name__ == "__main__":
    main()
