"""Checkpoints: folders of safetensors and JSON, which get their names when they are complete.

Every checkpoint has checksums, which are verified before a file is read. The two newest checkpoints
are kept, so that a run can be resumed from the older one if the newest is damaged. The weights that
were the best when each of the two was written are kept too, without the optimizer state if they
are in an older checkpoint.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from frostlab.errors import BadInput, FrostlabError
from frostlab.records.schema import CHECKPOINT_NAME
from frostlab.storage import (
    damaged_file,
    finite,
    flush,
    load_tensors,
    read_json,
    remove_sealed,
    remove_temporary,
    save_tensors,
    seal,
    whole_folder,
    write_whole,
)

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int  # optimizer steps done
    stage: int = 0  # counted from 0
    verified: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def place(self) -> tuple[int, int]:
        """The checkpoint's step and stage, by which checkpoints are sorted."""
        return self.step, self.stage

    def progress(self) -> dict[str, Any]:
        """Return the values of progress.json: the run's state other than tensors.

        Its checksum is verified, its keys and types are not.
        """
        return read_json(self._whole(PROGRESS))

    def model(self) -> dict[str, Tensor]:
        """Return the model's tensors; a tied tensor appears once."""
        return load_tensors(self._whole(MODEL))

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors."""
        return load_tensors(self._whole(OPTIMIZER))

    def damaged_file(self, *names: str) -> Path | None:
        """Return the first of these files that is missing or changed; verify each file once."""
        damaged = damaged_file(self.folder, [name for name in names if name not in self.verified])
        if damaged is None:
            self.verified.update(names)
        return damaged

    def _whole(self, name: str) -> Path:
        """Return the path of a file after verifying its checksum; refuse a damaged file."""
        if (damaged := self.damaged_file(name)) is not None:
            raise FrostlabError(f"{damaged} is damaged or missing")
        return self.folder / name


def checkpoint_name(step: int, stage: int) -> str:
    """Return a checkpoint's folder name; two stages can have checkpoints at the same step."""
    return f"step-{step:09d}" + (f"-stage-{stage + 1}" if stage else "")


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder that were written completely, oldest first."""
    root = _root(folder)
    if not root.is_dir():
        return []
    matches = ((path, CHECKPOINT_NAME.fullmatch(path.name)) for path in root.iterdir())
    checkpoints = [Checkpoint(p, int(m[1]), int(m[2] or 1) - 1) for p, m in matches if m]
    for checkpoint in checkpoints:
        if checkpoint.folder.is_symlink() or not checkpoint.folder.is_dir():
            raise BadInput(f"{checkpoint.folder} is not a folder")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.place)


def _root(folder: Path) -> Path:
    """Return the folder of a run's checkpoints; refuse a link, which could lead elsewhere."""
    root = folder / "checkpoints"
    if root.is_symlink():
        raise BadInput(f"{root} is a link; checkpoints should be in the run's own folder")
    return root


def resumable(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """Return the newest whole checkpoint with an optimizer state, and damaged files of newer ones.

    The checkpoint is None if the run has none; an error is raised if all are damaged.
    """
    damaged: list[Path] = []
    for checkpoint in reversed(checkpoints_in(folder)):
        if (checkpoint.folder / OPTIMIZER).exists():
            path = checkpoint.damaged_file(MODEL, OPTIMIZER, PROGRESS)
            if path is None:
                return checkpoint, damaged
            damaged.append(path)
    if damaged:
        raise FrostlabError(f"{damaged[0]} is damaged, and no older checkpoint is whole")
    return None, damaged


def save_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    progress: dict[str, Any],
    stage: int = 0,
) -> Checkpoint:
    """Write a checkpoint to a temporary folder, flush it to disk, and rename the folder."""
    target = _root(folder) / checkpoint_name(step, stage)
    remove_temporary(target.parent)
    with whole_folder(target) as temporary:
        save_tensors(temporary / MODEL, model)
        save_tensors(temporary / OPTIMIZER, optimizer)
        write_whole(temporary / PROGRESS, json.dumps(finite(progress), indent=1))
        seal(temporary)
        if target.exists():  # the run was killed after this step, and has repeated it
            shutil.rmtree(target)
    flush(target.parent)
    return Checkpoint(target, step, stage)


def keep_only(folder: Path, newest: int, best: int | None, stage: int = 0) -> None:
    """Remove all checkpoints but the newest, the one before it, and the best weights at each.

    A checkpoint that is kept only for its best weights loses its optimizer state.
    """
    checkpoints = checkpoints_in(folder)
    older = [c for c in checkpoints if c.place < (newest, stage)]
    before = next((c for c in reversed(older) if (c.folder / OPTIMIZER).exists()), None)
    whole = {(newest, stage)}
    weights = {(best, stage)}
    if before is not None:
        whole.add(before.place)
        weights.add((_best_step(before), before.stage))
    for checkpoint in checkpoints:
        if checkpoint.place in whole:
            continue
        if checkpoint.place in weights:
            remove_sealed(checkpoint.folder, OPTIMIZER)
        else:
            shutil.rmtree(checkpoint.folder)


def _best_step(checkpoint: Checkpoint) -> int | None:
    """Return the step of the best weights when a checkpoint was written; None if it is damaged."""
    try:
        step = checkpoint.progress()["best"]["step"]
    except (FrostlabError, OSError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None
