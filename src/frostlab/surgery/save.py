"""Saving only what can have learned, and loading it back onto the same model.

Frozen weights are not stored: they are kept as the base has them, or made again from their seed,
and a fingerprint tells whether they came out the same.
"""

import json
import os
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frostlab import __version__
from frostlab.errors import BadInput
from frostlab.roles.parts import Part, Slot
from frostlab.roles.read import survey
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import file_digest, use_default_mode
from frostlab.surgery.freeze import frozen_statistics, refuse_untouchable, refuse_wrapped
from frostlab.surgery.origin import Origin, fingerprint, origin_of, same_fingerprint
from frostlab.surgery.orthogonal import renewed

_MANIFEST = "delta.json"
_LEFTOVERS = ("trainable-*.safetensors", ".tensors-*.tmp", ".manifest-*.tmp")
FORMAT = 1
_FIELDS = {
    "model": str,
    "architecture": dict,
    "trainable": list,
    "buffers": list,
    "frozen": dict,
    "statistics": dict,
}


@dataclass(frozen=True)
class Delta:
    """A delta folder, read."""

    folder: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]


def write_delta(folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> Path:
    """Write the tensors, then the JSON that names them; the old delta holds until then."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"save_trainable: {folder} is a file, not a folder")
    if folder.is_dir() and not all(map(_is_ours, folder.iterdir())):
        raise BadInput(f"save_trainable: {folder} holds something else; choose an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Path] = []
    try:
        started.append(folder / f".tensors-{os.getpid()}.tmp")
        save_file(tensors, started[0])
        use_default_mode(started[0])
        digest = file_digest(started[0])
        name = f"trainable-{digest[:12]}.safetensors"
        manifest = {**manifest, "tensors": {"file": name, "sha256": digest}}
        os.replace(started[0], folder / name)
        started.append(folder / f".manifest-{os.getpid()}.tmp")
        started[1].write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        before = _named_before(folder)
        os.replace(started[1], folder / _MANIFEST)
    finally:
        for path in started:
            path.unlink(missing_ok=True)
    if before not in (None, name):  # only what the last delta named: another save may be under way
        (folder / before).unlink(missing_ok=True)
    return folder


def _is_ours(path: Path) -> bool:
    """Whether a file is a delta's, or what a save that was killed left behind."""
    return path.name == _MANIFEST or any(path.match(pattern) for pattern in _LEFTOVERS)


def _named_before(folder: Path) -> str | None:
    """The tensor file that the delta in a folder names, if there is a readable one."""
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["tensors"]["file"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and Path(found).name == found else None


def read_delta(folder: Path) -> Delta:
    """Read a delta folder, or say in one line what is wrong with it."""
    path = folder / _MANIFEST
    if not path.is_file():
        raise BadInput(f"load_trainable: {folder} is not a delta folder (no {_MANIFEST})")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        file, sha = folder / manifest["tensors"]["file"], manifest["tensors"]["sha256"]
        for name, kind in _FIELDS.items():
            if not isinstance(manifest[name], kind):
                raise TypeError(f"{name} is not a {kind.__name__}")
        for record in manifest["frozen"].values():
            if record["origin"] is not None:
                Origin(**record["origin"])
            [float(value) for value in record["fingerprint"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"load_trainable: {path} is damaged ({error!r})") from None
    if version != FORMAT:
        raise BadInput(f"load_trainable: {path} has format {version}, this frostlab reads 1")
    if not file.is_file() or file.parent != folder:
        raise BadInput(f"load_trainable: {file} is missing")
    if file_digest(file) != sha:
        raise BadInput(f"load_trainable: {file} was truncated or changed (its digest differs)")
    try:
        return Delta(folder, manifest, load_file(file))
    except SafetensorError as error:
        raise BadInput(f"load_trainable: {file} is damaged ({error})") from None


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


def export(model: nn.Module, folder: str | Path) -> Path:
    """Write a checkpoint that `from_pretrained` loads without frostlab, with equal logits."""
    refuse_wrapped(model, "export")
    _, slots = survey(model)
    refuse_untouchable(model, slots.values(), "export")
    if any(slot.adapts is not None for slot in slots.values()):
        raise BadInput("export: the model has adapters; put PEFT's adapters into its weights first")
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise BadInput(
            f"export: {type(model).__name__} is not a Hugging Face model; its state_dict() "
            "already has the plain names and shapes"
        )
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadInput(f"export: {target} is a file, not a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").exists():
        raise BadInput(f"export: {target} holds something else; choose an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}-{uuid4().hex}")
    made.mkdir()
    try:
        save(made, state_dict=model.state_dict())
        for path in made.glob("*.safetensors"):
            use_default_mode(path)
        if not target.exists():
            made.rename(target)
            return target
        written = {path.name for path in made.iterdir()}
        for old in target.glob("model*.safetensors*"):
            if old.name not in written:
                old.unlink()  # a shard of an older checkpoint; other files are the user's
        for path in made.iterdir():
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target
