"""Norms in a watched pass: statistics that shift or scale the tensor they are computed from.

In a watched pass (`trace.py`), gradients show which rows of the weights each head depends on. A
norm over all heads would make every head depend on every row, so the statistics of norms are held
fixed: autograd takes them for constants. A mean, a sum or another statistic belongs to a norm only
where the very tensor that it was computed from is shifted, multiplied or divided by it, along the
same axes. Everywhere else, such as in mean pooling, gradients flow through it. An alias is a tensor
that stands for one use of a parameter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FUSED_NORMS = ("layer_norm", "rms_norm", "group_norm", "normalize")
MULTIPLIES = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
DIVIDES = {"div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__"}
ADDS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
SUBTRACTS = {"sub", "__sub__", "sub_", "subtract", "__isub__", "rsub", "__rsub__"}
# function → the position of its argument `dim`
_REDUCTIONS = {
    "mean": 1, "var": 1, "std": 1, "var_mean": 1, "std_mean": 1, "sum": 1, "amax": 1, "norm": 2,
    "vector_norm": 2, "linalg_vector_norm": 2, "linalg_norm": 2,
}  # fmt: skip
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous"}
_VIEWS = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "view_as",
    "reshape_as",
}
_EXPANDS = {"expand", "expand_as", "broadcast_to"}
_ELEMENTWISE = MULTIPLIES | DIVIDES | ADDS | SUBTRACTS | _CASTS | {
    "pow", "__pow__", "pow_", "square", "sqrt", "rsqrt", "abs", "neg", "__neg__", "reciprocal",
    "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clip", "maximum", "__rtruediv__",
    "__rdiv__", "cumsum", "__abs__", "exp", "log", "sqrt_", "rsqrt_", "reciprocal_", "float_power",
    "relu",
}  # fmt: skip
# functions that take values from their first tensor only, and a shape or dtype from the second
_LIKE = {"view_as", "reshape_as", "expand_as", "type_as"}
Key = tuple[Any, int]  # a parameter, or one version of a tensor that may be changed in place


@dataclass(frozen=True)
class Statistic:
    """A value computed from statistics of one tensor."""

    origins: frozenset[Key]  # tensors of each of which it is a statistic, such as x and x²
    full: tuple[int, ...]  # the shape of these tensors
    kept: tuple[int, ...]  # the same, with 1 for every axis that was reduced


@dataclass
class Step:
    """One call of a torch function."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    values: Sequence[Tensor]  # the tensors among its arguments
    keys: Sequence[Key]  # the keys of these tensors before the call
    held: int | None  # which of them is a norm's statistic


class Norms:
    """Follows one pass, and tells which statistics and parameters belong to norms."""

    def __init__(self, uses: Mapping[int, Any]) -> None:
        self.owned: set[int] = set()  # ids of aliases that scale or shift a norm
        # id of a tensor that is computed from parameters alone → ids of their aliases
        self.computed: dict[int, frozenset[int]] = {}
        self._uses = uses  # id of an alias → its `trace.Use`
        self._alive: list[Tensor] = []  # so that no id is used twice
        # several for one tensor: a mean of the norms of x is a statistic of these norms and of x
        self._statistics: dict[Key, list[Statistic]] = {}
        # tensor y → all tensors x, such as y itself, for which each entry of y is computed from the
        # same entry of x and from statistics of x
        self._made: dict[Key, frozenset[Key]] = {}
        # tensor → the tensors that it is a scaled or shifted copy of → aliases that scaled it
        self._copies: dict[Key, dict[Key, frozenset[int]]] = {}
        # tensors that depend on an input or a parameter, even if they have no gradient
        self._live: set[Key] = set()
        self._normalised: set[Key] = set()  # results of a norm, before its scale and shift
        self._scaled: dict[Key, frozenset[int]] = {}  # normalised value → aliases that scale it

    def step(self, name: str, args: Any, kwargs: Any, values: Sequence[Tensor]) -> Step:
        """Return what is known of a call before it is made."""
        values = values[:1] if name in _LIKE else values
        keys = [self._key(value) for value in values]
        return Step(name, args, kwargs, values, keys, self._held(name, values, keys))

    def follow(self, step: Step, results: Sequence[Tensor]) -> None:
        """Record which results are statistics, normalised, or computed from parameters alone."""
        self._alive += [*step.values, *results]
        # zeros_like and new_zeros, for example, take only the shape
        takes_values = not step.name.endswith("_like") and not step.name.startswith("new_")
        if takes_values and any(map(self._varies, step.values, step.keys)):
            self._live |= {self._key(result) for result in results}
        aliases, alone = self._aliases(step)
        if alone and aliases:
            for result in results:
                self.computed[id(result)] = aliases
        axes = _reduced_axes(step)
        if axes is not None:
            for result in results:
                self._reduce(step.values[0], step.keys[0], axes, result)
        if axes is not None or len(results) != 1 or not step.values:
            return
        (result,) = results
        self._combine(step, result)
        own = frozenset(alias for alias in aliases if self._may_scale(alias, step.values))
        self._follow_function(step, result)
        self._follow_copy(step, result, own)
        if not (alone and aliases):
            self._follow_norm(step, result, own)

    def _varies(self, value: Tensor, key: Key) -> bool:
        """Return whether a tensor is no constant, as far as gradients and earlier calls show."""
        return value.requires_grad or key in self._live

    def _key(self, value: Tensor) -> Key:
        use = self._uses.get(id(value))
        if use is not None:
            return "parameter", use.parameter
        return id(value), 0 if value.is_inference() else value._version

    def _held(self, name: str, values: Sequence[Tensor], keys: Sequence[Key]) -> int | None:
        """Return which operand of a call is a statistic of the other one, to be held fixed."""
        if len(values) != 2 or name not in MULTIPLIES | DIVIDES | SUBTRACTS:
            return None
        for index in (1,) if name in DIVIDES else (1, 0):
            if self._statistic_of(keys[index], values[index], keys[1 - index], values[1 - index]):
                return index
        return None

    def _statistic_of(self, key: Key, value: Tensor, other: Key, tensor: Tensor) -> set[Key]:
        """Return the tensors of which `value` is a statistic and `tensor` a scaled copy."""
        copied = self._copied(other).keys()
        for statistic in self._statistics.get(key, ()):
            if (shared := statistic.origins & copied) and _is_aligned(value, statistic, tensor):
                return set(shared)
        return set()

    def _aliases(self, step: Step) -> tuple[frozenset[int], bool]:
        """Return the ids of the aliases that a call uses, and whether it uses no other tensor."""
        aliases: set[int] = set()
        alone = bool(step.values)
        for value in step.values:
            if id(value) in self._uses:
                aliases.add(id(value))
            elif id(value) in self.computed:
                aliases |= self.computed[id(value)]
            elif value.requires_grad or value.numel() > 1:
                alone = False
        return frozenset(aliases), alone

    def _may_scale(self, alias: int, values: Sequence[Tensor]) -> bool:
        """Return whether a parameter can scale or shift a norm.

        A single number that is first used in another computation, or selected from a vector,
        cannot: it is a temperature, or the weight of a sum.
        """
        return any(
            id(value) == alias or (alias in self.computed.get(id(value), ()) and value.numel() > 1)
            for value in values
        )

    def _reduce(self, value: Tensor, key: Key, axes: Sequence[int], result: Tensor) -> None:
        shape = tuple(value.shape)
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
        squeezed = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        if self._varies(value, key) and tuple(result.shape) in (kept, squeezed):
            made = self._made.get(key, frozenset([key]))
            earlier = [known for known in self._statistics.get(key, ()) if known.kept == shape]
            self._statistics[self._key(result)] = [
                Statistic(made, shape, kept),
                *(Statistic(known.origins, known.full, kept) for known in earlier),
            ]

    def _combine(self, step: Step, result: Tensor) -> None:
        """Record a value computed from statistics and, perhaps, constants such as counts."""
        pairs = list(zip(step.values, step.keys, strict=True))
        constants = [(v, k) for v, k in pairs if k not in self._statistics and v.numel() != 1]
        if any(self._varies(value, key) for value, key in constants):
            return
        known = [(tuple(v.shape), self._statistics[k]) for v, k in pairs if k in self._statistics]
        combined = []
        for first in known[0][1] if known else ():
            alike = [(shape, s) for shape, several in known for s in several
                     if s.full == first.full and s.origins & first.origins]  # fmt: skip
            origins = frozenset.intersection(*(statistic.origins for _, statistic in alike))
            if origins and len(alike) == len(known):
                kept = _combined_shape(step, alike, result)
                full = tuple(result.shape) if step.name in _EXPANDS else first.full
                if constants and kept != tuple(result.shape):
                    continue
                combined += [] if kept is None else [Statistic(origins, full, kept)]
        if combined:
            self._statistics[self._key(result)] = combined

    def _follow_function(self, step: Step, result: Tensor) -> None:
        """Record a result that is computed entry by entry from one tensor and its statistics."""
        made: list[frozenset[Key]] = []
        if step.name not in _ELEMENTWISE - {"cumsum"} and not _keeps_order(step):
            return
        for value, key in zip(step.values, step.keys, strict=True):
            aligned = [s for s in self._statistics.get(key, ()) if _is_aligned(value, s, result)]
            if aligned and value.numel() < result.numel():
                made.append(aligned[0].origins)
            elif value.numel() != 1 and self._varies(value, key):
                if value.numel() != result.numel():
                    return
                made.append(self._made.get(key, frozenset([key])))
        if made and (common := frozenset.intersection(*made)):
            after = self._key(result)
            self._made[after] = common | {after}

    def _follow_copy(self, step: Step, result: Tensor, own: frozenset[int]) -> None:
        """Record a result that is a scaled or shifted copy of a tensor."""
        of, scales = 0, frozenset[int]()
        if step.held is not None:
            of = 1 - step.held
        elif len(step.values) == 2 and step.name in MULTIPLIES | DIVIDES:
            factors = [i for i, value in enumerate(step.values) if self._is_factor(value)]
            if len(factors) != 1 or (step.name in DIVIDES and factors != [1]):
                return
            of, scales = 1 - factors[0], own
        elif len(step.values) != 1 or not (
            _keeps_order(step) or step.name in _CASTS | MULTIPLIES | DIVIDES
        ):
            return
        if result.numel() == step.values[of].numel():
            after = self._key(result)
            copied = self._copied(step.keys[of])
            self._copies[after] = {key: made | scales for key, made in copied.items()}
            self._copies[after][after] = frozenset()

    def _is_factor(self, value: Tensor) -> bool:
        """Return whether a factor is a number, or computed from parameters alone."""
        return value.numel() == 1 or id(value) in self._uses or id(value) in self.computed

    def _copied(self, key: Key) -> dict[Key, frozenset[int]]:
        return self._copies.get(key, {key: frozenset()})

    def _follow_norm(self, step: Step, result: Tensor, own: frozenset[int]) -> None:
        """Follow a norm's division, its scale and its shift."""
        after = self._key(result)
        scaled = [self._scaled[key] for key in step.keys if key in self._scaled]
        normalised = any(key in self._normalised for key in step.keys)
        if step.name in FUSED_NORMS:
            if not any(id(value) in self._uses for value in step.values):
                self._normalised.add(after)
        elif step.held is not None and step.name not in SUBTRACTS:
            self._normalised.add(after)
            copied = self._copied(step.keys[1 - step.held])
            shared = self._statistic_of(
                step.keys[step.held], step.values[step.held],
                step.keys[1 - step.held], step.values[1 - step.held],
            )  # fmt: skip
            before = min((copied[key] for key in shared), key=len)  # what scaled it before
            if before:
                self.owned |= before
                self._scaled[after] = before
        elif normalised and (step.name in MULTIPLIES or step.name == "addcmul"):
            self.owned |= own
            self._scaled[after] = own
        elif scaled and step.name in ADDS and self._are_alike(own, scaled[0]):
            self.owned |= own
        elif len(step.values) == 1:  # a cast or a view
            if normalised:
                self._normalised.add(after)
            if scaled:
                self._scaled[after] = scaled[0]

    def _are_alike(self, shifts: frozenset[int], scales: frozenset[int]) -> bool:
        wanted = {self._uses[alias].alias.shape for alias in scales}
        return bool(shifts) and {self._uses[alias].alias.shape for alias in shifts} <= wanted


def _combined_shape(
    step: Step, statistics: Sequence[tuple[tuple[int, ...], Statistic]], result: Tensor
) -> tuple[int, ...] | None:
    """Return `Statistic.kept` of a value computed from statistics; None if it is not clear."""
    shape, first = statistics[0]
    if step.name in _EXPANDS:
        return tuple(result.shape) if _is_aligned(step.values[0], first, result) else None
    if _keeps_order(step):
        return first.kept
    if step.name not in _ELEMENTWISE:
        return None
    if all((form, statistic.kept) == (shape, first.kept) for form, statistic in statistics):
        return first.kept
    whole = all(form == statistic.kept for form, statistic in statistics)
    return tuple(result.shape) if whole else None


def _keeps_order(step: Step) -> bool:
    """Return whether a call only changes the shape of one tensor, and not the order of entries."""
    if len(step.values) != 1:
        return False
    if step.name == "__getitem__":
        index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
        return all(i is None or i is Ellipsis or i == slice(None) for i in index)
    return step.name in _VIEWS


def _reduced_axes(step: Step) -> list[int] | None:
    """Return the axes that a call reduces to a statistic; None if it computes no statistic."""
    if not step.values:
        return None
    count = step.values[0].ndim
    if step.name == "einsum":
        return _summed_axes(step, count)
    if step.name not in _REDUCTIONS or len(step.values) != 1:
        return None
    position = _REDUCTIONS[step.name]
    given = step.args[position] if len(step.args) > position else None
    dim = step.kwargs.get("dim", step.kwargs.get("axis", given))
    if dim is None or isinstance(dim, bool) or dim in ((), []):
        return list(range(count))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if not all(isinstance(axis, int) and -count <= axis < count for axis in dims):
        return None
    return [axis % count for axis in dims]


def _summed_axes(step: Step, count: int) -> list[int] | None:
    """Return the axes that `einsum` sums over, if it multiplies a tensor by itself."""
    equation = step.args[0] if step.args and isinstance(step.args[0], str) else ""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(set(terms)) != 1 or len(set(step.keys)) != 1 or "->" not in equation:
        return None
    letters = terms[0].replace("...", "")
    if len(terms) != len(step.values) or len(set(letters)) != len(letters):
        return None
    start = terms[0].find("...")
    axes = {letter: i if start < 0 or i < start else count - len(letters) + i
            for i, letter in enumerate(letters)}  # fmt: skip
    left = [letter for letter in terms[0] if letter in output]
    return [axes[i] for i in letters if i not in output] if "".join(left) == output else None


def _is_aligned(value: Tensor, statistic: Statistic, other: Tensor) -> bool:
    """Return whether, broadcast to `other`, a statistic meets the entries it was computed from."""
    shape, wanted = tuple(value.shape), tuple(other.shape)
    if value.numel() == 1 and math.prod(statistic.kept) == 1:
        return True
    if shape == statistic.kept and wanted == statistic.full:
        return True
    if math.prod(statistic.full) != math.prod(wanted) or len(shape) > len(wanted):
        return False
    if math.prod(shape) != math.prod(statistic.kept):
        return False
    if any(a not in (1, b) for a, b in zip(reversed(shape), reversed(wanted), strict=False)):
        return False
    entries = torch.arange(math.prod(shape))
    own = entries.view(statistic.kept).expand(statistic.full).reshape(wanted)
    return torch.equal(entries.view(shape).expand(wanted), own)


def fixed_norm(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any],
    fixed: Callable[[Callable[[], Tensor]], Tensor],
) -> Tensor:  # fmt: skip
    """Compute one of torch's norms.

    Args:
        fixed: a function that computes the statistics and holds them fixed.
    """

    def given(index: int, word: str, default: Any = None) -> Any:
        return args[index] if len(args) > index else kwargs.get(word, default)

    x = given(0, "input")
    if name == "normalize":
        power, dim = given(1, "p", 2.0), given(2, "dim", 1)
        least = given(3, "eps", 1e-12)
        return x / fixed(lambda: torch.linalg.vector_norm(x, power, dim, True).clamp_min(least))
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

    mean, scale = fixed(statistics)
    result = ((shaped - mean) * scale).reshape(x.shape)
    if name == "group_norm":
        weight, bias = (
            None if p is None else p.reshape(1, -1, *[1] * (x.ndim - 2)) for p in (weight, bias)
        )
    result = result if weight is None else result * weight
    return result if bias is None else result + bias
