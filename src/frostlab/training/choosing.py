"""Stand-in: which step trains a model. Always the eager one."""

from dataclasses import dataclass

import torch
from torch import nn

from frostlab.recipe.settings import Optim
from frostlab.training.distributed import World
from frostlab.training.optimizer import build_optimizer
from frostlab.training.step import EagerStep


@dataclass(frozen=True)
class Built:
    """A step, and what it is made of."""

    step: EagerStep
    optimizer: torch.optim.Optimizer
    objective: nn.Module
    kind: str
    reason: str


def build_step(
    model: nn.Module,
    optim: Optim,
    wanted: str,
    precision: torch.dtype,
    *,
    device: torch.device,
    steps: int,
    world: World = World(),  # noqa: B008
) -> Built:
    """Build the eager step, whatever is wanted."""
    optimizer = build_optimizer(model, optim, fused=True)
    step = EagerStep(model, optimizer, precision, optim.clip, world)
    return Built(step, optimizer, model, "eager", "a stand-in")
