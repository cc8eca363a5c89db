"""Time frostlab's loop and the Hugging Face Trainer, each against a bare PyTorch loop.

The same BERT-mini (4 × 256), the same batches in the same order, the same fused AdamW, clipping
and schedule. A bare step follows each step of the loop (on a GPU: ten follow ten), so that the two
times of a pair are close together; rounds of the two loops alternate.

    python benchmarks/loop.py [--rounds 4] [--steps 60]
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
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import synchronize
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunFolder
from frostlab.timing.clock import Stopwatch
from frostlab.training.batches.batch import collate, epoch_order
from frostlab.training.distributed import Compute
from frostlab.training.loop import train
from frostlab.training.progress import Display, Nowhere
from frostlab.training.stages import Entered, Stage
from frostlab.training.state import Best, Progress, RunContext, StageModel
from frostlab.training.step.objective import Objective
from frostlab.training.tasks import TASKS

BATCH, LENGTH = 32, 64


def random_tokens(examples: int) -> Tokens:
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, LENGTH + 1, examples)
    stops = np.cumsum(lengths)
    ids = draw.integers(1000, 30000, int(stops[-1])).astype(np.uint16)
    labels = draw.integers(0, 2, examples)
    return Tokens(ids, stops - lengths, stops, labels, None, None, "random")


class PairTimer(Display):
    """After every few steps of a loop, take as many bare ones, and time both."""

    def __init__(self, bare: "BareLoop", steps: int, where: torch.device) -> None:
        super().__init__(Nowhere())
        self.bare, self.steps, self.where = bare, steps, where
        self.every = 10 if where.type == "cuda" else 1
        self.pairs: list[tuple[float, float]] = []
        self.count, self.began = 0, 0.0

    def advance(self, step: int, loss: Callable[[], float | None]) -> None:
        self.count += 1
        if self.count % self.every:
            return
        ended = self._now()
        for _ in range(self.every):
            self.bare.step()
        resumed = self._now()
        if self.began:
            self.pairs.append((ended - self.began, resumed - ended))
        self.began = resumed

    def _now(self) -> float:
        synchronize(self.where)
        return time.perf_counter()

    def over(self) -> bool:
        """End a round of our loop before anything is evaluated or saved."""
        if self.count >= self.steps:
            raise _RoundOver
        return False


class _RoundOver(Exception):
    """Ends a round."""


class BareLoop:
    """A plain PyTorch loop."""

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


def ours(model: Any, tokens: Tokens, steps: int, timer: PairTimer, where: torch.device) -> None:
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
        run = RunFolder(Path(folder) / "run").open()
        stage, compute = Stage("train", steps + 1), Compute(where, precision)
        current = StageModel(0, stage, Entered(), Objective(model))
        context = RunContext(recipe, prepared, TASKS["classification"], (stage,), compute,
                             run.path, run, timer, timer.over, current)  # fmt: skip
        with run, suppress(_RoundOver):
            train(context, Progress(Best("accuracy")), Stopwatch(where), None)


class _Batches(torch.utils.data.IterableDataset[Any]):
    def __init__(self, tokens: Tokens, steps: int) -> None:
        self.tokens, self.steps = tokens, steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for rows in epoch_order(self.tokens.lengths, BATCH, 0, 0, bucket=True)[: self.steps]:
            batch = collate(self.tokens, rows, 0)
            yield {**batch.inputs, "labels": batch.targets}


class _AfterSteps(TrainerCallback):
    def __init__(self, timer: PairTimer) -> None:
        self.timer = timer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.timer.advance(0, None)


def hugging_face(
    model: Any, tokens: Tokens, steps: int, timer: PairTimer, where: torch.device
) -> None:
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
            callbacks=[_AfterSteps(timer)],
        )
        trainer.train()


def ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the median of paired ratios and its distribution-free 95 % interval, by ranks."""
    ratios = np.sort([ours / theirs for ours, theirs in pairs])
    count = len(ratios)
    low, high = stats.binom.interval(0.95, count, 0.5)
    our_times, their_times = np.array(pairs).T
    return {
        "ours_ms": round(1e3 * float(np.median(our_times)), 3),
        "theirs_ms": round(1e3 * float(np.median(their_times)), 3),
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
    tokens = random_tokens(BATCH * (steps + 2))
    loops = {"frostlab": ours, "Trainer": hugging_face}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for round_ in range(options.rounds):
        for name, loop in list(loops.items())[:: -1 if round_ % 2 else 1]:
            timer = PairTimer(BareLoop(copy.deepcopy(first), tokens, where), steps, where)
            loop(copy.deepcopy(first), tokens, steps, timer, where)
            pairs[name] += timer.pairs[2:]  # after warming up
    for name, times in pairs.items():
        facts = {"loop": name, "against": "bare loop", "device": device_name(where)}
        report("loop", facts | {"torch": torch.__version__} | ratio(times))


if __name__ == "__main__":
    main()
