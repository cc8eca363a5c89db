"""Small models for gradient flow, batches for them, and loops that watch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from frostlab.models.gpt import GPT, GPTConfig

SYMBOLS = 30


def tiny_gpt(seed: int = 0, **more: Any) -> GPT:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocabulary": SYMBOLS, "positions": 16, "width": 16, "layers": 3, "heads": 2, "hidden": 32,
        "classes": 2, "dropout": 0.0,
    }  # fmt: skip
    return GPT(GPTConfig(**(sizes | more)))


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(3, SYMBOLS, (size, 8), generator=made)
    return ids, ids[:, 0] % 2


def loss_at(model: nn.Module, step: int) -> Tensor:
    ids, classes = batch(step)
    return F.cross_entropy(model(ids), classes)


def watched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor] | None = None,
    steps: int = 10,
    every_n_steps: int = 2,
    schedule: Any = None,
    **options: Any,
) -> fl.Flow:
    """Train a little, watching."""
    with fl.watch(model, optimizer, every_n_steps=every_n_steps, **options) as flow:
        for step in range(steps):
            (loss_at(model, step) if loss is None else loss(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return flow


def adamw(model: nn.Module, lr: float = 1e-3, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, **more)
