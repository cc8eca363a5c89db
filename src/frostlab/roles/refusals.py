"""Weights that cannot be read, and what to do about them, in one line."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from frostlab.errors import BadInput, UnknownArchitecture

_MOST_PATHS = 8  # largest number of paths that an error message lists


def refuse_lazy(model: nn.Module) -> None:
    """Raise an error if a weight has no shape yet, as in `nn.LazyLinear` before its first batch."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BadInput(
                f"{type(model).__name__}: {name} has no shape yet, because it is in a lazy module; "
                "run the model on one batch first"
            )


def refuse_complex(model: nn.Module) -> None:
    """Raise an error for a matrix of complex numbers."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.ndim > 1:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UnknownArchitecture(
                f"{name} is complex ({kind}), and only real weights can be probed; keep its real "
                "and imaginary parts as two parameters"
            )


def computed_weight(model: nn.Module, problem: str) -> str:
    """If an error names a module whose weight is computed from another one, say so."""
    words = [word.strip("`,;:") for word in problem.split()]
    for path, module in model.named_modules():
        if path and any(word == path or word.startswith(f"{path}.") for word in words):
            lists: Any = module.parametrizations if is_parametrized(module) else {}
            kinds = [type(item).__name__ for name in lists for item in lists[name]]
            kinds += [
                type(hook).__name__
                for hook in module._forward_pre_hooks.values()
                if type(hook).__module__.startswith("torch.nn.utils")
            ]
            if kinds:
                kind = kinds[0].strip("_")
                return f"; its weight is computed by a parametrization ({kind}): remove it first"
    return ""


def how_to_register(model: nn.Module, unplaced: Iterable[str]) -> str:
    """Return the end of the error message: how to describe the model, and what needs a role."""
    templates = _templates(unplaced)
    paths = ", ".join(f"`{path}`" for path in templates[:_MOST_PATHS])
    left = len(templates) - _MOST_PATHS
    more = f" and {left} more" if left > 0 else ""
    return (
        f"fl.register_architecture({type(model).__name__}, {{path: role}}, heads=…) can describe "
        f"it, with a role for {paths}{more} (docs/architectures.md)"
    )


def _templates(paths: Iterable[str]) -> list[str]:
    """Return the distinct paths, with `{i}` for the first number and `*` for later numbers."""
    templates: dict[str, None] = {}
    for path in paths:
        segments, numbered = path.split("."), False
        for i, segment in enumerate(segments):
            if segment.isdecimal():
                segments[i] = "*" if numbered else "{i}"
                numbered = True
        templates[".".join(segments)] = None
    return list(templates)
