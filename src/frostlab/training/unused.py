"""Parameters that learn and get no gradient: DDP must be told of them beforehand."""

import torch

from frostlab.training.distributed import World
from frostlab.training.examples import examples_of
from frostlab.training.norms import same_buffers
from frostlab.training.optimizer import build_optimizer
from frostlab.training.setting import Setting
from frostlab.training.step import EagerStep
from frostlab.training.treating import wants_types

CPU = torch.device("cpu")


def any_unused(setting: Setting) -> bool:
    """Whether some trainable parameter gets no gradient, which DDP must be told beforehand."""
    if setting.world.size == 1 or setting.recipe.train.parallel == "fsdp":
        return False
    prepared, model = setting.prepared, setting.model
    examples = examples_of(prepared, prepared.splits["train"], CPU, wants_types(model))
    batch = examples.collate(examples.epoch(2, setting.recipe.seed, 0, bucket=False)[0])
    optimizer = build_optimizer(model, setting.recipe.optim, fused=False)
    step = EagerStep(setting.objective, optimizer, setting.precision, None, World())
    with same_buffers(model):
        step.gradients([batch.to(setting.device)], batch.scored)
    unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
    optimizer.zero_grad(set_to_none=True)
    return unused
