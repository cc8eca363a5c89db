"""Freezing by structure: `requires_grad` for every parameter, fused projections split."""

import warnings
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostlab.errors import BadInput, NothingLearns
from frostlab.roles.parts import Part, Rows, Slot, Split
from frostlab.roles.read import anatomy, survey
from frostlab.roles.snapshot import Anatomy
from frostlab.surgery.multihead import SplitMultiheadAttention, put_together, take_apart
from frostlab.surgery.split import Plan, SplitProjection
from frostlab.surgery.stale import expect, record_change, retire

_FALCON_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"


def freeze(model: nn.Module, *selections: str) -> Anatomy:
    """Freeze exactly what is selected, make everything else trainable, and return the anatomy.

    Fused projections that are frozen in part are split, so that frozen rows have no gradient,
    no optimizer state and no weight-gradient matmul. Build the optimizer afterwards.
    """
    refuse_wrapped(model, "freeze")
    found, slots = survey(model)
    refuse_untouchable(model, slots.values(), "freeze")
    if not selections:
        raise BadInput("freeze: no selection given; `query`, `layers[0]`, `all`, or fl.thaw")
    wanted = found.with_frozen(*selections)
    _apply(model, wanted, slots)
    if not wanted.count("trainable"):
        warnings.warn("everything is frozen: nothing will learn", NothingLearns, stacklevel=2)
    return anatomy(model)


def thaw(model: nn.Module) -> Anatomy:
    """Make everything trainable again (but what the architecture holds fixed), projections whole.

    Build the optimizer afterwards.
    """
    refuse_wrapped(model, "thaw")
    found, slots = survey(model)
    refuse_untouchable(model, slots.values(), "thaw")
    _apply(model, found.with_frozen(), slots)
    return anatomy(model)


def learn_only(model: nn.Module, keys: Collection[str]) -> None:
    """Make exactly the parts with these keys trainable (but what the architecture holds fixed).

    Build the optimizer afterwards.
    """
    refuse_wrapped(model, "freeze")
    found, slots = survey(model)
    refuse_untouchable(model, slots.values(), "freeze")
    frozen = {part.key for part in found.parts} - set(keys)
    _apply(model, found.with_state(frozen), slots)


def _apply(model: nn.Module, wanted: Anatomy, slots: dict[str, Slot]) -> None:
    """Bring every parameter into the state that `wanted` gives it."""
    frozen_rows = _rows_to_freeze(wanted.parts)
    for name in frozen_rows:
        _check_splittable(slots[name], slots.values())
    learned = {id(p) for p in model.parameters() if p.requires_grad}
    changed = _resplit(model, frozen_rows, slots)
    if changed:
        _, slots = survey(model)
    for part in wanted.parts:
        parameter = slots[part.name].piece_of(part.rows).parameter
        learns = part.state == "trainable"
        changed |= parameter.requires_grad != learns
        parameter.requires_grad_(learns)
        if not learns:
            parameter.grad = None
        elif id(parameter) not in learned:
            expect(parameter, part.name)
            learned.add(id(parameter))
    _hold_running_statistics(model)
    if changed:
        record_change(model)


def _rows_to_freeze(parts: Iterable[Part]) -> dict[str, Rows]:
    """The rows to freeze of each slot that is to be frozen in part."""
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


def _check_splittable(slot: Slot, slots: Iterable[Slot]) -> None:
    owner = slot.owner
    held = {id(piece.parameter) for piece in slot.pieces}
    for other in slots:
        if other.owner is not owner and id(other.pieces[0].parameter) in held:
            raise BadInput(
                f"freeze: {slot.name} is fused and tied to {other.name}, so it cannot be split; "
                "freeze the roles it holds together, or untie the modules"
            )
    if any(other.adapts == slot.name.rpartition(".")[0] for other in slots):
        raise BadInput(
            f"freeze: {slot.name} is fused and has adapters, so it cannot be split; "
            "freeze the roles it holds together"
        )
    if isinstance(owner, Split) or type(owner) is nn.MultiheadAttention:
        return
    kind = type(owner)
    plain = isinstance(owner, nn.Linear) and kind.forward is nn.Linear.forward
    falcon = f"{kind.__module__}.{kind.__qualname__}" == _FALCON_LINEAR
    conv1d = f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"
    if not (plain or falcon or conv1d):
        raise BadInput(
            f"freeze: {slot.name} is fused in a {kind.__name__}, which cannot be split; "
            "freeze the roles it holds together"
        )
    if hasattr(owner, "parametrizations"):
        raise BadInput(f"freeze: {slot.name} is parametrized; remove the parametrization first")


def _resplit(model: nn.Module, plans: dict[str, Rows], slots: dict[str, Slot]) -> bool:
    """Split or join the owners of fused slots that are not as wanted; say whether any was."""
    owners = {
        id(slot.owner): (slot.owner, dict[str, Slot]())
        for slot in slots.values()
        if slot.name in plans or isinstance(slot.owner, Split)
    }
    for slot in slots.values():  # a module in several places has several names; one is planned
        if id(slot.owner) in owners:
            held = owners[id(slot.owner)][1]
            if slot.name in plans or slot.local not in held:
                held[slot.local] = slot
    changed = False
    for owner, held in owners.values():
        frozen = {local: plans.get(slot.name) for local, slot in held.items()}
        if isinstance(owner, nn.MultiheadAttention):
            changed |= _resplit_attention(owner, held, apart=any(frozen.values()))
            continue
        weight = held["weight"]
        plan = Plan(weight.axis, frozen["weight"], frozen.get("bias"))
        if isinstance(owner, SplitProjection) and owner.plan == plan:
            continue
        _retire(held)
        module = owner.joined() if isinstance(owner, SplitProjection) else owner
        if plan.weight is not None or plan.bias is not None:
            module = SplitProjection(module, plan)
        _replace(model, owner, module)
        changed = True
    if changed:
        _guard_nested_tensors(model)
    return changed


def _resplit_attention(
    attention: nn.MultiheadAttention, held: dict[str, Slot], apart: bool
) -> bool:
    if apart == isinstance(attention, SplitMultiheadAttention):
        return False
    _retire({local: s for local, s in held.items() if local.startswith("in_proj_")})
    if isinstance(attention, SplitMultiheadAttention):
        put_together(attention)
    else:
        take_apart(attention)
    return True


def _retire(held: dict[str, Slot]) -> None:
    for slot in held.values():
        for piece in slot.pieces:
            retire(piece.parameter, slot.name)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in another's place, everywhere it is used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _guard_nested_tensors(model: nn.Module) -> None:
    """Keep torch's encoder off its fused inference path while an attention in it is split."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        split = any(isinstance(m, SplitMultiheadAttention) for m in encoder.modules())
        if split and not hasattr(encoder, "_frostlab_nested"):
            encoder._frostlab_nested = encoder.use_nested_tensor  # type: ignore[assignment]
            encoder.use_nested_tensor = False
        elif not split and hasattr(encoder, "_frostlab_nested"):
            encoder.use_nested_tensor = encoder._frostlab_nested  # type: ignore[assignment]
            del encoder._frostlab_nested


def _use_running_statistics(module: nn.Module, args: object) -> None:
    module.training = False


def _hold_running_statistics(model: nn.Module) -> None:
    """Make a frozen BatchNorm use its running statistics even after `model.train()`.

    One without weights of its own is frozen when the whole model is.
    """
    everything = list(model.parameters())
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            continue
        own = list(module.parameters(recurse=False)) or everything
        frozen = not any(p.requires_grad for p in own)
        held = [k for k, hook in module._forward_pre_hooks.items()
                if hook is _use_running_statistics]  # fmt: skip
        if frozen and not held:
            module.register_forward_pre_hook(_use_running_statistics)
        elif not frozen and held:
            module.training = model.training
            for key in held:
                del module._forward_pre_hooks[key]


def frozen_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of frozen BatchNorms, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if _use_running_statistics in module._forward_pre_hooks.values()
        for name, buffer in module.named_buffers(recurse=False)
    }


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
