"""A folder of finished things: made once, whole or not at all, whoever asks at the same time."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock

from frostlab.errors import BadInput

FORMAT = 1  # raise it when what is written, or how text becomes numbers, changes


def cache_folder(given: Path | None) -> Path:
    """Return the folder asked for, else FROSTLAB_CACHE, else frostlab's in the user's cache."""
    if given is not None:
        return given.expanduser()
    if named := os.environ.get("FROSTLAB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "frostlab"


def digest_of(value: object) -> str:
    """Name a plain value by what it says, stably."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first built in a temporary place and renamed when it is not there yet."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the cache {folder.parent} cannot be written: {reason}; set FROSTLAB_CACHE to another"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = f"{folder.name}.part-"
    for left in folder.parent.glob(f"{prefix}*"):  # of a killed builder: the lock is ours now
        shutil.rmtree(left)
    part = folder.with_name(f"{prefix}{os.getpid()}")
    part.mkdir()
    try:
        build(part)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def like_any_file(path: Path) -> None:
    """Give a file the mode of any new file; safetensors lets its owner alone read what it wrote."""
    mask = os.umask(0o077)  # the one way to read it is to set it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def finite(value: Any) -> Any:
    """Plain values without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _locked(file: TextIO, tries: int = 20) -> bool:
    """Take a lock; a listing may hold it for a moment to see who does."""
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.01)
    return False


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, then rename it: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
