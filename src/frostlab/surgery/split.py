"""A fused projection whose rows are partly frozen, held as two parameters.

The forward is one matmul over all rows; the backward computes weight gradients for the
trainable rows only. State dicts keep the fused names and shapes, so a checkpoint moves freely
between split and untouched models.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.anatomy import Piece, Rows, join
from frostlab.anatomy.parts import Held, Split
from frostlab.surgery.state import load_pieces, save_pieces

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class Plan:
    """The static table of a split: which rows are frozen, of the weight and of the bias."""

    axis: int  # of the weight's rows: 0 for (out, in), 1 for Conv1D's (in, out)
    weight: Rows | None  # None: no row is frozen
    bias: Rows | None


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

    def slots(self) -> dict[str, Held]:
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
    def weight(self) -> Tensor:
        """The fused weight; gradients reach the trainable rows."""
        return _whole(self.trainable_weight, self.frozen_weight, self.plan.weight, self.plan.axis)

    @property
    def bias(self) -> Tensor | None:
        """The fused bias, if there is one; gradients reach the trainable rows."""
        if "bias" not in self.shapes:
            return None
        return _whole(self.trainable_bias, self.frozen_bias, self.plan.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                return self._project(x)
        return self._project(x)

    def _project(self, x: Tensor) -> Tensor:
        return _Project.apply(
            x,
            self.trainable_weight,
            self.frozen_weight,
            self.trainable_bias,
            self.frozen_bias,
            self.plan,
        )

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
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]


def _whole(trainable: Tensor | None, frozen: Tensor | None, rows: Rows | None, axis: int) -> Tensor:
    """Assemble a tensor from its two parts, in one copy where there are two."""
    if rows is None or frozen is None:
        assert trainable is not None
        return trainable
    return frozen if trainable is None else join(rows, frozen, trainable, axis)


class _Project(torch.autograd.Function):
    """x · Wᵀ + b over all rows; gradients of W and b for the trainable rows alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        trainable: Tensor | None,
        frozen: Tensor | None,
        trainable_bias: Tensor | None,
        frozen_bias: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_weight else None, trainable, frozen)
        ctx.plan = plan
        ctx.bias_dtype = None if trainable_bias is None else trainable_bias.dtype
        weight = _whole(trainable, frozen, plan.weight, plan.axis).to(x.dtype)
        bias = None
        if trainable_bias is not None or frozen_bias is not None:
            bias = _whole(trainable_bias, frozen_bias, plan.bias, 0).to(x.dtype)
        return F.linear(x, weight.t() if plan.axis else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, trainable, frozen = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = _whole(trainable, frozen, plan.weight, plan.axis).to(grad.dtype)
            grad_x = grad @ (weight.t() if plan.axis else weight)
        flat = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)  # (N, out)
        if ctx.needs_input_grad[1]:
            inputs = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)  # (N, in)
            blocks = [
                inputs.t() @ part if plan.axis else part.t() @ inputs
                for part in _columns(flat, plan.weight)
            ]
            grad_weight = blocks[0] if len(blocks) == 1 else torch.cat(blocks, plan.axis)
            grad_weight = grad_weight.to(trainable.dtype)
        if ctx.needs_input_grad[3]:
            sums = [part.sum(0) for part in _columns(flat, plan.bias)]
            grad_bias = (sums[0] if len(sums) == 1 else torch.cat(sums)).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, grad_bias, None, None


def _columns(grad: Tensor, frozen: Rows | None) -> list[Tensor]:
    """The trainable columns of (N, out): views where they are runs, one copy where not."""
    if frozen is None:
        return [grad]
    rest = frozen.rest()
    if rest.repeats == 1:
        return [grad[:, start:stop] for start, stop in rest.spans]
    return [rest.take(grad, 1)]
