"""AdamW over exactly what learns, and the learning rate of every step as a pure function."""

import math
from collections.abc import Mapping
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
    shares: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """Matrices decay, vectors do not, whatever their shape; frozen tensors are absent.

    `shares` of the learning rate, by name, are for tensors that have less than all of it.
    """
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    kinds: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for is_vector in (False, True):
        for name, p in learning:
            if (sum(size > 1 for size in p.shape) < 2) == is_vector:
                kinds.setdefault((is_vector, (shares or {}).get(name, 1.0)), []).append(p)
    groups = [
        {"params": found, "weight_decay": 0.0 if is_vector else optim.decay, "share": share}
        for (is_vector, share), found in kinds.items()
    ]
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
        return optim.lr * optim.schedule.factor ** (step // int(optim.schedule.every))
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    like: Any,
    partly: bool = False,
) -> None:
    """Put saved state back; `like` places and shards a tensor as its parameter is.

    `partly`: some tensors start without, as new layers do.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("//")
        if parameter not in parameters:
            raise FrostlabError(f"the checkpoint's optimizer knows {parameter}, the model does not")
        states.setdefault(parameter, {})[key] = value
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in parameters.items() if id(p) in held and n not in states]
    if states and missing and not partly:
        raise FrostlabError(f"the checkpoint's optimizer does not know {missing[0]}")
    for name, state in states.items():
        held_by = parameters[name]
        place = held_by.device if optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[held_by] = {
            key: like(value, held_by) if value.ndim else value.to(place)
            for key, value in state.items()
        }
