"""The optimizer: its groups, its learning rate at every step, its update, and its saved state."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.devices import updates_conditionally
from frostlab.errors import FrostlabError
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Optim, StepDecay
from frostlab.training.distributed import place_like


@dataclass
class _Copy:
    """A parameter of a module, its bf16 copy, and the parameter's version when it was copied."""

    module: nn.Module
    name: str
    own: nn.Parameter
    copy: nn.Parameter
    version: int = -1


class Bf16Copies:
    """Bf16 copies of the weights and biases of every layer's linear maps.

    A step computes with the copies, so that autocast casts nothing; the optimizer updates the
    float32 weights and their copies in one kernel.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = [
            _Copy(module, name, own, nn.Parameter(own.detach().bfloat16(), own.requires_grad))
            for module, name, own in _linear_parameters(model)
        ]
        self._by_id = {id(entry.own): entry.copy for entry in self._entries}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def of(self, own: nn.Parameter) -> nn.Parameter | None:
        """Return a parameter's copy."""
        return self._by_id.get(id(own))

    def gradient(self, own: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, which may be its copy's, in bf16."""
        copy = self.of(own)
        return own.grad if copy is None or copy.grad is None else copy.grad

    def refresh(self) -> None:
        """Copy parameters that anything but the optimizer changed, and their requires_grad."""
        stale = [entry for entry in self._entries if entry.own._version != entry.version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([e.copy.data for e in stale], [e.own.data for e in stale])
        for entry in stale:
            entry.version = entry.own._version
        for entry in self._entries:
            if entry.copy.requires_grad != entry.own.requires_grad:
                entry.copy.requires_grad_(entry.own.requires_grad)

    def clear(self) -> None:
        """Drop the gradients."""
        for entry in self._entries:
            entry.copy.grad = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let layers compute with the copies inside this context."""
        self.refresh()
        for entry in self._entries:
            entry.module._parameters[entry.name] = entry.copy
        try:
            yield
        finally:
            for entry in self._entries:
                entry.module._parameters[entry.name] = entry.own


def _linear_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the parameters of linear maps in the layers that nothing else uses or watches."""
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
    copies: Bf16Copies | None = None,
    lr_scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW over the trainable tensors; matrices decay, vectors do not.

    `lr_scales`, by name, are for tensors that learn at less than the whole learning rate.
    """
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    grouped: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for is_vector in (False, True):
        for name, p in trainable:
            if (sum(size > 1 for size in p.shape) < 2) == is_vector:
                grouped.setdefault((is_vector, (lr_scales or {}).get(name, 1.0)), []).append(p)
    groups = [
        {"params": members, "weight_decay": 0.0 if is_vector else optim.decay, "lr_scale": scale}
        for (is_vector, scale), members in grouped.items()
    ]
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if copies is not None:
        return KernelAdamW(groups, copies, **options, capturable=capturable)
    return torch.optim.AdamW(groups, **options, fused=fused, capturable=capturable)


def prepare_update(
    optimizer: Any, device: torch.device, clip_factor: Tensor | None, broken: Tensor
) -> bool:
    """Prepare an update; return False if a gradient is broken and the step must be skipped.

    On a GPU the optimizer's own kernel clips and skips, so that the host never waits.
    """
    if not updates_conditionally(device):
        return int(broken) < 0
    optimizer.grad_scale = None if clip_factor is None else 1.0 / clip_factor
    optimizer.found_inf = (broken >= 0).float()
    return True


def apply_update(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    reached: Sequence[nn.Parameter],
    clip_factor: Tensor,
) -> None:
    """Clip the gradients, where the optimizer's kernel does not, and take the step."""
    if not updates_conditionally(device) and float(clip_factor) < 1.0:
        gradients: list[Any] = [p.grad for p in reached]
        torch._foreach_mul_(gradients, clip_factor)
    optimizer.step()


def skip_update(optimizer: Any, device: torch.device, clip_factor: Tensor | None) -> None:
    """Run the kernels of an update without changing a weight or a moment."""
    prepare_update(optimizer, device, clip_factor, torch.zeros((), device=device))
    optimizer.step()


def rate_at(step: int, steps: int, optim: Optim) -> float:
    """Return the learning rate of a step (from 0) of a stage: warm-up, then the schedule."""
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
    """Return the steps of the warm-up: a fraction of the stage, or a number of steps."""
    return int(optim.warmup) if optim.warmup >= 1 else int(optim.warmup * steps)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter name, as `name//key`."""
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
    partly: bool = False,
) -> None:
    """Load saved state, placed and sharded as the parameters are.

    `partly`: some parameters start without state, as those of new layers do.
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
            key: place_like(value, held_by) if value.ndim else value.to(place)
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

    def __init__(self, groups: Any, copies: Bf16Copies, **options: Any) -> None:
        super().__init__(groups, **options, fused=True)
        self.copies = copies
        self._awaited: list[tuple[Tensor, list[int]]] = []
        self._spare: list[Tensor] = []
        self._cuts: dict[Any, list[Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.copies.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update everything that has a gradient."""
        rows: list[_Row] = []
        place = 0
        for group in self.param_groups:
            for p in group["params"]:
                gradient = self.copies.gradient(p)
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
            p, gradient, half = row.p, row.gradient, self.copies.of(row.p)
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
