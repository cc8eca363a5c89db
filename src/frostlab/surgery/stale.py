"""Notices an optimizer that a later freeze or thaw has left behind.

An optimizer that holds replaced parameters would go on stepping tensors that are no longer in the
model, and one built before a thaw would never touch what was thawed: training would look healthy.
One hook, installed with the first change, looks at each optimizer once after each change.
"""

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import LeftOutOfOptimizer, StaleOptimizer

_REPLACED = "_frostlab_replaced"
_CHECKED = "_frostlab_checked"
_changes = 0
_awaited: list[tuple["weakref.ref[nn.Parameter]", str]] = []


def retire(parameter: nn.Parameter, name: str) -> None:
    """Mark a parameter as no longer the model's: no optimizer may step with it."""
    _note_change()
    parameter.grad = None
    setattr(parameter, _REPLACED, name)


def expect(parameter: nn.Parameter, name: str) -> None:
    """Say that a parameter learns from now on, so some optimizer should hold it."""
    _note_change()
    _awaited.append((weakref.ref(parameter), name))


def changes() -> int:
    """How often freezing or thawing has changed what learns, in any model."""
    return _changes


def _note_change() -> None:
    global _changes
    if _changes == 0:
        register_optimizer_step_pre_hook(_look)
    _changes += 1


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, _CHECKED, None) == _changes:
        if _awaited:  # its second step since the change: the others have had their first
            _warn_of_left_out()
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = [getattr(parameter, _REPLACED) for parameter in held if hasattr(parameter, _REPLACED)]
    if stale:
        raise StaleOptimizer(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that freeze or thaw "
            f"replaced after it was built, such as {stale[0]}; build the optimizer afterwards"
        )
    known = {id(parameter) for parameter in held}
    _awaited[:] = [(ref, name) for ref, name in _awaited if id(ref()) not in known]
    setattr(optimizer, _CHECKED, _changes)


def _warn_of_left_out() -> None:
    """Warn of parameters that get gradients and are in no optimizer that steps."""
    left = [name for ref, name in _awaited if (p := ref()) is not None and p.grad is not None]
    _awaited.clear()
    if left:
        warnings.warn(
            f"{len(left)} parameters became trainable after the optimizer was built and are in "
            f"none that steps, such as {left[0]}; they will not learn until it is built anew",
            LeftOutOfOptimizer,
            stacklevel=4,
        )
