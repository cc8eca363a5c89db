"""BatchNorm among several processes: one set of statistics for all of them, or none."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostlab.errors import BadInput


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: a pass that only tries something out counts for no norm."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def prepare_norms(model: nn.Module, world_size: int, device: torch.device) -> None:
    """Let the BatchNorms that learn count over all processes; frozen ones count nothing.

    In place, before the model is wrapped, and again after each freeze or thaw.
    """
    if world_size == 1:
        return
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if not isinstance(norm, _BatchNorm) or isinstance(norm, nn.SyncBatchNorm):
                continue
            if not any(p.requires_grad for p in norm.parameters()):
                continue
            if device.type != "cuda":
                raise BadInput(
                    f"model.norm batch cannot count over {world_size} processes on "
                    f"{device.type}, only on GPUs; use layer or group"
                )
            setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))
