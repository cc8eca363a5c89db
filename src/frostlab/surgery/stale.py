"""Detection of outdated code and optimizers after freeze, thaw, grow or merge_adapters.

A compiled step or captured CUDA graph is valid while `changes(model)` returns the same number. A
hook before each optimizer step finds two errors that do not show in the loss at once: an optimizer
that updates replaced parameters, which are no longer in the model, and an optimizer that was built
before parameters became trainable and does not update them.
"""

import warnings
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import LeftOutOfOptimizer, StaleOptimizer

_REPLACED = "_frostlab_replaced"  # attribute of a replaced parameter: its former name
# Attribute of an optimizer: (`_total` at its last check, whether it has made another step since).
_CHECKED = "_frostlab_checked"


@dataclass(frozen=True, eq=False)
class _Expected:
    """A newly trainable parameter that no checked optimizer holds yet."""

    parameter: "weakref.ref[nn.Parameter]"
    name: str
    model: "tuple[weakref.ref[nn.Parameter], ...]"  # the parameters of its model

    def is_missed_by(self, held: Collection[int]) -> bool:
        """Return whether an optimizer trains other parameters of the model, but not this one.

        A parameter without a gradient does not count, because its model may not train yet.

        Args:
            held: the ids of the optimizer's parameters.
        """
        parameter = self.parameter()
        return (
            parameter is not None
            and parameter.grad is not None
            and any(id(other()) in held for other in self.model)
        )


# Number of changes per model, only for models that were passed to `changes`.
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
# Number of changes of all models; after each increase, optimizers are checked again.
_total = 0
_expected: list[_Expected] = []


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


def expect(model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Record the names and parameters that an optimizer of this model must hold from now on."""
    whole = tuple(weakref.ref(parameter) for parameter in model.parameters())
    _expected.extend(_Expected(weakref.ref(p), name, whole) for name, p in parameters)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer with replaced parameters at its first step after a change.

    At its second step, warn of newly trainable parameters of its model that no optimizer holds: if
    several optimizers take turns, the parameters of all of them are known by then.
    """
    checked_total, stepped_twice = getattr(optimizer, _CHECKED, (0, False))
    if checked_total == _total and stepped_twice:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in parameters}
    if checked_total == _total:
        setattr(optimizer, _CHECKED, (_total, True))
        _warn_of_left_out(ids)
        return
    stale = [
        getattr(parameter, _REPLACED) for parameter in parameters if hasattr(parameter, _REPLACED)
    ]
    if stale:
        raise StaleOptimizer(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters, such as {stale[0]}, "
            "that freeze, thaw or merge_adapters replaced; build a new optimizer"
        )
    _expected[:] = [
        expected for expected in _expected
        if (parameter := expected.parameter()) is not None and id(parameter) not in ids
    ]  # fmt: skip
    setattr(optimizer, _CHECKED, (_total, False))


def _warn_of_left_out(held: Collection[int]) -> None:
    """Warn about new parameters with a gradient that no optimizer updates.

    Args:
        held: ids of the parameters of the optimizer that steps; only the models that it trains
            are looked at.
    """
    left_out = [expected for expected in _expected if expected.is_missed_by(held)]
    if left_out:
        reported = set(left_out)
        _expected[:] = [expected for expected in _expected if expected not in reported]
        warnings.warn(
            f"{len(left_out)} parameters, such as {left_out[0].name}, became trainable after the "
            "optimizer was built, and no optimizer updates them; rebuild the optimizer",
            LeftOutOfOptimizer,
            stacklevel=4,
        )
