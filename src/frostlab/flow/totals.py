"""Adds numbers of tensors up into the parts they belong to, in few kernels and without waiting."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from frostlab.flow.places import Watched
from frostlab.flow.shards import is_sharded, local, shard_group, wide_dtype

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
