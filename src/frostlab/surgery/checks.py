"""What surgery refuses to touch, before it touches anything."""

from collections.abc import Iterable

import torch
from torch import nn

from frostlab.anatomy import Slot
from frostlab.errors import BadInput

_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes")


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Refuse a model that something else already holds on to the parameters of."""
    kind = type(model).__name__
    wrapped = kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        wrapped, kind = True, "fully_shard"
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        wrapped, kind = True, "torch.compile"
    if wrapped:
        raise BadInput(f"{verb}: the model is already wrapped ({kind}); {verb} before wrapping")


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
