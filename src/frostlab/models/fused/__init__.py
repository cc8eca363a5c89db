"""Operations with Triton kernels on CUDA, which also work in compiled layers and CUDA graphs."""

from collections.abc import Callable
from typing import Any

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
