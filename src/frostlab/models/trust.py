"""Checks of models that other people made, before transformers opens their files.

A model is a folder or a name on the hub. Its config is checked for code that it would run and for
absurd sizes. The weights in a folder must be safetensors files that lie inside it.
"""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from frostlab.errors import BadInput
from frostlab.storage import check_name, open_regular, read_json

TRUST = "FROSTLAB_TRUST_REMOTE_CODE"  # the variable is 1 if models may run their own code
CONVERT = "python -P -m frostlab.models.convert"  # reads pickled weights safely
_ALLOW = f"if you trust it, allow it with --trust-remote-code or {TRUST}=1"
_CONFIG_BYTES = 16 << 20
_INDEX_BYTES = 64 << 20
_MOST_COUNT = 100_000  # largest number of layers, experts, labels, …
# words in the config keys whose values are such numbers
_COUNTED = ("layer", "depth", "block", "expert", "stage", "label", "head", "stack", "group")
_MOST_PIECES = 30_000  # modules and parameters of a model; a Llama with 126 layers has 2,800
_MOST_NUMBERS = 10**13  # numbers in all parameters of a model
_SECONDS = 5  # processor time that reading a config, or building a model without weights, may take
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER = (".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".npz")


class Refused(BadInput):
    """Raised if a model would run its own code or load unchecked weights without permission."""


def code_is_trusted() -> bool:
    """Return whether the user allows models to run their own code.

    The permission comes from the command line or the environment; no recipe or run can give it.
    """
    return os.environ.get(TRUST) == "1"


def check_config(path: Path, name: str) -> dict[str, Any]:
    """Return the values of a config.json; refuse absurd sizes, and code unless it is trusted."""
    try:
        values = read_json(path, _CONFIG_BYTES)
    except FileNotFoundError:
        raise BadInput(f"{name} is not a model folder (no config.json)") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path} should be an object with the key model_type")
    for key, value in _entries(values):
        last = key.rpartition(".")[2]
        if isinstance(value, int | float) and any(word in last for word in _COUNTED):
            if not abs(value) <= _MOST_COUNT:
                shown = "a number of many digits" if abs(value) > 1e30 else value
                raise BadInput(f"{path}: {key!r:.80} is {shown}; {_MOST_COUNT:,} is the most")
        elif last == "configuration_files":
            raise BadInput(f"{path}: {key!r:.80} names other configs, which frostlab does not read")
    if not code_is_trusted():
        _refuse_code(values, path)
    return values


def _entries(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key and its value, also inside lists and objects."""
    waiting: list[tuple[str, Any]] = list(values.items())
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += [(f"{key}.{inner}", node) for inner, node in value.items()]
        elif isinstance(value, list):
            waiting += [(key, node) for node in value]


def _refuse_code(values: dict[str, Any], path: Path) -> None:
    """Refuse a config that needs code of its folder or the hub, or another model's weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = values.get("model_type")
    if "auto_map" in values and not (isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES):
        listed = values["auto_map"]
        classes = [str(entry) for entry in listed.values()] if isinstance(listed, dict) else []
        named = ", ".join(map(_file_and_class, classes)) or "the classes in auto_map"
        shown = "".join(letter if letter.isprintable() else "?" for letter in named)
        raise Refused(f"{path} wants to run {shown:.200}; {_ALLOW}")
    for key, value in _entries(values):
        last = key.rpartition(".")[2]
        choices = value.values() if isinstance(value, dict) else [value]
        if "_implementation" in last and any(isinstance(c, str) and "/" in c for c in choices):
            raise Refused(f"{path}: {key!r:.80} {value!r:.80} is code on the hub; {_ALLOW}")
        if last == "use_pretrained_backbone" and value:
            raise Refused(f"{path}: {key!r:.80} loads another model's weights unchecked; {_ALLOW}")


def _file_and_class(reference: str) -> str:
    """Name the file and the class of an `auto_map` entry, such as `user/name--file.Class`."""
    source, _, place = reference.rpartition("--")
    file, _, name = place.rpartition(".")
    return f"{name} of {file}.py" + (f" in {source}" if source else "")


def check_weights(folder: Path, values: dict[str, Any]) -> None:
    """Refuse a model folder whose weights are not safetensors files inside the folder."""
    # transformers reads these files: it would wait forever for a pipe, and read a huge file whole
    for path in folder.glob("*.json"):
        _check_size(path)
    first = values.get("transformers_weights")  # a config can name its weight file
    if first is not None:
        check_name(first, f"{folder / 'config.json'}: transformers_weights")
    names = [first] if first is not None else [n for n in _WEIGHTS if (folder / n).exists()]
    if not names:
        raise BadInput(_no_weights(folder))
    files = _shards(folder / names[0]) if names[0].endswith(".index.json") else names[:1]
    if (folder / "adapter_config.json").exists():
        files.append("adapter_model.safetensors")
    for file in files:
        if not file.endswith(".safetensors"):
            raise BadInput(f"{folder / file} is not a safetensors file; {_how_to_convert(folder)}")
        _check_inside(folder, file)


def _check_size(path: Path) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise BadInput(f"{path} is a link to a file that does not exist") from None
    if size > _INDEX_BYTES:
        raise BadInput(f"{path} is larger than {_INDEX_BYTES >> 20} MiB")


def _shards(index: Path) -> list[str]:
    """Return the files that an index of safetensors files names."""
    try:
        values = read_json(index, _INDEX_BYTES)
    except FileNotFoundError:
        raise BadInput(f"{index} does not exist") from None
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not isinstance(values.get("metadata"), dict):
        raise BadInput(f"{index} should have the objects `metadata` and `weight_map`")
    names = {check_name(name, f"{index}: the file of {key!r:.60}") for key, name in places.items()}
    return sorted(names)


def _check_inside(folder: Path, name: str) -> None:
    """Refuse a missing file, one that is not regular, or a link to a place outside the folder.

    In the hub's cache, the files of a snapshot are links to the folder `blobs`.
    """
    path = folder / name
    try:
        target = path.resolve(strict=True)
        regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError):
        raise BadInput(f"{path} does not exist or cannot be read") from None
    if not regular:
        raise BadInput(f"{path} is not a regular file")
    root = folder.resolve()
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise BadInput(f"{path} is a link to {target}, outside the model folder; copy it there")


def _no_weights(folder: Path) -> str:
    """Return the error for a folder without safetensors: its other weights, and a remedy."""
    present = sorted(path.name for path in folder.iterdir())
    if pickled := [name for name in present if name.endswith(_PICKLED)]:
        return f"{folder} has no model.safetensors, only {pickled[0]}; {_how_to_convert(folder)}"
    if other := [name for name in present if name.endswith(_OTHER)]:
        return (
            f"{folder} has no model.safetensors, only {other[0]}, which frostlab does not read; "
            "save the model as safetensors with the library that wrote it"
        )
    return f"{folder} has no weights (model.safetensors); set model.weights to false to draw them"


def _how_to_convert(folder: Path) -> str:
    return f"convert the weights without running their code: {CONVERT} '{folder}'"


def no_safetensors_on_hub(name: str) -> str:
    """Return the error for a hub model that has no safetensors."""
    return (
        f"{name} has no model.safetensors on the hub; download it to a folder and convert it "
        f"without running its code: {CONVERT} FOLDER"
    )


@contextmanager
def never_ask() -> Iterator[None]:
    """Make transformers refuse code that nobody allowed, instead of asking on the terminal.

    Transformers would ask even with `trust_remote_code=False`, because it does not pass this
    argument on to the parts of a model.
    """
    from transformers import dynamic_module_utils

    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


@contextmanager
def careful(name: str) -> Iterator[None]:
    """Limit the work of transformers on a config, or on a model without weights.

    Normally this takes well under a second. A model with too many modules or parameters, or one
    that takes too long, is refused.
    """
    pieces, numbers = 0, 0

    def count(_module: nn.Module, _name: str, piece: Any) -> None:
        nonlocal pieces, numbers
        pieces += 1
        if isinstance(piece, nn.Parameter):
            numbers += piece.numel()
        if pieces > _MOST_PIECES:
            raise BadInput(f"{name} has more than {_MOST_PIECES:,} tensors and modules")
        if numbers > _MOST_NUMBERS:
            raise BadInput(f"{name} has more than {_MOST_NUMBERS:.0e} parameters")

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
    ]
    try:
        with never_ask(), _time_limit(name):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _time_limit(name: str) -> Iterator[None]:
    """Raise an error after `_SECONDS` of processor time; only the main thread has this limit."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def stop(*_: object) -> None:
        raise BadInput(f"{name} takes more than {_SECONDS} s to read or build without weights")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
