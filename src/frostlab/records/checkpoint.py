"""Checkpoints: safetensors and JSON in a folder that appears whole, by one rename.

The newest and the best are kept; the best keeps its weights only.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from frostlab.errors import FrostlabError
from frostlab.storage import like_any_file

_NAME = re.compile(r"step-(\d{9})(?:-stage-(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int
    stage: int = 0

    def progress(self) -> dict[str, Any]:
        """Where the run was."""
        try:
            return json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FrostlabError(f"{self.folder}/progress.json is damaged ({error})") from None

    def model(self) -> dict[str, Tensor]:
        """The model's tensors; a tied one appears once."""
        return self._tensors("model.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's tensors."""
        return self._tensors("optimizer.safetensors")

    def _tensors(self, name: str) -> dict[str, Tensor]:
        return load_tensors(self.folder / name)


def checkpoint_name(step: int, stage: int) -> str:
    """A checkpoint's folder; where a stage begins, the one before it has ended at that step."""
    return f"step-{step:09d}" + (f"-stage-{stage + 1}" if stage else "")


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first."""
    root = folder / "checkpoints"
    if not root.is_dir():
        return []
    found = ((path, _NAME.fullmatch(path.name)) for path in root.iterdir())
    made = (Checkpoint(p, int(m[1]), int(m[2] or 1) - 1) for p, m in found if m)
    return sorted(made, key=lambda c: (c.step, c.stage))


def resumable(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be gone on from."""
    found = [c for c in checkpoints_in(folder) if (c.folder / "optimizer.safetensors").is_file()]
    return found[-1] if found else None


def save_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    progress: dict[str, Any],
    stage: int = 0,
) -> Checkpoint:
    """Write a checkpoint beside its place, flush it to disk, and rename it there."""
    target = folder / "checkpoints" / checkpoint_name(step, stage)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    remove_leftovers(folder)
    temporary.mkdir(parents=True)
    try:
        _save(model, temporary / "model.safetensors")
        _save(optimizer, temporary / "optimizer.safetensors")
        text = json.dumps(progress, indent=1)
        (temporary / "progress.json").write_text(text, encoding="utf-8")
        for path in temporary.iterdir():
            _flush(path)
        if target.exists():  # the same step, left by a run that was killed and went back
            shutil.rmtree(target)
        os.replace(temporary, target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(target, step, stage)


def keep_only(folder: Path, newest: int, best: int | None, stage: int = 0) -> None:
    """Remove every checkpoint but these two of a stage; the best, if older, keeps its weights."""
    for checkpoint in checkpoints_in(folder):
        place = (checkpoint.step, checkpoint.stage)
        if place == (newest, stage):
            continue
        if place == (best, stage):
            (checkpoint.folder / "optimizer.safetensors").unlink(missing_ok=True)
        else:
            shutil.rmtree(checkpoint.folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what a save that was killed left behind."""
    for path in (folder / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors that were saved."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FrostlabError(f"{path} is damaged ({error})") from None


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors beside their place and rename them there: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _save(tensors, temporary)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors; what the operating system refuses is its error, not safetensors'."""
    try:
        save_file(_plain(tensors), path)
        like_any_file(path)
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
        raise


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that safetensors can write: on the CPU, contiguous, each storage once."""
    seen: dict[tuple[int, int], str] = {}
    plain = {}
    for name, tensor in tensors.items():
        if tensor.numel() and seen.setdefault((tensor.data_ptr(), tensor.numel()), name) != name:
            continue
        plain[name] = tensor.detach().cpu().contiguous()
    return plain


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
