"""The dropout of `frostlab.models.fused.dropout_kernels`, written again with numpy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

SEED = 1234567890123456789


def keeps(rows: int, columns: int, dropout: float) -> Tensor:
    """Return the factors by which dropout with `SEED` multiplies elements of (rows, columns)."""
    number = np.uint32

    def mixed(x: Any) -> Any:
        x = (x ^ (x >> number(16))) * number(0x7FEB352D)
        x = (x ^ (x >> number(15))) * number(0x846CA68B)
        return x ^ (x >> number(16))

    with np.errstate(over="ignore"):
        low, high = number(SEED & 0xFFFFFFFF), number(SEED >> 32)
        first = mixed(mixed(np.arange(rows, dtype=number) + low) ^ high)
        second = mixed(first + number(0x9E3779B9))
        x = np.arange(columns, dtype=number) * number(0x9E3779B1) + first[:, None]
        x = (x ^ (x >> number(16))) * number(0x7FEB352D)
        x = (x ^ (x >> number(15)) ^ second[:, None]) * number(0x846CA68B)
    return torch.from_numpy(x >= round(dropout * 2**32)).double() / (1 - dropout)
