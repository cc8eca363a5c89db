"""Parameters of which every process holds a shard: what is here, and who has the rest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.anatomy import Rows
from frostlab.errors import BadInput

Ranges = tuple[tuple[int, int], ...]


def shard_ranges(parameter: Any, rows: Rows | None, axis: int) -> Ranges | None:
    """Which of these rows lie in this process's shard, counted in it; None if it is no shard."""
    if rows is None or not hasattr(parameter, "to_local"):
        return None
    start, size = _shard_of(parameter, axis)
    cut = ((max(a, start), min(b, start + size)) for a, b in rows.ranges())
    return tuple((a - start, b - start) for a, b in cut if a < b)


def _shard_of(parameter: Any, axis: int) -> tuple[int, int]:
    """Where this process's shard begins along an axis, and how long it is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[axis], shape[axis]


def shard_group(parameters: Sequence[nn.Parameter]) -> Any:
    """The processes that share the parameters among them, or None if nothing is sharded."""
    groups: dict[Any, Any] = {}
    for each in parameters:
        parameter: Any = each
        if hasattr(parameter, "to_local"):
            cut = [i for i, place in enumerate(parameter.placements) if place.is_shard()]
            if len(cut) > 1:
                raise BadInput("watch: parameters sharded along two mesh dimensions; use one")
            for i in cut:
                group = parameter.device_mesh.get_group(i)
                groups[group.group_name] = group
    if len(groups) > 1:
        raise BadInput("watch: parameters are sharded over different groups of processes; use one")
    return next(iter(groups.values()), None)


def is_sharded(parameter: Any) -> bool:
    """Whether other processes hold some of a parameter."""
    return hasattr(parameter, "to_local") and any(p.is_shard() for p in parameter.placements)


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor, as plain real numbers."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if held.layout != torch.strided:
        held = held.to_dense()
    return torch.view_as_real(held.resolve_conj()) if held.is_complex() else held


def wide_dtype(device: torch.device) -> torch.dtype:
    """What numbers are added up in."""
    return torch.float32 if device.type == "mps" else torch.float64
