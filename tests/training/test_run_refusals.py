"""What a run refuses: one line, and nothing half-written."""

import signal
from pathlib import Path

import pytest

import frostlab as fl
from forked import run_command, wait_for
from frostlab.training import setup
from tiny import tiny


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    recipe = tiny(train={"batch": 8, "epochs": 200, "threads": 1})
    folder = tmp_path / "run"
    first = run_command(tmp_path, recipe, "--out", str(folder))
    try:
        wait_for(folder / "events.jsonl", '"kind": "stage"')
        with pytest.raises(fl.BadInput, match="holds a run already; add --resume"):
            fl.run(recipe, out=folder)
        with pytest.raises(fl.BadInput, match="another process is running in it"):
            fl.run(recipe, out=folder, resume=True)
    finally:
        first.signal(signal.SIGKILL)
        first.wait()


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    with pytest.raises(fl.BadInput, match="run-none-s0 is finished already"):
        fl.run(tiny(), runs=tmp_path, resume=True)
    with pytest.raises(fl.BadInput, match="is finished"):
        fl.run(tiny(), out=record.folder, resume=True)
    (record.folder / "result.json").unlink()
    with pytest.raises(fl.BadInput, match=r"another recipe \(optim.lr, seed differ\)"):
        fl.run(tiny(optim__lr=1e-4, seed=3), out=record.folder, resume=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(fl.BadInput, match="is a file; choose another folder with --out"):
        fl.run(tiny(), out=file)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(fl.BadInput, match="is not empty"):
        fl.run(tiny(), out=tmp_path / "full", resume=True)


def test_data_that_changed_cannot_be_gone_on_with(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    rows = [f"w{i % 9} n{i},{i % 2}" for i in range(200)]
    own.write_text("text,label\n" + "\n".join(rows))
    recipe = tiny(data={"name": "own", "path": str(own), "length": 8}, tokenizer={"kind": "words"})
    record = fl.run(recipe, runs=tmp_path / "runs")
    (record.folder / "result.json").unlink()
    own.write_text("text,label\n" + "\n".join(rows[1:]))
    with pytest.raises(fl.BadInput, match="the data of .* have changed since the run"):
        fl.run(recipe, out=record.folder, resume=True)


def test_nothing_is_written_for_a_recipe_that_cannot_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for wrong, problem in (
        (tiny(treatment={"freeze": ["querry"]}), "did you mean `query`"),
        (tiny(treatment={"freeze": ["all"]}), "leaves nothing that learns"),
        (tiny(data={"name": "own", "path": "gone.csv"}), "gone.csv"),
        (tiny(train__batch=3, train__accumulate=2), "batch 3 is not a multiple of accumulate 2"),
        (tiny(optim__warmup=16), "optim.warmup 16 takes all 16 steps"),
    ):
        with pytest.raises(fl.FrostlabError, match=problem), _quiet():
            fl.run(wrong, runs=runs)
        assert not runs.exists() or not list(runs.iterdir()), wrong


class _quiet:
    def __enter__(self) -> None:
        import warnings

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore", fl.NothingLearns)

    def __exit__(self, *error: object) -> None:
        self._caught.__exit__(None, None, None)


def test_an_unwritable_folder_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder is wanted")
    with pytest.raises(fl.BadInput, match="cannot be written"):
        fl.run(tiny(), runs=tmp_path / "blocked" / "runs")


def test_a_batch_that_cannot_fit_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a device that says how much is free; the batch that is suggested is accepted."""
    recipe = tiny(model__width=64, train__batch=256)
    monkeypatch.setattr(setup, "free_bytes", lambda device: 4_000_000)
    with pytest.raises(fl.BadInput, match="train.batch 256 cannot fit: a step needs at least") as e:
        fl.run(recipe, runs=tmp_path)
    assert "cpu has 0.004 GB free; a batch of about" in str(e.value)
    assert not list(tmp_path.iterdir())
    largest = int(str(e.value).split("about ")[1].split()[0])
    assert 1 < largest < 256
    fl.run(tiny(model__width=64, train__batch=largest, train__epochs=1), runs=tmp_path / "fits")
    parts = tiny(model__width=64, train__batch=256, train__accumulate=16, train__epochs=1)
    fl.run(parts, runs=tmp_path / "parts")
    monkeypatch.setattr(setup, "free_bytes", lambda device: 1_000_000)
    with pytest.raises(fl.BadInput, match="too large for this device, even with the smallest"):
        fl.run(recipe, runs=tmp_path)
    monkeypatch.setattr(setup, "free_bytes", lambda device: None)
    fl.run(tiny(train__epochs=1), runs=tmp_path / "unknown")
