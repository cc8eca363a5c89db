"""Tiny trained runs on text of their own, each trained once a session and only when needed."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import BertTokenizer

import frostlab as fl
from zoo import SIZES

needs_causal_megatron = pytest.mark.skipif(
    Version("5.9") <= Version(transformers.__version__) < Version("5.18"),
    reason=f"transformers {transformers.__version__}: MegatronBERT ignores is_decoder",
)

_WORDS = ("the", "a", "cat", "dog", "bird", "sat", "ran", "on", "over", "mat", "tree", "and")
TRAIN = {"batch": 8, "steps": 4, "threads": 1}
GPT = {"kind": "gpt", "width": 16, "layers": 2, "heads": 2}
BERT = {"kind": "pretrained", "name": "bert", "weights": False, "config": SIZES}
RECIPES: dict[str, dict[str, Any]] = {
    "gpt": {"model": {**GPT, "positions": 40}, "treatment": "oelm"},
    "decoder": {
        "model": {"kind": "decoder", "width": 16, "layers": 1, "heads": 2, "norm": "before",
                  "final_norm": True},
        "tokenizer": {"kind": "words"},
        "stages": [{"steps": 2}, {"add": {}, "steps": 2}],
    },
    "decoder, norm after": {"model": {"kind": "decoder", "width": 16, "layers": 1, "heads": 2}},
    "lora": {"model": GPT, "treatment": {"peft": {"method": "lora",
                                                  "select": ["query", "key", "value"]}}},
    "bert decoder": {"model": {**BERT, "config": {**SIZES, "is_decoder": True}}},
    "classifier": {"model": GPT, "data": {"task": "classification"}, "treatment": "oelm"},
    "causal pairs": {  # with BERT's tokenizer, which gives token types
        "model": {**GPT, "causal": True, "bias": False, "pooling": "last"},
        "data": {"task": "classification", "text": ["text", "other"]},
    },
    "bert": {"model": BERT, "data": {"task": "classification", "text": ["text", "other"]}},
    "generated": {"model": GPT, "data": {"name": "induction", "examples": 64, "length": 12,
                                         "symbols": 16}},
    "majority": {"model": GPT, "data": {"name": "majority", "examples": 64, "length": 12,
                                        "symbols": 4}},
}  # fmt: skip


@cache
def _text_file(kind: str) -> Path:
    """A file of sentences, or of labelled pairs of sentences."""
    draw = random.Random(0)
    path = Path(mkdtemp()) / ("rows.jsonl" if kind == "classification" else "texts.txt")
    lines = []
    for _ in range(150):
        text, other = (" ".join(draw.choices(_WORDS, k=draw.randint(3, 9))) for _ in range(2))
        label = "animal" if "cat" in text else "other"
        row = {"text": text, "other": other, "label": label}
        lines.append(json.dumps(row) if kind == "classification" else text)
    path.write_text("\n".join(lines) + "\n")
    return path


@cache
def _bert_tokenizer() -> dict[str, str]:
    """The tokenizer section of a recipe with BERT's tokenizer for these words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    folder = mkdtemp()
    BertTokenizer(vocab={word: n for n, word in enumerate(words)}).save_pretrained(folder)
    return {"kind": "pretrained", "name": folder}


def recipe_of(name: str) -> dict[str, Any]:
    """A recipe of `RECIPES` with its data and its tokenizer."""
    recipe = {"tokenizer": {"kind": "bpe", "size": 300}, "train": TRAIN, **RECIPES[name]}
    if name == "causal pairs":
        recipe["tokenizer"] = _bert_tokenizer()
    data = {"task": "language", **recipe.get("data", {})}
    if "name" not in data:
        data |= {"name": "own", "path": str(_text_file(data["task"])), "length": 24}
    else:
        del data["task"], recipe["tokenizer"]
    return {**recipe, "data": data}


@cache
def trained(name: str) -> fl.Run:
    """The run of a recipe in `RECIPES`; tests must not change its folder."""
    with torch.enable_grad():  # the test that asks first may compute without gradients
        return fl.run(recipe_of(name), runs=Path(mkdtemp()))
