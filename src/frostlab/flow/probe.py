"""Measures one optimizer step on the device, into one tensor that is read later.

Nothing here waits for the device or looks at a value, so that all of it may be captured in a CUDA
graph. A step is measured by calling `before_step` and `after_step` around the optimizer's.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.flow.places import Watched
from frostlab.flow.shards import local
from frostlab.flow.totals import Totals
from frostlab.flow.updates import Updates, stand_in

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
        change: bool = False,
        agreement: bool = False,
        gradient: Gradient = own_gradient,
    ) -> None:
        self.watched, self.optimizers, self.gradient = watched, tuple(optimizers), gradient
        self.agreement, self.reached = agreement, [True] * len(watched.parameters)
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
        self._start = [local(p).detach().clone() for p in watched.parameters] if change else []
        self._last = [  # products of halves would overflow
            torch.zeros_like(local(p), dtype=_exact(local(p).dtype))
            for p in (watched.parameters if agreement else ())
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
        if self.agreement:
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
