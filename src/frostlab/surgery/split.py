"""A fused projection whose rows are partly frozen, held as two parameters.

The forward is one matmul over all rows; the backward computes weight gradients for the
trainable rows only. State dicts keep the fused names and shapes, so a checkpoint moves freely
between split and untouched models.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.anatomy import Piece, Rows
from frostlab.anatomy.parts import Held, Split
from frostlab.errors import BadInput
from frostlab.surgery.projection import Kept, Plan, Project, assemble
from frostlab.surgery.state import load_pieces, save_pieces

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
