"""Detection of stale code and optimizers after freeze, thaw or grow.

Compiled or captured code compares `changes(model)` to know whether it is still valid. A hook
checks optimizers: an optimizer with replaced parameters would update tensors that are no longer in
the model, and an optimizer built before a thaw would never update the thawed parameters. Training
would look healthy in both cases.
"""

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import LeftOutOfOptimizer, StaleOptimizer

_REPLACED = "_frostlab_replaced"  # attribute of a replaced parameter: its former name
_CHECKED = "_frostlab_checked"  # attribute of an optimizer: the last change it was checked for

# Number of changes per model; only models passed to `changes` are counted.
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
# Total number of changes; an optimizer is checked again when it has increased.
_total = 0


# Newly trainable parameters that are not known to be in an optimizer yet, and their names.
_expected: list[tuple["weakref.ref[nn.Parameter]", str]] = []


def changes(model: nn.Module) -> int:
    """Return the number of changes by freeze, thaw or grow since the first call for a model."""
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
    """Mark a parameter as replaced; an optimizer that holds it will raise StaleOptimizer."""
    parameter.grad = None
    setattr(parameter, _REPLACED, name)


def expect(parameter: nn.Parameter, name: str) -> None:
    """Record that an optimizer must hold this newly trainable parameter."""
    _expected.append((weakref.ref(parameter), name))


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer at its first and second steps after a change."""
    number, seen_twice = getattr(optimizer, _CHECKED, (0, False))
    if number == _total:
        if not seen_twice:  # by its second step, all other optimizers have made a first step
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
    """Warn about parameters that have a gradient but are in no optimizer that steps.

    Parameters without a gradient are checked again later: their model may not be in training yet.
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
