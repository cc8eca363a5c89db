"""Checkpoints have checksums; a damaged one is refused for the one before it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import frostlab as fl
from frostlab.errors import BadInput, DamagedCheckpoint, FrostlabError
from frostlab.records.checkpoint import (
    Checkpoint,
    checkpoints_in,
    keep_only,
    resumable,
    save_checkpoint,
)
from frostlab.records.folder import RunRecord
from frostlab.records.schema import NoteEvent, ResumeEvent
from frostlab.storage import SEAL, damaged_file, seal
from tiny import tiny

WEIGHTS = {"w": torch.arange(12.0)}
STATE = {"w//step": torch.tensor(3.0)}


def save(folder: Path, step: int, best: int | None = None, stage: int = 0) -> Checkpoint:
    progress = {"best": {"step": best}, "step": step}
    return save_checkpoint(folder, step, WEIGHTS, STATE, progress, stage)


def flip(path: Path, bit: int = -1) -> None:
    """Flip one bit of a file; default: of its last byte."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def kept(folder: Path) -> dict[tuple[int, int], bool]:
    """Whether each checkpoint has an optimizer state."""
    files = "optimizer.safetensors"
    return {c.place: (c.folder / files).exists() for c in checkpoints_in(folder)}


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4, best=2)
    (found,) = checkpoints_in(tmp_path)
    assert found == checkpoint
    assert found.progress() == {"best": {"step": 2}, "step": 4}
    assert torch.equal(found.model()["w"], WEIGHTS["w"])
    assert torch.equal(found.optimizer()["w//step"], STATE["w//step"])


@pytest.mark.parametrize("name", ["model", "optimizer", "progress"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path, 4)
    path = checkpoint.folder / f"{name}.{'json' if name == 'progress' else 'safetensors'}"
    flip(path)
    with pytest.raises(FrostlabError, match=f"^{path} is damaged or missing$"):
        getattr(checkpoint, name)()


def test_the_one_before_is_taken_for_a_damaged_one(tmp_path: Path) -> None:
    first, second = save(tmp_path, 2), save(tmp_path, 4)
    assert resumable(tmp_path) == (second, [])
    flip(second.folder / "model.safetensors")
    assert resumable(tmp_path) == (first, [second.folder / "model.safetensors"])
    (first.folder / SEAL).unlink()
    with pytest.raises(FrostlabError, match="is damaged, and no older checkpoint is whole$"):
        resumable(tmp_path)
    assert resumable(tmp_path / "other") == (None, [])


def test_the_two_newest_are_kept_and_the_best_weights_of_both(tmp_path: Path) -> None:
    for step, best in ((2, 2), (4, 2), (6, 6), (8, 6), (9, 6)):
        save(tmp_path, step, best)
        keep_only(tmp_path, step, best)
        if step == 6:
            assert kept(tmp_path) == {(2, 0): False, (4, 0): True, (6, 0): True}
    assert kept(tmp_path) == {(6, 0): False, (8, 0): True, (9, 0): True}
    assert [damaged_file(c.folder) for c in checkpoints_in(tmp_path)] == [None] * 3
    save(tmp_path, 9, None, stage=1)
    keep_only(tmp_path, 9, None, stage=1)
    assert kept(tmp_path) == {(6, 0): False, (9, 0): True, (9, 1): True}


def test_links_are_refused(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    save(elsewhere, 2)
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    for use in (checkpoints_in, resumable, lambda folder: save(folder, 4)):
        with pytest.raises(BadInput, match="checkpoints is a link"):
            use(run)
    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-000000002").symlink_to(elsewhere / "checkpoints")
    with pytest.raises(BadInput, match="step-000000002 is not a folder"):
        keep_only(run, 4, None)
    assert [c.step for c in checkpoints_in(elsewhere)] == [2]


RECIPE = tiny(train__checkpoint=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    fl.run(RECIPE, out=folder)
    return folder


def unfinished(finished: Path, folder: Path) -> Path:
    """A copy of the run as if it had been killed before its result."""
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    return folder


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    finished: Path, tmp_path: Path
) -> None:
    folder = unfinished(finished, tmp_path / "run")
    *_, before, newest = checkpoints_in(folder)
    flip(newest.folder / "model.safetensors")
    with pytest.warns(DamagedCheckpoint, match="model.safetensors was damaged; the run continues"):
        record = fl.run(RECIPE, out=folder, resume=True)
    assert record.events(ResumeEvent)[-1].step == before.step
    assert "was damaged" in record.events(NoteEvent)[-1].text
    whole = RunRecord(finished).result
    assert record.result.weights_digest == whole.weights_digest
    assert record.result.report == whole.report


def test_a_run_without_a_whole_checkpoint_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = unfinished(finished, tmp_path / "run")
    for checkpoint in checkpoints_in(folder):
        flip(checkpoint.folder / "progress.json")
    with pytest.raises(FrostlabError, match="no older checkpoint is whole"):
        fl.run(RECIPE, out=folder, resume=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "progress.json is not valid JSON"),
        ("{}", "progress.json: best is missing"),
        ('{"best": {"metric": "accuracy"}, "step": 1}', "belong to another checkpoint"),
        ('{"best": {"metric": "accuracy"}, "seconds": {"total": NaN}}', "seconds.total should be"),
    ],
)
def test_another_progress_is_refused_in_a_line(
    finished: Path, tmp_path: Path, text: str, reason: str
) -> None:
    folder = unfinished(finished, tmp_path / "run")
    newest = checkpoints_in(folder)[-1].folder
    (newest / "progress.json").write_text(text)
    seal(newest)
    with pytest.raises(FrostlabError, match=reason):
        fl.run(RECIPE, out=folder, resume=True)


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_tensors_of_another_shape_are_refused_in_a_line(
    finished: Path, tmp_path: Path, file: str
) -> None:
    from frostlab.storage import save_tensors

    folder = unfinished(finished, tmp_path / "run")
    newest = checkpoints_in(folder)[-1]
    tensors: dict[str, Tensor] = getattr(newest, file)()
    name = next(name for name, value in tensors.items() if value.ndim)
    save_tensors(newest.folder / f"{file}.safetensors", tensors | {name: torch.zeros(3)})
    seal(newest.folder)
    with pytest.raises(FrostlabError, match="does not fit"):
        fl.run(RECIPE, out=folder, resume=True)
