"""What a step does to the weights: by the optimizer's kernel where it can say, else by copies."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from frostlab.flow.places import Watched
from frostlab.flow.shards import local
from frostlab.flow.totals import Totals


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
