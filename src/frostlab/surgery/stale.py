"""Notices an optimizer that holds parameters a later freeze or thaw replaced.

Such an optimizer would go on stepping tensors that are no longer in the model: training would
look healthy and change nothing. Replaced parameters are marked, and one hook, installed when
the first is, looks at each optimizer once after each replacement.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frostlab.errors import StaleOptimizer

_MARK = "_frostlab_replaced"
_CHECKED = "_frostlab_checked"
_replacements = 0


def retire(parameter: nn.Parameter, name: str) -> None:
    """Mark a parameter as no longer the model's."""
    global _replacements
    if _replacements == 0:
        register_optimizer_step_pre_hook(_refuse_stale)
    _replacements += 1
    parameter.grad = None
    setattr(parameter, _MARK, name)


def _refuse_stale(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, _CHECKED, None) == _replacements:
        return
    stale = [
        getattr(parameter, _MARK)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if hasattr(parameter, _MARK)
    ]
    if stale:
        raise StaleOptimizer(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that freeze or thaw "
            f"replaced after it was built, such as {stale[0]}; build the optimizer afterwards"
        )
    setattr(optimizer, _CHECKED, _replacements)
