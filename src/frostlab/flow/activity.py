"""Measurement of activations in the forward pass: dead units, saturation, attention entropy.

Each measured training step has a `Report`, to which `Activity` adds its measurements.

Units are measured at the output of the modules in `ONE_SIDED` and `BOUNDED` and, if the
architecture is known, at the input of every feed-forward network's last projection (role `down`).
Functions such as F.relu are measured only at that input.

Attention is measured where the model calls F.scaled_dot_product_attention, or a softmax of a tensor
with four axes, which are taken as (batch, heads, queries, keys). Attention inside
nn.MultiheadAttention is not measured, nor is the attention of packed sequences in half precision on
a GPU, which calls the flash kernel directly.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frostlab.errors import UnknownArchitecture
from frostlab.roles.read import survey, unwrapped

# activation functions for which dead units are measured
ONE_SIDED = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
# activation functions for which saturation is measured, with their lower and upper bounds
BOUNDED: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Hardtanh: (-1.0, 1.0),
}
_EDGE = 0.01  # an activation closer to a bound than this fraction of the range is saturated
_NEGLIGIBLE = 1e-6  # a unit that never exceeds this fraction of the largest activation is dead
_EXAMPLES = 4  # the attention entropy is computed from the first examples of a batch, at most 4

# (field of `Report`, name of a module or of an attention call) → values
Measurements = dict[tuple[str, str], Tensor]


class Activity:
    """Forward hooks that measure activations in training mode, while `is_due()` is True."""

    def __init__(
        self,
        model: nn.Module,
        dead_units: bool,
        attention_entropy: bool,
        is_due: Callable[[], bool],
    ) -> None:
        self._model, self._is_due = unwrapped(model), is_due
        self._dead_units, self._attention_entropy = dead_units, attention_entropy
        self._measured: Measurements = {}
        self._attention_mode = ExitStack()

    def hooks(self) -> list[Any]:
        """Register the hooks for the requested measurements, and return their handles."""
        handles = self.unit_hooks()
        if self._attention_entropy:
            handles.append(self._model.register_forward_pre_hook(self._enter_forward))
            handles.append(self._model.register_forward_hook(self._leave_forward, always_call=True))
        return handles

    def unit_hooks(self) -> list[Any]:
        """Register only the hooks that measure units, if requested, and return their handles."""
        handles: list[Any] = []
        if self._dead_units:
            for name, module in _down_projections(self._model):
                handles.append(module.register_forward_pre_hook(self._on_input(name, module)))
            for name, module in self._model.named_modules():
                if isinstance(module, ONE_SIDED) or type(module) in BOUNDED:
                    handles.append(module.register_forward_hook(self._on_output(name, module)))
        return handles

    def listening(self) -> AbstractContextManager[Any]:
        """Return a context that measures attention in a forward pass, if a measurement is due.

        Use it where the model is not called as `model(…)`: the model's hooks do not run then.
        """
        if self._attention_entropy and self._is_due():
            return _AttentionMode(self._measured)
        return nullcontext()

    def numbers(self) -> Tensor | None:
        """Return the measurements since the last report as one tensor, or None if there are none.

        A module that ran several times contributes its last run. Attention calls are numbered
        within a forward pass; of several passes, the last one counts.
        """
        numbers = [value.flatten().double() for value in self._measured.values()]
        return torch.cat(numbers) if numbers else None

    def reader(self) -> Callable[[list[float]], dict[str, Any]]:
        """Clear the measurements; return a function that turns `numbers()` into `Report` fields."""
        sizes = {key: value.numel() for key, value in self._measured.items()}
        self._measured = {}

        def read(numbers: list[float]) -> dict[str, Any]:
            fields: dict[str, Any] = {"dead": {}, "saturated": {}, "entropy": {}}
            remaining = iter(numbers)
            for (kind, name), size in sizes.items():
                values = tuple(next(remaining) for _ in range(size))
                fields[kind][name] = values if kind == "entropy" else values[0]
            return fields

        return read

    def _on_input(self, name: str, hooked: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            # a deep copy of the model has this hook, too, but is not measured
            if module is hooked and self._measures(module):
                self._measured["dead", name] = dead_fraction(args[0].detach())

        return hook

    def _on_output(self, name: str, hooked: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if module is not hooked or not self._measures(module):
                return
            if type(module) in BOUNDED:
                fraction = saturated_fraction(output.detach(), *BOUNDED[type(module)])
                self._measured["saturated", name] = fraction
            else:
                self._measured["dead", name] = dead_fraction(output.detach())

        return hook

    def _measures(self, module: nn.Module) -> bool:
        return module.training and self._is_due()

    def _enter_forward(self, module: nn.Module, args: Any) -> None:
        if self._measures(module):
            self._attention_mode.enter_context(_AttentionMode(self._measured))

    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._attention_mode.close()


def _down_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every `down` projection of the feed-forward networks."""
    try:
        anatomy, slots = survey(model)
    except UnknownArchitecture:
        return
    for part in anatomy.parts:
        slot = slots[part.name]
        alone = slot.local == "weight" and len(part.shape) == 2  # not stacked weights of experts
        if part.role == "down" and part.kind == "weight" and part.rows is None and alone:
            yield part.name.rpartition(".")[0], slot.owner


def dead_fraction(activations: Tensor) -> Tensor:
    """Return the fraction of units (last axis) that are (almost) zero at every position."""
    size = activations.abs().reshape(-1, activations.shape[-1]).amax(0)  # (units,)
    return (size <= _NEGLIGIBLE * size.max()).float().mean()


def saturated_fraction(activations: Tensor, low: float, high: float) -> Tensor:
    """Return the fraction of activations close to a bound, where the slope is almost zero."""
    edge = _EDGE * (high - low)
    return ((activations < low + edge) | (activations > high - edge)).float().mean()


class _AttentionMode(TorchFunctionMode):
    """A TorchFunctionMode that measures the entropy of each attention call, in call order."""

    def __init__(self, measured: Measurements) -> None:
        super().__init__()
        self._measured, self._count = measured, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        probabilities = None
        if func is F.scaled_dot_product_attention:
            probabilities = attention_probabilities(*args, **(kwargs or {}))
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and output.ndim == 4:
            probabilities = output[:_EXAMPLES].detach().float()
        if probabilities is not None:
            self._measured["entropy", f"attention[{self._count}]"] = entropy(probabilities)
            self._count += 1
        return output


@torch.no_grad()
def attention_probabilities(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Recompute the attention probabilities of F.scaled_dot_product_attention, before dropout.

    The result covers the first examples of the batch: (examples, heads, queries, keys).
    """
    query, key = query[:_EXAMPLES].float(), key[:_EXAMPLES].float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * (scale or 1.0 / math.sqrt(query.shape[-1]))
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        mask = attn_mask[:_EXAMPLES] if attn_mask.ndim == 4 else attn_mask
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return scores.softmax(-1).nan_to_num()


@torch.no_grad()
def entropy(probabilities: Tensor) -> Tensor:
    """Return the mean entropy of each head, relative to the entropy of uniform attention.

    A head's result is 0 if it attends to one token, and 1 if it attends equally to all visible
    tokens. Queries that see fewer than two tokens are left out; if none remain, the result is 0.
    """
    entropies = torch.special.entr(probabilities).sum(-1)  # (examples, heads, queries)
    visible = (probabilities > 0).sum(-1).amax(1, keepdim=True)  # (examples, 1, queries)
    counted = (visible > 1) & (probabilities.sum(-1) > 0)
    relative = torch.where(counted, entropies / visible.clamp(min=2).log(), 0.0)
    return relative.sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)  # (heads,)
