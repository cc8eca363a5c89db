"""A delta folder on disk: one safetensors file, and `delta.json`, written last, that names it.

A crash leaves the old delta or the new one, never half of one.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from frostlab.data.cache import like_any_file
from frostlab.errors import BadInput
from frostlab.surgery.origin import Origin

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
        like_any_file(started[0])
        digest = _file_digest(started[0])
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


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    if _file_digest(file) != sha:
        raise BadInput(f"load_trainable: {file} was truncated or changed (its digest differs)")
    try:
        return Delta(folder, manifest, load_file(file))
    except SafetensorError as error:
        raise BadInput(f"load_trainable: {file} is damaged ({error})") from None
