"""What units and heads do in the forward pass of a measured step: dead, saturated, how focused.

Known: what goes into every `down` projection of a model with an anatomy, and the modules in
`ONE_SIDED` and `BOUNDED`; activations called as functions elsewhere are not seen. Attention is seen
where it calls torch's scaled_dot_product_attention or a softmax over (batch, heads, queries, keys);
nn.MultiheadAttention does neither in sight.
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

ONE_SIDED = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
BOUNDED: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Hardtanh: (-1.0, 1.0),
}
_EDGE = 0.01  # of a bounded range: closer to a bound is saturated
_NOTHING = 1e-6  # of the largest activation: a unit that never gets above is dead
_EXAMPLES = 4  # of a batch are enough to see what heads do


class Activity:
    """Forward hooks that look at the steps that are measured."""

    def __init__(
        self, model: nn.Module, units: bool, entropy: bool, due: Callable[[], bool]
    ) -> None:
        self._model, self._units, self._entropy, self._due = unwrapped(model), units, entropy, due
        self._found: dict[tuple[str, str], Tensor] = {}
        self._open = ExitStack()

    def hooks(self) -> list[Any]:
        """Install what was asked for; the handles remove it again."""
        made = self.unit_hooks()
        if self._entropy:
            made.append(self._model.register_forward_pre_hook(self._listen))
            made.append(self._model.register_forward_hook(self._hush, always_call=True))
        return made

    def unit_hooks(self) -> list[Any]:
        """Only those on modules inside the model."""
        made: list[Any] = []
        if self._units:
            for name, module in _before_down(self._model):
                made.append(module.register_forward_pre_hook(self._input(name, module)))
            for name, module in self._model.named_modules():
                if isinstance(module, ONE_SIDED) or type(module) in BOUNDED:
                    made.append(module.register_forward_hook(self._output(name, module)))
        return made

    def listening(self) -> AbstractContextManager[Any]:
        """Around a forward pass that is not the model's own: its attention is seen, if due."""
        return _Listener(self._found) if self._entropy and self._due() else nullcontext()

    def numbers(self) -> Tensor | None:
        """All that was seen since the last report, in one tensor."""
        found = [value.flatten().double() for value in self._found.values()]
        return torch.cat(found) if found else None

    def read(self) -> Callable[[list[float]], dict[str, Any]]:
        """How to read those numbers later; what was seen is then forgotten."""
        sizes = {key: value.numel() for key, value in self._found.items()}
        self._found = {}

        def told(numbers: list[float]) -> dict[str, Any]:
            made: dict[str, Any] = {"dead": {}, "saturated": {}, "entropy": {}}
            rest = iter(numbers)
            for (kind, name), size in sizes.items():
                own = tuple(next(rest) for _ in range(size))
                made[kind][name] = own if kind == "entropy" else own[0]
            return made

        return told

    def _input(self, name: str, own: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module is own and self._looks(module):  # a copy of the model has its hooks, too
                self._found["dead", name] = dead_share(args[0].detach())

        return hook

    def _output(self, name: str, own: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, made: Tensor) -> None:
            if module is not own or not self._looks(module):
                return
            if type(module) in BOUNDED:
                share = saturated_share(made.detach(), *BOUNDED[type(module)])
                self._found["saturated", name] = share
            else:
                self._found["dead", name] = dead_share(made.detach())

        return hook

    def _looks(self, module: nn.Module) -> bool:
        return module.training and self._due()

    def _listen(self, module: nn.Module, args: Any) -> None:
        if self._looks(module):
            self._open.enter_context(_Listener(self._found))

    def _hush(self, module: nn.Module, args: Any, made: Any) -> None:
        self._open.close()


def _before_down(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that take the hidden units of a feed-forward network back to the stream."""
    try:
        anatomy, slots = survey(model)
    except UnknownArchitecture:
        return
    for part in anatomy.parts:
        if part.role == "down" and part.kind == "weight" and part.rows is None:
            yield part.name.rpartition(".")[0], slots[part.name].owner


def dead_share(made: Tensor) -> Tensor:
    """The share of units (last axis) that no example moves off zero."""
    size = made.abs().reshape(-1, made.shape[-1]).amax(0)  # (units,)
    return (size <= _NOTHING * size.max()).float().mean()


def saturated_share(made: Tensor, low: float, high: float) -> Tensor:
    """The share of activations that lie at a bound, where the slope is all but zero."""
    edge = _EDGE * (high - low)
    return ((made < low + edge) | (made > high - edge)).float().mean()


class _Listener(TorchFunctionMode):
    """Sees every attention that a forward pass computes, in order."""

    def __init__(self, found: dict[tuple[str, str], Tensor]) -> None:
        super().__init__()
        self._found, self._count = found, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        chances = None
        if func is F.scaled_dot_product_attention:
            chances = _chances(*args, **(kwargs or {}))
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and made.ndim == 4:
            chances = made[:_EXAMPLES].detach().float()
        if chances is not None:
            self._found["entropy", f"attention[{self._count}]"] = entropy(chances)
            self._count += 1
        return made


@torch.no_grad()
def _chances(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What each query looks at, (examples, heads, queries, keys)."""
    query, key = query[:_EXAMPLES].float(), key[:_EXAMPLES].float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * (scale or 1.0 / math.sqrt(query.shape[-1]))
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        mask = attn_mask[:_EXAMPLES] if attn_mask.ndim == 4 else attn_mask
        hidden = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
        scores = hidden
    return scores.softmax(-1).nan_to_num()


@torch.no_grad()
def entropy(chances: Tensor) -> Tensor:
    """(heads,): how evenly a head looks; 0 at one token, 1 at all that any head can see alike."""
    own = torch.special.entr(chances).sum(-1)  # (examples, heads, queries)
    seen = (chances > 0).sum(-1).amax(1, keepdim=True)  # (examples, 1, queries)
    counts = (seen > 1) & (chances.sum(-1) > 0)
    even = torch.where(counts, own / seen.clamp(min=2).log(), 0.0)
    return even.sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)
