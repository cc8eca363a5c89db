"""A fused projection whose rows are partly frozen, held as two parameters.

The forward is one matmul over all rows; the backward computes weight gradients for the
trainable rows only. State dicts keep the fused names and shapes, so a checkpoint moves freely
between split and untouched models.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.errors import BadInput
from frostlab.roles.parts import Piece, Rows, SlotPieces, Split, gathered, join, join_pieces


@dataclass(frozen=True)
class Plan:
    """The static table of a split: which rows are frozen, of the weight and of the bias."""

    axis: int  # of the weight's rows: 0 for (out, in), 1 for Conv1D's (in, out)
    weight: Rows | None  # None: no row is frozen
    bias: Rows | None

    learning: Rows | None = field(init=False)  # the trainable rows; None: all
    learning_bias: Rows | None = field(init=False)

    def __post_init__(self) -> None:
        rest = [None if rows is None else rows.rest() for rows in (self.weight, self.bias)]
        object.__setattr__(self, "learning", rest[0])
        object.__setattr__(self, "learning_bias", rest[1])


class Kept:
    """A fused tensor kept between steps, its frozen rows in place.

    It costs one fused tensor of memory a projection, and saves a step the assembly of it. It is
    only ever written in place, so that a captured graph goes on reading what is true. Frozen
    rows written through `.data`, which torch does not count as a change, are not noticed.
    """

    def __init__(
        self,
        frozen_rows: Rows,
        axis: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.frozen_rows, self.learning, self.axis = frozen_rows, frozen_rows.rest(), axis
        self.whole = torch.empty(shape, dtype=dtype, device=device)
        self.stamp: tuple[int, int] | None = None  # of the frozen rows that are in
        self.filled: tuple[int, int] | None = None  # of the trainable rows that are in
        self.run: Tensor | None = None  # the trainable rows, where they are one run
        if self.learning.repeats == len(self.learning.spans) == 1:
            start, stop = self.learning.spans[0]
            self.run = self.whole.narrow(axis, start, stop - start)

    def fill(self, trainable: Tensor, frozen: Tensor) -> None:
        """Copy the trainable rows in, and the frozen ones if they are others than before."""
        stamp = (frozen.data_ptr(), frozen._version)
        if stamp != self.stamp:
            self.frozen_rows.put(self.whole, frozen.detach(), self.axis)
            self.stamp = stamp
        self.filled = (trainable.data_ptr(), trainable._version)
        if self.run is not None:
            self.run.copy_(trainable.detach())
        else:
            self.learning.put(self.whole, trainable.detach(), self.axis)


def assemble(
    trainable: Tensor | None, frozen: Tensor | None, rows: Rows | None, axis: int
) -> Tensor:
    """Assemble a tensor from its two parts, in one copy where there are two."""
    if rows is None or frozen is None:
        assert trainable is not None
        return trainable
    return frozen if trainable is None else join(rows, frozen, trainable, axis)


class Project(torch.autograd.Function):
    """x · Wᵀ + b over all rows; gradients of W and b for the trainable rows alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        trainable: Tensor | None,
        trainable_bias: Tensor | None,
        frozen: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        kept: Kept | None,
    ) -> Tensor:
        return F.linear(x, weight.t() if plan.axis else weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, trainable, trainable_bias, frozen, _, _, plan, kept = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, trainable, frozen)
        ctx.plan, ctx.kept = plan, kept
        ctx.filled = None if kept is None else kept.filled
        ctx.bias_dtype = None if trainable_bias is None else trainable_bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, trainable, frozen = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # What is kept serves if it still holds the rows of this forward; a second
            # derivative must reach the rows themselves.
            if ctx.kept is None or ctx.kept.filled != ctx.filled or torch.is_grad_enabled():
                weight = assemble(trainable, frozen, plan.weight, plan.axis).to(grad.dtype)
            else:
                weight = ctx.kept.whole
            grad_x = grad @ (weight.t() if plan.axis else weight)
        flat = grad.reshape(-1, grad.shape[-1])  # (N, out)
        parts = _columns(flat, plan.learning)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])  # (N, in)
            grad_weight = _as(_weight_gradient(parts, inputs, plan.axis), trainable.dtype)
        if ctx.needs_input_grad[2]:
            if plan.learning_bias != plan.learning:
                parts = _columns(flat, plan.learning_bias)
            sums = [part.sum(0) for part in parts]  # each (span,) or (repeats, span)
            joined = sums[0] if len(sums) == 1 else torch.cat(sums, -1)
            grad_bias = _as(joined.flatten() if joined.dim() > 1 else joined, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _columns(grad: Tensor, rows: Rows | None) -> list[Tensor]:
    """The trainable columns of (N, out), a view a span: (N, span), or (N, repeats, span).

    Interleaved columns are gathered for float32, where one matmul over the copy beats a batched
    one over the view; for halves on a GPU it is the other way round.
    """
    if rows is None:
        return [grad]
    if rows.repeats == 1:
        return [grad[:, start:stop] for start, stop in rows.spans]
    if grad.is_cuda and grad.element_size() == 2:
        return rows.pieces(grad, 1)
    return [rows.take(grad, 1)]


def _weight_gradient(parts: list[Tensor], inputs: Tensor, axis: int) -> Tensor:
    """The gradient of the trainable rows: a matmul a span of them, batched over repeats."""
    if parts[0].dim() == 2:
        blocks = [inputs.t() @ part if axis else part.t() @ inputs for part in parts]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, axis)
    repeated = inputs.expand(parts[0].shape[1], -1, -1)  # (repeats, N, in)
    heads = [torch.bmm(part.permute(1, 2, 0), repeated) for part in parts]
    whole = (heads[0] if len(heads) == 1 else torch.cat(heads, 1)).flatten(0, 1)  # (rows, in)
    return whole.t() if axis else whole


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


class SplitProjection(nn.Module, Split):
    """Stands in for a linear module some of whose rows are frozen."""

    trainable_weight: nn.Parameter | None
    frozen_weight: nn.Parameter | None
    trainable_bias: nn.Parameter | None
    frozen_bias: nn.Parameter | None

    def __init__(self, original: Any, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, tuple[int, ...]] = {}
        for local in ("weight", "bias"):
            whole = getattr(original, local)
            frozen = rest = None
            if whole is not None:
                self.shapes[local] = tuple(whole.shape)
                frozen, rest = self._cut(local, whole.detach())
            self.register_parameter(f"trainable_{local}", rest)
            self.register_parameter(f"frozen_{local}", frozen)
        self.claim()
        for name in _HOOKS:
            setattr(self, name, getattr(original, name))
        original.weight = original.bias = None
        self._original: tuple[nn.Module] = (original,)  # in a tuple, so not a submodule
        self.training = original.training

    def _cut(self, local: str, whole: Tensor) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        rows, axis = self._rows(local), self._axis(local)
        if rows is None:
            return None, nn.Parameter(whole)
        frozen = nn.Parameter(rows.take(whole, axis).clone(), requires_grad=False)
        rest = rows.rest()
        return frozen, nn.Parameter(rest.take(whole, axis).clone()) if len(rest) else None

    def _rows(self, local: str) -> Rows | None:
        return self.plan.weight if local == "weight" else self.plan.bias

    def _axis(self, local: str) -> int:
        return self.plan.axis if local == "weight" else 0

    def joined(self) -> nn.Module:
        """Return the original module, whole again."""
        (original,) = self._original
        for local in self.shapes:
            setattr(original, local, nn.Parameter(getattr(self, local).detach().clone()))
        original.train(self.training)
        return original

    def slots(self) -> dict[str, SlotPieces]:
        """The fused weight and bias, and the parameters that hold them."""
        found = {}
        for local, shape in self.shapes.items():
            rows, axis = self._rows(local), self._axis(local)
            frozen = getattr(self, f"frozen_{local}")
            trainable = getattr(self, f"trainable_{local}")
            pieces = []
            if frozen is not None:
                assert rows is not None
                pieces.append(Piece(rows, frozen))
            if trainable is not None:
                rest = Rows.whole(shape[axis]) if rows is None else rows.rest()
                pieces.append(Piece(rest, trainable))
            found[local] = (shape, axis, tuple(pieces))
        return found

    @property
    def out_features(self) -> int:
        return self.shapes["weight"][self.plan.axis]

    @property
    def in_features(self) -> int:
        return self.shapes["weight"][1 - self.plan.axis]

    @property
    def weight(self) -> Tensor:
        """The fused weight; gradients reach the trainable rows."""
        return assemble(self.trainable_weight, self.frozen_weight, self.plan.weight, self.plan.axis)

    @property
    def bias(self) -> Tensor | None:
        """The fused bias, if there is one; gradients reach the trainable rows."""
        if "bias" not in self.shapes:
            return None
        return assemble(self.trainable_bias, self.frozen_bias, self.plan.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        learning, frozen, frozen_bias = self.trainable_weight, self.frozen_weight, self.frozen_bias
        for held in (frozen, frozen_bias):
            if held is not None and held.requires_grad:
                raise BadInput("frozen rows were set to learn; use fl.thaw or fl.freeze for that")
        rows = frozen if learning is None else learning
        assert rows is not None
        dtype, kind = rows.dtype, x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x = x.to(dtype)
        weight, kept = self._whole("weight", learning, frozen, dtype)
        bias, _ = self._whole("bias", self.trainable_bias, frozen_bias, dtype)
        return Project.apply(
            x, learning, self.trainable_bias, frozen, weight, bias, self.plan, kept
        )

    def _whole(
        self, local: str, trainable: Tensor | None, frozen: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Kept | None]:
        """The fused tensor in a dtype, and what keeps it between steps, if anything does.

        It is kept while the rows are this module's own: tensors that something else puts in
        their place (a shard gathered for a moment, a functional call) come and go.
        """
        if trainable is None or frozen is None:
            only = frozen if trainable is None else trainable
            return None if only is None else only.detach().to(dtype), None
        if torch.compiler.is_compiling() or not self._owns(local, trainable, frozen):
            found = assemble(trainable, frozen, self._rows(local), self._axis(local))
            return found.detach().to(dtype), None
        kept = self._kept.get((local, dtype))
        if kept is None:
            rows = self._rows(local)
            assert rows is not None
            with torch.inference_mode(False):
                kept = Kept(rows, self._axis(local), self.shapes[local], dtype, frozen.device)
            self._kept[local, dtype] = kept
        kept.fill(trainable, frozen)
        return kept.whole, kept

    def _owns(self, local: str, trainable: Tensor, frozen: Tensor) -> bool:
        first, second = self._own[local]
        return first() is trainable and second() is frozen

    def claim(self) -> None:
        """Take the rows that are there for this module's own."""
        self._kept: dict[tuple[str, torch.dtype], Kept] = {}
        self._own: dict[str, tuple[weakref.ref[nn.Parameter], ...]] = {}
        for local in self.shapes:
            pair = (self._parameters[f"{state}_{local}"] for state in ("trainable", "frozen"))
            self._own[local] = tuple(weakref.ref(p) for p in pair if p is not None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.claim()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_kept", "_own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.claim()

    def extra_repr(self) -> str:
        shape = "×".join(map(str, self.shapes["weight"]))
        frozen = 0 if self.plan.weight is None else len(self.plan.weight)
        return f"{shape}, {frozen} rows frozen"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        save_pieces(self.slots(), destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = load_pieces(
            self, self.slots(), state_dict, prefix, local_metadata, missing_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers", False):
            self.claim()
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _like(value: Tensor, tensor: Any) -> Tensor:
    """Shard a whole value as `tensor` is sharded, if it is."""
    if not _is_sharded(tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def save_pieces(slots: dict[str, SlotPieces], destination: dict[str, Any], prefix: str) -> None:
    """Write each slot under its canonical name, in one piece."""
    for local, (_, axis, pieces) in slots.items():
        destination[prefix + local] = _like(join_pieces(pieces, axis), pieces[0].parameter)


def load_pieces(
    module: nn.Module,
    slots: dict[str, SlotPieces],
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    missing_keys: list[str],
    error_msgs: list[str],
) -> set[str]:
    """Read each slot from its canonical name and cut it; return the keys that were looked for."""
    assign = metadata.get("assign_to_params_buffers", False)
    for local, (shape, axis, pieces) in slots.items():
        key = prefix + local
        if key not in state_dict:
            missing_keys.append(key)
            continue
        value = gathered(state_dict[key])
        if tuple(value.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} "
                f"from checkpoint, the shape in current model is {shape}."
            )
            continue
        with torch.no_grad():
            for piece in pieces:
                part = _like(piece.rows.take(value, axis).contiguous(), piece.parameter)
                if assign:
                    _assign(module, piece.parameter, part)
                else:
                    piece.parameter.copy_(part)
    return {prefix + local for local in slots}


def _assign(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Put a loaded tensor in a parameter's place, as load_state_dict(assign=True) asks."""
    name = next(n for n, p in module._parameters.items() if p is old)
    module._parameters[name] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
