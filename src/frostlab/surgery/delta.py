"""Saving only what can have learned, and loading it back onto the same model.

Frozen weights are not stored: they are kept as the base has them, or made again from their seed,
and a fingerprint tells whether they came out the same.
"""

from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab import __version__
from frostlab.anatomy import Anatomy, Part, Slot, survey
from frostlab.errors import BadInput
from frostlab.surgery.checks import refuse_untouchable, refuse_wrapped
from frostlab.surgery.folder import FORMAT, Delta, read_delta, write_delta
from frostlab.surgery.freezing import frozen_statistics
from frostlab.surgery.origin import Origin, fingerprint, origin_of, same_fingerprint
from frostlab.surgery.orthogonal import renewed


def save_trainable(
    model: nn.Module, folder: str | Path, *, frozen: Literal["rebuild", "store"] = "rebuild"
) -> Path:
    """Write what can have learned: trainable tensors (rows, of split ones) and live buffers.

    Args:
        frozen: "rebuild" records how frozen weights were made and what they look like; "store"
            writes them too, for weights that cannot be made again elsewhere.
    """
    if frozen not in ("rebuild", "store"):
        raise BadInput(f'save_trainable: frozen={frozen!r} is not "rebuild" or "store"')
    refuse_wrapped(model, "save_trainable")
    found, slots = survey(model)
    refuse_untouchable(model, slots.values(), "save_trainable")
    tensors: dict[str, Tensor] = {}
    origins: dict[str, Any] = {}
    for part in found.parts:
        value = slots[part.name].read(part.rows)
        if part.state == "trainable" or frozen == "store":
            tensors[part.key] = value.cpu().contiguous().clone()
        if part.state != "trainable":
            origin = origin_of(model, part, slots[part.name])
            origins[part.key] = {
                "fingerprint": fingerprint(value),
                "origin": None if origin is None else origin.to_dict(),
            }
    held = frozen_statistics(model)
    buffers = {
        name: buffer
        for name, buffer in _saved_buffers(model).items()
        if name not in held or frozen == "store"
    }
    tensors |= {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
    manifest = {
        "format": FORMAT,
        "frostlab": __version__,
        "model": found.model,
        "architecture": _signature(found),
        "trainable": [p.key for p in found.parts if p.state == "trainable"],
        "buffers": sorted(buffers),
        "frozen": origins,
        "statistics": {n: fingerprint(b) for n, b in held.items() if n not in buffers},
    }
    return write_delta(Path(folder), tensors, manifest)


def load_trainable(model: nn.Module, folder: str | Path) -> None:
    """Put a delta's weights into a model of the same architecture and the same base.

    Everything is checked before anything is written. What is frozen or trainable in the model
    stays as it is: call freeze to go on training as before.
    """
    refuse_wrapped(model, "load_trainable")
    found, slots = survey(model)
    refuse_untouchable(model, slots.values(), "load_trainable")
    delta = read_delta(Path(folder))
    _check_architecture(found, delta)
    parts = {part.key: part for part in found.parts}
    _check_complete(delta, parts)
    buffers = _saved_buffers(model)
    _check_buffers(delta, buffers)
    values: list[tuple[Part, Tensor]] = []
    for key, part in parts.items():
        if key in delta.tensors:
            values.append((part, delta.tensors[key]))
        else:
            value = _frozen_value(part, slots[part.name], delta.manifest["frozen"][key])
            if value is not None:
                values.append((part, value))
    with torch.no_grad():
        for part, value in values:
            slots[part.name].write(value.to(slots[part.name].pieces[0].parameter), part.rows)
        for name in delta.manifest["buffers"]:
            buffers[name].copy_(delta.tensors[name])


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that checkpoints hold."""
    saved = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _signature(found: Anatomy) -> dict[str, list[list[int]]]:
    """The shape of every part, and how it is cut into heads."""
    return {
        part.key: [list(part.shape), [] if part.heads is None else list(astuple(part.heads))]
        for part in found.parts
    }


def _check_architecture(found: Anatomy, delta: Delta) -> None:
    ours, theirs = _signature(found), delta.manifest["architecture"]
    if ours == theirs and found.model == delta.manifest["model"]:
        return
    if ours == theirs:
        raise BadInput(
            f"load_trainable: {delta.folder} was saved from a {delta.manifest['model']}, "
            f"this is a {found.model}"
        )
    name = next(k for k in {**theirs, **ours} if ours.get(k) != theirs.get(k))
    raise BadInput(
        f"load_trainable: {delta.folder} was saved from another {delta.manifest['model']}: "
        f"{name} is {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} in this "
        f"{found.model}"
    )


def _check_complete(delta: Delta, parts: dict[str, Part]) -> None:
    """What the file lacks must be exactly what was frozen."""
    stored = delta.tensors.keys() - set(delta.manifest["buffers"])
    missing = parts.keys() - stored
    frozen = delta.manifest["frozen"].keys()
    if wrong := sorted((missing - frozen) | (stored - parts.keys())):
        raise BadInput(
            f"load_trainable: {delta.folder} lacks or adds {wrong[0]}, which was not frozen"
        )


def _check_buffers(delta: Delta, buffers: dict[str, Tensor]) -> None:
    """Buffers that were saved must fit, and frozen statistics be what they were."""
    for name in delta.manifest["buffers"]:
        ours = buffers.get(name)
        stored = delta.tensors.get(name)
        if ours is None or stored is None or ours.shape != stored.shape:
            raise BadInput(f"load_trainable: the buffer {name} of {delta.folder} does not fit")
    for name, wanted in delta.manifest["statistics"].items():
        ours = buffers.get(name)
        if ours is None or not same_fingerprint(fingerprint(ours), wanted):
            raise BadInput(
                f"load_trainable: the frozen statistics {name} differ from this model's; "
                'load the same base, or save with frozen="store"'
            )


def _frozen_value(part: Part, slot: Slot, record: dict[str, Any]) -> Tensor | None:
    """What a frozen part must become: None if it is that already, else made again and checked."""
    wanted = record["fingerprint"]
    if same_fingerprint(fingerprint(slot.read(part.rows)), wanted):
        return None
    if record["origin"] is None:
        raise BadInput(
            f"load_trainable: {part.key} was frozen as its base had it, and this model's is "
            'another; load the same base, or save with frozen="store"'
        )
    value = renewed(part, slot, Origin(**record["origin"])).to(slot.pieces[0].parameter.dtype)
    if not same_fingerprint(fingerprint(value), wanted):
        raise BadInput(
            f"load_trainable: {part.key}, made again, differs from what was trained with; "
            'load the same base, or save with frozen="store"'
        )
    return value
