"""Saving and loading of trainable tensors, and export of whole Hugging Face checkpoints.

A delta is a folder with the trainable tensors, the buffers and a manifest, delta.json. Tensors are
stored by part: a parameter, or the rows of a parameter that have one role, such as query. Frozen
weights and the running statistics of frozen BatchNorms are normally not stored: loading keeps the
model's own values if their fingerprints (a few numbers that identify a tensor) match the manifest.
If a weight's fingerprint differs, loading regenerates the weight from its recorded origin (the call
of `orthogonalize` or `randomize` that made it), or raises an error if it has none.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import torch
from torch import Tensor, nn

from frostlab import __version__
from frostlab.errors import BadInput
from frostlab.models.huggingface import as_huggingface, is_own
from frostlab.roles.parts import Part, Slot
from frostlab.roles.read import survey
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import (
    Lock,
    file_digest,
    load_tensors,
    parse_json,
    read_bytes,
    remove_temporary,
    save_tensors,
    use_default_mode,
    whole_folder,
    write_whole,
)
from frostlab.surgery.freeze import frozen_statistics, refuse_untouchable, refuse_wrapped
from frostlab.surgery.origin import (
    FINGERPRINT,
    Origin,
    fingerprint,
    origin_of,
    same_fingerprint,
)
from frostlab.surgery.orthogonal import renewed
from frostlab.text import plain, short
from frostlab.typed import check_schema, read

SCHEMA = 1  # version of delta.json
_MANIFEST = "delta.json"
_TENSORS = re.compile(r"trainable-[0-9a-f]{12}\.safetensors")  # name of a delta's tensor file
# Files that a delta folder may hold: tensor files, and temporary files of an interrupted save.
_OWN_FILES = (_MANIFEST, "trainable-*.safetensors", ".trainable-*.tmp", f".{_MANIFEST}.*.tmp")
HEAD = "head.safetensors"  # the head of an exported classifier, if its new class has no head
_WAIT = 60.0  # seconds to wait for another process that saves to the same folder


@dataclass(frozen=True)
class TensorFile:
    """The file with the tensors of a delta."""

    file: str  # its name in the folder
    sha256: str  # checksum of the file


@dataclass(frozen=True)
class FrozenPart:
    """The record of a frozen part, by which its values are recognised or regenerated."""

    fingerprint: list[float]  # numbers that identify the values, up to rounding
    origin: Origin | None  # how to make the values again; null if that is unknown


@dataclass(frozen=True)
class Manifest:
    """The contents of delta.json."""

    schema: int  # `SCHEMA` when it was written
    frostlab: str  # version that wrote the delta
    model: str  # class of the model
    architecture: dict[str, list[list[int]]]  # part → its shape and its heads
    trainable: list[str]  # names of the trainable parts
    buffers: list[str]  # names of the stored buffers
    frozen: dict[str, FrozenPart]  # part → how to recognise it
    statistics: dict[str, list[float]]  # statistic of a frozen BatchNorm → its fingerprint
    tensors: TensorFile  # the file of the tensors


@dataclass(frozen=True)
class Delta:
    """The contents of a delta folder."""

    folder: Path
    manifest: Manifest
    tensors: dict[str, Tensor]


def save_trainable(
    model: nn.Module, folder: str | Path, *, frozen: Literal["rebuild", "store"] = "rebuild"
) -> Path:
    """Write a delta: the buffers and the trainable parts, which may be rows of fused tensors.

    Args:
        frozen: "rebuild" records the origin and a fingerprint of frozen weights; "store" also
            writes their values, for weights that cannot be regenerated elsewhere.
    """
    if frozen not in ("rebuild", "store"):
        raise BadInput(f'save_trainable: frozen={frozen!r} is not "rebuild" or "store"')
    refuse_wrapped(model, "save_trainable")
    anatomy, slots = survey(model)
    refuse_untouchable(model, slots.values(), "save_trainable")
    tensors: dict[str, Tensor] = {}
    frozen_parts: dict[str, Any] = {}
    for part in anatomy.parts:
        value = slots[part.name].read(part.rows)
        if part.state == "trainable" or frozen == "store":
            tensors[part.key] = value.cpu().contiguous().clone()
        if part.state != "trainable":
            origin = origin_of(model, part, slots[part.name])
            frozen_parts[part.key] = {
                "fingerprint": fingerprint(value),
                "origin": None if origin is None else origin.to_dict(),
            }
    statistics = frozen_statistics(model)
    buffers = {
        name: buffer
        for name, buffer in _saved_buffers(model).items()
        if name not in statistics or frozen == "store"
    }
    tensors |= {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
    manifest = {
        "schema": SCHEMA,
        "frostlab": __version__,
        "model": anatomy.model,
        "architecture": _signature(anatomy),
        "trainable": [p.key for p in anatomy.parts if p.state == "trainable"],
        "buffers": sorted(buffers),
        "frozen": frozen_parts,
        "statistics": {n: fingerprint(b) for n, b in statistics.items() if n not in buffers},
    }
    return write_delta(Path(folder), tensors, manifest)


def load_trainable(model: nn.Module, folder: str | Path) -> None:
    """Load a delta into a model of the same architecture and with the same base weights.

    The delta is checked completely before the model is changed. Parameters stay frozen or
    trainable as they are; call freeze to continue training as before.
    """
    refuse_wrapped(model, "load_trainable")
    anatomy, slots = survey(model)
    refuse_untouchable(model, slots.values(), "load_trainable")
    delta = read_delta(Path(folder))
    _check_architecture(anatomy, delta)
    parts = {part.key: part for part in anatomy.parts}
    _check_complete(delta, parts)
    buffers = _saved_buffers(model)
    _check_buffers(delta, buffers)
    values: list[tuple[Part, Tensor]] = []
    for key, part in parts.items():
        if key in delta.tensors:
            _check_alike(delta, key, slots[part.name].read(part.rows))
            values.append((part, delta.tensors[key]))
        else:
            value = _frozen_value(part, slots[part.name], delta.manifest.frozen[key])
            if value is not None:
                values.append((part, value))
    with torch.no_grad():
        for part, value in values:
            slots[part.name].write(value.to(slots[part.name].pieces[0].parameter), part.rows)
        for name in delta.manifest.buffers:
            buffers[name].copy_(delta.tensors[name])


def export(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write a checkpoint that `from_pretrained` loads without frostlab, with the same logits.

    A folder that is not empty must hold an older checkpoint, which is replaced; other files in it
    are kept.

    frostlab's GPT becomes a GPT-2, its Decoder a Llama (with qk_norm a Qwen3). A GPT that
    classifies becomes a MegatronBERT without a head and the file head.safetensors: the logits are
    its last hidden states, averaged over the tokens or taken at the last token
    (`GPTConfig.pooling`), times the head's weight.

    Args:
        tokenizer: a Hugging Face tokenizer to write to the folder as well.
    """
    check_exportable(model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise BadInput(
            f"export: tokenizer {tokenizer!r:.40} is not a Hugging Face tokenizer; "
            "load it with AutoTokenizer.from_pretrained"
        )
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadInput(f"export: {target} is a file, not a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").exists():
        raise BadInput(f"export: {target} holds other files; choose an empty folder")
    new = target.with_name(f".{target.name}-{uuid4().hex}") if target.exists() else target
    with whole_folder(new) as temporary:
        write_checkpoint(model, temporary, tokenizer)
    if new != target:
        _move_checkpoint(new, target)
    return target


def check_exportable(model: nn.Module) -> None:
    """Refuse a model that cannot be written as a Hugging Face checkpoint."""
    refuse_wrapped(model, "export")
    _, slots = survey(model)
    refuse_untouchable(model, slots.values(), "export")
    if any(slot.adapts is not None for slot in slots.values()):
        own = hasattr(model, "merge_and_unload")  # PEFT's own wrapper around the model
        merge = "model.merge_and_unload()" if own else "fl.merge_adapters(model)"
        raise BadInput(f"export: the model has adapters; call {merge} first")
    if not is_own(model) and not hasattr(model, "save_pretrained"):
        raise BadInput(
            f"export: {type(model).__name__} is not a Hugging Face model; its state_dict() "
            "already has the original names and shapes"
        )


def write_checkpoint(
    model: nn.Module,
    folder: Path,
    tokenizer: Any = None,
    labels: Sequence[str] | None = None,
    length: int | None = None,
) -> None:
    """Write a model, its tokenizer and the names of its classes to an existing folder.

    Args:
        length: the number of tokens of the longest text in training.
    """
    pad, end = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos"))
    made, state = cast(Any, model), model.state_dict()
    if is_own(model):
        converted = as_huggingface(model, pad=pad, end=end, length=length)
        made, state = converted.model, converted.model.state_dict()
        if converted.head is not None:
            save_tensors(folder / HEAD, {"weight": converted.head})
    if labels is not None:
        made.config.id2label = dict(enumerate(labels))
        made.config.label2id = {label: number for number, label in enumerate(labels)}
    made.save_pretrained(folder, state_dict=state)
    for path in folder.glob("*.safetensors"):
        use_default_mode(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _move_checkpoint(source: Path, target: Path) -> None:
    """Move the files of a checkpoint into a folder that holds an older checkpoint."""
    try:
        written = {path.name for path in source.iterdir()}
        for old in (*target.glob("model*.safetensors*"), *target.glob(HEAD)):
            if old.name not in written:
                old.unlink()  # a shard of the older checkpoint; other files are the user's
        for path in source.iterdir():
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(source, ignore_errors=True)


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved in checkpoints."""
    saved = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _signature(anatomy: Anatomy) -> dict[str, list[list[int]]]:
    """Return the shape and the heads of every part, by key."""
    return {
        part.key: [list(part.shape), [] if part.heads is None else list(astuple(part.heads))]
        for part in anatomy.parts
    }


def _check_architecture(anatomy: Anatomy, delta: Delta) -> None:
    signature, saved = _signature(anatomy), delta.manifest.architecture
    if signature == saved and anatomy.model == delta.manifest.model:
        return
    if signature == saved:
        raise BadInput(
            f"load_trainable: {delta.folder} was saved from a {_shown(delta.manifest.model)}, "
            f"but this is a {anatomy.model}"
        )
    name = next(k for k in {**saved, **signature} if signature.get(k) != saved.get(k))
    raise BadInput(
        f"load_trainable: {delta.folder} was saved from another "
        f"{_shown(delta.manifest.model)}: "
        f"{_shown(name)} is {_shown(saved.get(name, 'absent'))} there, "
        f"but {signature.get(name, 'absent')} in this "
        f"{anatomy.model}"
    )


def _shown(value: object) -> str:
    """Return a value of a manifest for an error message: one short line."""
    return short(plain(value), 80)


def _check_complete(delta: Delta, parts: dict[str, Part]) -> None:
    """Check that the delta has the value or the record of every part, and no unknown parts."""
    stored = delta.tensors.keys() - set(delta.manifest.buffers)
    missing = parts.keys() - stored
    frozen = delta.manifest.frozen.keys()
    if absent := sorted(missing - frozen):
        raise BadInput(f"load_trainable: {delta.folder} has no value for {_shown(absent[0])}")
    if unknown := sorted(stored - parts.keys()):
        raise BadInput(
            f"load_trainable: {delta.folder} has a value for {_shown(unknown[0])}, which is not "
            "in the model"
        )


def _check_alike(delta: Delta, name: str, current: Tensor) -> None:
    """Check that a stored tensor has the shape and data type of the model's tensor."""
    stored = delta.tensors[name]
    if stored.shape != current.shape or stored.dtype != current.dtype:
        raise BadInput(
            f"load_trainable: {name} of {delta.folder} is {_kind(stored)}, "
            f"but {_kind(current)} in this model"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_buffers(delta: Delta, buffers: dict[str, Tensor]) -> None:
    """Check that saved buffers fit this model and that its frozen statistics match the manifest."""
    for name in delta.manifest.buffers:
        if name not in buffers or name not in delta.tensors:
            raise BadInput(
                f"load_trainable: the buffer {_shown(name)} of {delta.folder} does not fit this "
                "model"
            )
        _check_alike(delta, name, buffers[name])
    for name, wanted in delta.manifest.statistics.items():
        buffer = buffers.get(name)
        if buffer is None or not same_fingerprint(fingerprint(buffer), wanted):
            raise BadInput(
                f"load_trainable: the frozen statistics {_shown(name)} differ from this model's; "
                'load the same base weights, or save with frozen="store"'
            )


def _frozen_value(part: Part, slot: Slot, record: FrozenPart) -> Tensor | None:
    """Regenerate and check a frozen part's value; return None if the model already has it."""
    wanted = record.fingerprint
    if same_fingerprint(fingerprint(slot.read(part.rows)), wanted):
        return None
    if record.origin is None:
        raise BadInput(
            f"load_trainable: {part.key} was frozen and not stored, and this model has other "
            'values; load the same base weights, or save with frozen="store"'
        )
    value = renewed(part, slot, record.origin).to(slot.pieces[0].parameter.dtype)
    if not same_fingerprint(fingerprint(value), wanted):
        raise BadInput(
            f"load_trainable: the regenerated values of {part.key} differ from those in training; "
            'load the same base weights, or save with frozen="store"'
        )
    return value


def write_delta(folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> Path:
    """Write the tensors, then replace the manifest; until then an older delta stays valid.

    Afterwards, remove the older tensor file, and files that an interrupted save left behind.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"save_trainable: {folder} is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder.resolve())
    if not lock.acquire(_WAIT):
        raise BadInput(f"save_trainable: another process is saving to {folder}")
    try:
        if not all(any(path.match(name) for name in _OWN_FILES) for path in folder.iterdir()):
            raise BadInput(f"save_trainable: {folder} holds other files; choose an empty folder")
        path = folder / f"trainable-{uuid4().hex[:12]}.safetensors"
        try:
            save_tensors(path, tensors)
            complete = {**manifest, "tensors": {"file": path.name, "sha256": file_digest(path)}}
            write_whole(folder / _MANIFEST, json.dumps(complete, indent=1, sort_keys=True))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        for other in folder.iterdir():
            if _TENSORS.fullmatch(other.name) and other != path and not other.is_dir():
                other.unlink()
        remove_temporary(folder, "trainable-*")
        remove_temporary(folder, _MANIFEST)
    finally:
        lock.release()
    return folder


def read_delta(folder: Path) -> Delta:
    """Read and check a delta folder; raise a one-line error if it is damaged."""
    manifest = read_manifest(folder)
    file = folder / manifest.tensors.file
    if not file.is_file():
        raise BadInput(f"load_trainable: {file} is missing")
    if file_digest(file) != manifest.tensors.sha256:
        raise BadInput(f"load_trainable: {file} was truncated or changed (its digest differs)")
    return Delta(folder, manifest, load_tensors(file))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a delta folder; raise a one-line error if a value is invalid."""
    path = folder / _MANIFEST
    where = f"load_trainable: {path}"
    try:
        values = parse_json(read_bytes(path), where)
    except FileNotFoundError:
        raise BadInput(f"load_trainable: {folder} is not a delta folder (no {_MANIFEST})") from None
    manifest = read(Manifest, check_schema(values, SCHEMA, where), where)
    name = manifest.tensors.file
    if not _TENSORS.fullmatch(name):
        raise BadInput(
            f"{where}: tensors.file should be trainable-NNNNNNNNNNNN.safetensors, but is "
            f"{name!r:.60}"
        )
    for key, record in manifest.frozen.items():
        if len(record.fingerprint) != FINGERPRINT:
            raise BadInput(f"{where}: the fingerprint of {_shown(key)} has a wrong length")
        if record.origin is not None and not record.origin.is_valid:
            raise BadInput(f"{where}: the origin of {_shown(key)} is not one that frostlab makes")
    return manifest
