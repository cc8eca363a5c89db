"""Storage on disk: atomic files and folders, locks, digests, seeds and the cache."""

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from frostlab.errors import BadInput, FrostlabError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1  # version of the cache; increase it when the cached files or the tokenization change


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success, flush it and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder to fill; on success, rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until the contents of a file or folder are on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """Read a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FrostlabError(f"{path} is damaged ({error})") from None


def save_tensors(path: Path, tensors: "dict[str, Tensor]") -> None:
    """Write a safetensors file atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with whole_file(path) as temporary:
        try:
            save_file(_plain_tensors(tensors), temporary)
        except SafetensorError as error:  # raise OSError if the system refused, e.g. a full disk
            if code := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
            raise
        use_default_mode(temporary)


def _plain_tensors(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Return tensors as safetensors needs them: on the CPU, contiguous, shared ones only once."""
    seen: dict[tuple[int, int], str] = {}
    plain = {}
    for name, tensor in tensors.items():
        if tensor.numel() and seen.setdefault((tensor.data_ptr(), tensor.numel()), name) != name:
            continue
        plain[name] = tensor.detach().cpu().contiguous()
    return plain


def use_default_mode(path: Path) -> None:
    """Give a file the usual permissions; safetensors makes its files readable only by the owner."""
    mask = os.umask(0o077)  # the mask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


class Lock:
    """A file lock that one process holds at a time; the system releases it if the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def acquire(self, seconds: float = math.inf) -> bool:
        """Take the lock, waiting at most `seconds`; return whether it was taken."""
        fcntl = _fcntl()
        file = self.path.open("a")
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= deadline:
                    file.close()
                    return False
                time.sleep(0.01)
            else:
                self._file = file
                return True

    def release(self) -> None:
        """Release the lock for the next process."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of this file; False if the file cannot be read."""
    fcntl = _fcntl()
    with suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _fcntl() -> Any:
    try:
        import fcntl
    except ImportError:
        raise FrostlabError(
            "frostlab's records need POSIX file locks, which this system lacks; "
            "on Windows, use it inside WSL"
        ) from None
    return fcntl


def cache_folder(asked: Path | None) -> Path:
    """Return the cache folder: `asked`, else FROSTLAB_CACHE, else one in the user's cache."""
    if asked is not None:
        return asked.expanduser()
    if named := os.environ.get("FROSTLAB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "frostlab"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`; if it does not exist, build it under a temporary name and rename it."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Lock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the cache {folder.parent} cannot be written: {reason}; set FROSTLAB_CACHE to another"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a killed process
        shutil.rmtree(leftover)
    with whole_folder(folder) as temporary:
        build(temporary)


def digest_of(value: object) -> str:
    """Return the sha256 of a plain value's JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on all parts, such as a run's seed and a step."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, with None, also inside lists and dicts."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
