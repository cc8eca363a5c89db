"""Operations, most with Triton kernels on CUDA, that work in compiled layers and CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def chosen(
    function: Callable[..., Any], operation: Callable[..., Any], x: Tensor
) -> Callable[..., Any]:
    """Return `function`, which starts kernels, or `operation`, the torch operator made from it.

    A compiler that traces an autograd function passes tensors of its own classes, such as
    FakeTensor, and needs the operator. For an ordinary tensor x, the function is returned, because
    the first call of an operator imports torch's compiler, which takes a second.
    """
    return function if type(x) in (Tensor, nn.Parameter) else operation


def draw_seeds(device: torch.device, count: int) -> Tensor:
    """Draw seeds of dropout from torch's generator, (count, 2); each kernel gets a row.

    In a CUDA graph, every replay draws others. Kernels read the first number of a row; the second
    one keeps the rows' addresses multiples of 16.
    """
    return torch.randint(-(2**63), 2**63 - 1, (count, 2), device=device)
