"""Measures one optimizer step on the device, into one tensor that is read later.

Nothing here waits for the device or looks at a value, so that all of it may be captured in a CUDA
graph. A step is measured by calling `before_step` and `after_step` around the optimizer's.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.flow.tensors import Watched, is_sharded, local, shard_group, wide_dtype

Gradient = Callable[[nn.Parameter], Tensor | None]
SUMS = (
    "gradient", "before_clip", "weight", "update",
    "moved", "origin", "along",  # |weight - start|², |start|², weight·start
    "agree", "energy", "former",  # gradient·last one, |gradient|² as it lay there, |last one|²
)  # fmt: skip
_MAXIMA = ("largest", "high", "low")


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient where autograd leaves it."""
    return parameter.grad


class Probe:
    """The measurement of a step: squared norms a part, maxima a tensor at the ends.

    It holds a copy of the weights at the start if `change` is asked for, of the last gradients if
    `agreement` is, and what `Updates` does between `before_step` and `after_step`.
    """

    def __init__(
        self,
        watched: Watched,
        optimizers: Sequence[Optimizer],
        *,
        distance: bool = False,
        gradient_cosine: bool = False,
        gradient: Gradient = own_gradient,
    ) -> None:
        self.watched, self.optimizers, self.gradient = watched, tuple(optimizers), gradient
        self.gradient_cosine, self.reached = gradient_cosine, [True] * len(watched.parameters)
        self.device = watched.parameters[0].device
        self._totals = Totals(watched)
        self.wide, self._group = self._totals.wide, self._totals.group
        ends = dict.fromkeys((*watched.front, *watched.back, *watched.output))
        self.ends = tuple(ends)  # parameters whose largest gradient is wanted
        groups = self._groups()
        sizes = dict.fromkeys(SUMS, len(watched.parts))
        sizes |= {"largest": len(ends), "high": len(watched.front), "low": len(watched.front)}
        sizes |= {"rates": len(groups), "stopped": 1}
        self.values = torch.zeros(sum(sizes.values()), dtype=self.wide, device=self.device)
        self.views = dict(zip(sizes, self.values.split(list(sizes.values())), strict=True))
        # made once: a zero filled for each at every report is a kernel for each
        self._nothing = [stand_in(local(p)) for p in watched.parameters]
        self._updates = Updates(watched, self.optimizers, self._totals, self._nothing)
        self._turns = self._whose()
        self._clip_seen = False
        self._start = [local(p).detach().clone() for p in watched.parameters] if distance else []
        self._last = [  # products of halves would overflow
            torch.zeros_like(local(p), dtype=_exact(local(p).dtype))
            for p in (watched.parameters if gradient_cosine else ())
        ]
        self._energy = torch.zeros_like(self.views["energy"])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _whose(self) -> list[dict[int, None]]:
        """The parameters that each optimizer steps with; those of none come with the first."""
        turns: list[dict[int, None]] = [{} for _ in self.optimizers]
        owner = {
            id(p): turn
            for turn, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for i, parameter in enumerate(self.watched.parameters):
            turns[owner.get(id(parameter), 0)][i] = None
        return turns

    def start_as(self, former: "Probe") -> None:
        """Keep the start of what another probe has watched before."""
        pairs = zip(former.watched.parameters, former._start, strict=bool(former._start))
        known = {id(parameter): start for parameter, start in pairs}
        mine = zip(self.watched.parameters, self._start, strict=bool(self._start))
        self._start = [known.get(id(parameter), start) for parameter, start in mine]

    def start_at(self, weights: Sequence[Tensor]) -> None:
        """Measure change from these weights, or from this process's share of them."""
        self._start = list(weights)

    @torch.no_grad()
    def before_clip(self) -> None:
        """Measure gradients before they are clipped."""
        self.views["before_clip"].copy_(self._totals.squares(self._gradients()))
        self._clip_seen = True

    @torch.no_grad()
    def before_step(self, share: Tensor | None = None, gradients: bool = True) -> None:
        """Measure gradients and weights.

        `share` is what the optimizer's own kernel will keep of gradients not yet clipped. Without
        `gradients` they do not exist yet (a closure makes them) and are measured afterwards.
        """
        if gradients:
            self.measure_gradients(0, share)
        self._updates.before(self.reached if gradients else None)
        if self.watched.front:
            lowest, highest = zip(*map(self._range, self.watched.front), strict=True)
            self.views["high"].copy_(torch.stack(highest))
            self.views["low"].copy_(torch.stack(lowest).neg())

    @torch.no_grad()
    def after_step(self, gradients: bool = False) -> None:
        """Measure what the step changed."""
        if gradients:
            for turn in range(len(self.optimizers)):
                self.measure_gradients(turn)
        for name, values in zip(("weight", "update"), self._updates.after(), strict=True):
            self.views[name].copy_(values)
        if self._start:
            self._since_start([local(p) for p in self.watched.parameters])
        self._reduce()
        if not self._clip_seen:
            self.views["before_clip"].fill_(torch.nan)
        self._clip_seen = False
        self._note_rates()

    @torch.no_grad()
    def measure_gradients(self, turn: int, share: Tensor | None = None) -> None:
        """Add what an optimizer is about to step with; the first one's turn begins anew."""
        own = self._turns[turn]
        found = self._gradients(own)
        squares = self._totals.squares(found)
        if turn == 0:
            self.views["gradient"].zero_()
            self.views["largest"].zero_()
        if self.gradient_cosine:
            self._compare(own, found, squares, turn == 0)
        if share is not None:  # one pass serves both
            self.views["before_clip"].copy_(squares)
            self._clip_seen = True
        factor = share if share is not None else self._unscaling(turn)
        self.views["gradient"].add_(squares if factor is None else squares * factor.square())
        if self.ends:
            norms = self._totals.norms([found[i] for i in self.ends], torch.inf)
            largest = self.views["largest"]
            torch.maximum(largest, norms if factor is None else norms * factor, out=largest)

    def _gradients(self, own: Collection[int] | None = None) -> list[Tensor]:
        """Every gradient, or this process's share of it; a zero stands in for none.

        And for those of others, where only some are wanted.
        """
        found = []
        for i, parameter in enumerate(self.watched.parameters):
            gradient = None
            if own is None or i in own:
                gradient = self.gradient(parameter)
                self.reached[i] = gradient is not None
            found.append(self._nothing[i] if gradient is None else local(gradient))
        return found

    def _unscaling(self, turn: int) -> Tensor | None:
        """What a fused optimizer will multiply gradients with, as GradScaler asks it to."""
        scale = getattr(self.optimizers[turn], "grad_scale", None)
        return 1.0 / scale.to(self.device, self.wide) if isinstance(scale, Tensor) else None

    def _range(self, place: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest weight of a tensor; of one without any, infinities."""
        weight = local(self.watched.parameters[place]).detach()
        if not weight.numel():
            nothing = torch.full((), torch.inf, dtype=self.wide, device=self.device)
            return nothing, -nothing
        smallest, largest = weight.aminmax()
        return smallest.to(self.device), largest.to(self.device)

    def _compare(
        self, own: Collection[int], found: list[Tensor], squares: Tensor, begins: bool
    ) -> None:
        """The product of this gradient with the last one, which it then replaces.

        The first has none before it: zeros, of no norm and so without a cosine.
        """
        if begins:
            self.views["former"].copy_(self._energy)
            self.views["agree"].zero_()
            self._energy.zero_()
        mine = [self._last[i] for i in own]
        torch._foreach_mul_(mine, [found[i] for i in own])
        products = [self._last[i] if i in own else zero for i, zero in enumerate(self._nothing)]
        added = self._totals.add_up(lambda views: [v.sum() for v in views[0]], products)
        self.views["agree"].add_(added)
        torch._foreach_copy_(mine, [found[i] for i in own])
        self._energy.add_(squares)
        self.views["energy"].copy_(self._energy)

    def _since_start(self, now: list[Tensor]) -> None:
        """How far from the start, and along it: view by view, so that no copy is made."""

        def apart(views: list[list[Tensor]]) -> list[Tensor]:
            return [(a - b).float().norm().square() for a, b in zip(*views, strict=True)]

        def along(views: list[list[Tensor]]) -> list[Tensor]:
            pairs = zip(*views, strict=True)
            return [(a.to(_exact(a.dtype)) * b).sum(dtype=self.wide) for a, b in pairs]

        self.views["origin"].copy_(self._totals.squares(self._start))
        self.views["moved"].copy_(self._totals.add_up(apart, now, self._start))
        self.views["along"].copy_(self._totals.add_up(along, now, self._start))

    def _reduce(self) -> None:
        """Join what processes hold of a sharded model: one sum, one maximum."""
        if self._group is None:
            return
        sums = torch.cat([self.views[name] for name in SUMS])
        dist.all_reduce(sums, group=self._group)
        maxima = torch.cat([self.views[name] for name in _MAXIMA])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group)
        for names, joined in ((SUMS, sums), (_MAXIMA, maxima)):
            sizes = [len(self.views[name]) for name in names]
            for name, part in zip(names, joined.split(sizes), strict=True):
                self.views[name].copy_(part)

    def _note_rates(self) -> None:
        """Learning rates, and whether the optimizer was told to stand still."""
        groups = self._groups()
        for place, group in zip(self.views["rates"].unbind(), groups, strict=True):
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                place.copy_(rate)
            else:
                place.fill_(torch.nan if rate is None else rate)
        stopped = getattr(self.optimizers[0], "found_inf", None)
        if isinstance(stopped, Tensor):
            self.views["stopped"].copy_(stopped)
        else:
            self.views["stopped"].zero_()


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What products of such numbers are made in."""
    return torch.promote_types(dtype, torch.float32)


Views = list[list[Tensor]]


class Totals:
    """Sums a part over lists of tensors that are shaped as what learns.

    Of a sharded model a process adds up its own share; the sum over processes is the whole.
    """

    def __init__(self, watched: Watched) -> None:
        self.device = watched.parameters[0].device
        self.wide = wide_dtype(self.device)
        self.group = shard_group(watched.parameters)
        self._size = len(watched.parts)
        self._nothing = torch.zeros((), dtype=self.wide, device=self.device)
        shards = [is_sharded(p) for p in watched.parameters]
        self._bits = [
            [bit for bit in watched.bits if shards[bit.parameter] == shard]
            for shard in (False, True)
        ]
        self._owners = []  # of whole tensors and of shards: which part each view belongs to
        for bits in self._bits:
            held = [(bit, local(watched.parameters[bit.parameter])) for bit in bits]
            owners = [bit.part for bit, tensor in held for _ in bit.of(tensor)]
            self._owners.append(torch.tensor(owners, dtype=torch.long, device=self.device))

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """The squared norm of every part."""
        return self._add_up(lambda views: self.norms(views[0]).square(), tensors)

    def add_up(self, numbers: Callable[[Views], list[Tensor]], *lists: Sequence[Tensor]) -> Tensor:
        """The sum over every part of one number a view; `numbers` sees the views of each list."""

        def stacked(views: Views) -> Tensor:
            return torch.stack([n.to(self.device, self.wide) for n in numbers(views)])

        return self._add_up(stacked, *lists)

    def _add_up(self, numbers: Callable[[Views], Tensor], *lists: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(self._size, dtype=self.wide, device=self.device)
        for bits, owners, shard in zip(self._bits, self._owners, (False, True), strict=True):
            if not len(owners):
                continue
            made = numbers([[v for b in bits for v in b.of(own[b.parameter])] for own in lists])
            if not shard and self.group is not None:  # every process will add it
                made = made / dist.get_world_size(self.group)
            total.index_add_(0, owners, made)
        return total

    def norms(self, tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Norms in order, those of a kind in one kernel."""
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        made = [self._nothing] * len(tensors)
        for i, tensor in enumerate(tensors):
            stands_in = tensor.ndim > 0 and not any(tensor.stride())
            if tensor.numel() and not stands_in:
                key = (tensor.device, tensor.dtype, tensor.is_contiguous())
                kinds.setdefault(key, []).append(i)
        for (_, dtype, _), places in kinds.items():
            wider = torch.float32 if dtype.itemsize < 4 else None
            norms = torch._foreach_norm([tensors[i] for i in places], order, dtype=wider)
            stacked = torch.stack(norms).to(self.device, self.wide)
            if len(places) == len(tensors):  # all of a kind: in order already
                return stacked
            for i, norm in zip(places, stacked.unbind(), strict=True):
                made[i] = norm
        return torch.stack(made)


class Measuring(Protocol):
    """An optimizer whose own kernel measures what it moves, so that no copy is needed."""

    param_groups: list[dict[str, Any]]
    sums: Tensor | None  # (its parameters, 2): squared norms of weights before, and of changes
    measures: bool  # whether a step writes them


class Updates:
    """Squared norms a part, of weights before a step and of what it changed.

    Between `before` and `after` it holds a copy of what learns, but for whole parameters that the
    optimizer measures itself.
    """

    def __init__(
        self,
        watched: Watched,
        optimizers: Sequence[Any],
        totals: Totals,
        nothing: Sequence[Tensor],  # a zero shaped as each of what learns
    ) -> None:
        self._watched, self._totals = watched, totals
        self._nothing = nothing
        self._before: list[Tensor] = []
        self._copied: list[int] = []  # parameters of which there are copies
        self._squares: Tensor | None = None  # of the copies
        only = optimizers[0] if len(optimizers) == 1 and totals.group is None else None
        self._optimizer: Measuring | None = only if hasattr(only, "measures") else None
        self._told: set[int] = set()  # parameters whose optimizer says all that is wanted
        if self._optimizer is not None:
            self._begin(self._optimizer)

    def _begin(self, optimizer: Measuring) -> None:
        """Find out whose numbers are whose part's, outside of any graph."""
        bits, parts = self._watched.bits, len(self._watched.parts)
        counts = Counter(bit.parameter for bit in bits)
        alone = [bit for bit in bits if counts[bit.parameter] == 1 and bit.whole]
        part_of = {bit.parameter: bit.part for bit in alone}
        places = {id(p): i for i, p in enumerate(self._watched.parameters)}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        owners = [part_of.get(places.get(id(p), -1), parts) for p in held]  # `parts`: nobody's
        device, wide = self._totals.device, self._totals.wide
        self._owners = torch.tensor(owners, device=device)
        optimizer.sums = torch.zeros(len(held), 2, dtype=wide, device=device)
        self._told = set(part_of)

    def before(self, reached: Sequence[bool] | None) -> None:
        """A step is about to be taken; `reached` says who has a gradient, if that is known yet."""
        weights = [local(p).detach() for p in self._watched.parameters]
        has_one = reached or [False] * len(weights)
        self._copied = [i for i, has in enumerate(has_one) if i not in self._told or not has]
        self._before = list(self._nothing)
        for i in self._copied:
            self._before[i] = torch.empty_like(weights[i])
        if self._copied:
            torch._foreach_copy_(self._copies(), [weights[i] for i in self._copied])
        self._squares = self._totals.squares(self._before)
        if self._optimizer is not None:
            self._optimizer.measures = True

    def after(self) -> tuple[Tensor, Tensor]:
        """The step has been taken: what the weights were, and what it changed; copies go."""
        assert self._squares is not None, "before comes first"
        if self._copied:
            now = [local(self._watched.parameters[i]).detach() for i in self._copied]
            torch._foreach_sub_(self._copies(), now)
        weights, changes = self._squares, self._totals.squares(self._before)
        self._before, self._squares = [], None
        if self._optimizer is None or self._optimizer.sums is None:
            return weights, changes
        self._optimizer.measures = False
        told = torch.zeros(len(weights) + 1, 2, dtype=weights.dtype, device=weights.device)
        told.index_add_(0, self._owners, self._optimizer.sums)
        return weights + told[:-1, 0], changes + told[:-1, 1]

    def _copies(self) -> list[Tensor]:
        return [self._before[i] for i in self._copied]


def stand_in(like: Tensor) -> Tensor:
    """A zero of any shape, which takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand_as(like)
