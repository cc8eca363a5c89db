"""Checkpoints: safetensors and JSON in a folder that one rename makes visible.

The newest and the best checkpoint are kept; the best one keeps only its weights.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from frostlab.errors import FrostlabError
from frostlab.storage import flush, load_tensors, save_tensors, whole_folder, write_whole

_NAME = re.compile(r"step-(\d{9})(?:-stage-(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int
    stage: int = 0

    def progress(self) -> dict[str, Any]:
        """Return the state of the run apart from its tensors."""
        try:
            return json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FrostlabError(f"{self.folder}/progress.json is damaged ({error})") from None

    def model(self) -> dict[str, Tensor]:
        """Return the model's tensors; a tied tensor appears once."""
        return load_tensors(self.folder / "model.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors."""
        return load_tensors(self.folder / "optimizer.safetensors")


def checkpoint_name(step: int, stage: int) -> str:
    """Return the name of a checkpoint's folder; two stages can have checkpoints at one step."""
    return f"step-{step:09d}" + (f"-stage-{stage + 1}" if stage else "")


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return all complete checkpoints, oldest first."""
    root = folder / "checkpoints"
    if not root.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in root.iterdir())
    checkpoints = (Checkpoint(p, int(m[1]), int(m[2] or 1) - 1) for p, m in matches if m)
    return sorted(checkpoints, key=lambda c: (c.step, c.stage))


def resumable(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that a run can be resumed from."""
    complete = [c for c in checkpoints_in(folder) if (c.folder / "optimizer.safetensors").is_file()]
    return complete[-1] if complete else None


def save_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    progress: dict[str, Any],
    stage: int = 0,
) -> Checkpoint:
    """Write a checkpoint under a temporary name, flush it to disk, and rename it."""
    target = folder / "checkpoints" / checkpoint_name(step, stage)
    remove_leftovers(folder)
    with whole_folder(target) as temporary:
        save_tensors(temporary / "model.safetensors", model)
        save_tensors(temporary / "optimizer.safetensors", optimizer)
        write_whole(temporary / "progress.json", json.dumps(progress, indent=1))
        if target.exists():  # the run was killed and repeats this step
            shutil.rmtree(target)
    flush(target.parent)
    return Checkpoint(target, step, stage)


def keep_only(folder: Path, newest: int, best: int | None, stage: int = 0) -> None:
    """Remove all checkpoints but the newest and the best; an older best keeps only its weights."""
    for checkpoint in checkpoints_in(folder):
        place = (checkpoint.step, checkpoint.stage)
        if place == (newest, stage):
            continue
        if place == (best, stage):
            (checkpoint.folder / "optimizer.safetensors").unlink(missing_ok=True)
        else:
            shutil.rmtree(checkpoint.folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished folders that killed saves left behind."""
    for path in (folder / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
