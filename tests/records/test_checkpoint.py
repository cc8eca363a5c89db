"""Checkpoints have checksums; a damaged one is refused for the one before it."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import frostlab as fl
from frostlab.errors import BadInput, DamagedCheckpoint, FrostlabError
from frostlab.records.checkpoint import (
    Checkpoint,
    FrozenWeights,
    checkpoints_in,
    keep_only,
    resumable,
    save_checkpoint,
    save_frozen,
)
from frostlab.records.folder import RunRecord
from frostlab.records.manifest import verify
from frostlab.records.schema import NoteEvent, ResumeEvent
from frostlab.roles.parts import Rows
from frostlab.storage import SEAL, damaged_file, load_tensors, seal
from frostlab.surgery.freeze import PartlyFrozen
from frostlab.training.restore import best_model
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


# A frozen tensor, and one of six rows whose rows 1, 2, 4 and 5 are frozen.
WHOLE = torch.arange(4.0)
FUSED = torch.arange(12.0).reshape(6, 2)
PARTLY = {"fused": PartlyFrozen(0, Rows(3, 2, ((1, 3),)))}


def freeze(folder: Path, whole: Tensor = WHOLE) -> FrozenWeights:
    return save_frozen(folder, {"whole": whole, "fused": FUSED[[1, 2, 4, 5]]}, PARTLY)


def save_part(folder: Path, step: int, stage: int = 0, **more: Tensor) -> Checkpoint:
    """A checkpoint that holds only what learns."""
    learning = {**WEIGHTS, "fused": FUSED[[0, 3]]}
    progress, frozen = {"best": {"step": step}, "step": step}, freeze(folder, **more)
    return save_checkpoint(folder, step, learning, STATE, progress, stage, frozen)


def frozen_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/frozen-*"))


def test_frozen_weights_are_stored_once_and_read_with_every_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint = save_part(tmp_path, step)
        assert load_tensors(checkpoint.folder / "model.safetensors").keys() == {"w", "fused"}
    assert len(frozen_in(tmp_path)) == 1
    shutil.move(tmp_path / "checkpoints", tmp_path / "moved" / "checkpoints")
    for checkpoint in checkpoints_in(tmp_path / "moved"):
        tensors = checkpoint.model()
        assert tensors.keys() == {"w", "whole", "fused"}
        assert torch.equal(tensors["whole"], WHOLE)
        assert torch.equal(tensors["fused"], FUSED)
        assert damaged_file(checkpoint.folder) is None


@pytest.mark.parametrize("name", ["frozen.safetensors", SEAL])
def test_a_flipped_bit_in_frozen_weights_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = save_part(tmp_path, 2)
    assert resumable(tmp_path) == (checkpoint, [])
    path = tmp_path / "checkpoints" / frozen_in(tmp_path)[0] / name
    flip(path)
    (again,) = checkpoints_in(tmp_path)
    with pytest.raises(FrostlabError, match=f"^{path} is damaged or missing$"):
        again.model()
    with pytest.raises(FrostlabError, match=f"^{path} is damaged, and no older checkpoint"):
        resumable(tmp_path)
    assert save_part(tmp_path, 2).model().keys() == {"w", "whole", "fused"}, "stored again"


def test_missing_or_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    save_part(tmp_path, 2)
    other = freeze(tmp_path / "other", whole=WHOLE + 1)
    folder = tmp_path / "checkpoints" / frozen_in(tmp_path)[0]
    elsewhere = tmp_path / "other" / "checkpoints" / other.folder

    def refused() -> str:
        with pytest.raises(FrostlabError) as caught:
            checkpoints_in(tmp_path)[0].model()
        return str(caught.value)

    shutil.rmtree(folder)
    assert refused() == f"{folder} is damaged or missing"
    folder.symlink_to(elsewhere)
    assert refused() == f"{folder} is damaged or missing"
    with pytest.raises(BadInput, match="is a link"):
        freeze(tmp_path)
    folder.unlink()
    shutil.copytree(elsewhere, folder)  # whole, but not the weights that the checkpoint names
    assert refused() == f"{folder / SEAL} is damaged or missing"
    checkpoint = checkpoints_in(tmp_path)[0].folder
    (checkpoint / "frozen.json").unlink()
    assert refused() == f"{checkpoint / 'frozen.json'} is damaged or missing"


def test_a_forged_frozen_json_is_refused_in_a_line(tmp_path: Path) -> None:
    checkpoint = save_part(tmp_path, 2)
    frozen = freeze(tmp_path)
    wide = PartlyFrozen(0, Rows(4, 2, ((1, 3),)))
    forged = [
        (replace(frozen, folder="../elsewhere"), "folder should be frozen-…, but is "),
        (replace(frozen, partly={}), "does not list 'fused'"),
        (replace(frozen, partly={**PARTLY, "other": wide}), "does not fit the tensors"),
        (replace(frozen, partly={"fused": wide}), "does not fit the tensors"),
        (replace(frozen, partly={"fused": PartlyFrozen(0, Rows(0, 0, ()))}), "does not fit"),
        (replace(frozen, partly={"fused": PartlyFrozen(9, PARTLY["fused"].rows)}), "does not fit"),
    ]  # fmt: skip
    for content, line in forged:
        (checkpoint.folder / "frozen.json").write_text(json.dumps(asdict(content)))
        seal(checkpoint.folder)
        with pytest.raises(FrostlabError, match=line):
            checkpoints_in(tmp_path)[0].model()
    (checkpoint.folder / "frozen.json").write_text("{}")
    seal(checkpoint.folder)
    with pytest.raises(BadInput, match="frozen.json: folder is missing"):
        checkpoints_in(tmp_path)[0].model()


def test_frozen_weights_go_with_the_last_checkpoint_that_names_them(tmp_path: Path) -> None:
    save_part(tmp_path, 2)
    keep_only(tmp_path, 2, 2)
    (first,) = frozen_in(tmp_path)
    for step in (4, 6, 8):
        save_part(tmp_path, step, stage=1, whole=WHOLE + 1)
        keep_only(tmp_path, step, step, stage=1)
        assert len(frozen_in(tmp_path)) == (2 if step == 4 else 1), "stage 1 may be resumed at 4"
    assert first not in frozen_in(tmp_path)
    freeze(tmp_path)  # a killed run leaves weights that no checkpoint names
    keep_only(tmp_path, 8, 8, stage=1)
    assert first not in frozen_in(tmp_path)
    freeze(tmp_path)
    flip(checkpoints_in(tmp_path)[-1].folder / SEAL, 0)
    keep_only(tmp_path, 8, 8, stage=1)
    assert first in frozen_in(tmp_path), "a damaged checkpoint may name them"


def test_a_half_removed_folder_of_frozen_weights_is_stored_again(tmp_path: Path) -> None:
    frozen = freeze(tmp_path)
    for name in ("frozen.safetensors", SEAL):
        (tmp_path / "checkpoints" / frozen.folder / name).unlink()
        assert freeze(tmp_path) == frozen
        assert damaged_file(tmp_path / "checkpoints" / frozen.folder) is None


RECIPE = tiny(train__checkpoint=2)
OELM = tiny(treatment="oelm", train__checkpoint=2)


@pytest.fixture(scope="module")
def oelm(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return fl.run(OELM, runs=tmp_path_factory.mktemp("oelm"))


def test_a_run_keeps_what_learns_in_each_checkpoint(oelm: RunRecord, tmp_path: Path) -> None:
    whole = fl.run(tiny(treatment="oelm", train={**OELM["train"], "checkpoint_what": "all"}),
                   runs=tmp_path)  # fmt: skip
    assert whole.result.weights_digest == oelm.result.weights_digest
    assert frozen_in(whole.folder) == []
    (name,) = frozen_in(oelm.folder)
    stored = load_tensors(oelm.folder / "checkpoints" / name / "frozen.safetensors")
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        f"blocks.{layer}.qkv.{kind}": shape
        for layer in (0, 1) for kind, shape in (("weight", (32, 16)), ("bias", (32,)))
    }  # fmt: skip
    for mine, theirs in zip(checkpoints_in(oelm.folder), checkpoints_in(whole.folder), strict=True):
        learning = load_tensors(mine.folder / "model.safetensors")
        assert learning["blocks.0.qkv.weight"].shape == (16, 16)
        tensors, expected = mine.model(), theirs.model()
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_nothing_is_stored_apart_if_nothing_is_frozen(finished: Path) -> None:
    assert frozen_in(finished) == []
    for checkpoint in checkpoints_in(finished):
        assert not (checkpoint.folder / "frozen.json").exists()


def test_a_moved_run_has_its_frozen_weights(
    oelm: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may draw other weights from the seed; the run's folder has those that were used."""
    from frostlab.training import restore

    shutil.copytree(oelm.folder, tmp_path / "moved")
    moved, treat = RunRecord(tmp_path / "moved"), restore.treat

    def treat_otherwise(model: torch.nn.Module, *values: object, **named: object) -> set[str]:
        touched = treat(model, *values, **named)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0001)
        return touched

    monkeypatch.setattr(restore, "treat", treat_otherwise)
    best_model(moved)  # it verifies the digest of the weights
    assert verify(moved.folder) == (1, [])
    (path,) = moved.folder.glob("checkpoints/frozen-*/frozen.safetensors")
    flip(path)
    with pytest.raises(FrostlabError, match=f"^{path} is damaged or missing$"):
        best_model(moved)
    (problem,) = verify(moved.folder)[1]
    assert str(problem) == f"{path} was changed, added or removed"


def test_damaged_frozen_weights_are_refused_on_resuming(oelm: RunRecord, tmp_path: Path) -> None:
    folder = unfinished(oelm.folder, tmp_path / "run")
    (path,) = folder.glob("checkpoints/frozen-*/frozen.safetensors")
    flip(path)
    with pytest.raises(FrostlabError, match=f"^{path} is damaged, and no older checkpoint"):
        fl.run(OELM, out=folder, resume=True)
    flip(path)
    record = fl.run(OELM, out=folder, resume=True)
    assert record.result.weights_digest == oelm.result.weights_digest
    assert frozen_in(folder) == frozen_in(oelm.folder)


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
