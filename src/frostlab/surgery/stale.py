"""Detection of outdated code and optimizers after freeze, thaw, grow or merge_adapters.

A compiled step or captured CUDA graph is valid while `changes(model)` returns the same number. A
hook before each optimizer step finds two errors that do not show in the loss at once: an optimizer
that updates replaced parameters, which are no longer in the model, and an optimizer that was built
before parameters became trainable and does not update them.
"""

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import LeftOutOfOptimizer, StaleOptimizer

_REPLACED = "_frostlab_replaced"  # attribute of a replaced parameter: its former name
# Attribute of an optimizer: (`_total` at its last check, whether it has made another step since).
_CHECKED = "_frostlab_checked"

# Number of changes per model, only for models that were passed to `changes`.
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
# Number of changes of all models; after each increase, optimizers are checked again.
_total = 0
# Newly trainable parameters, with names, that no checked optimizer holds yet.
_expected: list[tuple["weakref.ref[nn.Parameter]", str]] = []


def changes(model: nn.Module) -> int:
    """Return how many changes of a model were recorded since `changes` was first called for it."""
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
    """Check an optimizer at its first step after a change; at its second step, warn if need be.

    The warning is about new parameters that no optimizer holds. If several optimizers take turns,
    all of them have been checked by then.
    """
    checked_total, stepped_twice = getattr(optimizer, _CHECKED, (0, False))
    if checked_total == _total:
        if not stepped_twice:
            setattr(optimizer, _CHECKED, (_total, True))
            _warn_of_left_out()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = [
        getattr(parameter, _REPLACED) for parameter in parameters if hasattr(parameter, _REPLACED)
    ]
    if stale:
        raise StaleOptimizer(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters, such as {stale[0]}, "
            "that freeze, thaw or merge_adapters replaced; build the optimizer afterwards"
        )
    ids = {id(parameter) for parameter in parameters}
    _expected[:] = [
        (ref, name)
        for ref, name in _expected
        if (parameter := ref()) is not None and id(parameter) not in ids
    ]
    setattr(optimizer, _CHECKED, (_total, False))


def _warn_of_left_out() -> None:
    """Warn about newly trainable parameters that have a gradient but that no optimizer updates.

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
            f"{len(left_out)} parameters, such as {left_out[0]}, became trainable after the "
            "optimizer was built, and no optimizer updates them; rebuild the optimizer",
            LeftOutOfOptimizer,
            stacklevel=4,
        )
