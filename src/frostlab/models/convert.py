"""Conversion of pickled weights to safetensors, without running the code in the pickle.

    python -P -m frostlab.models.convert FOLDER

PyTorch reads the files with `weights_only=True`, which refuses everything but tensors and plain
values. The result is FOLDER/model.safetensors; the pickled files stay as they are.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from frostlab.errors import BadInput, FrostlabError, first_line
from frostlab.storage import check_name, open_regular, read_json, save_tensors

_INDEX = "pytorch_model.bin.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def convert(folder: Path) -> Path:
    """Write the pickled weights of a model folder as model.safetensors; return its path."""
    target = folder / "model.safetensors"
    if target.exists():
        raise BadInput(f"{target} exists already")
    tensors: dict[str, torch.Tensor] = {}
    for path in _pickled_files(folder):
        tensors |= _read(path)
    save_tensors(target, tensors)
    return target


def _pickled_files(folder: Path) -> list[Path]:
    """Return pytorch_model.bin, the files that its index names, or the only other pickled file."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")
    if (folder / "pytorch_model.bin").exists():
        return [folder / "pytorch_model.bin"]
    if (folder / _INDEX).exists():
        values = read_json(folder / _INDEX, 64 << 20)
        places = values.get("weight_map") if isinstance(values, dict) else None
        if not isinstance(places, dict) or not places:
            raise BadInput(f"{folder / _INDEX} should have the object `weight_map`")
        where = f"{folder / _INDEX}: the file"
        return [folder / name for name in sorted({check_name(n, where) for n in places.values()})]
    others = [path for path in sorted(folder.iterdir()) if path.name.endswith(_SUFFIXES)]
    others = [path for path in others if path.name != "training_args.bin"]
    if len(others) != 1:
        endings = f"with pickled weights ({', '.join(_SUFFIXES)})"
        if not others:
            raise BadInput(f"{folder} has no file {endings}")
        raise BadInput(
            f"{folder} has {len(others)} files {endings}; rename the right one to pytorch_model.bin"
        )
    return others


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a pickled file, or of the weights in a pickled training checkpoint."""
    try:
        with open_regular(path) as file:
            values: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except BadInput:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        reason = first_line(error).partition(". ")[0]  # without torch's advice to unpickle
        raise BadInput(
            f"{path} is damaged, or holds more than tensors and plain values ({reason:.120})"
        ) from None
    for key in ("state_dict", "model"):  # where training checkpoints hold the weights
        if isinstance(values, dict) and isinstance(values.get(key), dict):
            values = values[key]
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadInput(f"{path} does not hold tensors by name")
    if other := [name for name, value in values.items() if not isinstance(value, torch.Tensor)]:
        raise BadInput(f"{path}: {other[0]!r:.80} is not a tensor")
    return values


def main() -> None:
    """Convert the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -P -m frostlab.models.convert FOLDER")
    try:
        target = convert(Path(sys.argv[1]))
    except FrostlabError as error:
        print(f"frostlab: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
