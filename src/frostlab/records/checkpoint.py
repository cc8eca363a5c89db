"""Checkpoints: folders of safetensors and JSON, which get their names when they are complete.

The newest and the best checkpoint are kept. If the best is older, it loses its optimizer state.
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
    step: int  # optimizer steps done
    stage: int = 0  # counted from 0

    def progress(self) -> dict[str, Any]:
        """Return the run's state other than tensors, from progress.json."""
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
    """Return a checkpoint's folder name; two stages can have checkpoints at the same step."""
    return f"step-{step:09d}" + (f"-stage-{stage + 1}" if stage else "")


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder that were written completely, oldest first."""
    root = folder / "checkpoints"
    if not root.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in root.iterdir())
    checkpoints = (Checkpoint(p, int(m[1]), int(m[2] or 1) - 1) for p, m in matches if m)
    return sorted(checkpoints, key=lambda c: (c.step, c.stage))


def resumable(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint with an optimizer state, from which a run can be resumed."""
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
    """Write a checkpoint to a temporary folder, flush it to disk, and rename the folder."""
    target = folder / "checkpoints" / checkpoint_name(step, stage)
    remove_leftovers(folder)
    with whole_folder(target) as temporary:
        save_tensors(temporary / "model.safetensors", model)
        save_tensors(temporary / "optimizer.safetensors", optimizer)
        write_whole(temporary / "progress.json", json.dumps(progress, indent=1))
        if target.exists():  # the run was killed after this step, and has repeated it
            shutil.rmtree(target)
    flush(target.parent)
    return Checkpoint(target, step, stage)


def keep_only(folder: Path, newest: int, best: int | None, stage: int = 0) -> None:
    """Remove all checkpoints but the newest and the best; an older best loses its optimizer."""
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
