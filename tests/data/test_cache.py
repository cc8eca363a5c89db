"""Prepared once: found again, shared by processes, and whole after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from frostlab.data import splits as survey
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared, Writer
from frostlab.errors import BadInput
from frostlab.recipe.recipe import Recipe
from frostlab.storage import build_once, cache_folder

PROGRAM = """
import json, sys, time
from pathlib import Path
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Writer
from frostlab.recipe.recipe import Recipe
path, cache, log, wait = sys.argv[1:]
real = Writer.append
def logged(self, ids):
    with open(log, "a") as file:
        file.write(self.role + "\\n")
    real(self, ids)
    time.sleep(float(wait))
Writer.append = logged
found = prepare(
    Recipe.model_validate({"data": {"name": "own", "path": path}, "tokenizer": {"kind": "words"}}),
    cache=Path(cache),
)
print(json.dumps([found.digest, {role: split.digest for role, split in found.splits.items()}]))
print("torch" in sys.modules)
"""


def start(path: Path, cache: Path, log: Path, wait: float, seed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(cache), str(log), str(wait)]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def digests(found: Prepared) -> list[object]:
    return [found.digest, {role: split.digest for role, split in found.splits.items()}]


@pytest.fixture
def own(tmp_path: Path, write: Callable[..., Path], sentences: Callable[..., list]) -> Path:
    return write(tmp_path / "own.jsonl", sentences(300, classes=3))


@pytest.fixture
def wanted(own: Path, recipe: Callable[..., Recipe]) -> Recipe:
    return recipe({"kind": "words"}, name="own", path=str(own))


def test_two_processes_do_the_work_once(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe
) -> None:
    log = tmp_path / "log"
    both = [start(own, cache, log, 0.2, seed) for seed in ("1", "2")]
    printed = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == printed[1]
    assert printed[0][1] == "False"  # nothing imported torch
    assert sorted(log.read_text().split()) == ["report", "train", "tune"]
    # Another process, hash seed and cache: the same numbers.
    assert json.loads(printed[0][0]) == digests(prepare(wanted, cache=tmp_path / "other"))


def test_a_killed_preparer_leaves_nothing_to_be_mistaken(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe
) -> None:
    log = tmp_path / "log"
    process = start(own, cache, log, 60, "0")
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list((cache / "prepared").glob(".*.tmp"))
    found = prepare(wanted, cache=cache)
    assert digests(found) == digests(prepare(wanted, cache=tmp_path / "other"))
    assert not list(cache.glob("*/.*.tmp"))


def test_a_second_call_reads_no_text(
    own: Path, cache: Path, wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(wanted, cache=cache)

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(survey.Part, "rows", fail)
    monkeypatch.setattr(Writer, "append", fail)
    second = prepare(wanted, cache=cache)
    assert digests(second) == digests(first)
    assert second.origin == first.origin
    os.utime(own, ns=(1, 1))
    with pytest.raises(AssertionError, match="read again"):
        prepare(wanted, cache=cache)


def test_equal_texts_elsewhere_are_found(
    tmp_path: Path, own: Path, cache: Path, wanted: Recipe, recipe: Callable[..., Recipe]
) -> None:
    first = prepare(wanted, cache=cache)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(own.read_bytes())
    second = prepare(recipe({"kind": "words"}, name="own", path=str(copy)), cache=cache)
    assert second.digest == first.digest
    assert len(list((cache / "prepared").glob("*/prepared.json"))) == 1
    assert str(copy) in second.origin["train"]
    copy.write_bytes(own.read_bytes().replace(b"w1", b"w2"))
    other = prepare(recipe({"kind": "words"}, name="own", path=str(copy)), cache=cache)
    assert other.digest != first.digest


def test_each_setting_changes_the_digest(own: Path, cache: Path, recipe: Callable) -> None:
    words, data = {"kind": "words"}, {"name": "own", "path": str(own)}
    made = [
        prepare(made, cache=cache).digest
        for made in (
            recipe(words, **data),
            recipe(words, **data, length=5),
            recipe(words, **data, limit=50),
            recipe(words, **data, evaluation_limit=5),
            recipe(words, **data, tune=0.1),
            recipe(words, **data, task="language"),
            recipe(words | {"lowercase": False}, **data),
            recipe(words | {"size": 100}, **data),
            recipe({"kind": "bpe", "size": 300}, **data),
        )
    ]
    assert len(set(made)) == len(made)


def test_arrays_are_mapped_and_read_only(cache: Path, wanted: Recipe) -> None:
    ids = prepare(wanted, cache=cache).splits["train"].ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(cache / "a", fail)
    assert [path.name for path in cache.iterdir()] == ["a.lock"]


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written: Not a directory; set FROSTLAB_CACHE"):
        build_once(tmp_path / "file" / "in" / "it", lambda _: None)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(Path("x")) == Path("x")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("FROSTLAB_CACHE", raising=False)
    assert cache_folder(None) == Path("/xdg/frostlab")
    monkeypatch.setenv("FROSTLAB_CACHE", "/mine")
    assert cache_folder(None) == Path("/mine")


def test_a_file_that_changes_meanwhile_is_refused(
    own: Path, cache: Path, wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Writer.append

    def touching(self: Writer, ids: object) -> None:
        own.write_bytes(own.read_bytes() + b"\n")
        real(self, ids)

    monkeypatch.setattr(Writer, "append", touching)
    with pytest.raises(BadInput, match=r"own\.jsonl changed while it was read"):
        prepare(wanted, cache=cache)
