"""AdamW: parameter groups, learning rates, clipped updates, saved state, and a faster variant.

The variant, `KernelAdamW`, also keeps bf16 copies of the weights up to date.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.devices import captures_graphs, updates_conditionally
from frostlab.errors import FrostlabError
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Optim, StepDecay
from frostlab.roles.parts import Span
from frostlab.surgery.split import SplitProjection
from frostlab.training.distributed import place_like
from frostlab.training.step.head_loss import HEAD_COPY

_BLOCK = 4096  # elements that one program of a kernel (`adamw_kernels`) reads or updates
_COLUMNS = 9  # of the kernels' table, which `adamw_kernels` describes


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    fused: bool,
    capturable: bool = False,
    copies: "Bf16Copies | None" = None,
    lr_scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters.

    Weight decay applies to parameters with at least two dimensions larger than 1. `lr_scales`
    holds factors of the learning rate by parameter name; the default factor is 1.
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


def rate_at(step: int, steps: int, optim: Optim) -> float:
    """Return the learning rate of a stage's step, counted from 0: warm-up, then schedule."""
    warmup = warmup_steps(steps, optim)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if isinstance(optim.schedule, StepDecay):  # `Stage.optim` converted `every` to steps
        return optim.lr * optim.schedule.factor ** (step // int(optim.schedule.every))
    if optim.schedule == "constant":
        return optim.lr
    left = (steps - step) / max(steps - warmup, 1)  # from 1 down to 1 / (steps - warmup)
    return optim.lr * (left if optim.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def warmup_steps(steps: int, optim: Optim) -> int:
    """Return the number of warm-up steps; a setting below 1 is a fraction of the stage."""
    return int(optim.warmup) if optim.warmup >= 1 else int(optim.warmup * steps)


def prepare_update(
    optimizer: Any, device: torch.device, clip_factor: Tensor | None, broken: Tensor
) -> bool:
    """Prepare an update; return False if a gradient is not finite and the step must be skipped.

    `broken` is the index of the first parameter whose gradient is not finite, or −1. On CUDA,
    return True: the optimizer's kernel clips gradients and skips steps, so the host never waits.
    """
    if not updates_conditionally(device):
        return int(broken) < 0
    if not isinstance(optimizer, KernelAdamW):  # its `measure` has prepared the update
        optimizer.grad_scale = None if clip_factor is None else 1.0 / clip_factor
        optimizer.found_inf = (broken >= 0).float()
    return True


def apply_update(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    reached: Sequence[nn.Parameter],
    clip_factor: Tensor,
) -> None:
    """Clip the gradients of the parameters in `reached`, and take the optimizer's step.

    On CUDA, the optimizer's kernel clips the gradients.
    """
    if not updates_conditionally(device) and float(clip_factor) < 1.0:
        gradients: list[Any] = [p.grad for p in reached]
        torch._foreach_mul_(gradients, clip_factor)
    optimizer.step()


def skip_update(
    optimizer: Any, device: torch.device, clip_factor: Tensor | None, broken: Tensor
) -> None:
    """Run the kernels of an update on CUDA, without changing a weight or a moment."""
    prepare_update(optimizer, device, clip_factor, broken)
    optimizer.found_inf = torch.ones((), device=device)  # makes the kernel skip the step
    optimizer.step()


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter and key, such as `head.weight//exp_avg`."""
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
    """Load saved optimizer state, placed and sharded like the parameters.

    `partly`: whether parameters may lack state, as the parameters of new layers do.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("//")
        if parameter not in parameters:
            raise FrostlabError(
                f"the checkpoint has optimizer state for {parameter}, which is not in the model"
            )
        states.setdefault(parameter, {})[key] = value
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in parameters.items() if id(p) in optimized and n not in states]
    if states and missing and not partly:
        raise FrostlabError(f"the checkpoint has no optimizer state for {missing[0]}")
    for name, state in states.items():
        p = parameters[name]
        keys = {"step", "exp_avg", "exp_avg_sq"} if _is_adam(optimizer) else state.keys()
        if state.keys() != keys or any(v.ndim and v.shape != p.shape for v in state.values()):
            raise FrostlabError(f"the checkpoint's optimizer state of {name} does not fit it")
        step_device = p.device if optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[p] = {
            key: place_like(value, p) if value.ndim else value.to(step_device)
            for key, value in state.items()
        }


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is a recipe's optimizer, whose state has three known tensors."""
    return isinstance(optimizer, torch.optim.AdamW) and not optimizer.defaults["amsgrad"]


class KernelAdamW(torch.optim.AdamW):
    """AdamW for float32 weights on CUDA in a few kernels; its state is as in torch's.

    As in torch's fused AdamW, `grad_scale` divides gradients and `found_inf` above 0 skips a step;
    `measure` sets both. If `measures` is set, a step writes the squared norms of each parameter and
    of its change to `sums`, from which `frostlab.flow.probe` reads them.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    sums: Tensor | None = None
    measures = False

    def __init__(self, groups: Any, copies: "Bf16Copies", **options: Any) -> None:
        super().__init__(groups, **options, fused=True)
        self.copies = copies
        self._measured: _Table | None = None  # the gradients that `measure` has measured
        # tables of the graph that is being recorded, and their values
        self._unfilled: list[tuple[Tensor, list[int]]] = []
        self._spare_tables: list[Tensor] = []  # an empty table for the next graph
        self._layouts: dict[Any, list[Tensor]] = {}  # results of `_block_layout`

    # Torch decorates the next two methods with functions that import its compiler, which takes a
    # second or more; the methods themselves do not need it.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _undecorated("add_param_group")(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _undecorated("zero_grad")(self, set_to_none)
        self.copies.clear()
        self._measured = None

    @torch.no_grad()
    def measure(self, clip: float | None) -> tuple[list[Any], Tensor, Tensor, Tensor]:
        """Measure all gradients, so that the next step clips them, or is skipped.

        The step is skipped if a gradient is not finite. Return the parameters that have gradients,
        one for each stretch; the norm; the factor that clips it; and the index among these
        parameters of the first whose gradient is not finite, or −1.
        """
        from frostlab.training.step.adamw_kernels import measure_gradients

        self._measured = table = self._read_gradients()
        values = measure_gradients(
            table.addresses, table.owners, table.starts, float(clip or math.inf), block=_BLOCK
        )
        norm, clip_factor, broken, scale, self.found_inf = values.unbind()
        self.grad_scale = None if clip is None else scale
        return [row.p for row in table.rows], norm, clip_factor, broken

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        from frostlab.training.step.adamw_kernels import adamw_blocks

        table, self._measured = self._measured or self._read_gradients(), None
        if self.measures and self.sums is not None:
            self.sums.zero_()
        if not table.rows:
            return
        group, device = table.rows[0].group, table.addresses.device
        rates = [
            rate if isinstance(rate, Tensor) else torch.full((), rate, device=device)
            for rate in table.rates
        ]
        rate = rates[0] if len(rates) == 1 else torch.stack(rates)
        sums = torch.zeros(len(table.owners), 2, device=device) if self.measures else None
        adamw_blocks(
            table.addresses, table.owners, table.starts, table.decays, rate, table.rate_indices,
            self.grad_scale, self.found_inf, sums, betas=group["betas"], eps=group["eps"],
            block=_BLOCK,
        )  # fmt: skip
        if sums is not None and self.sums is not None:
            self.sums.index_add_(0, table.places[table.owners], sums.to(self.sums.dtype))

    def _read_gradients(self) -> "_Table":
        """Return a table of the gradients that there are now."""
        rows: list[_Row] = []
        place = 0
        for group in self.param_groups:
            for p in group["params"]:
                rows += _rows_of(p, self.copies.pieces(p), group, place)
                place += 1
        values: list[int] = []  # the kernels' table, row by row
        for row in rows:
            state, gradient, copy = self._state_of(row.p), row.gradient, row.copy
            tensors = (row.p, state["exp_avg"], state["exp_avg_sq"])
            addresses = [t.data_ptr() + row.start * t.element_size() for t in tensors]
            addresses += [gradient.data_ptr(), 0 if copy is None else copy.data_ptr()]
            size, half = gradient.numel(), gradient.dtype == torch.bfloat16
            even = all(number % 16 == 0 for number in (*addresses, size))
            values += [*addresses, state["step"].data_ptr(), size, half, even]
        rate_index: dict[Any, int] = {}
        for row in rows:  # number the distinct rates; tensors are compared by identity
            rate_index.setdefault(row.group["lr"], len(rate_index))
        device = self.param_groups[0]["params"][0].device
        layout = self._block_layout(
            tuple(row.gradient.numel() for row in rows),
            tuple(float(row.group["weight_decay"]) for row in rows),
            tuple(rate_index[row.group["lr"]] for row in rows),
            tuple(row.place for row in rows),
            device,
        )
        return _Table(rows, list(rate_index), self._address_table(values, device), *layout)

    def _state_of(self, p: Any) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        # a count that was loaded may be elsewhere, and the kernel needs its address
        state["step"] = state["step"].to(p.device, torch.float32)
        return state

    def _block_layout(
        self,
        sizes: tuple[int, ...],
        decays: tuple[float, ...],
        rate_indices: tuple[int, ...],
        places: tuple[int, ...],
        device: torch.device,
    ) -> list[Tensor]:
        """Return each block's row and start, and each row's decay, rate index and place."""
        key = (sizes, decays, rate_indices, places)
        if key not in self._layouts:
            counts = torch.tensor([-(-size // _BLOCK) for size in sizes], dtype=torch.int64)
            owners = torch.repeat_interleave(counts)
            firsts = torch.cumsum(counts, 0) - counts
            starts = (torch.arange(len(owners)) - firsts[owners]) * _BLOCK
            by_row = (torch.tensor(decays), torch.tensor(rate_indices), torch.tensor(places))
            self._layouts[key] = [t.to(device) for t in (owners.int(), starts, *by_row)]
        return self._layouts[key]

    def _address_table(self, values: list[int], device: torch.device) -> Tensor:
        """Return the kernels' table of addresses on the device.

        While a graph is recorded, return an empty table that `fill_address_tables` fills later.
        This table lies outside the graph's memory pool, which the graph's other kernels overwrite.
        """
        if not captures_graphs(device) or not torch.cuda.is_current_stream_capturing():
            self._keep_spare_table(device)
            return torch.tensor(values, dtype=torch.int64).view(-1, _COLUMNS).to(device)
        table = self._spare_tables.pop()
        self._unfilled.append((table, values))
        return table

    def _keep_spare_table(self, device: torch.device) -> None:
        """Allocate the table of the next graph before the graph is recorded."""
        if not self._spare_tables:
            parameters = [p for group in self.param_groups for p in group["params"]]
            rows = sum(self.copies.rows_of(p) for p in parameters)
            self._spare_tables = [torch.zeros(rows, _COLUMNS, dtype=torch.int64, device=device)]

    def fill_address_tables(self) -> list[Tensor]:
        """Fill and return a recorded graph's tables; the caller keeps them as long as the graph."""
        unfilled, self._unfilled = self._unfilled, []
        for table, values in unfilled:
            table.view(-1)[: len(values)] = torch.tensor(values)
            self._keep_spare_table(table.device)
        return [table for table, _ in unfilled]


def _undecorated(name: str) -> Callable[..., None]:
    """Return a method of torch's `Optimizer` without its decorator."""
    method = getattr(torch.optim.Optimizer, name)
    function: Callable[..., None] = getattr(method, "__wrapped__", method)
    return function


@dataclass(frozen=True)
class _Row:
    """A row of the kernels' table: a contiguous stretch of a parameter that has a gradient."""

    p: Any
    start: int  # of the stretch, in elements
    gradient: Tensor  # of the stretch
    copy: Tensor | None  # where the kernel writes the stretch in bf16
    group: dict[str, Any]
    place: int  # index of the parameter among the optimizer's parameters


@dataclass(frozen=True)
class _Table:
    """The gradients of a step, in rows, as the kernels read them from the device."""

    rows: list[_Row]
    rates: list[Any]  # the distinct learning rates: numbers, or tensors on the device
    addresses: Tensor  # (rows, columns); in a graph, there may be more rows at the end
    owners: Tensor  # of each block, its row
    starts: Tensor  # of each block, its first element
    decays: Tensor  # of each row, like the next two
    rate_indices: Tensor  # in `rates`
    places: Tensor  # see `_Row.place`


def _rows_of(p: Any, pieces: list["Piece"], group: dict[str, Any], place: int) -> list[_Row]:
    """Return the rows of one parameter in the kernels' table."""
    starts = accumulate((gradient.numel() for gradient, _ in pieces), initial=0)
    return [
        _Row(p, start, gradient, copy, group, place)
        for start, (gradient, copy) in zip(starts, pieces, strict=False)
    ]


# The gradient of a contiguous stretch of a parameter, and its bf16 copy if there is one.
Piece = tuple[Tensor, Tensor | None]


@dataclass
class _Copy:
    """A parameter of a module, and the bf16 tensors that hold its values.

    Inside `Bf16Copies.in_place`, `leaf` takes the parameter's place and gets its gradient. Usually
    the leaf is the copy itself. In a partly frozen projection (`SplitProjection`), the copy is rows
    of a fused weight or bias, and the leaf only gets the gradient. The leaf is None for frozen
    rows, and for a language model's head, whose loss takes the weight and the copy.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    leaf: nn.Parameter | None
    targets: tuple[Tensor, ...]  # the copy, in contiguous stretches in the order of its rows
    # where the stretches are in the leaf's gradient, if the leaf also has frozen rows; else None
    ranges: tuple[Span, ...] | None = None
    version: int = -1  # of the parameter, when it was copied

    @property
    def values(self) -> Tensor:
        """Return the copied values in the parameter's shape."""
        return torch.cat([t.flatten() for t in self.targets]).view_as(self.parameter)

    def pieces(self) -> list[Piece]:
        """Return the gradients of the stretches with their targets; empty without a gradient."""
        of_leaf = None if self.leaf is None else self.leaf.grad
        whole = self.parameter.grad if of_leaf is None else of_leaf
        if whole is None:
            return []
        if of_leaf is not None and self.ranges is not None:
            gradients = [whole[start:stop] for start, stop in self.ranges]
        else:
            gradients = list(whole.split([len(t) for t in self.targets]))
        return list(zip(gradients, self.targets, strict=True))


class Bf16Copies:
    """Bf16 copies of the weights and biases of the linear maps in all layers.

    A step with one micro-batch computes with the copies, so that autocast does not cast these
    weights; the optimizer updates the float32 weights and their copies in one kernel. The rows of a
    partly frozen projection are copied into one fused weight, so that no step assembles it. The
    weight of a language model's head is copied, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._fused: list[tuple[SplitProjection, dict[str, Tensor]]] = []
        self._entries: list[_Copy] = []
        maps = list(_linear_maps(model))
        empty = _allocate_side_by_side(model, maps)
        for module, names in maps:
            if isinstance(module, SplitProjection):
                self._add_split(module)
                continue
            for name in names:
                p = module._parameters[name]
                assert p is not None
                copy = nn.Parameter(empty[id(p)], p.requires_grad)
                self._entries.append(_Copy(module, name, p, copy, (copy.detach(),)))
        self._head: _Copy | None = None
        if self._entries and (head := _language_head(model)) is not None:
            weight = head._parameters["weight"]
            assert weight is not None
            values = torch.empty_like(weight, dtype=torch.bfloat16).detach()
            self._head = _Copy(head, "weight", weight, None, (values,))
            self._entries.append(self._head)
        self._by_id = {id(entry.parameter): entry for entry in self._entries}
        self.refresh()

    def _add_split(self, module: SplitProjection) -> None:
        """Allocate the fused bf16 tensors of a partly frozen projection; `refresh` fills them."""
        fused: dict[str, Tensor] = {}
        for local, (shape, _, pieces) in module.slots().items():
            device = pieces[0].parameter.device
            fused[local] = torch.empty(shape, dtype=torch.bfloat16, device=device)
            for piece in pieces:
                p, leaf = piece.parameter, None
                ranges = tuple(piece.rows.ranges())
                targets = tuple(fused[local][start:stop] for start, stop in ranges)
                trains = module._parameters[f"trainable_{local}"] is p
                name = f"{'trainable' if trains else 'frozen'}_{local}"
                if trains:
                    # The gradient of a bias has its frozen rows, too: one sum over all rows is
                    # faster than a sum for each trainable span of rows.
                    like = fused[local] if local == "bias" else p
                    leaf = nn.Parameter(torch.zeros_like(like, dtype=torch.bfloat16))
                self._entries.append(
                    _Copy(module, name, p, leaf, targets, ranges if local == "bias" else None)
                )
        self._fused.append((module, fused))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def pieces(self, p: nn.Parameter) -> list[Piece]:
        """Return a parameter's gradient with its copy, in stretches; empty without a gradient."""
        entry = self._by_id.get(id(p))
        if entry is not None:
            return entry.pieces()
        return [] if p.grad is None else [(p.grad, None)]

    def rows_of(self, p: nn.Parameter) -> int:
        """Return the most rows that a parameter takes in the kernels' table, one per stretch."""
        entry = self._by_id.get(id(p))
        return 1 if entry is None else len(entry.targets)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """Return the bf16 gradient of a parameter's copy, or else the parameter's gradient."""
        gradients = [gradient for gradient, _ in self.pieces(p)]
        return torch.cat(gradients) if len(gradients) > 1 else next(iter(gradients), None)

    def refresh(self) -> None:
        """Copy the parameters that changed outside the optimizer, and their `requires_grad`."""
        stale = [entry for entry in self._entries if entry.parameter._version != entry.version]
        targets, sources = list[Tensor](), list[Tensor]()
        for entry in stale:
            targets += entry.targets
            sources += entry.parameter.detach().split([len(t) for t in entry.targets])
        if targets:
            torch._foreach_copy_(targets, sources)
        for entry in stale:
            entry.version = entry.parameter._version
        for entry in self._entries:
            leaf, learns = entry.leaf, entry.parameter.requires_grad
            if leaf is not None and leaf.requires_grad != learns:
                leaf.requires_grad_(learns)

    def clear(self) -> None:
        """Drop the gradients of the copies."""
        for entry in self._entries:
            if entry.leaf is not None:
                entry.leaf.grad = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters with their copies inside this context, so that layers use them."""
        self.refresh()
        for entry in self._entries:
            if entry.leaf is not None:
                entry.module._parameters[entry.name] = entry.leaf
        for module, fused in self._fused:
            module.kept = fused
        if self._head is not None:
            setattr(self._head.module, HEAD_COPY, self._head.targets[0])
        try:
            yield
        finally:
            if self._head is not None:
                delattr(self._head.module, HEAD_COPY)
            for entry in self._entries:
                if entry.leaf is not None:
                    entry.module._parameters[entry.name] = entry.parameter
            for module, _ in self._fused:
                module.kept = None


def _allocate_side_by_side(
    model: nn.Module, maps: list[tuple[nn.Module, list[str]]]
) -> dict[int, Tensor]:
    """Return empty bf16 tensors for the parameters of plain linear maps, by the parameter's id.

    Compiled layers join maps of the same input into one product (`joined_linear`), which reads
    weights, and biases, as one tensor if they lie side by side in memory. So those of maps in one
    module that have equally many inputs do, frozen ones first, as in the product. All of them begin
    at multiples of 16 bytes, which may leave a gap behind one of an odd size.
    """
    parents = {id(child): id(module) for module in model.modules() for child in module.children()}
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for module, names in maps:
        if isinstance(module, SplitProjection):
            continue
        inputs = getattr(module, "in_features", id(module))  # a Conv1D stays apart
        for name in names:
            p = module._parameters[name]
            assert p is not None
            groups[parents.get(id(module)), inputs, name, p.device].append(p)
    found = {}
    for group in groups.values():
        group.sort(key=lambda p: p.requires_grad)
        sizes = [-(-p.numel() // 8) * 8 for p in group]
        memory = torch.empty(sum(sizes), dtype=torch.bfloat16, device=group[0].device)
        for p, part in zip(group, memory.split(sizes), strict=True):
            found[id(p)] = part[: p.numel()].view(p.shape)
    return found


def _language_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a language model, if its weight can be copied."""
    stack = take_apart(model)
    if stack is None or stack.classifies or type(stack.head) is not nn.Linear:
        return None
    weight = stack.head.weight
    return stack.head if weight.dtype == torch.float32 and weight.is_contiguous() else None


def _linear_maps(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield the linear maps in all layers, with the names of the parameters that can be copied.

    Parameters that are shared, hooked, not contiguous or not float32 are skipped. A partly frozen
    projection is skipped as a whole if one of its parameters is, or if its weight is stored as
    (in, out), as in GPT-2.
    """
    stack = take_apart(model)
    modules = [m for layer in (stack.layers if stack else []) for m in layer.modules()]
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)

    def can_be_copied(p: nn.Parameter | None) -> bool:
        if p is None or uses[id(p)] > 1 or p.dtype != torch.float32 or not p.is_contiguous():
            return False
        return not (p._backward_hooks or p._post_accumulate_grad_hooks)

    for module in modules:
        names = [name for name, p in module._parameters.items() if can_be_copied(p)]
        if isinstance(module, SplitProjection):
            present = [name for name, p in module._parameters.items() if p is not None]
            if module.frozen_rows.axis == 0 and names == present:
                yield module, names
        # GPT-2 in transformers has Conv1D instead of Linear
        elif type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            yield module, names
