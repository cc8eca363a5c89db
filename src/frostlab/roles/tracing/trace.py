"""One small forward pass of a model, watched: which parameter enters which operation.

Every time a parameter enters a torch function, it is replaced by a tensor of its own (an alias), so
that the autograd graph distinguishes the uses of a shared parameter. Statistics of norms are held
fixed: a norm over all heads would otherwise make every head depend on every row.

The pass runs on a copy of the model's modules that shares its parameters, so the model keeps its
weights, buffers, modes and hooks. A second pass of the same inputs can be given parameters with
changed values (moved parameters). Chosen calls then return the results of the first pass (pins), so
that a change in one layer does not reach the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frostlab.roles.tracing.facts import Call
from frostlab.roles.undisturbed import shared_copy

_NOISY_SIZE = 1 << 16  # parameters up to this size get noise, so that none is all zeros or ones
_NOISE = 0.05  # standard deviation of the noise
_KEPT_HOOKS = "torch.nn.utils"  # hooks that compute a weight, such as those of weight_norm
_REDUCTIONS = {
    "mean", "var", "std", "norm", "vector_norm", "var_mean", "std_mean", "sum", "amax",
    "linalg_vector_norm", "linalg_norm",
}  # fmt: skip
_MULTIPLIES = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
_DIVIDES = {"div", "__truediv__", "true_divide", "divide", "div_"}
_ADDS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
_SUBTRACTS = {"sub", "__sub__", "sub_", "subtract"}
PRODUCTS = {
    "matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__", "mm",
    "scaled_dot_product_attention",
}  # fmt: skip
PROJECTIONS = {"linear", "addmm", "conv1d", "conv2d"}
_TRANSPOSES = {"T", "mT", "H", "mH"}  # attributes that compute a result like a function
_CUTS = {"detach", "data"}  # operations whose results have no autograd history
SUMS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_KEPT = PRODUCTS | PROJECTIONS | SUMS  # functions whose results are kept for later passes (pins)
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
    result: Any = None  # None, unless it is a product, projection, sum or statistic
    node: Any = None  # the graph node that made the result
    indices: Tensor | None = None  # for an embedding: the indices that were looked up
    given: bool = False  # whether the indices are an input of the model, but not one of positions


@dataclass
class Trace:
    """What one watched forward pass has shown."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # floating-point inputs
    uses: dict[int, Use] = field(default_factory=dict)  # id of the alias → use
    records: list[Record] = field(default_factory=list)
    norms: set[int] = field(default_factory=set)  # ids of aliases that scale or shift a norm
    modules: dict[str, list[int]] = field(default_factory=dict)  # path → calls at which it began
    cut: list[Any] = field(default_factory=list)  # nodes whose results go on without a history


class AnotherWay(Exception):
    """A later pass made other calls than the first, e.g. because the first filled a cache."""


@dataclass(frozen=True)
class Pin:
    """The result that a call of a later pass returns."""

    name: str  # of the function
    result: Any
    always: bool = True  # False: only if none of the call's parameters has moved

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
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self._parameters, self._moved, self._pins = parameters, moved or {}, pins
        self._noise: dict[int, Tensor] = {}
        self._normalised: dict[int, Tensor] = {}  # normalised values that no weight has scaled yet
        self._scales: dict[int, set[int]] = {}  # tensors computed from parameters → their aliases
        self._statistics: dict[int, Tensor] = {}
        self._centred: dict[int, set[int]] = {}  # x − mean → aliases that scale it
        self._scaled: dict[int, set[int]] = {}  # normalised value → aliases that scale it
        self._kept: list[Tensor] = []  # keeps them alive, so that no id is used twice
        self.modules: list[str] = [""]
        self.ids: set[int] = set()  # storages of integer inputs, without positions

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
        args, kwargs = _replaced((args, kwargs), self._alias)
        if name in _NORMS:
            for value in tensors_in((args[1:], kwargs)):
                if id(value) in trace.uses:
                    trace.norms.add(id(value))
                trace.norms |= self._scales.get(id(value), set())
        if name in ("layer_norm", "rms_norm", "group_norm", "normalize"):
            result = self._fixed_norm(name, number, args, kwargs)
            if not any(id(value) in trace.uses for value in tensors_in((args, kwargs))):
                self._normalised[id(result)] = result  # a weight that multiplies it is the norm's
        elif name in _REDUCTIONS and _keeps_dimensions(args, kwargs):
            result = self._statistic(number, lambda: func(*args, **kwargs))
        else:
            result = func(*args, **kwargs)
            if name == "embedding":
                found = [t for t in tensors_in((args, kwargs)) if not t.is_floating_point()]
                record.indices = found[0] if found else None
                record.given = bool(found) and _storage(found[0]) in self.ids
        record.last = _node_number()
        if name in _KEPT and isinstance(result, Tensor):
            record.node = result.grad_fn
            record.result = result.detach().clone()  # what follows may change it in place
            if self._pins is not None and number in self._pins and self._pins[number].always:
                if self._pins[number].result.shape != result.shape:
                    raise AnotherWay
                result = self._pins[number].copy(result.requires_grad)
        self._follow(name, (args, kwargs), result)
        return result

    def _is_still(self, arguments: Any) -> bool:
        """Return whether a call is pinned and none of its parameters has moved."""
        if len(self.trace.records) - 1 not in (self._pins or {}):
            return False
        for value in tensors_in(arguments):
            aliases = self._scales.get(id(value), set())
            if id(value) in self._moved or any(
                self.trace.uses[alias].parameter in self._moved for alias in aliases
            ):
                return False
        return True

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in self._parameters:
            return value
        key = id(value)
        plain = value.detach()
        if not plain.is_floating_point():
            return value
        if key in self._moved:
            plain = self._moved[key]
        elif plain.numel() <= _NOISY_SIZE:
            if key not in self._noise:
                self._noise[key] = noisy(plain)
            plain = self._noise[key]
        alias = plain.detach().requires_grad_()
        self.trace.uses[id(alias)] = Use(key, alias, len(self.trace.records) - 1)
        return alias

    def _statistic(self, number: int, compute: Callable[[], Any]) -> Any:
        """Return a statistic without its history or, if it is pinned, as it was recorded."""
        result: Any
        if self._pins is not None and number in self._pins:
            result = self._pins[number].result
        else:
            result = _replaced(compute(), lambda t: t.detach() if isinstance(t, Tensor) else t)
        for value in tensors_in(result):
            self._statistics[id(value)] = value
        self.trace.records[number].result = result
        return result

    def _fixed_norm(self, name: str, number: int, args: Any, kwargs: Any) -> Tensor:
        """Compute a norm whose statistics are held fixed."""

        def given(index: int, word: str, default: Any = None) -> Any:
            return args[index] if len(args) > index else kwargs.get(word, default)

        x = given(0, "input")
        if name == "normalize":
            power, dim = given(1, "p", 2.0), given(2, "dim", 1)
            least = given(3, "eps", 1e-12)
            scale = self._statistic(
                number, lambda: torch.linalg.vector_norm(x, power, dim, True).clamp_min(least)
            )
            return x / scale
        if name == "group_norm":
            groups, weight, bias = given(1, "num_groups"), given(2, "weight"), given(3, "bias")
            shaped = x.reshape(len(x), groups, -1)
            dims: list[int] = [-1]
            eps = given(4, "eps", 1e-5)
        else:
            shape = given(1, "normalized_shape")
            weight = given(2, "weight")
            bias = given(3, "bias") if name == "layer_norm" else None
            eps = given(4, "eps", 1e-5) if name == "layer_norm" else given(3, "eps")
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            shaped, dims = x, list(range(-len(shape), 0))

        def statistics() -> Tensor:
            centre = torch.zeros_like(shaped) if name == "rms_norm" else shaped
            mean = centre.mean(dims, keepdim=True)
            square = (shaped - mean).square().mean(dims, keepdim=True)
            return torch.stack([mean, torch.rsqrt(square + eps)])

        mean, scale = self._statistic(number, statistics)
        result = ((shaped - mean) * scale).reshape(x.shape)
        if name == "group_norm":
            weight, bias = (
                None if p is None else p.reshape(1, -1, *[1] * (x.ndim - 2)) for p in (weight, bias)
            )
        result = result if weight is None else result * weight
        return result if bias is None else result + bias

    def _follow(self, name: str, arguments: Any, result: Any) -> None:
        """Record which results are statistics, normalised, or computed from parameters alone."""
        values = list(tensors_in(arguments))
        results = list(tensors_in(result))
        if not results:
            return
        self._kept += results
        origins: set[int] = set()
        alone = bool(values)
        for value in values:
            if id(value) in self.trace.uses:
                origins.add(id(value))
            elif id(value) in self._scales:
                origins |= self._scales[id(value)]
            elif value.requires_grad or value.numel() > 1:
                alone = False
        if alone and origins:
            for item in results:
                self._scales[id(item)] = origins
            return
        with_statistic = any(id(v) in self._statistics for v in values)
        if with_statistic and all(id(v) in self._statistics or v.numel() == 1 for v in values):
            for item in results:
                self._statistics[id(item)] = item
            return
        own = {o for o in origins if self._is_norms_own(o, values)}
        for item in results:
            self._follow_norm(name, values, own, with_statistic, item)

    def _is_norms_own(self, alias: int, values: Sequence[Tensor]) -> bool:
        """Return whether a parameter can scale or shift a norm.

        A single number that is first used in another computation cannot: it is a temperature.
        """
        use = self.trace.uses[alias]
        return use.alias.numel() > 1 or any(value is use.alias for value in values)

    def _follow_norm(
        self, name: str, values: Sequence[Tensor], own: set[int], statistic: bool, result: Tensor
    ) -> None:
        """Follow a norm that is written out: x − mean, its division, its scale and its shift."""
        centred = [self._centred[id(v)] for v in values if id(v) in self._centred]
        scaled = [self._scaled[id(v)] for v in values if id(v) in self._scaled]
        normalised = any(id(v) in self._normalised for v in values)
        if statistic and name in _SUBTRACTS:
            self._centred[id(result)] = set()
        elif statistic and name in _MULTIPLIES | _DIVIDES:
            self._normalised[id(result)] = result
            for before in centred:  # what scaled it before it was divided
                self.trace.norms |= before
                self._scaled[id(result)] = before
        elif normalised and (name in _MULTIPLIES or name == "addcmul"):
            self.trace.norms |= own
            self._scaled[id(result)] = own
        elif centred and own and name in _MULTIPLIES:
            self._centred[id(result)] = centred[0] | own
        elif scaled and name in _ADDS and self._same_shapes(own, scaled[0]):
            self.trace.norms |= own
        elif len(values) == 1:  # a cast or a view of it
            if normalised:
                self._normalised[id(result)] = result
            if scaled:
                self._scaled[id(result)] = scaled[0]
            if centred:
                self._centred[id(result)] = centred[0]

    def _same_shapes(self, shifts: set[int], scales: set[int]) -> bool:
        uses = self.trace.uses
        wanted = {uses[alias].alias.shape for alias in scales}
        return bool(shifts) and {uses[alias].alias.shape for alias in shifts} <= wanted


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
    """Compute what `nn.MultiheadAttention` does, without masks, in steps that can be watched."""
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
        projected = [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]
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
    mixed = F.scaled_dot_product_attention(*sides).movedim(-2, 0).flatten(-2)
    return F.linear(mixed, out_proj_weight, out_proj_bias), shares


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with every leaf changed."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, change) for key, item in value.items()}
    return change(value)


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


def _keeps_dimensions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("keepdim")) or any(value is True for value in args[2:])


def watched_copy(model: nn.Module) -> nn.Module:
    """Return an eval copy that shares the parameters; only hooks that compute weights stay."""
    made = shared_copy(model).eval()
    for module in made.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if not _computes_weight(hook)]:
                del hooks[key]
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return made


def _computes_weight(hook: Any) -> bool:
    owner = hook if hasattr(hook, "__module__") else type(hook)
    return str(getattr(owner, "__module__", "")).startswith(_KEPT_HOOKS)


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
    """Run a watched copy once; with other parameters or pinned results if they are given.

    Args:
        moved: the id of a parameter → the tensor that replaces it.
        pins: the number of a call → the result that it returns.
        trace: an empty trace to fill, which shows how far a pass came that fails.
    """
    floats: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            floats.append(value.detach().clone().requires_grad_())
            return floats[-1]
        return value

    args, kwargs = _replaced((tuple(call.args), dict(call.kwargs)), leaf)
    parameters = {id(p) for p in model.parameters()}
    watch = _Watch(parameters, moved, pins)
    watch.trace = watch.trace if trace is None else trace
    watch.trace.inputs = floats
    named = {name: value for name, value in kwargs.items() if "pos" not in name}
    watch.ids = {_storage(t) for t in tensors_in((args, named)) if not t.is_floating_point()}
    devices = [] if not torch.cuda.is_initialized() else list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), torch.enable_grad(), _paths(model, watch):
        torch.default_generator.manual_seed(0)
        with watch:
            outputs = model(*args, **kwargs)
    watch.trace.outputs = [t for t in _outputs(outputs) if t.grad_fn is not None]
    return watch.trace
