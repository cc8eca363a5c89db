"""torch's AdamW with its whole step in one or two kernels, which also clip and cast."""

from typing import Any

import torch
from torch import Tensor

from frostlab.training.halves import Halves

_BLOCK = 4096  # elements a program updates
_COLUMNS = 7  # weight, two moments, gradient, copy, size, whether the gradient is bf16


class KernelAdamW(torch.optim.AdamW):
    """AdamW over float32 weights on CUDA; its state is torch's own.

    As with torch's fused one, `grad_scale` divides gradients and `found_inf` above 0 stops a step.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

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
        rows: list[tuple[Any, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            for p in group["params"]:
                gradient = self.halves.gradient(p)
                if gradient is not None:
                    rows.append((p, gradient, group))
        for even in (True, False):
            chosen = [row for row in rows if _is_even(row[0], row[1]) == even]
            if chosen:
                self._launch(chosen, even)

    def _launch(self, rows: list[tuple[Any, Tensor, dict[str, Any]]], even: bool) -> None:
        from frostlab.training.kernels import adamw_blocks

        device = rows[0][0].device
        states = [self._state_of(p) for p, _, _ in rows]
        steps = [state["step"] for state in states]
        stopped = self.found_inf
        torch._foreach_add_(steps, 1.0)
        if stopped is not None:  # a list: adding one tensor to many would wait for its value
            torch._foreach_sub_(steps, [stopped] * len(steps))
        values = []
        for (p, gradient, _), state in zip(rows, states, strict=True):
            half = self.halves.of(p)
            values += [
                p.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(),
                gradient.data_ptr(), 0 if half is None else half.data_ptr(), p.numel(),
                gradient.dtype == torch.bfloat16,
            ]  # fmt: skip
        group = rows[0][2]
        (beta1, beta2), eps = group["betas"], group["eps"]
        taken = torch.stack(steps).double()
        first, second = ((1 - beta**taken).float() for beta in (beta1, beta2))
        rates: dict[Any, int] = {}
        for _, _, each in rows:  # a tensor is known by its identity, a number by its value
            rates.setdefault(each["lr"], len(rates))
        owners, starts, decay, places = self._cut(
            tuple(p.numel() for p, _, _ in rows),
            tuple(float(each["weight_decay"]) for _, _, each in rows),
            tuple(rates[each["lr"]] for _, _, each in rows),
            device,
        )
        held = [r if isinstance(r, Tensor) else torch.full((), r, device=device) for r in rates]
        rate = held[0] if len(held) == 1 else torch.stack(held)
        table = self._on_device(values, device)
        adamw_blocks(
            table, owners, starts, decay, first, second, rate, places, self.grad_scale, stopped,
            betas=(beta1, beta2), eps=eps, block=_BLOCK, columns=_COLUMNS, even=even,
        )  # fmt: skip

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
        places: tuple[int, ...],
        device: torch.device,
    ) -> list[Tensor]:
        """Which tensor each program works on, from where; each tensor's decay and rate's place."""
        key = (sizes, decays, places)
        if key not in self._cuts:
            counts = torch.tensor([-(-size // _BLOCK) for size in sizes])
            owners = torch.repeat_interleave(counts)
            firsts = torch.cumsum(counts, 0) - counts
            starts = (torch.arange(len(owners)) - firsts[owners]) * _BLOCK
            cut = (owners.int(), starts, torch.tensor(decays), torch.tensor(places))
            self._cuts[key] = [t.to(device) for t in cut]
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


def _is_even(p: Tensor, gradient: Tensor) -> bool:
    """Whether wide loads are allowed."""
    return p.numel() % 16 == 0 and p.data_ptr() % 16 == 0 and gradient.data_ptr() % 16 == 0
