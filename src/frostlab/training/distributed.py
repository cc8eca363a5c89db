"""The device, precision and processes of a run, and how the processes combine their gradients.

Models are wrapped in DDP or FSDP. Steps that are captured in CUDA graphs use `GradientSum` instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostlab.devices import use_device, uses_nccl
from frostlab.errors import BadInput, FrostlabError
from frostlab.launcher import local_world_size, world_size
from frostlab.recipe.settings import Train


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes that train together."""

    rank: int = 0
    size: int = 1
    nccl: bool = False  # whether there is a process group, perhaps of one process, that uses NCCL

    @property
    def writes(self) -> bool:
        """Return whether this is rank 0, the only process that writes to the run's folder."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: Any) -> Any:
        """Return the value of rank 0 in every process."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def same(self, value: Any) -> bool:
        """Return whether all processes have an equal value."""
        if self.size == 1:
            return True
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return all(other == value for other in values)

    def wait(self) -> None:
        """Wait until every process has reached this barrier."""
        if self.size > 1:
            dist.barrier()


@dataclass(frozen=True)
class Compute:
    """The device, precision and processes of a run."""

    device: torch.device
    precision: torch.dtype
    world: World = World()

    @property
    def half(self) -> bool:
        """Return whether matrix products are computed in bf16."""
        return self.precision == torch.bfloat16

    def autocast(self) -> torch.autocast:
        """Return the autocast context for the run's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)


@contextmanager
def process_group(device: torch.device, train: Train) -> Iterator[World]:
    """Join the processes that torchrun started; refuse if `train.processes` is another number.

    A single process joins no group. If the program has already made a group of one process, with
    NCCL, captured steps sum their gradients over this group (`GradientSum`).
    """
    asked = train.processes
    size = world_size()
    if asked is not None and asked != size:
        raise BadInput(
            f"train.processes asks for {asked}, but {size} started; "
            f"start the run with `torchrun --nproc_per_node {asked} -m frostlab run …`"
        )
    if size == 1:
        yield World(nccl=_is_nccl() and dist.get_world_size() == 1)
        return
    use_device(device)  # before the processes communicate
    initialize = not dist.is_initialized()
    if initialize:
        gpus, enough = torch.cuda.device_count(), torch.cuda.device_count() >= local_world_size()
        if uses_nccl(device) and not enough and train.parallel == "fsdp":
            raise BadInput(
                f"train.parallel fsdp needs a GPU for each of {local_world_size()} processes, but "
                f"this machine has {gpus}; set train.parallel: ddp"
            )
        # NCCL refuses two processes on one GPU
        dist.init_process_group("nccl" if uses_nccl(device) and enough else "gloo")
    try:
        if dist.get_world_size() != size:
            raise BadInput(f"WORLD_SIZE is {size}, but {dist.get_world_size()} processes joined")
        yield World(dist.get_rank(), size, _is_nccl())
    finally:
        if initialize and dist.is_initialized():
            dist.destroy_process_group()


def _is_nccl() -> bool:
    """Return whether there is a process group whose tensors on GPUs are exchanged by NCCL."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and "nccl" in dist.get_backend_config()


def wrap_model(
    model: nn.Module, world: World, parallel: Literal["ddp", "fsdp"], unused: bool
) -> nn.Module:
    """Wrap a model in DDP or FSDP; with a single process, return it unchanged.

    Freeze the model and move it to its device first. `unused` tells DDP whether some trainable
    parameters get no gradient.
    """
    if world.size == 1:
        return model
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in blocks(model):
            fully_shard(block)
        fully_shard(model)
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, find_unused_parameters=unused)


class GradientSum:
    """Sums gradients over all processes, in one all-reduce of one flat buffer.

    A CUDA graph can record this all-reduce between backward and clipping; DDP's hooks, which sum
    gradients during backward, are difficult to record. The buffer is float32, or float64 for
    float64 weights, so bf16 gradients are not summed in bf16. Gradients of one dtype lie side by
    side in the buffer, so that a few kernels copy all tensors.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], world: World) -> None:
        """Copy the weights and buffers of rank 0 to all processes, as DDP does."""
        self._world = world
        exact = any(p.dtype == torch.float64 for p in parameters)
        dtype = torch.float64 if exact else torch.float32
        size = sum(p.numel() for p in parameters)
        self._flat = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        self._present: list[bool] | None = None  # which parameters have a gradient
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Replace gradients with their sums over all processes.

        `gradients` has a list for each parameter: its gradient, in one or more pieces, or nothing.
        """
        self._check_present([bool(pieces) for pieces in gradients])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for piece in (piece for pieces in gradients for piece in pieces):
            by_dtype.setdefault(piece.dtype, []).append(piece)
        sizes = [sum(piece.numel() for piece in pieces) for pieces in by_dtype.values()]
        summed = self._flat[: sum(sizes)]
        parts = summed.split(sizes)
        for part, pieces in zip(parts, by_dtype.values(), strict=True):
            part.copy_(torch.cat([piece.flatten() for piece in pieces]))
        dist.all_reduce(summed)
        for part, (dtype, pieces) in zip(parts, by_dtype.items(), strict=True):
            values = part.to(dtype).split([piece.numel() for piece in pieces])
            sums = [value.view_as(piece) for value, piece in zip(values, pieces, strict=True)]
            torch._foreach_copy_(pieces, sums)

    def reset(self) -> None:
        """Allow other parameters to have gradients, as after a freeze or thaw in every process."""
        self._present = None

    def _check_present(self, present: list[bool]) -> None:
        """Refuse to go on if processes or steps have gradients of different parameters."""
        if self._present is None:
            if not self._world.same(present):
                raise FrostlabError(
                    "the processes have gradients of different parameters; set train.step: eager"
                )
            self._present = present
        if present != self._present:
            raise FrostlabError(
                "a step has gradients of other parameters than earlier steps; set train.step: eager"
            )


def reshard(model: nn.Module) -> None:
    """Shard the parameters of FSDP modules again, which an evaluation leaves gathered."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP"):
            module.reshard()  # type: ignore[operator]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers, assumed to be the members of its longest `ModuleList`.

    If several lists are equally long, as in encoder-decoders, the members of all are returned.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max((len(stack) for stack in lists), default=0)
    return [block for stack in lists if len(stack) == longest for block in stack]


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    """Leave out FSDP's gradient synchronisation in this context."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def accumulate_gradients(model: Any, last: bool) -> Any:
    """Return a context for a micro-batch; only the last one of a step synchronises gradients."""
    if last:
        return nullcontext()
    if hasattr(model, "no_sync"):
        return model.no_sync()
    return _without_sync(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered if it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def place_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a full tensor with the device, dtype and sharding of `tensor`."""
    value = value.to(tensor.device, tensor.dtype)
    if not hasattr(tensor, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    return distribute_tensor(value, sharded.device_mesh, sharded.placements)


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers after this context: a trial pass must not change running statistics."""
    copies = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


def sync_batch_norms(model: nn.Module, world_size: int, device: torch.device) -> None:
    """With several processes, convert trainable BatchNorms to SyncBatchNorm.

    Frozen BatchNorms stay as they are, because they use running statistics. Call this before the
    model is wrapped, and again after each freeze or thaw.
    """
    if world_size == 1:
        return
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if not isinstance(norm, _BatchNorm) or isinstance(norm, nn.SyncBatchNorm):
                continue
            if not any(p.requires_grad for p in norm.parameters()):
                continue
            if not uses_nccl(device):
                raise BadInput(
                    f"model.norm batch cannot be synchronised over {world_size} processes on "
                    f"{device.type}, only on GPUs; set model.norm to layer or group"
                )
            setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))
