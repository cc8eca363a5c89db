"""Random examples, and batches for the Trainer."""

import numpy as np
import torch

from frostlab.bench.workloads import padding_collator, random_tokens
from frostlab.training.batches.batch import collate
from uneven import uneven_tokens


def test_the_trainers_batches_are_padded_like_ours() -> None:
    tokens = uneven_tokens()
    rows = [
        {"input_ids": tokens.ids[a:b].tolist(), "label": int(c)}
        for a, b, c in zip(tokens.starts, tokens.stops, tokens.labels, strict=True)  # type: ignore[arg-type]
    ]
    padded, plain = padding_collator(0)(rows), collate(tokens, np.arange(8), 0)
    width = plain.inputs["input_ids"].shape[1]
    assert padded["input_ids"].shape[1] % 8 == 0
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(padded[name][:, :width], plain.inputs[name])
        assert not padded[name][:, width:].any()
    assert torch.equal(padded["labels"], plain.targets)


def test_random_examples_have_one_length() -> None:
    tokens = random_tokens(6, 9, 50, 0)
    assert tokens.labels is None
    assert set(tokens.lengths) == {9}
    assert collate(tokens, np.arange(6), 0).inputs["input_ids"].shape == (6, 8)
