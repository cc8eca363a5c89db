"""One process or several: who am I, what do all of us have, and how is a model shared."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostlab.errors import BadInput
from frostlab.recipe.settings import Train


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: Any) -> Any:
        """What the writing process says, for everyone."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: torch.device, train: Train) -> Iterator[World]:
    """Join the processes that torchrun started, if they are as many as the recipe insists on."""
    asked = train.processes
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if asked is not None and asked != size:
        raise BadInput(
            f"train.processes asks for {asked}, and {size} run; "
            f"start it with `torchrun --nproc_per_node {asked} -m frostlab run …`"
        )
    if size == 1:
        yield World()
        return
    ours = not dist.is_initialized()
    if ours:
        cuda, enough = device.type == "cuda", torch.cuda.device_count() >= _neighbours()
        if cuda and not enough and train.parallel == "fsdp":
            raise BadInput(
                f"train.parallel fsdp needs a GPU for each process; {_neighbours()} share "
                f"{torch.cuda.device_count()}: use ddp"
            )
        dist.init_process_group("nccl" if cuda and enough else "gloo")
    try:
        if dist.get_world_size() != size:
            raise BadInput(f"WORLD_SIZE is {size}, but {dist.get_world_size()} processes joined")
        yield World(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def _neighbours() -> int:
    """How many processes share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def share(model: nn.Module, world: World, way: Literal["ddp", "fsdp"], unused: bool) -> nn.Module:
    """Wrap a model, already frozen and on its device, for all processes."""
    if world.size == 1:
        return model
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in blocks(model):
            fully_shard(block)
        fully_shard(model)
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, find_unused_parameters=unused)


def gather_nothing(model: nn.Module) -> None:
    """Let go of what sharded layers have gathered: their parameters are the optimizer's again."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP"):
            module.reshard()  # type: ignore[operator]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of every stack: the children of the model's longest module lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max((len(stack) for stack in lists), default=0)
    return [block for stack in lists if len(stack) == longest for block in stack]


@contextmanager
def _deferred(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def accumulating(model: Any, last: bool) -> Any:
    """Within this, gradients of one part are added up; only the last part's are exchanged."""
    if last:
        return nullcontext()
    if hasattr(model, "no_sync"):
        return model.no_sync()
    return _deferred(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece, gathered if it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def like(value: Tensor, tensor: Tensor) -> Tensor:
    """A whole value, sharded and placed as `tensor` is."""
    value = value.to(tensor.device, tensor.dtype)
    if not hasattr(tensor, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    return distribute_tensor(value, sharded.device_mesh, sharded.placements)


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
