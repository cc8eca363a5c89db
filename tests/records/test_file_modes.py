"""Every file that frostlab writes has the mode that the user's umask asks for."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import frostlab as fl
from comparing import compare
from tiny import tiny
from zoo import build


@pytest.fixture
def _group_may_read() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_group_may_read")
def test_modes_are_those_of_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "written"
    written.mkdir()
    monkeypatch.setenv("FROSTLAB_CACHE", str(written / "cache"))
    texts = tmp_path / "mine.csv"
    texts.write_text("text,label\n" + "".join(f"word{i} word{i % 7},{i % 2}\n" for i in range(200)))
    texts.chmod(0o600)  # not passed on
    recipe = tiny(
        data={"name": "own", "path": str(texts), "length": 8}, watch={"distance": True},
        treatment={"freeze": ["embedding", "position", "layers[0]"]},
        train__batching="packed", train__cache_prefix="disk", train__epochs=1, model__dropout=0.0,
    )  # fmt: skip
    record = fl.run(recipe, runs=written / "runs", tensorboard=written / "board")
    fl.load_flow(record).save(written / "flow.json")
    compare(written / "comparison", seeds=1)
    model, _ = build("bert")
    fl.freeze(model, "query")
    fl.export(model, written / "exported")
    fl.save_trainable(model, written / "delta")
    paths = list(written.rglob("*"))
    assert {path.suffix for path in paths} >= {".json", ".jsonl", ".safetensors", ".npy", ".yaml"}
    wanted = {True: 0o750, False: 0o640}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    wrong = {path: oct(mode) for path, mode in modes.items() if mode != wanted[path.is_dir()]}
    assert not wrong
