"""Measures one optimizer step on the device, into one tensor that is read later.

Nothing here waits for the device or looks at a value, so that all of it may be captured in a CUDA
graph. A step is measured by calling `before_step` and `after_step` around the optimizer's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.flow.places import Bit, Watched
from frostlab.flow.shards import is_sharded, local, shard_group, wide_dtype

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

    It holds one copy of what learns between `before_step` and `after_step`, one of the weights at
    the start if `change` is asked for, one of the last gradients if `agreement` is.
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
        self.wide = wide_dtype(self.device)
        self._group = shard_group(watched.parameters)
        self._sharded = [is_sharded(p) for p in watched.parameters]
        ends = dict.fromkeys((*watched.front, *watched.back, *watched.output))
        self.ends = tuple(ends)  # parameters whose largest gradient is wanted
        groups = self._groups()
        sizes = dict.fromkeys(SUMS, len(watched.parts))
        sizes |= {"largest": len(ends), "high": len(watched.front), "low": len(watched.front)}
        sizes |= {"rates": len(groups), "stopped": 1}
        self.values = torch.zeros(sum(sizes.values()), dtype=self.wide, device=self.device)
        self.views = dict(zip(sizes, self.values.split(list(sizes.values())), strict=True))
        self._owners = {
            shared: self._index([b for b in watched.bits if self._sharded[b.parameter] == shared])
            for shared in (False, True)
        }
        self._nothing = torch.zeros((), dtype=self.wide, device=self.device)
        self._before: list[Tensor] = []
        self._clip_seen = False
        self._start = self._copies() if change else []
        self._last: list[Tensor] = []
        self._energy = torch.zeros_like(self.views["energy"])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def decays(self) -> tuple[float, ...]:
        """The weight decay of every group."""
        return tuple(float(group.get("weight_decay", 0.0)) for group in self._groups())

    def _index(self, bits: list[Bit]) -> Tensor:
        """Which part each view belongs to."""
        found = [
            bit.part for bit in bits for _ in bit.of(local(self.watched.parameters[bit.parameter]))
        ]
        return torch.tensor(found, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def before_clip(self) -> None:
        """Measure gradients before they are clipped."""
        self._write("before_clip", self._gradients())
        self._clip_seen = True

    @torch.no_grad()
    def before_step(self, share: Tensor | None = None, gradients: bool = True) -> None:
        """Measure gradients and weights, and copy the weights.

        `share` is what the optimizer's own kernel will keep of gradients not yet clipped. Without
        `gradients` they do not exist yet (a closure makes them) and are measured afterwards.
        """
        if gradients:
            self._measure_gradients(share)
        self._before = self._copies()
        self._write("weight", self._before)
        for name, values in zip(("high", "low"), self._ranges(), strict=True):
            if values:
                self.views[name].copy_(torch.stack(values))

    @torch.no_grad()
    def after_step(self, gradients: bool = False) -> None:
        """Measure what the step changed; the copy is freed."""
        if gradients:
            self._measure_gradients(None)
        now = [local(p) for p in self.watched.parameters]
        torch._foreach_sub_(self._before, now)
        self._write("update", self._before)
        self._before = []
        if self._start:
            self._since_start(now)
        self._reduce()
        if not self._clip_seen:
            self.views["before_clip"].fill_(torch.nan)
        self._clip_seen = False
        self._note_rates()

    def _measure_gradients(self, share: Tensor | None) -> None:
        found = self._gradients()
        self._write("gradient", found)
        if self.ends:
            self.views["largest"].copy_(self._norms([found[i] for i in self.ends], torch.inf))
        if self.agreement:
            self._compare(found)
        if share is not None:  # one pass serves both
            self.views["before_clip"].copy_(self.views["gradient"])
            self._clip_seen = True
        factor = share if share is not None else self._unscaling()
        if factor is not None:
            self.views["gradient"].mul_(factor.square())
            self.views["largest"].mul_(factor)

    def _gradients(self) -> list[Tensor]:
        """Every gradient, or this process's share of it; a zero stands in for none."""
        found, self.reached = [], []
        for parameter in self.watched.parameters:
            gradient = self.gradient(parameter)
            self.reached.append(gradient is not None)
            found.append(_stand_in(local(parameter)) if gradient is None else local(gradient))
        return found

    def _unscaling(self) -> Tensor | None:
        """What a fused optimizer will multiply gradients with, as GradScaler asks it to."""
        scale = getattr(self.optimizers[0], "grad_scale", None)
        return 1.0 / scale.to(self.device, self.wide) if isinstance(scale, Tensor) else None

    def _copies(self) -> list[Tensor]:
        return [local(p).detach().clone() for p in self.watched.parameters]

    def _write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Square sums a part."""
        self._add_up(name, lambda views: self._norms(views[0]).square(), tensors)

    def _add_up(
        self, name: str, numbers: Callable[[list[list[Tensor]]], Tensor], *lists: Sequence[Tensor]
    ) -> None:
        """Add a number a view up into the parts; shares of other processes come later."""
        total = self.views[name].zero_()
        for shared, owners in self._owners.items():
            if not len(owners):
                continue
            bits = [b for b in self.watched.bits if self._sharded[b.parameter] == shared]
            made = numbers([[v for b in bits for v in b.of(own[b.parameter])] for own in lists])
            if not shared and self._group is not None:  # every process will add it
                made = made / dist.get_world_size(self._group)
            total.index_add_(0, owners, made)

    def _norms(self, tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
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
            for i, norm in zip(places, stacked.unbind(), strict=True):
                made[i] = norm
        return torch.stack(made)

    def _ranges(self) -> tuple[list[Tensor], list[Tensor]]:
        """The largest and the negative smallest weight of every tensor of the front."""
        high, low = [], []
        nothing = torch.full((), -torch.inf, dtype=self.wide, device=self.device)
        for i in self.watched.front:
            smallest, largest = -nothing, nothing
            if self._before[i].numel():
                smallest, largest = self._before[i].aminmax()
            high.append(largest.to(self.device, self.wide))
            low.append(-smallest.to(self.device, self.wide))
        return high, low

    def _compare(self, found: list[Tensor]) -> None:
        """The product of this gradient with the last one, which it then replaces."""
        if self._last:
            torch._foreach_mul_(self._last, found)
            self._add_up(
                "agree", lambda views: self._stack([v.sum() for v in views[0]]), self._last
            )
            torch._foreach_copy_(self._last, found)
        else:
            self.views["agree"].fill_(torch.nan)
            self._last = [t.clone() for t in found]
        energy = self.views["gradient"]
        self.views["former"].copy_(self._energy)
        self.views["energy"].copy_(energy)
        self._energy.copy_(energy)

    def _since_start(self, now: list[Tensor]) -> None:
        """How far from the start, and along it: view by view, so that no copy is made."""

        def apart(views: list[list[Tensor]]) -> Tensor:
            pairs = zip(*views, strict=True)
            return self._stack([(a - b).float().norm() for a, b in pairs]).square()

        def along(views: list[list[Tensor]]) -> Tensor:
            pairs = zip(*views, strict=True)
            return self._stack([(a * b).sum(dtype=self.wide) for a, b in pairs])

        self._write("origin", self._start)
        self._add_up("moved", apart, now, self._start)
        self._add_up("along", along, now, self._start)

    def _stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack([n.to(self.device, self.wide) for n in numbers])

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
            rate = group["lr"]
            place.copy_(rate) if isinstance(rate, Tensor) else place.fill_(rate)
        stopped = getattr(self.optimizers[0], "found_inf", None)
        if isinstance(stopped, Tensor):
            self.views["stopped"].copy_(stopped)
        else:
            self.views["stopped"].zero_()


def _stand_in(like: Tensor) -> Tensor:
    """A zero of any shape, which takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand_as(like)
