"""Reading, writing and checking files."""

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frostlab import storage
from frostlab.errors import BadInput, DamagedCache, FrostlabError
from frostlab.storage import (
    SEAL,
    Lock,
    build_once,
    check_name,
    damaged_file,
    load_tensors,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    remove_temporary,
    save_tensors,
    seal,
    whole_file,
    whole_folder,
    write_whole,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)  # fmt: skip


@given(value=PLAIN)
@settings(max_examples=60, deadline=None)
def test_what_is_written_as_json_is_read_back_equal(
    value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("json") / "x.json"
    write_whole(path, json.dumps(value, ensure_ascii=False, allow_nan=True))
    assert read_json(path) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_saved_tensors_are_read_back_equal(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a.b": torch.arange(6).view(2, 3).to(dtype), "empty": torch.zeros(0, 4, dtype=dtype)}
    save_tensors(tmp_path / "x.safetensors", tensors)
    stored = load_tensors(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def _special(kind: str, path: Path) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("read", [read_bytes, read_text, read_json])
def test_only_regular_files_are_read(kind: str, read: Any, tmp_path: Path) -> None:
    path = _special(kind, tmp_path / "result.json")
    with pytest.raises(BadInput, match="result.json is not a regular file"):
        read(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 10_000, "not valid JSON"),
        (b" " * 2000, "larger than"),
    ],
)
def test_bad_json_is_one_line_with_the_file(content: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    most = 1999 if content.isspace() else 1 << 20
    with pytest.raises(BadInput, match=line) as caught:
        read_json(path, most)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_stays_missing_and_a_null_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "x")
    with pytest.raises(BadInput, match="not a path"):
        read_bytes(tmp_path / "a\x00b")
    (tmp_path / "y").write_bytes(b"a\xff")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_text(tmp_path / "y")
    with pytest.raises(BadInput, match="line 3 is not valid JSON"):
        parse_json("{", "line 3")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/x", "a\\b", ".hidden", "a\x1b[0m", "a\nb", "\ud800", "x" * 300,
     5, None],
)  # fmt: skip
def test_names_are_one_part_of_a_path(name: object) -> None:
    with pytest.raises(BadInput, match="--name"):
        check_name(name, "--name")


def test_ordinary_names_are_accepted() -> None:
    for name in ("imdb-gpt-none-s0", "a b", "größe", "x.1", "[red]"):
        assert check_name(name, "--name") == name


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    link = tmp_path / "page.html"
    link.symlink_to(outside)
    write_whole(link, "new")
    assert outside.read_text() == "kept"
    assert not link.is_symlink()
    assert link.read_text() == "new"


def test_a_lock_is_not_followed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        Lock(tmp_path / "lock").acquire(0)
    assert not (tmp_path / "outside").exists()


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with whole_file(tmp_path / "x") as temporary:
            names.add(temporary.name)
            temporary.write_text("x")
        with whole_folder(tmp_path / f"folder{len(names)}") as folder:
            names.add(folder.name)
    assert len(names) == 4
    assert not any(str(os.getpid()) in name.split(".") for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder1", "folder3", "x"]


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", "old")

    def fail() -> None:
        with whole_file(tmp_path / "x") as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_files_have_the_mode_of_the_users_mask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "x", "")
        save_tensors(tmp_path / "y", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "xy"} == {0o640}


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.json.0123.tmp").write_text("")
    (tmp_path / ".b.0123.tmp").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / ".c.0123.tmp").symlink_to(tmp_path / "outside")
    (tmp_path / "kept.tmp").write_text("")
    remove_temporary(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.tmp", "outside"]


def _made(folder: Path) -> None:
    np.save(folder / "ids.npy", np.arange(50))
    (folder / "inner").mkdir()
    (folder / "inner" / "facts.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    _made(tmp_path)
    seal(tmp_path)
    assert damaged_file(tmp_path) is None
    random = np.random.default_rng(0)
    for path in [tmp_path / "ids.npy", tmp_path / "inner" / "facts.json", tmp_path / SEAL]:
        whole = path.read_bytes()
        for place in random.choice(len(whole), 40):
            changed = bytearray(whole)
            changed[place] ^= 1 << random.integers(8)
            path.write_bytes(changed)
            assert damaged_file(tmp_path) is not None, (path.name, place)
        path.write_bytes(whole[:-1])
        assert damaged_file(tmp_path) is not None
        path.write_bytes(whole)
    assert damaged_file(tmp_path) is None


def test_a_missing_or_linked_file_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _made(folder)
    seal(folder)
    os.replace(folder / "ids.npy", tmp_path / "ids.npy")
    assert damaged_file(folder) == folder / "ids.npy"
    (folder / "ids.npy").symlink_to(tmp_path / "ids.npy")
    assert damaged_file(folder) == folder / "ids.npy"
    assert damaged_file(folder, ["empty"]) is None
    assert damaged_file(folder, ["unknown"]) == folder / SEAL


@pytest.mark.parametrize("content", ["", "[]", "{", '{"../ids.npy": [1, "x"]}', '{"ids.npy": 1}'])
def test_a_hostile_seal_is_damage(content: str, tmp_path: Path) -> None:
    _made(tmp_path)
    (tmp_path / SEAL).write_text(content)
    assert damaged_file(tmp_path) is not None


def test_files_larger_than_a_block_have_several_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostlab.storage._BLOCK", 64)
    monkeypatch.setattr("frostlab.storage._PIECE", 16)
    (tmp_path / "x").write_bytes(bytes(range(200)))
    seal(tmp_path)
    assert len(json.loads((tmp_path / SEAL).read_text())["x"]) == 1 + 4
    for place in (0, 63, 64, 199):
        changed = bytearray(range(200))
        changed[place] ^= 1
        (tmp_path / "x").write_bytes(changed)
        assert damaged_file(tmp_path) == tmp_path / "x"


def test_a_damaged_cache_is_built_again_and_only_then(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        _made(folder)

    folder = tmp_path / "cache" / "x"
    build_once(folder, build)
    build_once(folder, build)
    assert len(built) == 1
    content = bytearray((folder / "ids.npy").read_bytes())
    content[-8] ^= 1
    (folder / "ids.npy").write_bytes(content)
    with pytest.warns(DamagedCache, match=r"x is built again, because ids\.npy is missing, was"):
        build_once(folder, build)
    assert len(built) == 2
    assert np.array_equal(np.load(folder / "ids.npy"), np.arange(50))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["x", "x.lock"]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose checksums are computed, where every cached folder counts as large."""
    names: list[str] = []
    compute = storage.checksums

    def counted(folder: Path, asked: list[str]) -> dict[str, list[Any]]:
        names.extend(asked)
        return compute(folder, asked)

    monkeypatch.setattr(storage, "checksums", counted)
    monkeypatch.setattr(storage, "_LARGE", 0)
    return names


def _settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' last change be long enough ago."""
    monkeypatch.setattr(storage, "_SETTLED", -1_000_000_000)


def test_a_large_cache_is_not_hashed_while_it_looks_unchanged(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "x"
    files = ["empty", "ids.npy", "inner/facts.json"]
    build_once(folder, _made)
    assert hashed == files
    build_once(folder, _made)
    assert hashed == 2 * files, "it was written a moment ago: its times may not tell"
    _settle(monkeypatch)
    build_once(folder, _made)
    assert hashed == 3 * files
    for _ in range(3):
        build_once(folder, _made)
    assert hashed == 3 * files
    os.utime(folder)  # as a reused prefix does
    build_once(folder, _made)
    assert hashed == 3 * files
    os.utime(folder / "ids.npy")
    build_once(folder, _made)
    assert hashed == 4 * files, "another time is looked into, and is no damage"
    build_once(folder, _made)
    assert hashed == 4 * files
    monkeypatch.setattr(storage, "_LARGE", 1 << 20)
    build_once(folder, _made)
    assert hashed == 5 * files, "a small one is always verified"


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def _flip_and_hide(path: Path) -> None:
    before = path.stat()
    _flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def _replace(path: Path) -> None:
    """Another file of the same size and times."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(bytes(before.st_size))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize(
    "spoil",
    [
        _flip,
        _flip_and_hide,
        _replace,
        Path.unlink,
        lambda path: os.truncate(path, 5),
        lambda path: (path.parent / "more").write_text("x"),
        lambda path: (path.parent / SEAL).unlink(),
    ],
    ids=["flipped", "flipped, time restored", "replaced", "gone", "cut", "one more", "no seal"],
)
def test_a_large_cache_that_changed_is_built_again(
    spoil: Callable[[Path], object],
    tmp_path: Path,
    hashed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cache" / "x"
    build_once(folder, _made)
    _settle(monkeypatch)
    build_once(folder, _made)
    before = len(hashed)
    build_once(folder, _made)
    assert len(hashed) == before, "it is trusted"
    time.sleep(0.02)  # longer than a tick of the file system's clock
    spoil(folder / "ids.npy")
    with pytest.warns(DamagedCache, match="is built again"):
        build_once(folder, _made)
    assert np.array_equal(np.load(folder / "ids.npy"), np.arange(50))
    build_once(folder, _made)


def test_remembering_a_verification_leaves_the_folder_as_it_was(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file inside, or one that a killed process left there, would have others build it again."""
    folder = tmp_path / "cache" / "x"
    build_once(folder, _made)
    names = sorted(path.name for path in folder.iterdir())
    _settle(monkeypatch)
    written: list[Path] = []
    write = storage.write_whole
    monkeypatch.setattr(
        storage, "write_whole", lambda path, text: (written.append(path), write(path, text))
    )
    build_once(folder, _made)
    assert [path.parent for path in written] == [folder.parent]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("content", ["", "[]", "{", '{"ids.npy": 1}', "null", "1e999"])
def test_a_hostile_memory_of_a_verification_is_not_believed(
    content: str, tmp_path: Path, hashed: list[str]
) -> None:
    folder = tmp_path / "cache" / "x"
    build_once(folder, _made)
    storage._verified(folder).write_text(content)
    before = len(hashed)
    build_once(folder, _made)
    assert len(hashed) == before + 3


def test_one_of_several_processes_builds_a_cache(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        _made(folder)

    threads = [
        threading.Thread(target=build_once, args=(tmp_path / "cache" / "x", build))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_damaged_tensor_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content in (b"", b"\x00" * 8, b"\xff" * 100, b"{" * 30):
        path.write_bytes(content)
        with pytest.raises(FrostlabError, match=r"x\.safetensors") as caught:
            load_tensors(path)
        assert "\n" not in str(caught.value)
