"""Operations, most with Triton kernels on CUDA, that work in compiled layers and CUDA graphs."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from frostlab.devices import on_device_of

_P = ParamSpec("_P")
_R = TypeVar("_R")


def chosen(
    function: Callable[..., Any], operation: Callable[..., Any], x: Tensor
) -> Callable[..., Any]:
    """Return `function`, which starts kernels, or `operation`, the torch operator made from it.

    A compiler that traces an autograd function passes tensors of its own classes, such as
    FakeTensor, and needs the operator. For an ordinary tensor x, the function is returned, because
    the first call of an operator imports torch's compiler, which takes a second.
    """
    return function if type(x) in (Tensor, nn.Parameter) else operation


def starts_kernels(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function start its kernels on the device of its first tensor.

    Triton starts a kernel on torch's current device, and so on another GPU than the tensors' if a
    model is on `cuda:1` and the program has not selected it.
    """

    @functools.wraps(function)
    def start(*given: _P.args, **named: _P.kwargs) -> _R:
        with on_device_of(given[0]):  # type: ignore[arg-type]
            return function(*given, **named)

    return start


def draw_seeds(device: torch.device, count: int) -> Tensor:
    """Draw seeds of dropout from torch's generator, (count, 2); each kernel gets a row.

    In a CUDA graph, every replay draws others. Kernels read the first number of a row; the second
    one keeps the rows' addresses multiples of 16.
    """
    return torch.randint(-(2**63), 2**63 - 1, (count, 2), device=device)
