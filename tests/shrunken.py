"""Every shipped recipe made small: narrow models, short examples, data that are written here."""

import json
import random
from pathlib import Path
from typing import Any

from frostlab.recipe.load import load_recipe, short_run_settings
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe

_BERT = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 6,
    "vocab_size": 400, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_EEG = {
    "name": "eeg-simulated", "subjects": 2, "unseen": 0, "recordings": 3, "seconds": 13,
    "length": 64,
}  # fmt: skip
_FOLLOWS = random.Random(0).sample(range(60), 60)  # which word tends to come after which


def _text(draw: random.Random, least: int = 8, most: int = 40) -> str:
    """Words of which every other one can be guessed from the one before."""
    word, words = draw.randrange(60), []
    for _ in range(draw.randint(least, most)):
        words.append(f"w{word}")
        word = _FOLLOWS[word] if draw.random() < 0.5 else int(60 * draw.random() ** 2)
    return " ".join(words)


def _labelled(draw: random.Random, columns: tuple[str, ...], classes: int) -> dict[str, Any]:
    """A row whose label can be read off its first word."""
    label = draw.randrange(classes)
    texts = [_text(draw) for _ in columns]
    texts[0] = f"label{label} {texts[0]}"
    return {**dict(zip(columns, texts, strict=True)), "label": label}


def write_data(folder: Path) -> Path:
    """Write a little of every public data set, in the layout that `--data-dir` asks for."""
    draw = random.Random(1)
    sets: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
        "sst2": (("sentence",), 2, ("train", "validation")),
        "mnli": (("premise", "hypothesis"), 3, ("train", "validation_matched")),
        "xnli/en": (("premise", "hypothesis"), 3, ("validation", "test")),
        "imdb": (("text",), 2, ("train", "test", "unsupervised")),
        "ag_news": (("text",), 4, ("train", "test")),
    }
    for name, (columns, classes, splits) in sets.items():
        for split in splits:
            rows = [_labelled(draw, columns, classes) for _ in range(400)]
            _write(folder / name / f"{split}.jsonl", "\n".join(map(json.dumps, rows)))
    for name in ("tinystories", "openwebtext", "wikitext2", "wikitext2-raw", "wikitext103"):
        for split in ("train", "validation", "test"):
            lines = (_text(draw) for _ in range(600))
            _write(folder / name / f"{split}.txt", "\n".join(lines))
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def shrunken(name: str, steps: int, settings: dict[str, Any] | None = None) -> Recipe:
    """A shipped recipe, cut short as `frostlab diagnose` does it and small enough for the CPU."""
    whole = load_recipe(name)
    bpe = {"kind": "bpe", "size": 400}
    small: dict[str, Any] = {"data.length": 24, "train.batch": 16, "train.threads": 1}
    if whole.data.task == "envelope":
        small = {"data": _EEG, "train.batch": 8, "train.threads": 1, "model.width": 16}
    elif isinstance(whole.model, PretrainedModel):
        bert = {"kind": "pretrained", "name": "bert", "weights": False, "config": _BERT}
        small |= {"model": bert, "tokenizer": bpe}
    else:
        small |= {"model.width": 32, "model.heads": 4}
        if whole.tokenizer is not None:
            small["tokenizer"] = {"kind": "words"} if whole.tokenizer.kind == "words" else bpe
    if whole.data.name.startswith("docstrings"):
        small |= {"data.limit": 1500, "data.per_package": 300}
    return load_recipe(name, short_run_settings(whole, steps=steps) | small | (settings or {}))
