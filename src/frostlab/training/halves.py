"""bf16 copies of what layers multiply with, cast once a step instead of layer by layer.

Autocast turns a weight into bf16 in the forward pass and its gradient into float32 in the backward
pass, a kernel each. Here layers find the copies in the weights' place; the optimizer reads their
gradients as they are and writes both. The numbers are autocast's.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostlab.models.stack import take_apart


@dataclass
class _Place:
    """Where a weight is used, the weight, its copy, and the weight's version when it was copied."""

    module: nn.Module
    name: str
    own: nn.Parameter
    half: nn.Parameter
    version: int = -1


class Halves:
    """The copies of the weights and biases of every layer's linear maps."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            _Place(module, name, own, nn.Parameter(own.detach().bfloat16(), own.requires_grad))
            for module, name, own in _multiplied(model)
        ]
        self._of = {id(place.own): place.half for place in self._places}

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, own: nn.Parameter) -> nn.Parameter | None:
        """A weight's copy."""
        return self._of.get(id(own))

    def gradient(self, own: nn.Parameter) -> Tensor | None:
        """The gradient of a weight, which may be its copy's, in bf16."""
        half = self.of(own)
        return own.grad if half is None or half.grad is None else half.grad

    def refresh(self) -> None:
        """Copy what was changed by anything but the optimizer, and learn who learns."""
        stale = [place for place in self._places if place.own._version != place.version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([p.half.data for p in stale], [p.own.data for p in stale])
        for place in stale:
            place.version = place.own._version
        for place in self._places:
            if place.half.requires_grad != place.own.requires_grad:
                place.half.requires_grad_(place.own.requires_grad)

    def clear(self) -> None:
        """Forget the gradients."""
        for place in self._places:
            place.half.grad = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this, layers compute with the copies."""
        self.refresh()
        for place in self._places:
            place.module._parameters[place.name] = place.half
        try:
            yield
        finally:
            for place in self._places:
                place.module._parameters[place.name] = place.own


def _multiplied(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What linear maps in the layers multiply with, and nobody else uses or watches."""
    stack = take_apart(model)
    modules = [m for layer in (stack.layers if stack else []) for m in layer.modules()]
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for module in modules:
        if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
            continue
        for name, own in module._parameters.items():
            if own is None or uses[id(own)] > 1 or own.dtype != torch.float32:
                continue
            watched = own._backward_hooks or own._post_accumulate_grad_hooks
            if own.is_contiguous() and not watched:
                yield module, name, own
