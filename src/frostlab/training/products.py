"""Matrix products of half precision that keep the float32 they are summed in."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether values may be looked at: elsewhere that waits, and no graph can be captured."""
    return tensor.device.type == "cpu"


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in: autocast's choice, which leaves float64 alone."""
    if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def put_product(out: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Their matrix product; of half precision, rounded once, to what `out` is."""
    if out.dtype == one.dtype:
        return torch.mm(one, other, out=out)
    if one.device.type == "cuda" and out.dtype == torch.float32:
        return torch.mm(one, other, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(one, other))


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add their matrix product to a total of full precision."""
    if one.dtype == total.dtype:
        torch.addmm(total, one, other, out=total)
    elif one.device.type == "cuda":
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(one, other))
