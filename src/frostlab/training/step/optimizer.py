"""AdamW over exactly what learns, and the learning rate of every step as a pure function."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.errors import FrostlabError
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Optim, StepDecay


@dataclass
class _Place:
    """Where a weight is used, the weight, its copy, and the weight's version when it was copied."""

    module: nn.Module
    name: str
    own: nn.Parameter
    half: nn.Parameter
    version: int = -1


class Halves:
    """The copies of the weights and biases of every layer's linear maps."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            _Place(module, name, own, nn.Parameter(own.detach().bfloat16(), own.requires_grad))
            for module, name, own in _multiplied(model)
        ]
        self._of = {id(place.own): place.half for place in self._places}

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, own: nn.Parameter) -> nn.Parameter | None:
        """A weight's copy."""
        return self._of.get(id(own))

    def gradient(self, own: nn.Parameter) -> Tensor | None:
        """The gradient of a weight, which may be its copy's, in bf16."""
        half = self.of(own)
        return own.grad if half is None or half.grad is None else half.grad

    def refresh(self) -> None:
        """Copy what was changed by anything but the optimizer, and learn who learns."""
        stale = [place for place in self._places if place.own._version != place.version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([p.half.data for p in stale], [p.own.data for p in stale])
        for place in stale:
            place.version = place.own._version
        for place in self._places:
            if place.half.requires_grad != place.own.requires_grad:
                place.half.requires_grad_(place.own.requires_grad)

    def clear(self) -> None:
        """Forget the gradients."""
        for place in self._places:
            place.half.grad = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this, layers compute with the copies."""
        self.refresh()
        for place in self._places:
            place.module._parameters[place.name] = place.half
        try:
            yield
        finally:
            for place in self._places:
                place.module._parameters[place.name] = place.own


def _multiplied(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What linear maps in the layers multiply with, and nobody else uses or watches."""
    stack = take_apart(model)
    modules = [m for layer in (stack.layers if stack else []) for m in layer.modules()]
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for module in modules:
        if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
            continue
        for name, own in module._parameters.items():
            if own is None or uses[id(own)] > 1 or own.dtype != torch.float32:
                continue
            watched = own._backward_hooks or own._post_accumulate_grad_hooks
            if own.is_contiguous() and not watched:
                yield module, name, own


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    fused: bool,
    capturable: bool = False,
    halves: Halves | None = None,
    shares: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """Matrices decay, vectors do not, whatever their shape; frozen tensors are absent.

    `shares` of the learning rate, by name, are for tensors that have less than all of it.
    """
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    kinds: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for is_vector in (False, True):
        for name, p in learning:
            if (sum(size > 1 for size in p.shape) < 2) == is_vector:
                kinds.setdefault((is_vector, (shares or {}).get(name, 1.0)), []).append(p)
    groups = [
        {"params": found, "weight_decay": 0.0 if is_vector else optim.decay, "share": share}
        for (is_vector, share), found in kinds.items()
    ]
    given: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if halves is not None:
        return KernelAdamW(groups, halves, **given, capturable=capturable)
    return torch.optim.AdamW(groups, **given, fused=fused, capturable=capturable)


def rate_at(step: int, steps: int, optim: Optim) -> float:
    """The learning rate of a step (from 0) of a stage of `steps`: warm-up, then the schedule."""
    warmup = warmup_steps(steps, optim)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if isinstance(optim.schedule, StepDecay):
        return optim.lr * optim.schedule.factor ** (step // int(optim.schedule.every))
    if optim.schedule == "constant":
        return optim.lr
    left = (steps - step) / max(steps - warmup, 1)  # from 1 down to 1 / (steps - warmup)
    return optim.lr * (left if optim.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def warmup_steps(steps: int, optim: Optim) -> int:
    """How many steps the warm-up takes: a share of the stage, or as many as were given."""
    return int(optim.warmup) if optim.warmup >= 1 else int(optim.warmup * steps)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, as `name//key`."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}//{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    like: Any,
    partly: bool = False,
) -> None:
    """Put saved state back; `like` places and shards a tensor as its parameter is.

    `partly`: some tensors start without, as new layers do.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("//")
        if parameter not in parameters:
            raise FrostlabError(f"the checkpoint's optimizer knows {parameter}, the model does not")
        states.setdefault(parameter, {})[key] = value
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in parameters.items() if id(p) in held and n not in states]
    if states and missing and not partly:
        raise FrostlabError(f"the checkpoint's optimizer does not know {missing[0]}")
    for name, state in states.items():
        held_by = parameters[name]
        place = held_by.device if optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[held_by] = {
            key: like(value, held_by) if value.ndim else value.to(place)
            for key, value in state.items()
        }


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
        from frostlab.training.step.kernels import adamw_blocks

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
