"""A linear module with separate parameters for its frozen and its trainable rows.

Most are fused projections: the rows of one weight are queries, keys and values. The fused tensor
has all rows, frozen and trainable. The forward pass is one matmul over all rows; the backward pass
computes weight gradients only for the trainable rows. State dicts keep the fused names and shapes,
so split and unmodified models can load each other's checkpoints.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.devices import on_gpu
from frostlab.errors import BadInput
from frostlab.roles.parts import (
    Multiplies,
    Piece,
    Rows,
    SlotPieces,
    Split,
    gathered,
    join,
    join_pieces,
)

_HOOKS = (  # attributes of nn.Module that hold hooks
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


@dataclass(frozen=True)
class FrozenRows:
    """The frozen rows of a projection, in its weight and in its bias."""

    axis: int  # axis of the weight's rows: 0 for (out, in), 1 for Conv1D's (in, out)
    weight: Rows | None  # None: no row is frozen
    bias: Rows | None

    trainable: Rows | None = field(init=False)  # the other rows of the weight; None: all rows
    trainable_bias: Rows | None = field(init=False)

    def __post_init__(self) -> None:
        rest = [None if rows is None else rows.rest() for rows in (self.weight, self.bias)]
        object.__setattr__(self, "trainable", rest[0])
        object.__setattr__(self, "trainable_bias", rest[1])


class FusedCache:
    """The fused tensor of a projection, kept between steps so that frozen rows are copied once.

    The cache trades the memory of the fused tensor for the time to assemble it in each step. It
    is written in place only, so a captured CUDA graph always reads current values. Writes to
    frozen rows through `.data` do not change the tensor's version and are not detected.
    """

    def __init__(
        self,
        frozen_rows: Rows,
        axis: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.frozen_rows, self.trainable_rows, self.axis = frozen_rows, frozen_rows.rest(), axis
        self.fused = torch.empty(shape, dtype=dtype, device=device)
        # (address, version) of the tensors from which the cached rows were copied
        self.frozen_version: tuple[int, int] | None = None
        self.trainable_version: tuple[int, int] | None = None
        self.trainable_view: Tensor | None = None  # view of the trainable rows, if contiguous
        if self.trainable_rows.repeats == len(self.trainable_rows.spans) == 1:
            start, stop = self.trainable_rows.spans[0]
            self.trainable_view = self.fused.narrow(axis, start, stop - start)

    def fill(self, trainable: Tensor, frozen: Tensor) -> None:
        """Copy the trainable rows into the cache, and the frozen rows if they have changed."""
        version = (frozen.data_ptr(), frozen._version)
        if version != self.frozen_version:
            self.frozen_rows.put(self.fused, frozen.detach(), self.axis)
            self.frozen_version = version
        self.trainable_version = (trainable.data_ptr(), trainable._version)
        if self.trainable_view is not None:
            self.trainable_view.copy_(trainable.detach())
        else:
            self.trainable_rows.put(self.fused, trainable.detach(), self.axis)


def assemble(
    trainable: Tensor | None, frozen: Tensor | None, rows: Rows | None, axis: int
) -> Tensor:
    """Join trainable and frozen rows into the fused tensor; `rows` are the frozen ones.

    Nothing is copied if all rows are trainable or all are frozen.
    """
    if rows is None or frozen is None:
        assert trainable is not None
        return trainable
    return frozen if trainable is None else join(rows, frozen, trainable, axis)


class Project(torch.autograd.Function):
    """x · Wᵀ + b over all rows, with gradients of W and b for the trainable rows only.

    The forward pass uses the fused `weight` and `bias`, which have no gradient. The backward pass
    returns gradients for `x`, `trainable` and `trainable_bias`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        trainable: Tensor | None,
        trainable_bias: Tensor | None,
        frozen: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        rows: FrozenRows,
        cache: FusedCache | None,
    ) -> Tensor:
        return F.linear(x, weight.t() if rows.axis else weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, trainable, trainable_bias, frozen, _, _, rows, cache = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, trainable, frozen)
        ctx.rows, ctx.cache = rows, cache
        ctx.version = None if cache is None else cache.trainable_version
        ctx.bias_dtype = None if trainable_bias is None else trainable_bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, trainable, frozen = ctx.saved_tensors
        rows: FrozenRows = ctx.rows
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # Use the cache only if it still holds the values of the forward pass, and not for
            # second derivatives, which must reach the parameters themselves.
            cache: FusedCache | None = ctx.cache
            if cache is None or cache.trainable_version != ctx.version or torch.is_grad_enabled():
                weight = assemble(trainable, frozen, rows.weight, rows.axis).to(grad.dtype)
            else:
                weight = cache.fused
            grad_x = grad @ (weight.t() if rows.axis else weight)
        flat = grad.reshape(-1, grad.shape[-1])  # (N, out)
        columns = _trainable_columns(flat, rows.trainable)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])  # (N, in)
            grad_weight = _cast(_weight_gradient(columns, inputs, rows.axis), trainable.dtype)
        if ctx.needs_input_grad[2]:
            if rows.trainable_bias != rows.trainable:
                columns = _trainable_columns(flat, rows.trainable_bias)
            sums = [span.sum(0) for span in columns]  # each (span,) or (repeats, span)
            joined = sums[0] if len(sums) == 1 else torch.cat(sums, -1)
            grad_bias = _cast(joined.flatten() if joined.dim() > 1 else joined, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _trainable_columns(grad: Tensor, rows: Rows | None) -> list[Tensor]:
    """Return the columns of an output gradient (N, out) that belong to trainable rows.

    The result has one view per span of adjacent rows, (N, span) or, if interleaved, (N, repeats,
    span). Except for half precision on a GPU, where a batched matmul is faster, interleaved columns
    are copied into one tensor (N, columns), because one matmul over the copy is faster.
    """
    if rows is None:
        return [grad]
    if rows.repeats == 1:
        return [grad[:, start:stop] for start, stop in rows.spans]
    if on_gpu(grad) and grad.element_size() == 2:
        return rows.pieces(grad, 1)
    return [rows.take(grad, 1)]


def _weight_gradient(columns: list[Tensor], inputs: Tensor, axis: int) -> Tensor:
    """Return the weight gradient of the trainable rows, by one matmul per tensor in `columns`."""
    if columns[0].dim() == 2:
        blocks = [inputs.t() @ span if axis else span.t() @ inputs for span in columns]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, axis)
    repeated = inputs.expand(columns[0].shape[1], -1, -1)  # (repeats, N, in)
    blocks = [torch.bmm(span.permute(1, 2, 0), repeated) for span in columns]
    rows = (blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)).flatten(0, 1)  # (rows, in)
    return rows.t() if axis else rows


class KeptProject(torch.autograd.Function):
    """x · Wᵀ + b with fused tensors that a step keeps up to date (`SplitProjection.kept`).

    The gradient of W has the trainable rows only. The gradient of b has all rows: one sum over all
    of them is faster than a sum per span, and the optimizer reads only the trainable ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trainable: Tensor | None,
        trainable_bias: Tensor | None,
        rows: Rows | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        flat = grad.reshape(-1, grad.shape[-1])  # (N, out)
        if ctx.needs_input_grad[3]:
            columns = _trainable_columns(flat, ctx.rows)
            grad_weight = _products(columns, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[4]:
            grad_bias = flat.sum(0)
        return grad_x, None, None, grad_weight, grad_bias, None


def _products(columns: list[Tensor], inputs: Tensor) -> Tensor:
    """Return the weight gradient as `_weight_gradient` does; matmuls write to its rows directly."""
    if len(columns) == 1 or columns[0].dim() != 2 or torch.compiler.is_compiling():
        return _weight_gradient(columns, inputs, 0)  # compiled code joins them without a copy
    sizes = [span.shape[1] for span in columns]
    rows = inputs.new_empty(sum(sizes), inputs.shape[1])
    for span, out in zip(columns, rows.split(sizes), strict=True):
        torch.mm(span.t(), inputs, out=out)
    return rows


class SplitProjection(nn.Module, Multiplies, Split):
    """A replacement for a linear module with some frozen rows.

    A step with bf16 copies (`Bf16Copies` of training/step/optimizer.py) keeps the fused weight and
    bias up to date itself. While it runs, `kept` holds these two, and the trainable parameters are
    replaced by tensors that only receive gradients.
    """

    kept: dict[str, Tensor] | None = None
    trainable_weight: nn.Parameter | None
    frozen_weight: nn.Parameter | None
    trainable_bias: nn.Parameter | None
    frozen_bias: nn.Parameter | None

    def __init__(self, original: Any, frozen_rows: FrozenRows) -> None:
        super().__init__()
        self.frozen_rows = frozen_rows
        self.shapes: dict[str, tuple[int, ...]] = {}
        for local in ("weight", "bias"):
            fused = getattr(original, local)
            frozen = trainable = None
            if fused is not None:
                self.shapes[local] = tuple(fused.shape)
                frozen, trainable = self._cut(local, fused.detach())
            self.register_parameter(f"trainable_{local}", trainable)
            self.register_parameter(f"frozen_{local}", frozen)
        self._remember_own_rows()
        for name in _HOOKS:
            setattr(self, name, getattr(original, name))
        original.weight = original.bias = None
        self._original: tuple[nn.Module] = (original,)  # in a tuple: not a submodule
        self.training = original.training

    def _cut(self, local: str, fused: Tensor) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """Divide a fused tensor into its frozen and its trainable rows."""
        rows, axis = self._rows(local), self._axis(local)
        if rows is None:
            return None, nn.Parameter(fused)
        frozen = nn.Parameter(rows.take(fused, axis).clone(), requires_grad=False)
        rest = rows.rest()
        return frozen, nn.Parameter(rest.take(fused, axis).clone()) if len(rest) else None

    def _rows(self, local: str) -> Rows | None:
        return self.frozen_rows.weight if local == "weight" else self.frozen_rows.bias

    def _axis(self, local: str) -> int:
        return self.frozen_rows.axis if local == "weight" else 0

    def joined(self) -> nn.Module:
        """Return the original module with the rows rejoined; this one must no longer be used."""
        (original,) = self._original
        for local in self.shapes:
            setattr(original, local, nn.Parameter(getattr(self, local).detach().clone()))
        original.train(self.training)
        return original

    def slots(self) -> dict[str, SlotPieces]:
        """Return the fused shape of weight and bias, the axis of their rows, and their pieces."""
        slots = {}
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
            slots[local] = (shape, axis, tuple(pieces))
        return slots

    @property
    def out_features(self) -> int:
        return self.shapes["weight"][self.frozen_rows.axis]

    @property
    def in_features(self) -> int:
        return self.shapes["weight"][1 - self.frozen_rows.axis]

    @property
    def weight(self) -> Tensor:
        """The fused weight; gradients flow to the trainable rows."""
        return assemble(
            self.trainable_weight,
            self.frozen_weight,
            self.frozen_rows.weight,
            self.frozen_rows.axis,
        )

    @property
    def bias(self) -> Tensor | None:
        """The fused bias, or None; gradients flow to the trainable rows."""
        if "bias" not in self.shapes:
            return None
        return assemble(self.trainable_bias, self.frozen_bias, self.frozen_rows.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        trainable, frozen = self.trainable_weight, self.frozen_weight
        for parameter in (frozen, self.frozen_bias):
            if parameter is not None and parameter.requires_grad:
                raise BadInput(
                    "frozen rows have requires_grad=True; to train them, call fl.thaw(model), or "
                    "fl.freeze(model, …) with a selection that leaves them out"
                )
        if (kept := self.kept) is not None:
            x = x.to(kept["weight"].dtype)
            leaves = (trainable, self.trainable_bias)
            rows = self.frozen_rows.trainable
            return KeptProject.apply(x, kept["weight"], kept.get("bias"), *leaves, rows)
        either = frozen if trainable is None else trainable
        assert either is not None
        dtype, device = either.dtype, x.device.type
        if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
        weight, cache = self._fused("weight", trainable, frozen, dtype)
        bias, _ = self._fused("bias", self.trainable_bias, self.frozen_bias, dtype)
        return Project.apply(
            x, trainable, self.trainable_bias, frozen, weight, bias, self.frozen_rows, cache
        )

    def _fused(
        self, local: str, trainable: Tensor | None, frozen: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, FusedCache | None]:
        """Return the fused tensor in a dtype, and the cache that holds it, if any.

        Only this module's own parameters are cached, not tensors that replace them temporarily,
        such as gathered shards, or the arguments of `torch.func.functional_call`.
        """
        if trainable is None or frozen is None:
            only = frozen if trainable is None else trainable
            return None if only is None else only.detach().to(dtype), None
        if torch.compiler.is_compiling() or not self._owns(local, trainable, frozen):
            fused = assemble(trainable, frozen, self._rows(local), self._axis(local))
            return fused.detach().to(dtype), None
        cache = self._caches.get((local, dtype))
        if cache is None:
            rows = self._rows(local)
            assert rows is not None
            with torch.inference_mode(False):
                shape = self.shapes[local]
                cache = FusedCache(rows, self._axis(local), shape, dtype, frozen.device)
            self._caches[local, dtype] = cache
        cache.fill(trainable, frozen)
        return cache.fused, cache

    def _owns(self, local: str, trainable: Tensor, frozen: Tensor) -> bool:
        own_trainable, own_frozen = self._own[local]
        return own_trainable() is trainable and own_frozen() is frozen

    def _remember_own_rows(self) -> None:
        """Remember the current parameters as this module's own, and clear the caches."""
        self._caches: dict[tuple[str, torch.dtype], FusedCache] = {}
        self._own: dict[str, tuple[weakref.ref[nn.Parameter], ...]] = {}
        for local in self.shapes:
            pair = (self._parameters[f"{state}_{local}"] for state in ("trainable", "frozen"))
            self._own[local] = tuple(weakref.ref(p) for p in pair if p is not None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._remember_own_rows()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_caches", "_own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remember_own_rows()

    def extra_repr(self) -> str:
        shape = "×".join(map(str, self.shapes["weight"]))
        rows = self.frozen_rows.weight
        frozen = 0 if rows is None else len(rows)
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
        read_keys = load_pieces(
            self, self.slots(), state_dict, prefix, local_metadata, missing_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers", False):
            self._remember_own_rows()
        if strict:
            unexpected_keys += [
                k for k in state_dict if k.startswith(prefix) and k not in read_keys
            ]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def sharded_like(value: Tensor, tensor: Any) -> Tensor:
    """Shard a value like `tensor`, if `tensor` is sharded."""
    if not _is_sharded(tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def save_pieces(slots: dict[str, SlotPieces], destination: dict[str, Any], prefix: str) -> None:
    """Add each fused tensor (slot), joined from its pieces, to a state dict."""
    for local, (_, axis, pieces) in slots.items():
        destination[prefix + local] = sharded_like(join_pieces(pieces, axis), pieces[0].parameter)


def load_pieces(
    module: nn.Module,
    slots: dict[str, SlotPieces],
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    missing_keys: list[str],
    error_msgs: list[str],
) -> set[str]:
    """Load each fused tensor (slot) of a state dict into its pieces; return the slots' keys."""
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
                rows = piece.rows.take(value, axis).contiguous()
                rows = sharded_like(rows, piece.parameter)
                if assign:
                    _assign(module, piece.parameter, rows)
                else:
                    piece.parameter.copy_(rows)
    return {prefix + local for local in slots}


def _assign(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter by a loaded tensor, as load_state_dict(assign=True) does."""
    name = next(n for n, p in module._parameters.items() if p is old)
    module._parameters[name] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
