"""Where and how a benchmark runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostlab.bench.catalogue import Benchmark
from frostlab.data.eeg.recordings import text_of
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import captures_graphs, default_precision
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.data import Task
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Train
from frostlab.timing.flops import Ceilings
from frostlab.timing.interleave import Driver, Step, Times, interleave
from frostlab.training.batches.batch import Batch, Order, collate, row_lengths
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.batches.prefix import Prefix, build_prefix
from frostlab.training.distributed import Compute

Feed = Callable[[int], Batch]  # the batch of a step, made when it is asked for


@dataclass(frozen=True)
class Setting:
    """What every benchmark is given."""

    benchmark: Benchmark
    device: torch.device
    small: bool
    rounds: int | None  # None: as many as the benchmark thinks right
    seconds: float | None  # of timed rounds at most, but never fewer than three rounds
    data_dir: Path | None
    ceilings: Ceilings

    @property
    def compute(self) -> Compute:
        """Return where and how precisely it computes."""
        return Compute(self.device, default_precision(self.device))

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU, where graphs are captured."""
        return captures_graphs(self.device)

    @property
    def precision(self) -> torch.dtype:
        """Return the precision of both sides."""
        return self.compute.precision

    @property
    def every(self) -> int:
        """Return the steps of one side before it is the other's turn."""
        return 10 if self.on_gpu else 2

    def interleave(
        self,
        ours: Callable[[], Step],
        theirs: Callable[[], Driver],
        rounds: int,
        warm: int = 3,
    ) -> Times:
        """Time both sides in turn: as many rounds as asked for, else as usual, few if small."""
        count = self.rounds or (min(rounds, 3) if self.small else rounds)
        return interleave(
            ours, theirs, self.device,
            rounds=count, every=self.every, warm=warm, seconds=self.seconds,
        )  # fmt: skip


SMALL_VOCABULARY = 400


def bert(setting: Setting, dropout: float = 0.1, layers: int = 12) -> nn.Module:
    """BERT-base for two classes, from its config; small: at most 2 layers of width 32."""
    from transformers import BertConfig, BertForSequenceClassification

    shape: dict[str, Any] = {"num_hidden_layers": layers}
    if setting.small:
        shape = {"num_hidden_layers": min(layers, 2), "hidden_size": 32, "num_attention_heads": 2,
                 "intermediate_size": 64, "vocab_size": SMALL_VOCABULARY}  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2, **shape
        )
    )


def gpt(setting: Setting, vocabulary: int, classes: int, dropout: float) -> GPT:
    """GPT Medium-512; small: 2 × 32. A classifier looks both ways."""
    config = GPTConfig(
        vocabulary=vocabulary, classes=classes, causal=not classes, dropout=dropout
    )  # fmt: skip
    if setting.small:
        config = replace(
            config, vocabulary=SMALL_VOCABULARY, width=32, layers=2, heads=2, hidden=64
        )
    torch.manual_seed(0)
    return GPT(config)


def drawn(examples: int, length: int, vocabulary: int, classes: int) -> Tokens:
    """Random ids, every example as long as the others; 0 classes: language."""
    draw = np.random.default_rng(0)
    stops = np.arange(1, examples + 1) * length
    ids = draw.integers(5, vocabulary, examples * length).astype(np.int32)
    labels = draw.integers(0, classes, examples) if classes else None
    return Tokens(ids, stops - length, stops, labels, None, None, "drawn")


def drawn_feed(batch: int, length: int, vocabulary: int, classes: int) -> Feed:
    """Batches of random ids, 64 of them over and over, each collated when it is asked for."""
    tokens = drawn(64 * batch, length, vocabulary, classes)
    order = np.arange(64 * batch).reshape(64, batch)
    return lambda step: collate(tokens, order[step % 64], 0)


def only_first(feed: Feed) -> Feed:
    """The first batch, again and again."""
    return lambda step: feed(0)


def text(setting: Setting, name: str, length: int, size: int) -> Prepared:
    """A public set from the data folder, its own byte pairs learned from it."""
    limit = {"limit": 400, "evaluation_limit": 50} if setting.small else {}
    recipe = recipe_from(
        {
            "data": {"name": name, "length": length, "splits": "published", **limit},
            "tokenizer": {"kind": "bpe", "size": 300 if setting.small else size},
            "model": {"kind": "gpt"},
        }
    )
    return text_of(prepare(recipe, setting.data_dir))


def examples_of(tokens: Tokens) -> list[dict[str, Any]]:
    """Examples as a Hugging Face dataset has them."""
    assert tokens.labels is not None
    bounds = zip(tokens.starts.tolist(), tokens.stops.tolist(), strict=True)
    ids = [tokens.ids[start:stop].tolist() for start, stop in bounds]
    return [
        {"input_ids": row, "label": label}
        for row, label in zip(ids, tokens.labels.tolist(), strict=True)
    ]


def padding_collator(pad: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Fill up to the longest of a batch, to a multiple of 8, as DataCollatorWithPadding does."""

    def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        width = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
        ids = [row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in rows]
        real = [len(row["input_ids"]) for row in rows]
        mask = [[1] * count + [0] * (width - count) for count in real]
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    return collated


def packed_feed(tokens: Tokens, order: Order, pad: int) -> tuple[Feed, list[int]]:
    """Batches packed into few static widths; and a step of each width, for warming up."""
    shapes, lengths = shapes_for(tokens, order), row_lengths(tokens)
    fits = [shapes.width(int(lengths[rows].sum())) for rows in order]

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], pad, shapes=shapes)

    return feed, [fits.index(width) for width in dict.fromkeys(fits)]


def prefixed_feed(
    model: nn.Module, tokens: Tokens, order: Order, setting: Setting, cached: bool
) -> tuple[Prefix | None, Feed]:
    """The cache of a model's frozen prefix (None uncached), and the batches that go with it."""
    shapes, prefix = shapes_for(tokens, order), None
    if cached:
        task: Task = "classification" if tokens.labels is not None else "language"
        prepared = Prepared(task, 2, 0, 0, {"train": tokens}, {}, None, {}, "", None)
        wanted = Train(cache_prefix="memory")
        prefix = build_prefix(model, prepared, wanted, setting.precision, types=False)
    table = None if prefix is None else prefix.starts

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], 0, shapes=shapes, cached_starts=table)

    return prefix, feed
