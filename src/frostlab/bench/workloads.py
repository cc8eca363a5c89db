"""Settings, models and batches that the benchmarks share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostlab.bench.catalogue import Benchmark
from frostlab.data.prepare import as_token_data, prepare
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import captures_graphs, default_precision
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.data import Task
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Train
from frostlab.timing.flops import Ceilings
from frostlab.timing.interleave import Driver, PairTimes, Step, interleave_pair
from frostlab.training.batches.batch import (
    Batch,
    Order,
    collate,
    padded_width,
    padding_limit,
    row_lengths,
)
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.batches.prefix import Prefix, build_prefix
from frostlab.training.distributed import Compute

Feed = Callable[[int], Batch]  # returns the batch of a step, given its number
SMALL_VOCABULARY = 400
_RANDOM_BATCHES = 64


@dataclass(frozen=True)
class BenchSettings:
    """The device, the scale and the limits that a benchmark runs with."""

    benchmark: Benchmark
    device: torch.device
    small: bool
    rounds: int | None  # None: the benchmark's default
    seconds: float | None  # time limit of the timed rounds; ignored for the first three
    data_dir: Path | None
    ceilings: Ceilings

    @property
    def compute(self) -> Compute:
        """The device and the precision of both sides."""
        return Compute(self.device, default_precision(self.device))

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU that can capture CUDA graphs."""
        return captures_graphs(self.device)

    @property
    def precision(self) -> torch.dtype:
        """The precision of both sides."""
        return self.compute.precision

    @property
    def steps_per_round(self) -> int:
        """The number of steps that each side takes per round."""
        return 10 if self.on_gpu else 2

    def interleave(
        self,
        ours: Callable[[], Step],
        theirs: Callable[[], Driver],
        rounds: int,
        warm_up: int = 3,
        loop: Callable[[], Step] | None = None,
    ) -> PairTimes:
        """Time both sides, and a third one if there is a `loop`, in turn.

        Unless the user sets the number of rounds, it is `rounds`, or at most 3 at small scale.
        """
        return interleave_pair(
            ours,
            theirs,
            self.device,
            rounds=self.rounds or (min(rounds, 3) if self.small else rounds),
            steps_per_round=self.steps_per_round,
            warm_up=warm_up,
            seconds=self.seconds,
            loop=loop,
        )


def bert(settings: BenchSettings, dropout: float = 0.1, layers: int = 12) -> nn.Module:
    """Build BERT-base with two classes, random weights and this number of layers.

    At small scale, it has at most 2 layers of width 32 and a vocabulary of 400.
    """
    from transformers import BertConfig, BertForSequenceClassification

    shape: dict[str, Any] = {"num_hidden_layers": layers}
    if settings.small:
        shape = {"num_hidden_layers": min(layers, 2), "hidden_size": 32, "num_attention_heads": 2,
                 "intermediate_size": 64, "vocab_size": SMALL_VOCABULARY}  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2, **shape
        )
    )


def gpt(settings: BenchSettings, vocabulary: int, classes: int, dropout: float) -> GPT:
    """Build GPT Medium-512, the default GPT of frostlab; a classifier is bidirectional.

    At small scale, it has 2 layers of width 32 and a vocabulary of 400.
    """
    config = GPTConfig(
        vocabulary=vocabulary, classes=classes, causal=not classes, dropout=dropout
    )  # fmt: skip
    if settings.small:
        config = replace(
            config, vocabulary=SMALL_VOCABULARY, width=32, layers=2, heads=2, hidden=64
        )
    torch.manual_seed(0)
    return GPT(config)


def random_tokens(examples: int, length: int, vocabulary: int, classes: int) -> Tokens:
    """Draw examples of one length with random ids; with 0 classes, for language modelling."""
    draw = np.random.default_rng(0)
    stops = np.arange(1, examples + 1) * length
    # ids below 5 may be special tokens
    ids = draw.integers(5, vocabulary, examples * length).astype(np.int32)
    labels = draw.integers(0, classes, examples) if classes else None
    return Tokens(ids, stops - length, stops, labels, None, None, "random")


def random_feed(batch: int, length: int, vocabulary: int, classes: int) -> Feed:
    """Return a feed that cycles through 64 batches of random ids; each step collates its batch."""
    tokens = random_tokens(_RANDOM_BATCHES * batch, length, vocabulary, classes)
    order = np.arange(_RANDOM_BATCHES * batch).reshape(_RANDOM_BATCHES, batch)
    return lambda step: collate(tokens, order[step % _RANDOM_BATCHES], 0)


def first_batch_only(feed: Feed) -> Feed:
    """Return a feed that repeats the first batch."""
    return lambda step: feed(0)


def load_text(settings: BenchSettings, name: str, length: int, size: int) -> Prepared:
    """Prepare a public dataset from the data folder, with a BPE tokenizer trained on it."""
    limit = {"limit": 400, "evaluation_limit": 50} if settings.small else {}
    recipe = recipe_from(
        {
            "data": {"name": name, "length": length, "splits": "published", **limit},
            "tokenizer": {"kind": "bpe", "size": 300 if settings.small else size},
            "model": {"kind": "gpt"},
        }
    )
    return as_token_data(prepare(recipe, settings.data_dir))


def trainer_examples(tokens: Tokens) -> list[dict[str, Any]]:
    """Return the examples as rows of a Hugging Face dataset."""
    assert tokens.labels is not None
    bounds = zip(tokens.starts.tolist(), tokens.stops.tolist(), strict=True)
    ids = [tokens.ids[start:stop].tolist() for start, stop in bounds]
    return [
        {"input_ids": row, "label": label}
        for row, label in zip(ids, tokens.labels.tolist(), strict=True)
    ]


def padding_collator(pad: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return a collator that pads to the longest row, rounded up to a multiple of 8."""

    def collate_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        width = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
        ids = [row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in rows]
        lengths = [len(row["input_ids"]) for row in rows]
        mask = [[1] * length + [0] * (width - length) for length in lengths]
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    return collate_padded


def packed_feed(tokens: Tokens, order: Order, pad: int) -> tuple[Feed, list[int]]:
    """Return a feed of packed batches of a few widths, and the first step of each width."""
    shapes, lengths = shapes_for(tokens, order), row_lengths(tokens)
    widths = [shapes.width(int(lengths[rows].sum())) for rows in order]

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], pad, shapes=shapes)

    return feed, [widths.index(width) for width in dict.fromkeys(widths)]


def padded_feed(
    tokens: Tokens, order: Order, pad: int, device: torch.device
) -> tuple[Feed, list[int]]:
    """Return a feed of padded batches, and the first step of each of their widths.

    On a GPU, there are only a few widths. Every batch has a mask, so that a compiled model sees
    inputs of one kind.
    """
    limit = padding_limit(tokens, device)

    def feed(step: int) -> Batch:
        batch = collate(tokens, order[step % len(order)], pad, limit=limit)
        ids = batch.inputs["input_ids"]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
        return replace(batch, inputs={"input_ids": ids, "attention_mask": mask})

    longest = [int(tokens.lengths[rows].max()) for rows in order]
    widths = longest if limit is None else [padded_width(length, limit) for length in longest]
    return feed, [widths.index(width) for width in dict.fromkeys(widths)]


def prefix_feed(
    model: nn.Module, tokens: Tokens, order: Order, settings: BenchSettings, cached: bool
) -> tuple[Prefix | None, Feed]:
    """Return the cached outputs of a model's frozen lowest layers, and a feed of packed batches.

    If `cached` is false, None is returned in place of the cached outputs.
    """
    shapes, prefix = shapes_for(tokens, order), None
    if cached:
        task: Task = "classification" if tokens.labels is not None else "language"
        prepared = Prepared(task, 2, 0, 0, {"train": tokens}, {}, None, {}, "", None)
        train = Train(cache_prefix="memory")
        prefix = build_prefix(model, prepared, train, settings.precision, types=False)
    starts = None if prefix is None else prefix.starts

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], 0, shapes=shapes, cached_starts=starts)

    return prefix, feed
