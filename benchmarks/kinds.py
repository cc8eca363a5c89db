"""Kinds of step: eager, captured, and captured with its layers compiled, in turn; CUDA only.

Preparing counts from building the step to the end of its sixth: compiling (cold, its cache is put
into an empty folder) and capturing are in it, against six eager steps.

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
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from common import device_name, report, timed
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.batching import Batch
from frostlab.training.choosing import WORTH_COMPILING, build_step
from frostlab.training.distributed import World
from frostlab.training.objective import Objective
from frostlab.training.step import EagerStep

CUDA = torch.device("cuda", 0)
KINDS: dict[str, tuple[StepKind, int]] = {
    "eager": ("eager", 1),
    "captured": ("captured", 1),
    "compiled and captured": ("captured", WORTH_COMPILING),
}


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(num_labels=2))


def gpt(classes: int) -> nn.Module:
    return GPT(GPTConfig(50304, dropout=0.0, classes=classes, causal=not classes))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], bool]] = {
    "bert": (bert, (32, 128), False),
    "gpt classifies": (lambda: gpt(2), (16, 512), False),
    "gpt language 8": (lambda: gpt(0), (8, 512), True),
    "gpt language 64": (lambda: gpt(0), (64, 512), True),
}


def drawn(shape: tuple[int, int], language: bool) -> Batch:
    ids = torch.randint(5, 30000, (shape[0], shape[1] + language))
    targets = ids[:, 1:].contiguous() if language else torch.randint(2, shape[:1])
    inputs = ids[:, :-1].contiguous() if language else ids
    return Batch({"input_ids": inputs}, targets, shape[0], inputs.numel(), targets.numel())


def prepare(build: Callable[[], nn.Module], kind: StepKind, steps: int, batch: Batch) -> EagerStep:
    torch.manual_seed(0)
    torch.compiler.reset()
    objective = Objective(build().to(CUDA).train())
    with tempfile.TemporaryDirectory() as cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold
        step = build_step(
            objective, Optim(), Train(step=kind), torch.bfloat16, CUDA, World(), steps=steps
        )
        take(step, batch, 6)
    return step


def take(step: EagerStep, batch: Batch, times: int) -> None:
    for _ in range(times):
        step([batch], batch.scored, 1e-5)
    torch.cuda.synchronize()


def compare(case: str, rounds: int) -> None:
    build, shape, language = CASES[case]
    batch = drawn(shape, language)
    sides: dict[str, EagerStep] = {}
    prepared, times = {}, {name: list[float]() for name in KINDS}
    for name, (kind, steps) in KINDS.items():
        began = time.perf_counter()
        sides[name] = prepare(build, kind, steps, batch)
        prepared[name] = time.perf_counter() - began
    for _ in range(rounds):
        for name, step in sides.items():
            times[name].append(100 * timed(functools.partial(take, step, batch, 10), CUDA))
    for name, step in sides.items():
        facts: dict[str, Any] = {
            "case": case,
            "shape": shape,
            "way": name,
            "became": step.kind,
            "ms": round(statistics.median(times[name]), 3),
            "low": round(min(times[name]), 3),
            "high": round(max(times[name]), 3),
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
