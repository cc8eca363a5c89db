"""One small forward pass of a model, watched: which parameter enters which operation.

A call is a call of a torch function, such as `linear`; each is recorded. Every time a parameter
enters a call, it is replaced by a new tensor (an alias), so that the autograd graph distinguishes
the uses of a shared parameter. Gradients then show which rows of the weights each attention head
depends on. A normalization over all heads would make each depend on every row, so the statistics of
normalizations, such as a mean, are held fixed: autograd takes them for constants (`norms.py`).

The pass runs on a copy of the model's modules that shares its parameters, so the model keeps its
weights, buffers, modes and hooks. A later pass on the same inputs can be given other values for
some parameters (moved parameters). Chosen calls of that pass then return the results of the first
pass (pins), so that a change in one layer does not reach the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frostlab.roles.copies import Unwatchable, shared_copy
from frostlab.roles.tracing.passes.facts import Call, replaced
from frostlab.roles.tracing.passes.norms import ADDS, FUSED_NORMS, Norms, Step, fixed_norm
from frostlab.roles.undisturbed import Unwritten, seeded

_NOISY_SIZE = 1 << 16  # parameters up to this size get noise, so that none is all zeros or ones
_NOISE = 0.05  # standard deviation of the noise
PRODUCTS = {
    "matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__", "mm",
    "scaled_dot_product_attention",
}  # fmt: skip
PROJECTIONS = {"linear", "addmm", "conv1d", "conv2d"}
_TRANSPOSES = {"T", "mT", "H", "mH"}  # attributes that compute a result like a function
_CUTS = {"detach", "data"}  # operations whose results have no autograd history
SUMS = ADDS
# functions whose results are kept for later passes (pins)
_KEPT_FUNCTIONS = PRODUCTS | PROJECTIONS | SUMS
_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: the tensor that stood for it in one call."""

    parameter: int  # id of the parameter
    alias: Tensor
    call: int  # number of the call, as in `Trace.records`


@dataclass
class Record:
    """A call of a torch function."""

    name: str
    module: str  # path of the module that made it
    first: int  # number of the first graph node that it made
    last: int = 0  # number after the last one
    result: Any = None  # of a product, projection or sum, or a norm's statistics; else None
    node: Any = None  # the graph node that made the result
    indices: Tensor | None = None  # for an embedding: the indices that were looked up
    given: bool = False  # whether the indices are an input of the model, other than position ids
    # which tensor among its arguments is a norm's statistic; `result` is then that tensor's value
    held: int | None = None


@dataclass
class Trace:
    """What one watched forward pass has shown."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # floating-point inputs
    uses: dict[int, Use] = field(default_factory=dict)  # id of the alias → use
    records: list[Record] = field(default_factory=list)
    norms: set[int] = field(default_factory=set)  # ids of aliases that scale or shift a norm
    # path of a module → numbers of the calls at which it began to run
    modules: dict[str, list[int]] = field(default_factory=dict)
    cut: list[Any] = field(default_factory=list)  # graph nodes whose results were detached


class AnotherWay(Exception):
    """A later pass made other calls than the first, e.g. because the first filled a cache."""


@dataclass(frozen=True)
class Pin:
    """A result of the first pass that a call of a later pass returns, or takes as an argument."""

    name: str  # of the function
    result: Any
    always: bool = True  # False: only if none of the call's parameters has moved
    # if not None, the call runs, with its tensor argument of this number replaced by `result`
    held: int | None = None

    def copy(self, history: bool = True) -> Tensor:
        """Return a copy; with `history`, it requires a gradient: torch's kernels depend on that."""
        leaf: Tensor = self.result.detach()
        return leaf.requires_grad_(history and leaf.is_floating_point()).clone()


class _Watch(TorchFunctionMode):
    """The mode that sees every torch function."""

    def __init__(
        self,
        parameters: set[int],
        moved: Mapping[int, Tensor] | None = None,
        pins: Mapping[int, Pin] | None = None,
        trace: Trace | None = None,
        unwritten: Unwritten | None = None,
    ) -> None:
        super().__init__()
        self._unwritten = unwritten
        self.trace = Trace() if trace is None else trace
        self._parameters, self._moved, self._pins = parameters, moved or {}, pins
        self._noise: dict[int, Tensor] = {}
        self._norms = Norms(self.trace.uses)
        self.trace.norms = self._norms.owned
        self.modules: list[str] = [""]
        self.without_gradients = False  # whether some products were computed without gradients
        self.ids: set[int] = set()  # storages of integer inputs, except position ids

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _CUTS and args and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
            self.trace.cut.append(args[0].grad_fn)
        if getattr(func, "__name__", "") in ("__get__", "__set__") and name not in _TRANSPOSES:
            if name == "data" and id(args[0]) in self._parameters:
                return self._data(*args)
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head(*args, **kwargs)
        trace, number = self.trace, len(self.trace.records)
        record = Record(name, self.modules[-1], _node_number())
        trace.records.append(record)
        if self._pins is not None and number in self._pins and self._pins[number].name != name:
            raise AnotherWay
        if self._pins is not None and name in PROJECTIONS and self._is_still((args, kwargs)):
            record.last = _node_number()
            return self._pins[number].copy()
        args, kwargs = replaced((args, kwargs), self._alias)
        tensors = list(tensors_in((args, kwargs)))
        if self._unwritten is not None:
            self._unwritten.before(name, args, kwargs, tensors)
        if name in PRODUCTS | PROJECTIONS and not torch.is_grad_enabled():
            self.without_gradients = True
        if name in _NORMS:
            for value in tensors_in((args[1:], kwargs)):
                if id(value) in trace.uses:
                    trace.norms.add(id(value))
                trace.norms |= self._norms.computed.get(id(value), frozenset())
        step = self._norms.step(name, args, kwargs, tensors)
        if name in FUSED_NORMS:
            result = fixed_norm(name, args, kwargs, lambda compute: self._fixed(number, compute))
        else:
            args, kwargs = self._hold(number, step)
            result = func(*args, **kwargs)
            if name == "embedding":
                indices = [t for t in tensors_in((args, kwargs)) if not t.is_floating_point()]
                record.indices = indices[0] if indices else None
                record.given = bool(indices) and _storage(indices[0]) in self.ids
        record.last = _node_number()
        if name in _KEPT_FUNCTIONS and isinstance(result, Tensor):
            record.node = result.grad_fn
            record.result = result.detach().clone()  # what follows may change it in place
            if self._pins is not None and number in self._pins and self._pins[number].always:
                if self._pins[number].result.shape != result.shape:
                    raise AnotherWay
                result = self._pins[number].copy(result.requires_grad)
        self._norms.follow(step, list(tensors_in(result)))
        return result

    def _is_still(self, arguments: Any) -> bool:
        """Return whether a call is pinned and none of its parameters has moved."""
        if len(self.trace.records) - 1 not in (self._pins or {}):
            return False
        for value in tensors_in(arguments):
            aliases = self._norms.computed.get(id(value), frozenset())
            if id(value) in self._moved or any(
                self.trace.uses[alias].parameter in self._moved for alias in aliases
            ):
                return False
        return True

    def _alias(self, value: Any) -> Any:
        """Return a new alias of a parameter, and any other value as it is."""
        if not isinstance(value, Tensor) or id(value) not in self._parameters:
            return value
        if not value.is_floating_point():
            return value
        alias = self._values(value).detach().requires_grad_()
        self.trace.uses[id(alias)] = Use(id(value), alias, len(self.trace.records) - 1)
        return alias

    def _data(self, parameter: Tensor, *new: Tensor) -> Tensor | None:
        """Return `parameter.data`, or set it."""
        values = self._values(parameter).detach()
        if not new:
            return values
        if new[0].shape != values.shape:
            parameter.data = new[0]
        elif self._unwritten is not None:
            self._unwritten.before("copy_", (), {}, [values])
            values.copy_(new[0])
        return None

    def _values(self, parameter: Tensor) -> Tensor:
        """Return the values of a parameter in this pass: moved ones, or its own, with noise."""
        key, plain = id(parameter), parameter.data
        if key in self._moved:
            return self._moved[key]
        if not plain.is_floating_point() or plain.numel() > _NOISY_SIZE:
            return plain
        if key not in self._noise:
            self._noise[key] = noisy(plain)
        return self._noise[key]

    def _fixed(self, number: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return statistics without their history or, if they are pinned, as recorded."""
        if self._pins is not None and number in self._pins:
            result: Tensor = self._pins[number].result
        else:
            result = compute().detach()
        self.trace.records[number].result = result
        return result

    def _hold(self, number: int, step: Step) -> tuple[Any, Any]:
        """Return a call's arguments with a norm's statistic held fixed, if there is one."""
        record = self.trace.records[number]
        record.held, fixed = step.held, None
        if self._pins is not None:
            pin = self._pins.get(number)
            record.held = None if pin is None else pin.held
            fixed = None if pin is None else pin.result
        if record.held is None or record.held >= len(step.values):
            return step.args, step.kwargs
        given = step.values[record.held]
        record.result = given.detach().clone() if fixed is None else fixed
        return replaced(
            (step.args, step.kwargs), lambda value: record.result if value is given else value
        )


def _node_number() -> int:
    """Return the number that autograd gives to the next node of the graph."""
    return int(torch._C._autograd._get_sequence_nr())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def noisy(values: Tensor) -> Tensor:
    """Return values with small noise, the same for the same shape."""
    generator = torch.Generator().manual_seed(values.numel())
    noise = torch.randn(values.shape, generator=generator).to(values)
    return values + _NOISE * noise


def _multi_head(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Any, in_proj_bias: Tensor | None, bias_k: Tensor | None,
    bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
    out_proj_bias: Tensor | None, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute what `nn.MultiheadAttention` does, in steps that can be watched.

    Only masks that are learned are used.
    """
    separate = in_proj_weight is None or kwargs.get("use_separate_proj_weight", False)
    if not separate and query is key is value:
        projected: Sequence[Tensor] = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        weights: Sequence[Tensor] = (
            [kwargs[f"{name}_proj_weight"] for name in "qkv"]
            if separate else in_proj_weight.chunk(3)
        )  # fmt: skip
        biases: Sequence[Tensor | None] = (
            (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        )
        inputs = (query, key, value)
        projected = [F.linear(*operands) for operands in zip(inputs, weights, biases, strict=True)]
    if bias_k is not None and bias_v is not None:  # one more key and value, the same for all
        added = (bias_k.expand(1, *key.shape[1:-1], -1), bias_v.expand(1, *key.shape[1:-1], -1))
        pairs = zip(projected[1:], added, strict=True)
        projected = [projected[0], *(torch.cat(pair) for pair in pairs)]
    # Each becomes (…, heads, length, size).
    sides = [y.unflatten(-1, (num_heads, -1)).movedim(0, -2) for y in projected]
    shares = None
    if kwargs.get("need_weights", True):
        scores = sides[0].detach() @ sides[1].detach().transpose(-1, -2)
        shares = (scores / sides[0].shape[-1] ** 0.5).softmax(-1)
        if kwargs.get("average_attn_weights", True):
            shares = shares.mean(-3)
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if not (isinstance(mask, nn.Parameter) or (isinstance(mask, Tensor) and mask.requires_grad)):
        mask = None
    elif mask.ndim == 3 and sides[0].ndim == 4:
        mask = mask.unflatten(0, (-1, num_heads))
    if mask is not None:  # keys that are added above are not masked
        mask = F.pad(mask, (0, sides[1].shape[-2] - mask.shape[-1]))
    mixed = F.scaled_dot_product_attention(sides[0], sides[1], sides[2], attn_mask=mask)
    mixed = mixed.movedim(-2, 0).flatten(-2)
    return F.linear(mixed, out_proj_weight, out_proj_bias), shares


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested values, such as a model's outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping) and depth < 6:
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, tuple | list) and depth < 6:
        for item in value:
            yield from tensors_in(item, depth + 1)


def _outputs(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a model returns, perhaps as the attributes of an object."""
    plain = isinstance(value, Tensor | Mapping | tuple | list | nn.Module | str)
    yield from tensors_in(value if plain or not hasattr(value, "__dict__") else dict(vars(value)))


def watched_copy(model: nn.Module) -> nn.Module:
    """Return an eval copy that shares the parameters, with the hooks that may change a result."""
    return shared_copy(model).eval()


@contextmanager
def _paths(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module runs."""
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            watch.modules.append(path)
            watch.trace.modules.setdefault(path, []).append(len(watch.trace.records))

        return hook

    def leave(*_: Any) -> None:
        watch.modules.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def traced(
    model: nn.Module,
    call: Call,
    moved: Mapping[int, Tensor] | None = None,
    pins: Mapping[int, Pin] | None = None,
    trace: Trace | None = None,
) -> Trace:
    """Run a copy that `watched_copy` made, perhaps with moved parameters and pins; return a trace.

    Args:
        moved: the id of a parameter → the tensor that replaces it.
        pins: the number of a call → its pin.
        trace: an empty trace to fill; if the pass fails, it shows how far the pass came.
    """
    floats: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            floats.append(value.detach().clone().requires_grad_())
            return floats[-1].clone()  # the model may write into it
        return value

    call = call.copied()
    args, kwargs = replaced((tuple(call.args), dict(call.kwargs)), leaf)
    parameters = {id(p) for p in model.parameters()}
    unwritten = Unwritten(model)
    watch = _Watch(parameters, moved, pins, trace, unwritten)
    watch.trace.inputs = floats
    named = {name: value for name, value in kwargs.items() if "pos" not in name}
    watch.ids = {_storage(t) for t in tensors_in((args, named)) if not t.is_floating_point()}
    try:
        with seeded(), torch.enable_grad(), _paths(model, watch), watch:
            outputs = model(*args, **kwargs)
    finally:
        unwritten.restore()
    watch.trace.outputs = [t for t in _outputs(outputs) if t.grad_fn is not None]
    if watch.without_gradients and not watch.trace.outputs:
        raise Unwatchable(
            "its forward pass turns gradients off (torch.no_grad or torch.inference_mode), so that "
            "it cannot be watched; turn them off outside of the model instead"
        )
    return watch.trace
