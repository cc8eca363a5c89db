"""Freezing and thawing of parts of a model.

A part is a parameter, or the rows of a parameter that have one role, such as query. A fixed part,
such as a table of sinusoids, is one that is never trained. Each call sets the state of every part,
so the result does not depend on earlier calls. The exception is a model with adapters: PEFT has
frozen its other weights, they stay frozen, and a selection such as `query` freezes more.

A fused projection (several roles in one parameter) with both frozen and trainable rows is split
into separate parameters. A frozen BatchNorm keeps its running statistics. A slot is a parameter of
the unmodified model, with the parameters that hold its rows now (`frostlab.roles.parts.Slot`).
"""

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList

from frostlab.errors import BadInput, NothingLearns
from frostlab.roles.parts import Part, Rows, Slot, Split, join
from frostlab.roles.read import anatomy, keep_evidence, slots_of, survey
from frostlab.roles.snapshot import Anatomy
from frostlab.surgery.anywhere import Frozen, SplitModule, can_split, split_module
from frostlab.surgery.multihead import SplitMultiheadAttention, join_attention, split_attention
from frostlab.surgery.split import FrozenRows, SplitProjection
from frostlab.surgery.stale import expect, record_change, retire

# Classes of modules that SplitProjection can replace although their forward is not nn.Linear's.
_FALCON_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"
_CONV1D = "transformers.pytorch_utils.Conv1D"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes")


def freeze(model: nn.Module, *selections: str) -> Anatomy:
    """Freeze the selected parts, and make the others trainable; return the anatomy.

    If the model has adapters, the parts that are already frozen stay frozen, and a selection such
    as `"query"` freezes more. To say exactly what learns, select all parts and exceptions, for
    example `"all", "!adapter", "!head"`.

    Fixed parts, which are never trained, stay as they are. Partly frozen fused projections are
    split, so that frozen rows have no gradient, no optimizer state and no weight-gradient matmul.
    Splitting replaces parameters, so build the optimizer afterwards.
    """
    refuse_wrapped(model, "freeze")
    before, slots = survey(model)
    refuse_untouchable(model, slots.values(), "freeze")
    if not selections:
        raise BadInput("freeze: no selection given; try `query`, `layers[0]` or `all`, or fl.thaw")
    wanted = before.with_frozen(*selections)
    _apply(model, wanted, slots)
    if not wanted.count("trainable"):
        warnings.warn("everything is frozen: nothing will learn", NothingLearns, stacklevel=2)
    return anatomy(model)


def thaw(model: nn.Module) -> Anatomy:
    """Make all parts trainable except fixed parts, and rejoin split projections.

    In a model with adapters, this includes the weights that PEFT froze. Build the optimizer
    afterwards.
    """
    refuse_wrapped(model, "thaw")
    before, slots = survey(model)
    refuse_untouchable(model, slots.values(), "thaw")
    _apply(model, before.with_frozen(), slots)
    return anatomy(model)


def learn_only(model: nn.Module, keys: Collection[str]) -> None:
    """Make the parts with these keys trainable, except fixed parts, and freeze all others.

    Build the optimizer afterwards.
    """
    refuse_wrapped(model, "freeze")
    before, slots = survey(model)
    refuse_untouchable(model, slots.values(), "freeze")
    frozen = {part.key for part in before.parts} - set(keys)
    _apply(model, before.with_state(frozen), slots)


def _apply(model: nn.Module, wanted: Anatomy, slots: dict[str, Slot]) -> None:
    """Set every parameter to its state in `wanted`."""
    frozen_rows = _rows_to_freeze(wanted.parts)
    for name in frozen_rows:
        roles = [part.role for part in wanted.parts if part.name == name]
        _check_splittable(slots[name], slots.values(), ", ".join(roles[:-1]) + f" and {roles[-1]}")
    learned_before = {id(p) for p in model.parameters() if p.requires_grad}
    newly_trainable: list[tuple[str, nn.Parameter]] = []
    changed = _resplit(model, frozen_rows, slots)
    if changed:
        keep_evidence(model)  # a split changes no computation, so nothing is read again
        slots = {slot.name: slot for slot in slots_of(model)}
    for part in wanted.parts:
        parameter = slots[part.name].piece_of(part.rows).parameter
        learns = part.state == "trainable"
        changed |= parameter.requires_grad != learns
        parameter.requires_grad_(learns)
        if not learns:
            parameter.grad = None
        elif id(parameter) not in learned_before:
            newly_trainable.append((part.name, parameter))
            learned_before.add(id(parameter))  # a parameter can hold several parts
    expect(model, newly_trainable)
    _hold_running_statistics(model)
    if changed:
        record_change(model)


def _rows_to_freeze(parts: Iterable[Part]) -> dict[str, Rows]:
    """Return the frozen rows of each slot that also has trainable rows."""
    frozen: dict[str, Rows] = {}
    trainable: set[str] = set()
    for part in parts:
        if part.rows is None:
            continue
        if part.state == "trainable":
            trainable.add(part.name)
        else:
            rows = frozen.get(part.name)
            frozen[part.name] = part.rows if rows is None else rows | part.rows
    return {name: rows for name, rows in frozen.items() if name in trainable}


def _check_splittable(slot: Slot, slots: Iterable[Slot], roles: str) -> None:
    """Raise an error if a slot cannot be split.

    A slot cannot be split if it is tied, quantised, has adapters, is what another weight is
    computed from, or is in a module that does not read its parameters by their names (an LSTM).

    Args:
        roles: the roles of its rows, for the error message.
    """
    why, instead = "", ""
    owner, kind = slot.owner, type(slot.owner)
    parameters = {id(piece.parameter) for piece in slot.pieces}
    for other in slots:
        if id(other.pieces[0].parameter) in parameters and (
            other.owner is not owner or other.local != slot.local
        ):
            why, instead = f"is tied to {other.name}", ", or untie the modules"
    if any(other.adapts == slot.name.rpartition(".")[0] for other in slots):
        why = "has adapters"
    if _is_computed_from(slot):
        why = "is what another weight is computed from (weight_norm or the like)"
        instead = ", or remove the parametrization first"
    elif slot.pieces[0].parameter.dtype.itemsize == 1:
        why = f"is quantised ({slot.pieces[0].parameter.dtype})"
    elif not isinstance(owner, Split) and not can_split(kind):
        why = f"is in a {kind.__name__}, which does not read its parameters by their names"
    if why:
        raise BadInput(
            f"freeze: {slot.name} holds {roles} and {why}, so it cannot be split; "
            f"freeze {roles} together{instead}"
        )


def _is_computed_from(slot: Slot) -> bool:
    """Return whether another weight is computed from a slot, as with weight_norm."""
    owner = slot.owner
    if isinstance(owner, ParametrizationList):
        return True
    hooks = owner._forward_pre_hooks.values()
    return any(
        type(hook).__module__.startswith("torch.nn.utils")
        and slot.local.startswith(str(getattr(hook, "name", "\n")))
        for hook in hooks
    )


def _is_projection(weight: Slot | None) -> bool:
    """Return whether a weight belongs to a linear module that SplitProjection can replace."""
    if weight is None:
        return False
    kind = type(weight.owner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    plain = issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward
    return (weight.axis == 1) == (name == _CONV1D) and (plain or name in (_FALCON_LINEAR, _CONV1D))


def _resplit(model: nn.Module, frozen_rows: dict[str, Rows], slots: dict[str, Slot]) -> bool:
    """Split or join the modules of fused slots as needed; return whether anything changed."""
    owners = {  # id → module, and its slots by local name
        id(slot.owner): (slot.owner, dict[str, Slot]())
        for slot in slots.values()
        if slot.name in frozen_rows or isinstance(slot.owner, Split)
    }
    # a shared module has slots under several names; `frozen_rows` has only one of the names
    for slot in slots.values():
        if id(slot.owner) in owners:
            owned = owners[id(slot.owner)][1]
            if slot.name in frozen_rows or slot.local not in owned:
                owned[slot.local] = slot
    changed = False
    for owner, owned in owners.values():
        frozen = {local: frozen_rows.get(slot.name) for local, slot in owned.items()}
        if type(owner) in (nn.MultiheadAttention, SplitMultiheadAttention):
            changed |= _resplit_attention(owner, owned, split=any(frozen.values()))
            continue
        if not isinstance(owner, SplitProjection) and not _is_projection(owned.get("weight")):
            changed |= _resplit_in_place(owner, owned, frozen)
            continue
        weight = owned["weight"]
        rows = FrozenRows(weight.axis, frozen["weight"], frozen.get("bias"))
        if isinstance(owner, SplitProjection) and owner.frozen_rows == rows:
            continue
        _retire(owned)
        module = owner.joined() if isinstance(owner, SplitProjection) else owner
        if rows.weight is not None or rows.bias is not None:
            module = SplitProjection(module, rows)
        _replace(model, owner, module)
        changed = True
    if changed:
        avoid_fast_path(model)
    return changed


def _resplit_attention(
    attention: nn.MultiheadAttention, slots: dict[str, Slot], split: bool
) -> bool:
    """Split or join an nn.MultiheadAttention; return whether it changed."""
    if split == isinstance(attention, SplitMultiheadAttention):
        return False
    _retire({local: s for local, s in slots.items() if local.startswith("in_proj_")})
    if isinstance(attention, SplitMultiheadAttention):
        join_attention(attention)
    else:
        split_attention(attention)
    return True


def _resplit_in_place(
    owner: nn.Module, slots: dict[str, Slot], frozen_rows: dict[str, Rows | None]
) -> bool:
    """Split or join parameters of a module that keeps its forward; return whether it changed."""
    wanted = {
        local: Frozen(slots[local].axis, rows)
        for local, rows in frozen_rows.items()
        if rows is not None
    }
    present = owner._frostlab_frozen if isinstance(owner, SplitModule) else {}
    if wanted == present:
        return False
    _retire({local: slot for local, slot in slots.items() if local in wanted.keys() | present})
    if isinstance(owner, SplitModule):
        owner.joined()
    if wanted:
        split_module(owner, wanted)
    return True


def _retire(slots: dict[str, Slot]) -> None:
    for slot in slots.values():
        for piece in slot.pieces:
            retire(piece.parameter, slot.name)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another one wherever the model uses it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def avoid_fast_path(model: nn.Module) -> None:
    """Make torch call the modules of each nn.TransformerEncoder that surgery has changed.

    In eval mode torch otherwise passes the weights of a whole layer to one operation, on nested
    tensors if a batch is padded. That operation knows no adapters and needs the fused weight that a
    split attention does not have. The former settings are restored once no such change is left.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            _switch_off(module, "activation_relu_or_gelu", _is_adapted(module))
        elif isinstance(module, nn.TransformerEncoder):
            changed = any(
                isinstance(child, SplitMultiheadAttention) or _is_adapted(child)
                for child in module.modules()
            )
            _switch_off(module, "use_nested_tensor", changed)


def _is_adapted(layer: nn.Module) -> bool:
    """Return whether a layer of torch's encoder calls PEFT's modules in its MLP."""
    return isinstance(layer, nn.TransformerEncoderLayer) and not (
        isinstance(layer.linear1, nn.Linear) and isinstance(layer.linear2, nn.Linear)
    )


def _switch_off(module: nn.Module, setting: str, off: bool) -> None:
    """Set an attribute of a module to False if `off`, else back to its former value."""
    former = f"_frostlab_{setting}"
    if off and not hasattr(module, former):
        setattr(module, former, getattr(module, setting))
        setattr(module, setting, False)
    elif not off and hasattr(module, former):
        setattr(module, setting, getattr(module, former))
        delattr(module, former)


def _use_running_statistics(module: nn.Module, args: object) -> None:
    """Put a BatchNorm into eval mode; registered as a forward pre-hook."""
    module.training = False


def _hold_running_statistics(model: nn.Module) -> None:
    """Make a frozen BatchNorm use its running statistics even after `model.train()`.

    A BatchNorm without weights counts as frozen if the whole model is frozen.
    """
    all_parameters = list(model.parameters())
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            continue
        parameters = list(module.parameters(recurse=False)) or all_parameters
        frozen = not any(p.requires_grad for p in parameters)
        keys = [key for key, hook in module._forward_pre_hooks.items()
                if hook is _use_running_statistics]  # fmt: skip
        if frozen and not keys:
            module.register_forward_pre_hook(_use_running_statistics)
        elif not frozen and keys:
            module.training = model.training
            for key in keys:
                del module._forward_pre_hooks[key]


def frozen_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of frozen BatchNorms, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if _use_running_statistics in module._forward_pre_hooks.values()
        for name, buffer in module.named_buffers(recurse=False)
    }


@dataclass(frozen=True)
class PartlyFrozen:
    """The frozen rows of a tensor of a state dict; its other rows are trainable."""

    axis: int
    rows: Rows

    def frozen_rows(self, tensor: Tensor) -> Tensor:
        """Return the frozen rows of the whole tensor."""
        return self.rows.take(tensor, self.axis)

    def trainable_rows(self, tensor: Tensor) -> Tensor:
        """Return the trainable rows of the whole tensor."""
        return self.rows.rest().take(tensor, self.axis)

    def join(self, frozen: Tensor, trainable: Tensor) -> Tensor:
        """Return the whole tensor."""
        return join(self.rows, frozen, trainable, self.axis)


def frozen_tensors(model: nn.Module) -> dict[str, PartlyFrozen | None]:
    """Return the frozen rows of each state dict tensor that has any; None if all are frozen."""
    frozen: dict[str, PartlyFrozen | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        held: set[int] = set()  # ids of parameters that hold rows of fused tensors
        for local, (shape, axis, pieces) in (
            module.slots() if isinstance(module, Split) else {}
        ).items():
            held |= {id(piece.parameter) for piece in pieces}
            spans = [piece.rows for piece in pieces if not piece.parameter.requires_grad]
            if spans:
                rows = reduce(or_, spans)
                whole = len(rows) == shape[axis]
                frozen[prefix + local] = None if whole else PartlyFrozen(axis, rows)
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in held and not parameter.requires_grad:
                frozen[prefix + local] = None
    return frozen


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Raise an error if the model or a submodule is wrapped for several devices or compiled."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"{verb}: {model!r} is not a model")
    for path, module in model.named_modules():
        if kind := _wrapper(module):
            where = f"the model's `{path}`" if path else "the model"
            raise BadInput(
                f"{verb}: {where} is already wrapped ({kind}); "
                f"unwrap it, or call {verb} before wrapping it"
            )


def _wrapper(module: nn.Module) -> str:
    """Return the name of the wrapper around a module, or an empty string."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "torch.compile"
    for cls in type(module).__mro__:
        if cls.__name__ == "FSDPModule":
            return "fully_shard"
        if cls.__name__ in _WRAPPERS:
            return cls.__name__
    return ""


def refuse_untouchable(model: nn.Module, slots: Iterable[Slot], verb: str) -> None:
    """Raise an error for weights on the meta device and for quantised weights."""
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
                    f"{type(parameter.data).__name__}); use the full-precision model"
                )
    for path, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED_MODULES):
            raise BadInput(
                f"{verb}: {path} is quantised ({type(module).__name__}); "
                "use the full-precision model"
            )
