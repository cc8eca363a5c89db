"""Manifests find every file of a finished run or comparison that was changed, added or removed."""

import json
import os
import shutil
from pathlib import Path

import pytest

import frostlab as fl
from comparing import compare
from frostlab.records.folder import RunFolder, RunRecord
from frostlab.records.manifest import MANIFEST, check_unchanged, verify
from tiny import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fl.run(tiny(), out=tmp_path_factory.mktemp("run") / "it").folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "it")
    return tmp_path / "it"


def problems(folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in verify(folder)[1]]


def test_a_finished_run_is_whole(run: Path) -> None:
    assert verify(run) == (1, [])
    check_unchanged(run)
    listed = json.loads((run / MANIFEST).read_text())
    names = {"recipe.yaml", "environment.json", "digests.json", "data.json", "events.jsonl",
             "result.json", "predictions.json"}  # fmt: skip
    checkpoints = {str(path.relative_to(run)) for path in run.glob("checkpoints/*/checksums.json")}
    assert set(listed) == names | checkpoints | {"model/checksums.json"}
    assert checkpoints


@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "recipe.yaml", "predictions.json"])
def test_a_changed_or_missing_file_is_found(name: str, run: Path) -> None:
    with (run / name).open("a") as file:
        file.write(" ")
    assert problems(run) == [f"{name} was changed after it was written"]
    with pytest.raises(fl.BadInput, match=f"{name} was changed after it was written; delete"):
        check_unchanged(run)
    (run / name).unlink()
    assert problems(run) == [f"{name} is missing"]
    (run / name).symlink_to(run / "digests.json")
    assert problems(run) == [f"{name} is not a file"]


def test_changed_weights_are_found(run: Path) -> None:
    weights = next(run.glob("checkpoints/*/model.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    (problem,) = problems(run)
    assert problem == f"{weights.relative_to(run)} was changed, added or removed"
    check_unchanged(run)  # no number of a comparison is read from the weights


def test_an_added_file_is_found_but_refuses_nothing(run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "more").symlink_to(run)
    assert problems(run) == ["more was added", "notes.txt was added"]
    check_unchanged(run)


def test_files_that_other_commands_add_are_not_listed(run: Path) -> None:
    RunFolder(run).write("exits.json", {})
    RunFolder(run).write("targets.json", {})
    (run / "flow" / "1").mkdir(parents=True)
    (run / "flow" / "1" / "flow.html").write_text("")
    assert verify(run) == (1, [])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"../x": 1, "/etc/passwd": 2, "result.json": 3}'])
def test_a_damaged_manifest_is_a_problem(text: str, run: Path) -> None:
    (run / MANIFEST).write_text(text)
    assert problems(run)
    with pytest.raises(fl.BadInput):
        check_unchanged(run)


def test_a_run_without_a_manifest_is_not_finished(run: Path, tmp_path: Path) -> None:
    (run / MANIFEST).unlink()
    assert problems(tmp_path) == ["it has no manifest.json, so it is not finished"]
    with pytest.raises(fl.BadInput, match="no run and no comparison"):
        verify(run / "checkpoints")
    with pytest.raises(fl.BadInput, match="is not a folder"):
        verify(tmp_path / "none")


def test_a_run_that_can_be_resumed_has_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between manifest and result, it has one that the resumed run replaces."""
    recipe = tiny()
    replace = os.replace

    def killed(source: object, target: Path) -> None:
        if Path(target).name == "result.json":
            raise KeyboardInterrupt
        replace(source, target)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            fl.run(recipe, out=tmp_path / "it")
    assert problems(tmp_path / "it") == ["result.json is missing"]
    record = fl.run(recipe, out=tmp_path / "it", resume=True)
    assert record.status == "finished"
    assert verify(record.folder) == (1, [])
    assert RunRecord(record.folder).environments[1:] != []


def test_a_comparison_is_checked_with_its_runs(tmp_path: Path) -> None:
    folder = compare(tmp_path / "all" / "c", seeds=1).folder
    fl.run(tiny(), out=tmp_path / "all" / "run")
    assert verify(tmp_path / "all") == (2, [])
    (folder / "comparison.md").write_text("better")
    (folder / "runs" / "oelm-s0" / "result.json").write_text("{}")
    shutil.rmtree(folder / "repeat")
    assert problems(folder) == [
        "comparison.md was changed after it was written",
        "repeat/baseline-s0/manifest.json is missing",
        "runs/oelm-s0/result.json was changed after it was written",
    ]


def test_more_seeds_give_a_new_manifest(tmp_path: Path) -> None:
    for seeds in (1, 2):
        assert verify(compare(tmp_path / "c", seeds=seeds).folder) == (1, [])
