"""What surgery refuses to touch, before it touches anything."""

from collections.abc import Iterable

import torch
from torch import nn

from frostlab.anatomy import Slot
from frostlab.errors import BadInput

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes")


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Refuse a model, or a part of one, whose parameters something else already holds."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"{verb}: {model!r} is not a model")
    for path, module in model.named_modules():
        if kind := _wrapper(module):
            where = f"its `{path}`" if path else "the model"
            raise BadInput(f"{verb}: {where} is already wrapped ({kind}); {verb} before wrapping")


def _wrapper(module: nn.Module) -> str:
    """What a module is wrapped in, or nothing."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "torch.compile"
    for cls in type(module).__mro__:
        if cls.__name__ == "FSDPModule":
            return "fully_shard"
        if cls.__name__ in _WRAPPERS:
            return cls.__name__
    return ""


def refuse_untouchable(model: nn.Module, slots: Iterable[Slot], verb: str) -> None:
    """Refuse weights that have no values here, or none that can be changed."""
    for slot in slots:
        for piece in slot.pieces:
            parameter = piece.parameter
            if parameter.is_meta:
                raise BadInput(
                    f"{verb}: {slot.name} is on the meta device and has no values; "
                    "load the weights first (`anatomy` and `inspect` accept meta models)"
                )
            plain = type(parameter.data) in (torch.Tensor, nn.Parameter)
            if not parameter.is_floating_point() or not plain:
                raise BadInput(
                    f"{verb}: {slot.name} is quantised or packed ({parameter.dtype}, "
                    f"{type(parameter.data).__name__}); {verb} the full-precision model"
                )
    for path, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED_MODULES):
            raise BadInput(
                f"{verb}: {path} is quantised ({type(module).__name__}); "
                f"{verb} the full-precision model"
            )
