"""AdamW over exactly what learns, and the learning rate of every step as a pure function."""

import math
from typing import Any

import torch
from torch import nn

from frostlab.errors import FrostlabError
from frostlab.recipe.settings import Optim, StepDecay
from frostlab.training.adamw import KernelAdamW
from frostlab.training.halves import Halves


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    fused: bool,
    capturable: bool = False,
    halves: Halves | None = None,
) -> torch.optim.AdamW:
    """Matrices decay, vectors do not, whatever their shape; frozen tensors are absent."""
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in learning if sum(size > 1 for size in p.shape) >= 2]
    known = {id(p) for p in matrices}
    vectors = [p for p in learning if id(p) not in known]
    groups = [{"params": matrices, "weight_decay": optim.decay},
              {"params": vectors, "weight_decay": 0.0}]  # fmt: skip
    groups = [group for group in groups if group["params"]]
    given: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if halves is not None:
        return KernelAdamW(groups, halves, **given, capturable=capturable)
    return torch.optim.AdamW(groups, **given, fused=fused, capturable=capturable)


def rate_at(step: int, steps: int, optim: Optim) -> float:
    """The learning rate of a step (from 0) of a stage of `steps`: warm-up, then the schedule."""
    warmup = warmup_steps(steps, optim)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if isinstance(optim.schedule, StepDecay):
        return optim.lr * optim.schedule.factor ** (step // optim.schedule.every)
    if optim.schedule == "constant":
        return optim.lr
    left = (steps - step) / max(steps - warmup, 1)  # from 1 down to 1 / (steps - warmup)
    return optim.lr * (left if optim.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def warmup_steps(steps: int, optim: Optim) -> int:
    """How many steps the warm-up takes: a share of the stage, or as many as were given."""
    return int(optim.warmup) if optim.warmup >= 1 else int(optim.warmup * steps)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, as `name//key`."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}//{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], like: Any
) -> None:
    """Put saved state back; `like` places and shards a tensor as its parameter is."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("//")
        if parameter not in parameters:
            raise FrostlabError(f"the checkpoint's optimizer knows {parameter}, the model does not")
        states.setdefault(parameter, {})[key] = value
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in parameters.items() if id(p) in held and n not in states]
    if states and missing:
        raise FrostlabError(f"the checkpoint's optimizer does not know {missing[0]}")
    for name, state in states.items():
        held_by = parameters[name]
        place = held_by.device if optimizer.defaults["fused"] else torch.device("cpu")
        optimizer.state[held_by] = {
            key: like(value, held_by) if value.ndim else value.to(place)
            for key, value in state.items()
        }
