"""Choose and build the kind of step a run takes: eager, compiled, or captured in a CUDA graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from frostlab.devices import captures_graphs, runs_ahead
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.distributed import Compute, wrap_model
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.head_loss import has_kernel
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies, build_optimizer

# Captured steps are compiled only in stages of at least this many steps: compiling takes seconds,
# and saves milliseconds per step (measured by benchmarks/kinds.py).
WORTH_COMPILING = 3000


@dataclass(frozen=True)
class Choice:
    """A kind of step and the reason for it."""

    kind: StepKind
    compiles: bool  # whether the layers are compiled; a captured step can do without
    reason: str


def choose_kind(
    wanted: StepKind, compute: Compute, steps: int, watches_inside: bool = False
) -> Choice:
    """Return the wanted kind of step, or eager if that kind cannot work; `auto` wants captured.

    `watches_inside`: whether the gradient-flow measurement reads activations of the forward pass.
    """
    if wanted == "eager":
        return Choice("eager", False, "asked for")
    obstacle = None
    if watches_inside:
        obstacle = "watch.dead_units and watch.attention_entropy need eager steps"
    elif compute.world.size > 1:
        obstacle = f"with {compute.world.size} processes steps are neither compiled nor captured"
    elif not captures_graphs(compute.device) and wanted != "compiled":
        obstacle = f"graphs are captured on CUDA, not on {compute.device.type}"
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
    compute: Compute,
    *,
    steps: int,
    unused: bool = False,
    lr_scales: Mapping[str, float] | None = None,
    watches_inside: bool = False,
) -> EagerStep:
    """Build the step that `choose_kind` chooses, and its optimizer, for a stage of `steps` steps.

    Args:
        unused: whether some trainable parameters get no gradient.
        lr_scales: factors of the learning rate by parameter name; the default factor is 1.
        watches_inside: whether the gradient-flow measurement reads activations.
    """
    world = compute.world
    choice = choose_kind(train.step, compute, steps, watches_inside)
    wrapped = wrap_model(objective, world, train.parallel, unused)
    sharded = world.size > 1 and train.parallel == "fsdp"
    copies = None
    if world.size == 1 and compute.half and has_kernel(compute.device, compute.precision):
        copies = _bf16_copies(objective.model)
    optimizer = build_optimizer(
        objective.model,
        optim,
        fused=runs_ahead(compute.device) or not sharded,  # the CPU has no fused kernel for shards
        capturable=choice.kind == "captured",
        copies=copies,
        lr_scales=lr_scales,
    )
    if choice.kind == "captured":
        return CapturedStep(
            wrapped, optimizer, compute, optim.clip, choice.reason, copies, choice.compiles
        )
    if choice.kind == "compiled":
        return CompiledStep(wrapped, optimizer, compute, optim.clip, choice.reason, copies)
    return EagerStep(wrapped, optimizer, compute, optim.clip, choice.reason, copies)


def _bf16_copies(model: nn.Module) -> Bf16Copies | None:
    """Return bf16 copies of weights, or None if there is nothing to copy.

    Also return None if a trainable parameter is not contiguous float32, as `KernelAdamW` requires.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if any(p.dtype != torch.float32 or not p.is_contiguous() for p in trainable):
        return None
    return Bf16Copies(model) or None
