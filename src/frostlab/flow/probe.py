"""Measurement of one optimizer step on the device, into one tensor that is read later.

Once a `Probe` is built, its measurements neither synchronise with the device nor read a value, so
they can be captured in a CUDA graph. Call `before_step` and `after_step` around the optimizer step.

Each measured step gives a report. A part is all tensors of one role, such as query, in one layer or
outside the layers (`frostlab.flow.tensors`). The front is the first two layers, the back the last
two, and the output is the head.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.devices import exact_dtype
from frostlab.flow.tensors import Layout, is_sharded, local, shard_group

Gradient = Callable[[nn.Parameter], Tensor | None]
# the lists of tensors passed to `Totals.add_up`, cut into views that each lie in one part
Views = list[list[Tensor]]
SUMS = (  # names of the sums over each part
    "gradient", "before_clip", "weight", "update",  # squared norms
    "moved", "origin", "along",  # |weight - start|², |start|², weight·start
    # gradient·previous, |gradient|², |previous|², before the unscaling and clipping that the
    # optimizer's own step does
    "agree", "energy", "former",
)  # fmt: skip
_MAXIMA = ("largest", "high", "low")  # max |gradient|, max weight, max -weight of a parameter


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd stored in `.grad`."""
    return parameter.grad


class Probe:
    """Measures a step: norms and dot products of each part, and the learning rates.

    It also measures max |gradient| of every parameter in the front, the back and the output, and
    the range of the weights of every parameter in the front.

    It keeps a copy of the initial weights for `distance`, a copy of the previous gradients for
    `gradient_cosine` and, between `before_step` and `after_step`, the copies that `Updates` makes.
    """

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[Optimizer],
        *,
        distance: bool = False,
        gradient_cosine: bool = False,
        gradient: Gradient = own_gradient,
    ) -> None:
        self.layout, self.optimizers, self.gradient = layout, tuple(optimizers), gradient
        self.gradient_cosine, self.reached = gradient_cosine, [True] * len(layout.parameters)
        self.device = layout.parameters[0].device
        self._totals = Totals(layout)
        self.wide, self._group = self._totals.wide, self._totals.group
        # indices of the parameters whose max |g| is measured
        self.extremes = tuple(dict.fromkeys((*layout.front, *layout.back, *layout.output)))
        sizes = dict.fromkeys(SUMS, len(layout.parts))
        sizes |= {"largest": len(self.extremes)}
        sizes |= {"high": len(layout.front), "low": len(layout.front)}
        sizes |= {"rates": len(self._groups()), "stopped": 1}
        self.values = torch.zeros(sum(sizes.values()), dtype=self.wide, device=self.device)
        self.views = dict(zip(sizes, self.values.split(list(sizes.values())), strict=True))
        # created once: creating them at every report would launch one kernel per parameter
        self._zeros = [expanded_zero(local(p)) for p in layout.parameters]
        self._updates = Updates(layout, self.optimizers, self._totals, self._zeros)
        self._parameters_of = self._parameters_by_optimizer()
        self._clip_measured = False
        self._start = [local(p).detach().clone() for p in layout.parameters] if distance else []
        self._previous = [  # at least float32: half-precision products could overflow
            torch.zeros_like(local(p), dtype=_product_dtype(local(p).dtype))
            for p in (layout.parameters if gradient_cosine else ())
        ]
        # |gradient|² in this process; `_reduce` puts the sum over processes into views["energy"]
        self._energy = torch.zeros_like(self.views["energy"])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _parameters_by_optimizer(self) -> list[dict[int, None]]:
        """Return the parameter indices of each optimizer, as an ordered set.

        Parameters that no optimizer holds are assigned to the first one.
        """
        parameters: list[dict[int, None]] = [{} for _ in self.optimizers]
        owner = {
            id(p): number
            for number, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for i, parameter in enumerate(self.layout.parameters):
            parameters[owner.get(id(parameter), 0)][i] = None
        return parameters

    def start_as(self, former: "Probe") -> None:
        """Take over another probe's initial weights for the parameters that both probes have."""
        pairs = zip(former.layout.parameters, former._start, strict=bool(former._start))
        former_starts = {id(parameter): start for parameter, start in pairs}
        pairs = zip(self.layout.parameters, self._start, strict=bool(self._start))
        self._start = [former_starts.get(id(parameter), start) for parameter, start in pairs]

    def start_at(self, weights: Sequence[Tensor]) -> None:
        """Measure distances from these weights; if sharded, pass this process's shards."""
        self._start = list(weights)

    @torch.no_grad()
    def before_clip(self) -> None:
        """Measure the gradients before clipping."""
        self.views["before_clip"].copy_(self._totals.squares(self._gradients()))
        self._clip_measured = True

    @torch.no_grad()
    def before_step(self, clip_factor: Tensor | None = None, gradients: bool = True) -> None:
        """Measure the weights, and the gradients of the first optimizer.

        Call `measure_gradients` for every further optimizer.

        Args:
            clip_factor: the factor by which the optimizer's kernel will multiply the gradients;
                None if they are clipped already, or not at all.
            gradients: False if a closure computes the gradients during the step; they are then
                measured after it.
        """
        if gradients:
            self.measure_gradients(0, clip_factor)
        self._updates.before(self.reached if gradients else None)
        if self.layout.front:
            lowest, highest = zip(*map(self._range, self.layout.front), strict=True)
            self.views["high"].copy_(torch.stack(highest))
            self.views["low"].copy_(torch.stack(lowest).neg())

    @torch.no_grad()
    def after_step(self, gradients: bool = False) -> None:
        """Measure the update and, with `gradients`, the gradients that a closure computed."""
        if gradients:
            for number in range(len(self.optimizers)):
                self.measure_gradients(number)
        for name, values in zip(("weight", "update"), self._updates.after(), strict=True):
            self.views[name].copy_(values)
        if self._start:
            self._measure_distance([local(p) for p in self.layout.parameters])
        self._reduce()
        if not self._clip_measured:
            self.views["before_clip"].fill_(torch.nan)
        self._clip_measured = False
        self._measure_rates()

    @torch.no_grad()
    def measure_gradients(self, optimizer: int, clip_factor: Tensor | None = None) -> None:
        """Add one optimizer's gradients to the norms; optimizer 0 sets the norms to zero first."""
        parameters = self._parameters_of[optimizer]
        gradients = self._gradients(parameters)
        squares = self._totals.squares(gradients)
        if optimizer == 0:
            self.views["gradient"].zero_()
            self.views["largest"].zero_()
        if self.gradient_cosine:
            self._compare_with_previous(parameters, gradients, squares, optimizer == 0)
        if clip_factor is not None:  # one pass gives the norms before and after clipping
            self.views["before_clip"].copy_(squares)
            self._clip_measured = True
        factor = clip_factor if clip_factor is not None else self._unscaling(optimizer)
        self.views["gradient"].add_(squares if factor is None else squares * factor.square())
        if self.extremes:
            norms = self._totals.norms([gradients[i] for i in self.extremes], torch.inf)
            largest = self.views["largest"]
            torch.maximum(largest, norms if factor is None else norms * factor, out=largest)

    def _gradients(self, parameters: Collection[int] | None = None) -> list[Tensor]:
        """Return this process's shards of the gradients of these parameters (default: all).

        The list has one tensor per parameter: zeros if its gradient is None or not requested.
        `reached` records which of the requested gradients exist.
        """
        gradients = []
        for i, parameter in enumerate(self.layout.parameters):
            gradient = None
            if parameters is None or i in parameters:
                gradient = self.gradient(parameter)
                self.reached[i] = gradient is not None
            gradients.append(self._zeros[i] if gradient is None else local(gradient))
        return gradients

    def _unscaling(self, optimizer: int) -> Tensor | None:
        """Return the factor by which a fused optimizer undoes the scale of GradScaler, or None."""
        scale = getattr(self.optimizers[optimizer], "grad_scale", None)
        return 1.0 / scale.to(self.device, self.wide) if isinstance(scale, Tensor) else None

    def _range(self, parameter: int) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest weight; (inf, -inf) for an empty shard."""
        weight = local(self.layout.parameters[parameter]).detach()
        if not weight.numel():
            infinity = torch.full((), torch.inf, dtype=self.wide, device=self.device)
            return infinity, -infinity
        smallest, largest = weight.aminmax()
        return smallest.to(self.device), largest.to(self.device)

    def _compare_with_previous(
        self, parameters: Collection[int], gradients: list[Tensor], squares: Tensor, resets: bool
    ) -> None:
        """Compute the dot products with the previous gradients, then keep the current ones.

        The first gradients are compared with zeros, so their cosine is undefined.
        """
        if resets:
            self.views["former"].copy_(self._energy)
            self.views["agree"].zero_()
            self._energy.zero_()
        previous = [self._previous[i] for i in parameters]
        current = [gradients[i] for i in parameters]
        torch._foreach_mul_(previous, current)  # in place, to save memory; overwritten below
        products = [
            self._previous[i] if i in parameters else zero for i, zero in enumerate(self._zeros)
        ]
        sums = self._totals.add_up(lambda views: [v.sum() for v in views[0]], products)
        self.views["agree"].add_(sums)
        torch._foreach_copy_(previous, current)
        self._energy.add_(squares)
        self.views["energy"].copy_(self._energy)

    def _measure_distance(self, weights: list[Tensor]) -> None:
        """Measure |start|² and, view by view to save memory, |weight - start|² and weight·start."""

        def distances(views: Views) -> list[Tensor]:
            return [(a - b).float().norm().square() for a, b in zip(*views, strict=True)]

        def products(views: Views) -> list[Tensor]:
            pairs = zip(*views, strict=True)
            return [(a.to(_product_dtype(a.dtype)) * b).sum(dtype=self.wide) for a, b in pairs]

        self.views["origin"].copy_(self._totals.squares(self._start))
        self.views["moved"].copy_(self._totals.add_up(distances, weights, self._start))
        self.views["along"].copy_(self._totals.add_up(products, weights, self._start))

    def _reduce(self) -> None:
        """All-reduce the sums and the maxima of a sharded model over its process group."""
        if self._group is None:
            return
        sums = torch.cat([self.views[name] for name in SUMS])
        dist.all_reduce(sums, group=self._group)
        maxima = torch.cat([self.views[name] for name in _MAXIMA])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group)
        for names, reduced in ((SUMS, sums), (_MAXIMA, maxima)):
            sizes = [len(self.views[name]) for name in names]
            for name, values in zip(names, reduced.split(sizes), strict=True):
                self.views[name].copy_(values)

    def _measure_rates(self) -> None:
        """Record the learning rates, and whether the first optimizer skipped the step.

        An optimizer skips a step if its `found_inf` is set, by GradScaler or, in frostlab's own
        training, because a gradient is not finite.
        """
        groups = self._groups()
        for element, group in zip(self.views["rates"].unbind(), groups, strict=True):
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                element.copy_(rate)
            else:
                element.fill_(torch.nan if rate is None else rate)
        stopped = getattr(self.optimizers[0], "found_inf", None)
        if isinstance(stopped, Tensor):
            self.views["stopped"].copy_(stopped)
        else:
            self.views["stopped"].zero_()


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for products of this dtype: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


class Totals:
    """Sums per part over lists of tensors that have the shapes of the trainable parameters.

    In a sharded model each process sums its own shards; `Probe` then adds up the processes.
    """

    def __init__(self, layout: Layout) -> None:
        self.device = layout.parameters[0].device
        self.wide = exact_dtype(self.device)
        self.group = shard_group(layout.parameters)
        self._parts = len(layout.parts)
        self._zero = torch.zeros((), dtype=self.wide, device=self.device)
        sharded = [is_sharded(p) for p in layout.parameters]
        self._slices = [  # slices of unsharded parameters, then of sharded parameters
            [s for s in layout.slices if sharded[s.parameter] == kind] for kind in (False, True)
        ]
        self._part_of_view = []  # for each list in `_slices`: the part of each view
        for slices in self._slices:
            pairs = [(s, local(layout.parameters[s.parameter])) for s in slices]
            parts = [s.part for s, tensor in pairs for _ in s.views(tensor)]
            self._part_of_view.append(torch.tensor(parts, dtype=torch.long, device=self.device))

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of every part."""
        return self._add_up(lambda views: self.norms(views[0]).square(), tensors)

    def add_up(self, numbers: Callable[[Views], list[Tensor]], *lists: Sequence[Tensor]) -> Tensor:
        """Compute one number for each view by calling `numbers`, and sum them over each part."""

        def stacked(views: Views) -> Tensor:
            return torch.stack([n.to(self.device, self.wide) for n in numbers(views)])

        return self._add_up(stacked, *lists)

    def _add_up(self, numbers: Callable[[Views], Tensor], *lists: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(self._parts, dtype=self.wide, device=self.device)
        kinds = zip(self._slices, self._part_of_view, (False, True), strict=True)
        for slices, parts, is_shard in kinds:
            if not len(parts):
                continue
            addends = numbers(
                [[v for s in slices for v in s.views(tensors[s.parameter])] for tensors in lists]
            )
            if not is_shard and self.group is not None:  # every process adds these same numbers
                addends = addends / dist.get_world_size(self.group)
            total.index_add_(0, parts, addends)
        return total

    def norms(self, tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Return each tensor's norm, with one foreach call per device, dtype and contiguity."""
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        norms = [self._zero] * len(tensors)
        for i, tensor in enumerate(tensors):
            is_zero = tensor.ndim > 0 and not any(tensor.stride())  # from `expanded_zero`
            if tensor.numel() and not is_zero:
                key = (tensor.device, tensor.dtype, tensor.is_contiguous())
                kinds.setdefault(key, []).append(i)
        for (_, dtype, _), indices in kinds.items():
            wider = torch.float32 if dtype.itemsize < 4 else None
            of_kind = torch._foreach_norm([tensors[i] for i in indices], order, dtype=wider)
            stacked = torch.stack(of_kind).to(self.device, self.wide)
            if len(indices) == len(tensors):  # one kind only: already in order
                return stacked
            for i, norm in zip(indices, stacked.unbind(), strict=True):
                norms[i] = norm
        return torch.stack(norms)


class MeasuringOptimizer(Protocol):
    """An optimizer whose kernel measures its updates, so no copy of the weights is needed."""

    param_groups: list[dict[str, Any]]
    sums: Tensor | None  # (parameters, 2): squared norms of old weights and of updates
    measures: bool  # whether a step writes `sums`


class Updates:
    """Measures, for each part, the squared norms of the weights before a step and of the update.

    Between `before` and `after` it keeps a copy of the trainable parameters, except the ones that
    the optimizer measures itself.
    """

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[Any],
        totals: Totals,
        zeros: Sequence[Tensor],  # an `expanded_zero` for each trainable parameter
    ) -> None:
        self._layout, self._totals, self._zeros = layout, totals, zeros
        self._before: list[Tensor] = []
        self._copied: list[int] = []  # parameters whose copy is in `_before`
        self._squares: Tensor | None = None  # squared norms of the copies
        only = optimizers[0] if len(optimizers) == 1 and totals.group is None else None
        self._optimizer: MeasuringOptimizer | None = only if hasattr(only, "measures") else None
        self._measured: set[int] = set()  # parameters that the optimizer measures itself
        if self._optimizer is not None:
            self._assign_parts(self._optimizer)

    def _assign_parts(self, optimizer: MeasuringOptimizer) -> None:
        """Map the optimizer's parameters to parts; call this before a CUDA graph is captured."""
        slices, no_part = self._layout.slices, len(self._layout.parts)
        counts = Counter(s.parameter for s in slices)
        part_of = {s.parameter: s.part for s in slices if counts[s.parameter] == 1 and s.is_whole}
        indices = {id(p): i for i, p in enumerate(self._layout.parameters)}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = [part_of.get(indices.get(id(p), -1), no_part) for p in parameters]
        device, wide = self._totals.device, self._totals.wide
        self._parts = torch.tensor(parts, device=device)
        optimizer.sums = torch.zeros(len(parameters), 2, dtype=wide, device=device)
        self._measured = set(part_of)

    def before(self, reached: Sequence[bool] | None) -> None:
        """Copy the weights before a step.

        Args:
            reached: whether each parameter has a gradient, or None if that is unknown.
        """
        weights = [local(p).detach() for p in self._layout.parameters]
        has_gradient = reached or [False] * len(weights)
        # the optimizer skips, and does not measure, parameters without a gradient
        self._copied = [
            i for i, has in enumerate(has_gradient) if i not in self._measured or not has
        ]
        self._before = list(self._zeros)
        for i in self._copied:
            self._before[i] = torch.empty_like(weights[i])
        if self._copied:
            torch._foreach_copy_(self._copies(), [weights[i] for i in self._copied])
        self._squares = self._totals.squares(self._before)
        if self._optimizer is not None:
            self._optimizer.measures = True

    def after(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms of the old weights and of the update, and drop the copies."""
        assert self._squares is not None, "call before() first"
        if self._copied:
            now = [local(self._layout.parameters[i]).detach() for i in self._copied]
            torch._foreach_sub_(self._copies(), now)
        weights, updates = self._squares, self._totals.squares(self._before)
        self._before, self._squares = [], None
        if self._optimizer is None or self._optimizer.sums is None:
            return weights, updates
        self._optimizer.measures = False
        # the last row, which is dropped, collects parameters that are measured by copies
        sums = torch.zeros(len(weights) + 1, 2, dtype=weights.dtype, device=weights.device)
        sums.index_add_(0, self._parts, self._optimizer.sums)
        return weights + sums[:-1, 0], updates + sums[:-1, 1]

    def _copies(self) -> list[Tensor]:
        return [self._before[i] for i in self._copied]


def expanded_zero(like: Tensor) -> Tensor:
    """Return a tensor of zeros shaped like `like` that stores only one element (strides of 0)."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand_as(like)
