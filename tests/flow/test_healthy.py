"""Models without a fault are called healthy, at any time of a schedule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import frostlab as fl
from flowing import SYMBOLS, adamw, batch, tiny_gpt
from frostlab.flow.judge import LEARNING, UNKNOWN
from frostlab.models.decoder import Decoder, DecoderConfig
from zoo import CASES


def decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(vocabulary=SYMBOLS, width=16, layers=3, heads=2, hidden=32))


def hugging(name: str) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = CASES[name].make_config()
        config.pad_token_id = 0
        return AutoModelForSequenceClassification.from_config(config)

    return build


def healthy_loss(model: nn.Module, step: int) -> Tensor:
    ids, classes = batch(step)
    made = model(ids)
    logits = made if isinstance(made, Tensor) else made.logits
    if logits.ndim == 3:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return F.cross_entropy(logits, classes)


HEALTHY = {
    "gpt": tiny_gpt,
    "gpt, language": lambda seed: tiny_gpt(seed, classes=0),
    "decoder": decoder,
    "bert": hugging("bert"),
    "gpt2": hugging("gpt2"),
    "llama": hugging("llama"),
    "residual": lambda seed: (torch.manual_seed(seed), Residual())[1],
}


class Residual(nn.Module):
    """A healthy model that no anatomy knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).mean(1)
        for each in self.layers:
            x = x + each(x)
        return self.head(x)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: adamw(m, weight_decay=0.01),
    "fast": lambda m: adamw(m, lr=1e-2, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "coupled": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=1e-2),
}


PAIRS = [(name, way) for name in HEALTHY for way in ("adamw", "fast", "coupled")]
PAIRS += [("residual", "sgd")]


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_healthy_models_raise_no_alarm(name: str, optimizer: str) -> None:
    """At any time of a schedule from zero to zero."""
    for seed in (0, 1) if optimizer == "adamw" else (2,):
        model = HEALTHY[name](seed).train()
        made = OPTIMIZERS[optimizer](model)
        ends = torch.optim.lr_scheduler.LambdaLR(made, lambda s: s / 5 if s < 5 else (40 - s) / 35)
        with fl.watch(model, made, every_n_steps=3) as flow:
            for step in range(40):
                healthy_loss(model, step).backward()
                made.step()
                made.zero_grad()
                ends.step()
                if step in (0, 3, 10, 20, 39):
                    word = LEARNING if step else UNKNOWN  # at first the learning rate is 0
                    found = {n: v for n, v in flow.verdicts().items() if v.word != word}
                    assert found == {}, (seed, step)
