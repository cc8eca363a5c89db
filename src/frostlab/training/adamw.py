"""torch's AdamW with its whole step in one or two kernels, which also clip and cast."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frostlab.training.halves import Halves

_BLOCK = 4096  # elements a program updates
_COLUMNS = 7  # weight, two moments, gradient, copy, size, whether the gradient is bf16


class KernelAdamW(torch.optim.AdamW):
    """AdamW over float32 weights on CUDA; its state is torch's own.

    As with torch's fused one, `grad_scale` divides gradients and `found_inf` above 0 stops a step.
    Where it `measures`, a step leaves in `sums` (see `frostlab.flow.probe`) what it moved.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    sums: Tensor | None = None
    measures = False

    def __init__(self, groups: Any, halves: Halves, **options: Any) -> None:
        super().__init__(groups, **options, fused=True)
        self.halves = halves
        self._awaited: list[tuple[Tensor, list[int]]] = []
        self._spare: list[Tensor] = []
        self._cuts: dict[Any, list[Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.halves.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update everything that has a gradient."""
        rows: list[_Row] = []
        place = 0
        for group in self.param_groups:
            for p in group["params"]:
                gradient = self.halves.gradient(p)
                if gradient is not None:
                    rows.append(_Row(p, gradient, group, place))
                place += 1
        if self.measures and self.sums is not None:
            self.sums.zero_()
        for even in (True, False):
            chosen = [row for row in rows if row.even == even]
            if chosen:
                self._launch(chosen, even)

    def _launch(self, rows: list["_Row"], even: bool) -> None:
        from frostlab.training.kernels import adamw_blocks

        device = rows[0].p.device
        states = [self._state_of(row.p) for row in rows]
        steps = [state["step"] for state in states]
        stopped = self.found_inf
        torch._foreach_add_(steps, 1.0)
        if stopped is not None:  # a list: adding one tensor to many would wait for its value
            torch._foreach_sub_(steps, [stopped] * len(steps))
        values = []
        for row, state in zip(rows, states, strict=True):
            p, gradient, half = row.p, row.gradient, self.halves.of(row.p)
            values += [
                p.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(),
                gradient.data_ptr(), 0 if half is None else half.data_ptr(), p.numel(),
                gradient.dtype == torch.bfloat16,
            ]  # fmt: skip
        group = rows[0].group
        (beta1, beta2), eps = group["betas"], group["eps"]
        taken = torch.stack(steps).double()
        first, second = ((1 - beta**taken).float() for beta in (beta1, beta2))
        rates: dict[Any, int] = {}
        for row in rows:  # a tensor is known by its identity, a number by its value
            rates.setdefault(row.group["lr"], len(rates))
        owners, starts, decay, whose, places = self._cut(
            tuple(row.p.numel() for row in rows),
            tuple(float(row.group["weight_decay"]) for row in rows),
            tuple(rates[row.group["lr"]] for row in rows),
            tuple(row.place for row in rows),
            device,
        )
        held = [r if isinstance(r, Tensor) else torch.full((), r, device=device) for r in rates]
        rate = held[0] if len(held) == 1 else torch.stack(held)
        table, sums = self._on_device(values, device), None
        if self.measures:
            sums = torch.zeros(len(owners), 2, device=device)
        adamw_blocks(
            table, owners, starts, decay, first, second, rate, whose, self.grad_scale, stopped,
            sums, betas=(beta1, beta2), eps=eps, block=_BLOCK, columns=_COLUMNS, even=even,
        )  # fmt: skip
        if sums is not None and self.sums is not None:
            self.sums.index_add_(0, places[owners], sums.to(self.sums.dtype))

    def _state_of(self, p: Any) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state

    def _cut(
        self,
        sizes: tuple[int, ...],
        decays: tuple[float, ...],
        whose: tuple[int, ...],
        places: tuple[int, ...],
        device: torch.device,
    ) -> list[Tensor]:
        """Which tensor each program works on, from where; each tensor's decay, rate and place."""
        key = (sizes, decays, whose, places)
        if key not in self._cuts:
            counts = torch.tensor([-(-size // _BLOCK) for size in sizes])
            owners = torch.repeat_interleave(counts)
            firsts = torch.cumsum(counts, 0) - counts
            starts = (torch.arange(len(owners)) - firsts[owners]) * _BLOCK
            each = (torch.tensor(decays), torch.tensor(whose), torch.tensor(places))
            self._cuts[key] = [t.to(device) for t in (owners.int(), starts, *each)]
        return self._cuts[key]

    def _on_device(self, values: list[int], device: torch.device) -> Tensor:
        """Addresses for the kernel. Those of a graph that is being recorded come later, into
        memory that is not the graph's: what is its own, its other kernels write over."""
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._top_up(device)
            return torch.tensor(values).to(device)
        table = self._spare.pop()
        self._awaited.append((table, values))
        return table

    def _top_up(self, device: torch.device) -> None:
        size = _COLUMNS * sum(len(group["params"]) for group in self.param_groups)
        while len(self._spare) < 2:  # a step launches the kernel at most twice
            self._spare.append(torch.zeros(size, dtype=torch.int64, device=device))

    def fill_in(self) -> list[Tensor]:
        """After recording, give the graph its addresses; the tables must live as long as it."""
        awaited, self._awaited = self._awaited, []
        for table, values in awaited:
            table[: len(values)] = torch.tensor(values)
            self._top_up(table.device)
        return [table for table, _ in awaited]


@dataclass(frozen=True)
class _Row:
    """A parameter that has a gradient, and its place among all of the optimizer."""

    p: Any
    gradient: Tensor
    group: dict[str, Any]
    place: int

    @property
    def even(self) -> bool:
        """Whether wide loads are allowed."""
        tensors = (self.p, self.gradient)
        return self.p.numel() % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
