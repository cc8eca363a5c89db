"""Models that can be packed, tiny, and data of different lengths to pack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from frostlab.data.tokens import Prepared, Tokens
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig

VOCABULARY, CLASSES, PAD = 90, 3, 0
_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40,
}  # fmt: skip
_LLAMA: dict[str, Any] = _BERT | {
    "num_key_value_heads": 2, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(VOCABULARY, 40, 32, 2, 4, 48, **changes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt classifier": lambda: _gpt(causal=False, classes=CLASSES),
    "gpt causal classifier": lambda: _gpt(classes=CLASSES),
    "gpt last-token classifier": lambda: _gpt(causal=False, classes=CLASSES, pooling="last"),
    "gpt": _gpt,
    "decoder": lambda: Decoder(DecoderConfig(VOCABULARY, 32, 2, 4, 48)),
    "decoder norm before": lambda: Decoder(
        DecoderConfig(VOCABULARY, 32, 2, 4, 48, norm="before", final_norm=True)
    ),
    "bert classifier": lambda: BertForSequenceClassification(
        BertConfig(**_BERT, num_labels=CLASSES)
    ),
    "bert decoder": lambda: BertLMHeadModel(BertConfig(**_BERT, is_decoder=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "gpt2 classifier": lambda: GPT2ForSequenceClassification(
        GPT2Config(**_GPT2, num_labels=CLASSES)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)),
    "llama classifier": lambda: LlamaForSequenceClassification(
        LlamaConfig(**_LLAMA, num_labels=CLASSES)
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def exactly(name: str) -> nn.Module:
    """The model in float64, in which another order of the same sums shows from 1e-12 on."""
    return build(name).double()


def classifies(name: str) -> bool:
    return "classifier" in name


def tokens(
    lengths: list[int] | None = None, *, labels: bool, seed: int = 0, pairs: bool = False
) -> Tokens:
    """Examples of these lengths, by default sixty of 2 to 30 tokens."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 31, 60) if lengths is None else np.array(lengths)
    stops = np.cumsum(sizes)
    return Tokens(
        draw.integers(3, VOCABULARY, int(stops[-1])).astype(np.uint16),
        stops - sizes,
        stops,
        draw.integers(0, CLASSES, len(sizes)) if labels else None,
        (sizes // 2).astype(np.int32) if pairs else None,
        None,
        f"made {seed}",
    )


def prepared(**changes: Any) -> Prepared:
    """The same as all the data of a run."""
    data = tokens(**changes)
    task = "classification" if data.labels is not None else "language"
    classes = CLASSES if data.labels is not None else 0
    splits = {"train": data, "report": data}
    return Prepared(task, classes, VOCABULARY, PAD, splits, {}, None, {}, data.digest, None)
