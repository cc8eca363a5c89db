"""Which kind of step a run takes, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.distributed import World, share
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.head_loss import has_kernel
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Halves, build_optimizer

WORTH_COMPILING = 3000  # steps: it takes seconds and saves milliseconds (benchmarks/kinds.py)


@dataclass(frozen=True)
class Choice:
    """A kind of step and the reason for it."""

    kind: StepKind
    compiles: bool
    reason: str


def choose(
    wanted: StepKind, device: torch.device, world: World, steps: int, inside: bool = False
) -> Choice:
    """The fastest kind known to work; one that was asked for and cannot be had is named.

    `inside`: somebody looks into the forward pass.
    """
    if wanted == "eager":
        return Choice("eager", False, "asked for")
    obstacle = None
    if inside:
        obstacle = "watch.dead_units and watch.attention_entropy need eager steps"
    elif world.size > 1:
        obstacle = f"with {world.size} processes steps are neither compiled nor captured"
    elif device.type != "cuda" and wanted != "compiled":
        obstacle = f"graphs are captured on CUDA, not on {device.type}"
    if obstacle is not None:
        return Choice("eager", False, obstacle)
    if wanted == "compiled":
        return Choice("compiled", True, "asked for")
    reason = "the fastest on CUDA" if wanted == "auto" else "asked for"
    if steps < WORTH_COMPILING:
        return Choice("captured", False, f"{reason}; {steps} steps are too few to compile for")
    return Choice("captured", True, reason)


def build_step(
    objective: Objective,
    optim: Optim,
    train: Train,
    precision: torch.dtype,
    device: torch.device,
    world: World,
    *,
    steps: int,
    unused: bool = False,
    shares: Mapping[str, float] | None = None,
    inside: bool = False,
) -> EagerStep:
    """The step a run takes, with its optimizer; `unused`: some that learn get no gradient."""
    choice = choose(train.step, device, world, steps, inside)
    wrapped = share(objective, world, train.parallel, unused)
    sharded = world.size > 1 and train.parallel == "fsdp"
    halves = None
    if world.size == 1 and precision == torch.bfloat16 and has_kernel(device, precision):
        halves = _halves(objective.model)
    optimizer = build_optimizer(
        objective.model,
        optim,
        fused=not (sharded and device.type == "cpu"),  # one kernel, where parameters are whole
        capturable=choice.kind == "captured",
        halves=halves,
        shares=shares,
    )
    settings = (wrapped, optimizer, precision, optim.clip, world)
    if choice.kind == "captured":
        return CapturedStep(
            *settings, compiles=choice.compiles, reason=choice.reason, halves=halves
        )
    kind = CompiledStep if choice.kind == "compiled" else EagerStep
    return kind(*settings, reason=choice.reason, halves=halves)


def _halves(model: nn.Module) -> Halves | None:
    """Copies in bf16, where all that learns is float32, whole and in one piece."""
    learning = [p for p in model.parameters() if p.requires_grad]
    if any(p.dtype != torch.float32 or not p.is_contiguous() for p in learning):
        return None
    return Halves(model) or None
