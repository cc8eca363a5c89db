"""Recipes on a small text of their own, and a small pretrained BERT in a folder."""

import csv
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tiny import changed

WORDS = {"dry": ["sun", "heat", "drought"], "wet": ["rain", "hail", "flood"]}
RECIPE: dict[str, Any] = {
    "data": {"name": "own", "length": 12},
    "tokenizer": {"kind": "words"},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2},
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "epochs": 2, "threads": 1},
    "evaluate": {"batch": 16},
}


def rows(first: int, days: int) -> list[tuple[str, str]]:
    """Sentences about the weather of some days, with their labels."""
    return [
        (f"{word} on day {day}{' and after' * (day % 3)}", label)
        for day in range(first, first + days)
        for label, words in WORDS.items()
        for word in words[: 1 + day % 3]
    ]


def write_table(path: Path, head: list[str], table: list[tuple[str, ...]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *table])
    return path


def write_weather(folder: Path) -> Path:
    """A folder with train.csv and test.csv."""
    write_table(folder / "train.csv", ["text", "label"], rows(0, 40))
    write_table(folder / "test.csv", ["text", "label"], rows(40, 12))
    return folder


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    made = changed(RECIPE, changes)
    made["data"] = {"path": str(folder), **made["data"]}
    return made


def bert_folder(folder: Path) -> Path:
    """A small BERT with weights, and a WordPiece tokenizer."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    digits = list("0123456789")
    pieces = [*letters, *digits, *(f"##{mark}" for mark in letters + digits), "on", "day", "and"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *pieces])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_act="relu",
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder
