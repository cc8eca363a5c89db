"""frostlab's loop and the Hugging Face Trainer, each against a bare PyTorch loop.

The same BERT-mini (4 × 256), the same batches in the same order, the same fused AdamW, clipping
and schedule. A bare step (on a GPU: ten) is taken after each step of the other side, so that each
pair of times lies side by side; rounds of the two sides alternate.

    python benchmarks/loop.py [--rounds 4] [--steps 60]
"""

import argparse
import copy
import logging
import tempfile
import time
from collections.abc import Iterator
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
from frostlab.data.tokens import Prepared, Tokens
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunFolder
from frostlab.timing.clock import Stopwatch
from frostlab.training.batches.batch import collate, epoch_order
from frostlab.training.distributed import World
from frostlab.training.loop import train
from frostlab.training.stages import Stage
from frostlab.training.state import Best, Progress, Setting, Silent
from frostlab.training.step.objective import Objective

BATCH, LENGTH = 32, 64


def made_tokens(examples: int) -> Tokens:
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, LENGTH + 1, examples)
    stops = np.cumsum(lengths)
    ids = draw.integers(1000, 30000, int(stops[-1])).astype(np.uint16)
    labels = draw.integers(0, 2, examples)
    return Tokens(ids, stops - lengths, stops, labels, None, None, "made")


class Turns(Silent):
    """After every few steps of one side, takes as many bare ones, and times both."""

    def __init__(self, other: "Bare", steps: int, where: torch.device) -> None:
        self.other, self.steps, self.where = other, steps, where
        self.every = 10 if where.type == "cuda" else 1
        self.pairs: list[tuple[float, float]] = []
        self.count, self.began = 0, 0.0

    def advance(self, step: int, loss: float | None) -> None:
        self.count += 1
        if self.count % self.every:
            return
        ended = self._now()
        for _ in range(self.every):
            self.other.step()
        resumed = self._now()
        if self.began:
            self.pairs.append((ended - self.began, resumed - ended))
        self.began = resumed

    def _now(self) -> float:
        if self.where.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def over(self) -> bool:
        """Ends a round of ours before anything is evaluated or saved."""
        if self.count >= self.steps:
            raise _Enough
        return False


class _Enough(Exception):
    """The round is over."""


class Bare:
    """What one would write by hand."""

    def __init__(self, model: Any, tokens: Tokens, where: torch.device) -> None:
        self.model, self.tokens, self.where = model.train(), tokens, where
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.order = epoch_order(tokens.lengths, BATCH, 0, 0, bucket=True)
        self.taken = 0

    def step(self) -> None:
        rows = self.order[self.taken % len(self.order)]
        self.taken += 1
        batch = collate(self.tokens, rows, 0).to(self.where)
        self.optimizer.param_groups[0]["lr"] = 3e-4 * (1 - self.taken / 10**4)
        cuda = self.where.type == "cuda"
        with torch.autocast(self.where.type, torch.bfloat16, enabled=cuda):
            logits = self.model(**batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(model: Any, tokens: Tokens, steps: int, turns: Turns, where: torch.device) -> None:
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
    precision = torch.bfloat16 if where.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        made = RunFolder(Path(folder) / "run").open()
        setting = Setting(recipe, prepared, model, Objective(model), (Stage("train", steps + 1),),
                          where, precision, World(), made, None, turns, turns.over,
                          made.path)  # fmt: skip
        with made, suppress(_Enough):
            train(setting, Progress(Best("accuracy")), Stopwatch(where), None)


class _Batches(torch.utils.data.IterableDataset[Any]):
    def __init__(self, tokens: Tokens, steps: int) -> None:
        self.tokens, self.steps = tokens, steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for rows in epoch_order(self.tokens.lengths, BATCH, 0, 0, bucket=True)[: self.steps]:
            batch = collate(self.tokens, rows, 0)
            yield {**batch.inputs, "labels": batch.targets}


class _AfterSteps(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.turns.advance(0, None)


def hugging_face(model: Any, tokens: Tokens, steps: int, turns: Turns, where: torch.device) -> None:
    cuda = where.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=3e-4, optim="adamw_torch_fused",
            max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not cuda, bf16=cuda, per_device_train_batch_size=1,
        )  # fmt: skip
        trainer = Trainer(
            model,
            arguments,
            train_dataset=_Batches(tokens, steps),
            data_collator=lambda rows: rows[0],
            callbacks=[_AfterSteps(turns)],
        )
        trainer.train()


def ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """The median of paired ratios and its 95 % interval, by ranks: no shape is assumed."""
    ratios = np.sort([one / other for one, other in pairs])
    count = len(ratios)
    low, high = stats.binom.interval(0.95, count, 0.5)
    ones, others = np.array(pairs).T
    return {
        "ours_ms": round(1e3 * float(np.median(ones)), 3),
        "theirs_ms": round(1e3 * float(np.median(others)), 3),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_95": [round(float(ratios[int(i)]), 4) for i in (low, min(high, count - 1))],
        "pairs": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    where, steps = torch.device(device().type, 0), options.steps
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                        intermediate_size=1024)  # fmt: skip
    first = BertForSequenceClassification(config).to(where)
    tokens = made_tokens(BATCH * (steps + 2))
    sides = {"frostlab": ours, "Trainer": hugging_face}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for round_ in range(options.rounds):
        for name, side in list(sides.items())[:: -1 if round_ % 2 else 1]:
            turns = Turns(Bare(copy.deepcopy(first), tokens, where), steps, where)
            side(copy.deepcopy(first), tokens, steps, turns, where)
            pairs[name] += turns.pairs[2:]  # the first warm up
    for name, found in pairs.items():
        facts = {"loop": name, "against": "bare loop", "device": device_name(where)}
        report("loop", facts | {"torch": torch.__version__} | ratio(found))


if __name__ == "__main__":
    main()
