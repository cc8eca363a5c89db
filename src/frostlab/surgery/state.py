"""State dicts of split modules: fused on save, cut on load, sharded tensors included."""

from typing import Any

import torch
from torch import Tensor, nn

from frostlab.anatomy.parts import Held, gathered, read_pieces


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _like(value: Tensor, tensor: Any) -> Tensor:
    """Shard a whole value as `tensor` is sharded, if it is."""
    if not _is_sharded(tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def save_pieces(slots: dict[str, Held], destination: dict[str, Any], prefix: str) -> None:
    """Write each slot under its canonical name, in one piece."""
    for local, (_, axis, pieces) in slots.items():
        destination[prefix + local] = _like(read_pieces(pieces, axis), pieces[0].parameter)


def load_pieces(
    module: nn.Module,
    slots: dict[str, Held],
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    missing_keys: list[str],
    error_msgs: list[str],
) -> set[str]:
    """Read each slot from its canonical name and cut it; return the keys that were looked for."""
    assign = metadata.get("assign_to_params_buffers", False)
    for local, (shape, axis, pieces) in slots.items():
        key = prefix + local
        if key not in state_dict:
            missing_keys.append(key)
            continue
        value = gathered(state_dict[key])
        if tuple(value.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} "
                f"from checkpoint, the shape in current model is {shape}."
            )
            continue
        with torch.no_grad():
            for piece in pieces:
                part = _like(piece.rows.take(value, axis).contiguous(), piece.parameter)
                if assign:
                    _assign(module, piece.parameter, part)
                else:
                    piece.parameter.copy_(part)
    return {prefix + local for local in slots}


def _assign(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Put a loaded tensor in a parameter's place, as load_state_dict(assign=True) asks."""
    name = next(n for n, p in module._parameters.items() if p is old)
    module._parameters[name] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
