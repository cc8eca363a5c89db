"""Checkpoints: folders of safetensors and JSON, which get their names when they are complete.

Every checkpoint has checksums, which are verified before a file is read. The two newest checkpoints
are kept, so that a run can be resumed from the older one if the newest is damaged. For each of the
two, the best weights up to its step are kept, too. If these are in an earlier checkpoint, that one
is kept without its optimizer state.

A run has one or more stages, each with its own trainable weights. The frozen weights do not change
during a stage. They can be stored once, in a folder of their own with checksums, whose name is a
digest of its contents. A checkpoint then holds only the trainable weights and the buffers, and
names that folder and the digest of its checksums.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from frostlab.errors import BadInput, FrostlabError
from frostlab.records.schema import CHECKPOINT_NAME
from frostlab.storage import (
    SEAL,
    damaged_file,
    digest_of,
    file_digest,
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
from frostlab.surgery.freeze import PartlyFrozen
from frostlab.surgery.origin import digest
from frostlab.typed import read

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"
FROZEN = "frozen.json"  # in a checkpoint whose frozen weights are in a folder of their own
_FROZEN_FOLDER = re.compile(r"frozen-[0-9a-f]{16}")
_FROZEN_TENSORS = "frozen.safetensors"


@dataclass(frozen=True)
class FrozenWeights:
    """The frozen weights of a stage, in a folder next to the checkpoints that name it."""

    folder: str  # name of the folder
    sha256: str  # of the folder's checksums.json
    # tensor → its frozen rows, which are in the folder; its other rows are in the checkpoint
    partly: dict[str, PartlyFrozen]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int  # optimizer steps done
    stage: int = 0  # counted from 0
    # names of the files whose checksums were verified
    verified: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def place(self) -> tuple[int, int]:
        """The checkpoint's step and stage, by which checkpoints are sorted."""
        return self.step, self.stage

    def progress(self) -> dict[str, Any]:
        """Return the values of progress.json: the run's state other than tensors.

        The file's checksum is verified, its keys and types are not.
        """
        return read_json(self._whole(PROGRESS))

    def model(self) -> dict[str, Tensor]:
        """Return all of the model's tensors, including frozen ones; a tied tensor appears once."""
        tensors = load_tensors(self._whole(MODEL))
        if (frozen := self.frozen()) is None:
            return tensors
        stored = load_tensors(self._frozen_folder(frozen) / _FROZEN_TENSORS)
        try:
            joined = {name: rows.join(stored.pop(name), tensors.pop(name))
                      for name, rows in frozen.partly.items()}  # fmt: skip
        except (LookupError, RuntimeError, ValueError, ArithmeticError):
            raise FrostlabError(f"{self.folder / FROZEN} does not fit the tensors") from None
        if twice := sorted(stored.keys() & tensors.keys()):
            raise FrostlabError(
                f"{self.folder / FROZEN} does not list {twice[0]!a:.80}, but both the checkpoint "
                "and the folder of frozen weights have values of it"
            )
        return tensors | stored | joined

    def frozen(self) -> FrozenWeights | None:
        """Return where the frozen weights are; None if this checkpoint holds all weights."""
        if not self._names_frozen():
            return None
        path = self._whole(FROZEN)
        frozen = read(FrozenWeights, read_json(path), path)
        if not _FROZEN_FOLDER.fullmatch(frozen.folder):
            raise BadInput(f"{path}: folder should be frozen-…, but is {frozen.folder!r:.80}")
        return frozen

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors."""
        return load_tensors(self._whole(OPTIMIZER))

    def damaged_file(self, *names: str) -> Path | None:
        """Return the first of these files that is missing or changed; verify each file once.

        Together with the model's file, the frozen weights that the checkpoint names are verified.
        """
        unverified = [name for name in names if name not in self.verified]
        damaged = damaged_file(self.folder, unverified)
        if damaged is None and MODEL in unverified and self._names_frozen():
            damaged = self._damaged_frozen()
        if damaged is None:
            self.verified.update(names)
        return damaged

    def _names_frozen(self) -> bool:
        """Return whether the checkpoint's checksums list a frozen.json."""
        try:
            return FROZEN in read_json(self.folder / SEAL)
        except (OSError, BadInput, TypeError):
            raise FrostlabError(f"{self.folder / SEAL} is damaged or missing") from None

    def _damaged_frozen(self) -> Path | None:
        """Return the first file of the frozen weights that is missing or changed."""
        if (damaged := damaged_file(self.folder, [FROZEN])) is not None:
            return damaged
        self.verified.add(FROZEN)
        frozen = self.frozen()
        assert frozen is not None
        folder = self._frozen_folder(frozen)
        if folder.is_symlink() or not folder.is_dir():
            return folder
        with suppress(OSError):
            if file_digest(folder / SEAL) == frozen.sha256:
                return damaged_file(folder)
        return folder / SEAL

    def _frozen_folder(self, frozen: FrozenWeights) -> Path:
        return self.folder.parent / frozen.folder

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
    frozen: FrozenWeights | None = None,
) -> Checkpoint:
    """Write a checkpoint to a temporary folder, flush it to disk, and rename the folder.

    `frozen` is where `save_frozen` has stored the weights that `model` lacks; None: it lacks none.
    """
    target = _root(folder) / checkpoint_name(step, stage)
    remove_temporary(target.parent)
    with whole_folder(target) as temporary:
        save_tensors(temporary / MODEL, model)
        save_tensors(temporary / OPTIMIZER, optimizer)
        write_whole(temporary / PROGRESS, json.dumps(finite(progress), indent=1))
        if frozen is not None:
            write_whole(temporary / FROZEN, json.dumps(asdict(frozen), indent=1))
        seal(temporary)
        if target.exists():  # the run was killed after this step, and has repeated it
            shutil.rmtree(target)
    flush(target.parent)
    return Checkpoint(target, step, stage)


def save_frozen(
    folder: Path, tensors: Mapping[str, Tensor], partly: Mapping[str, PartlyFrozen]
) -> FrozenWeights:
    """Store the frozen weights of a stage, for checkpoints to name, unless they are stored already.

    `partly` has the tensors of which only the frozen rows are stored.
    """
    plain = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    contents = {name: digest(tensor) for name, tensor in plain.items()}
    target = _root(folder) / f"frozen-{digest_of(contents)[:16]}"
    if target.is_symlink():
        raise BadInput(f"{target} is a link; checkpoints should be in the run's own folder")
    if not target.is_dir() or damaged_file(target) is not None:
        remove_temporary(target.parent)
        with whole_folder(target) as temporary:
            save_tensors(temporary / _FROZEN_TENSORS, plain)
            seal(temporary)
            if target.exists():  # damaged, or a kill interrupted its removal
                shutil.rmtree(target)
        flush(target.parent)
    return FrozenWeights(target.name, file_digest(target / SEAL), dict(partly))


def keep_only(folder: Path, newest: int, best: int | None, stage: int = 0) -> None:
    """Keep the two newest checkpoints, and the best weights up to each of them; remove all others.

    `newest` and `best` are steps in `stage`. A checkpoint that is kept only for its best weights
    loses its optimizer state. Frozen weights are removed with the last checkpoint that names them.
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
    _remove_unnamed_frozen(folder)


def _remove_unnamed_frozen(folder: Path) -> None:
    """Remove the frozen weights that no checkpoint names, unless a checkpoint is damaged."""
    paths = (path for path in _root(folder).glob("frozen-*") if path.is_dir())
    unnamed = {path.name: path for path in paths if _FROZEN_FOLDER.fullmatch(path.name)}
    for checkpoint in reversed(checkpoints_in(folder) if unnamed else []):
        try:
            frozen = checkpoint.frozen()
        except FrostlabError:
            return
        if frozen is not None:
            unnamed.pop(frozen.folder, None)
        if not unnamed:
            return
    for path in unnamed.values():
        shutil.rmtree(path)


def _best_step(checkpoint: Checkpoint) -> int | None:
    """Return the step of the best weights when a checkpoint was written; None if it is damaged."""
    try:
        step = checkpoint.progress()["best"]["step"]
    except (FrostlabError, OSError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None
