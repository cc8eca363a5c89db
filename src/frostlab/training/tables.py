"""Tables of numbers on disk that outlive a run: whole or absent, checked, bounded in size."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from frostlab.data.cache import cache_folder
from frostlab.errors import BadInput


def kept_table(
    key: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    limit: int,
    fill: Callable[[Tensor], None],
) -> tuple[Tensor, bool]:
    """Map a table from its file, filled first if it is not there or spoilt; say if it was there.

    One process at a time looks, fills and makes room. A table that another removes while it is
    mapped stays readable.
    """
    parent = cache_folder(None) / "prefixes"
    folder, needed = parent / key, shape[0] * shape[1] * dtype.itemsize
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / "lock"):
            for left in parent.glob("*.part"):  # of a killed process: the lock is ours now
                shutil.rmtree(left)
            reused = _is_whole(folder, needed)
            if not reused:
                shutil.rmtree(folder, ignore_errors=True)
                _make_room(parent, needed, limit)
                part = folder.with_suffix(".part")
                _write(part, shape, dtype, fill)
                part.rename(folder)
            os.utime(folder)
            return _mapped(folder / "vectors", shape, dtype, shared=False), reused
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the cache {parent} cannot be written: {reason}; set FROSTLAB_CACHE to another"
        ) from error


def _mapped(path: Path, shape: tuple[int, int], dtype: torch.dtype, shared: bool) -> Tensor:
    count = shape[0] * shape[1]
    return torch.from_file(str(path), shared=shared, size=count, dtype=dtype).view(shape)


def _write(
    folder: Path, shape: tuple[int, int], dtype: torch.dtype, fill: Callable[[Tensor], None]
) -> None:
    folder.mkdir()
    path, needed = folder / "vectors", shape[0] * shape[1] * dtype.itemsize
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is noticed here
                os.posix_fallocate(file.fileno(), 0, needed)
            file.truncate(needed)
        fill(_mapped(path, shape, dtype, shared=True))
        about = {"bytes": needed, "sha256": _digest(path)}
        (folder / "about.json").write_text(json.dumps(about))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_whole(folder: Path, needed: int) -> bool:
    try:
        about = json.loads((folder / "about.json").read_text())
        path = folder / "vectors"
        return path.stat().st_size == needed and about["sha256"] == _digest(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_room(parent: Path, needed: int, limit: int) -> None:
    """Remove the tables that were used longest ago until a new one fits."""
    tables = [path.parent for path in parent.glob("*/vectors")]
    sizes = {folder: (folder / "vectors").stat().st_size for folder in tables}
    for folder in sorted(tables, key=lambda folder: folder.stat().st_mtime):
        if sum(sizes.values()) + needed <= limit:
            return
        shutil.rmtree(folder)
        del sizes[folder]
