"""Operations with Triton kernels on CUDA, which also work in compiled layers and captured steps."""

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

HAS_TRITON = importlib.util.find_spec("triton") is not None


def chosen(
    function: Callable[..., Any], operation: Callable[..., Any], x: Tensor
) -> Callable[..., Any]:
    """Return a function that starts kernels, or the operation of torch made from it, for x.

    Only a compiler, which calls an autograd function with tensors of its own kind, needs the
    operation. Calling it imports torch's compiler, which takes a second.
    """
    return function if type(x) in (Tensor, nn.Parameter) else operation
