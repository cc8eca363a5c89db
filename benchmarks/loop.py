"""frostlab's loop against a bare PyTorch loop and against the Hugging Face Trainer.

The same BERT-mini (4 × 256), the same batches in the same order, the same fused AdamW, clipping
and schedule; the sides take turns, round after round. On CUDA also: timing on against timing off.

    python benchmarks/loop.py [--rounds 10] [--steps 20]
"""

import argparse
import copy
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from common import device, device_name, report
from frostlab.data import Prepared, Tokens
from frostlab.recipe.loading import recipe_from
from frostlab.records.folder import RunFolder
from frostlab.training.batching import collate, epoch_order
from frostlab.training.distributed import World
from frostlab.training.loop import Setting, train
from frostlab.training.patience import Best
from frostlab.training.progress import Progress, Silent
from frostlab.training.stages import Stage
from frostlab.training.step import seed_step
from frostlab.training.stopwatch import Stopwatch

BATCH, LENGTH = 32, 64


def made_tokens(examples: int) -> Tokens:
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, LENGTH + 1, examples)
    stops = np.cumsum(lengths)
    ids = draw.integers(1000, 30000, int(stops[-1])).astype(np.uint16)
    labels = draw.integers(0, 2, examples)
    return Tokens(ids, stops - lengths, stops, labels, None, None, "made")


class Stamps(Silent):
    """Notes the time after every step."""

    def __init__(self, where: torch.device) -> None:
        self.where, self.times = where, list[float]()

    def advance(self, step: int, loss: float | None) -> None:
        self.times.append(time.perf_counter())

    def milliseconds(self) -> float:
        """Per step, the first of them left out; the device has finished."""
        return 1e3 * (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def ours(model: Any, tokens: Tokens, steps: int, where: torch.device, timing: bool) -> float:
    recipe = recipe_from(
        {
            "data": {"name": "sst2"},
            "model": {"kind": "pretrained", "name": "bert"},
            "train": {"batch": BATCH, "steps": steps + 1},
            "evaluate": {"every": 10**6},
        }
    )
    prepared = Prepared("classification", 2, 30522, 0, {"train": tokens, "tune": tokens},
                        {}, None, {}, "", None)  # fmt: skip
    stamps, halt = Stamps(where), _Halt(steps, where)
    watch = Stopwatch(where) if timing else _NoTiming(where)
    with tempfile.TemporaryDirectory() as folder:
        made = RunFolder.create(Path(folder) / "run", {}, name="bench")
        setting = Setting(recipe, prepared, model, (Stage("train", steps + 1),), where,
                          torch.bfloat16 if where.type == "cuda" else torch.float32, World(),
                          made, None, stamps, lambda: halt(stamps))  # fmt: skip
        with made, suppress(_Enough):
            train(setting, Progress(Best("accuracy")), watch, None)
    return stamps.milliseconds()


class _Enough(Exception):
    """The round is over."""


class _Halt:
    """Ends a round after its last step, before anything is evaluated or saved."""

    def __init__(self, steps: int, where: torch.device) -> None:
        self.steps, self.where = steps, where

    def __call__(self, stamps: Stamps) -> bool:
        if len(stamps.times) == self.steps:
            if self.where.type == "cuda":
                torch.cuda.synchronize()
                stamps.times[-1] = time.perf_counter()
            raise _Enough
        return False


class _NoTiming(Stopwatch):
    """Marks nothing."""

    def mark(self) -> Any:
        return 0.0

    def lap(self, began: Any) -> None:
        self._count = getattr(self, "_count", 0) + 1

    def laps(self, count: int) -> list[float]:
        return [0.0] * count


def bare(model: Any, tokens: Tokens, steps: int, where: torch.device) -> float:
    """What one would write by hand."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    stamps = Stamps(where)
    cuda = where.type == "cuda"
    order = epoch_order(tokens.lengths, BATCH, 0, 0, bucket=True)
    for step in range(steps):
        batch = collate(tokens, order[step], 0).to(where)
        seed_step(0, step, 0, where)
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - step / steps)
        with torch.autocast(where.type, torch.bfloat16, enabled=cuda):
            logits = model(**batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stamps.advance(step, None)
    if cuda:
        torch.cuda.synchronize()
        stamps.times[-1] = time.perf_counter()
    return stamps.milliseconds()


class _Batches(torch.utils.data.IterableDataset[Any]):
    def __init__(self, tokens: Tokens, steps: int) -> None:
        self.tokens, self.steps = tokens, steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for rows in epoch_order(self.tokens.lengths, BATCH, 0, 0, bucket=True)[: self.steps]:
            batch = collate(self.tokens, rows, 0)
            yield {**batch.inputs, "labels": batch.targets}


class _StampSteps(TrainerCallback):
    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.stamps.advance(0, None)


def hugging_face(model: Any, tokens: Tokens, steps: int, where: torch.device) -> float:
    cuda = where.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=3e-4, optim="adamw_torch_fused",
            max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not cuda, bf16=cuda, per_device_train_batch_size=1,
        )  # fmt: skip
        stamps = Stamps(where)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=_Batches(tokens, steps),
            data_collator=lambda rows: rows[0],
            callbacks=[_StampSteps(stamps)],
        )
        trainer.train()
    if cuda:
        torch.cuda.synchronize()
        stamps.times[-1] = time.perf_counter()
    return stamps.milliseconds()


def compare(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every side once a round, each round starting with another."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round_ in range(rounds + 1):
        for i in range(len(names)):
            name = names[(i + round_) % len(names)]
            value = sides[name]()
            if round_:  # the first warms up
                times[name].append(value)
    return times


def ratio(one: list[float], other: list[float]) -> dict[str, Any]:
    """The paired ratio of times: its median, and a 95 % interval of its geometric mean."""
    logs = np.log(np.array(one) / np.array(other))
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    return {
        "ours_ms": round(float(np.median(one)), 3),
        "theirs_ms": round(float(np.median(other)), 3),
        "ratio": round(float(np.exp(np.median(logs))), 4),
        "ratio_95": [round(float(np.exp(low)), 4), round(float(np.exp(high)), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    where, steps = torch.device(device().type, 0), options.steps
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                        intermediate_size=1024)  # fmt: skip
    first = BertForSequenceClassification(config).to(where)
    tokens = made_tokens(BATCH * (steps + 2))

    def model() -> Any:
        return copy.deepcopy(first)

    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(model(), tokens, steps, where, timing=True),
        "bare": lambda: bare(model(), tokens, steps, where),
        "trainer": lambda: hugging_face(model(), tokens, steps, where),
    }
    if where.type == "cuda":
        sides["untimed"] = lambda: ours(model(), tokens, steps, where, timing=False)
    times = compare(sides, options.rounds)
    for other in times:
        if other != "ours":
            facts = {"against": other, "rounds": options.rounds, "steps": steps}
            facts |= {"device": device_name(where), "torch": torch.__version__}
            report("loop", facts | ratio(times["ours"], times[other]))


if __name__ == "__main__":
    main()
