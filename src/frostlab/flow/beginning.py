"""`watch`: looks at what it is given, and begins a flow."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from frostlab.errors import BadInput
from frostlab.flow.probe import Gradient, own_gradient
from frostlab.flow.watching import Tell, Watch


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    every: int = 10,
    *,
    change: bool = False,
    agreement: bool = False,
    units: bool = False,
    entropy: bool = False,
    verify: bool = True,
    gradient: Gradient = own_gradient,
    tell: Tell | None = None,
) -> Watch:
    """Watch which parts of a model learn: `with fl.watch(model, optimizer) as flow: train()`.

    Steps 1, 1 + every, 1 + 2 every … are measured: gradient, weight and update norms a part.
    `change` adds the distance from the start and keeps a copy of what learns; `agreement` the
    cosine between successive gradients and keeps a copy of them; `units` dead and saturated units;
    `entropy` that of every attention head. `verify` compares digests of what is frozen at the end.
    `gradient` says where a parameter's gradient lies, if it is not in `.grad`. `tell` is called
    with each report as it arrives, such as `TensorBoard(folder).flow`.
    """
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise BadInput("watch: the optimizer is no torch.optim.Optimizer; give the one that steps")
    if not isinstance(every, int) or every < 1:
        raise BadInput(f"watch: every is {every}; a whole number of steps from 1 on, such as 10")
    if (units or entropy) and _is_compiled(model):
        raise BadInput("watch: units and entropy need the model as it was before torch.compile")
    return Watch(
        model, optimizers, every, change, agreement, units, entropy, verify, gradient, tell
    )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )
