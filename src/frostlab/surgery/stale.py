"""Notice when freeze, thaw or grow has changed which parameters of a model learn.

Code that was compiled or captured for a model asks `changes(model)` whether it is still valid.
Optimizers are checked by a hook: one that holds replaced parameters would go on stepping tensors
that are no longer in the model, and one built before a thaw would never update what was thawed;
training would look healthy in both cases.
"""

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import LeftOutOfOptimizer, StaleOptimizer

_REPLACED = "_frostlab_replaced"  # on a parameter: the name it had in the model
_CHECKED = "_frostlab_checked"  # on an optimizer: the change it was last checked after

# How often each model changed; only models that somebody asked about are counted.
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
# Changes of all models together: it only tells optimizers when to check their own parameters.
_total = 0


# Parameters that have become trainable and that no optimizer is known to hold yet, by name.
_expected: list[tuple["weakref.ref[nn.Parameter]", str]] = []


def changes(model: nn.Module) -> int:
    """How often freeze, thaw or grow has changed what learns in this model, since first asked."""
    return _counts.setdefault(model, 0)


def record_change(model: nn.Module) -> None:
    """Count a change for every model that shares a module with this one."""
    global _total
    if _total == 0:
        register_optimizer_step_pre_hook(_check_optimizer)
    _total += 1
    changed = set(model.modules())
    for counted in list(_counts):
        if not changed.isdisjoint(counted.modules()):
            _counts[counted] += 1


def retire(parameter: nn.Parameter, name: str) -> None:
    """Mark a parameter as replaced: no optimizer may step with it."""
    parameter.grad = None
    setattr(parameter, _REPLACED, name)


def expect(parameter: nn.Parameter, name: str) -> None:
    """Expect an optimizer to hold a parameter, which is trainable from now on."""
    _expected.append((weakref.ref(parameter), name))


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer at its first and its second step after a change."""
    number, seen_twice = getattr(optimizer, _CHECKED, (0, False))
    if number == _total:
        if not seen_twice:  # its second step: the model's other optimizers have had their first
            setattr(optimizer, _CHECKED, (_total, True))
            _warn_of_left_out()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = [
        getattr(parameter, _REPLACED) for parameter in parameters if hasattr(parameter, _REPLACED)
    ]
    if stale:
        raise StaleOptimizer(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that freeze or thaw "
            f"replaced after it was built, such as {stale[0]}; build the optimizer afterwards"
        )
    ids = {id(parameter) for parameter in parameters}
    _expected[:] = [
        (ref, name)
        for ref, name in _expected
        if (parameter := ref()) is not None and id(parameter) not in ids
    ]
    setattr(optimizer, _CHECKED, (_total, False))


def _warn_of_left_out() -> None:
    """Warn of parameters that get gradients and are in no optimizer that steps.

    Parameters without a gradient stay expected: their model may not have been trained yet.
    """
    left_out: list[str] = []
    waiting: list[tuple[weakref.ref[nn.Parameter], str]] = []
    for ref, name in _expected:
        parameter = ref()
        if parameter is not None and parameter.grad is not None:
            left_out.append(name)
        else:
            waiting.append((ref, name))
    _expected[:] = waiting
    if left_out:
        warnings.warn(
            f"{len(left_out)} parameters became trainable after the optimizer was built and are in "
            f"none that steps, such as {left_out[0]}; they will not learn until it is rebuilt",
            LeftOutOfOptimizer,
            stacklevel=4,
        )
