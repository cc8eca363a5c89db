"""No figure before both sides are shown to do the same work."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from frostlab.errors import FrostlabError

STEPS = 4
_FIRST = {torch.bfloat16: 0.015, torch.float32: 1e-4}
_LATER = {torch.bfloat16: 0.05, torch.float32: 0.005}


class SidesDiffer(FrostlabError):
    """The two sides do not compute the same: their times mean nothing."""


def sharpened(model: nn.Module, head: str, factor: float = 10.0) -> nn.Module:
    """Make a fresh head's answers far apart, so that a loss depends on what it is given."""
    with torch.no_grad():
        model.get_submodule(head).weight.mul_(factor)  # type: ignore[operator]
    return model


def step_losses(step: Callable[[], Any]) -> list[float]:
    """The losses of a side's first steps."""
    return [float(step()) for _ in range(STEPS)]


def agree(ours: Sequence[float], theirs: Sequence[float], precision: torch.dtype) -> dict[str, Any]:
    """Compare the losses of the first steps over one batch, dropout off; refuse what differs.

    The first loss shows that the forward pass is the same, those after it the backward pass and
    the update. Tolerances are shares of the first loss, or of the present one where that is larger.
    """
    first, later = _FIRST[precision], _LATER[precision]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        allowed = max(abs(theirs[0]), abs(other)) * (later if number else first)
        if not abs(one - other) <= allowed:
            raise SidesDiffer(
                f"the sides differ: loss {one:.6g} and {other:.6g} at step {number + 1} on the "
                f"first batch, {allowed:.2g} is allowed; nothing was timed"
            )
    tidy()
    return {
        "ours_losses": [round(value, 6) for value in ours],
        "theirs_losses": [round(value, 6) for value in theirs],
        "loss_tolerance": [first, later],
    }


def tidy() -> None:
    """Forget compiled code and give memory back, so that one measurement leaves the next alone."""
    torch._dynamo.reset()  # it also forgets how often it compiled, which has a limit
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
