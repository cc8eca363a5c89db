"""Storage on disk: bounded reads, atomic writes, locks, checksums, seeds and the cache."""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from frostlab.errors import BadInput, DamagedCache, FrostlabError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2  # version of the cache; increase it if the files or the tokenization change
MOST_BYTES = 256 << 20  # the largest file that is read whole
MOST_VALUES = 10_000_000  # the most values in a JSON text, estimated as commas + 2 × colons
LINE_BYTES = 16 << 20  # the longest line of a file that is read line by line
SEAL = "checksums.json"  # the file with the checksums of the other files in its folder
_BLOCK = 64 << 20  # bytes that have one checksum
_PIECE = 1 << 20  # bytes that are read at once to compute a checksum
# A cached folder of this many bytes or more is not verified again while its files look unchanged.
# Smaller folders are always verified, in less than a second.
_LARGE = 256 << 20
# On some file systems, a second change within 2 s of the first does not change a file's times. So
# the times of a file are trusted only if its last change is at least this many ns ago.
_SETTLED = 2_000_000_000
_NAME_BYTES = 200  # the longest name of a file or folder; most file systems allow 255 bytes


def check_name(name: object, what: str) -> str:
    """Return a name that a file or folder can have; an error begins with `what` ("the run's name").

    Refuse separators, control characters, a leading dot, and names that are empty or too long.
    """
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name.strip(". ") == ""
        or name.startswith(".")
        or any(separator in name for separator in "/\\")
    ):
        raise BadInput(f"{what} {name!r:.80} should be a plain file name, without / or a leading .")
    if len(name.encode()) > _NAME_BYTES:
        raise BadInput(f"{what} {name[:40]!r}… is longer than {_NAME_BYTES} bytes")
    return name


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; refuse folders, pipes and devices.

    A missing file raises FileNotFoundError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    except ValueError:  # a path with a null character
        raise BadInput(f"{str(path)!r} is not a path") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadInput(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def open_append(path: Path) -> IO[bytes]:
    """Open or create a regular file for reading and appending; refuse links, pipes and devices."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise BadInput(f"{path} cannot be written ({reason})") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadInput(f"{path} is not a regular file")
    return os.fdopen(handle, "r+b")


def read_lines(path: Path, most: int = LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file, each with its end; refuse one longer than `most` bytes."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise BadInput(f"{path} line {number} is longer than {most >> 20} MiB")
            yield line


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file whole; refuse a file of more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadInput(f"{path} is larger than {most >> 20} MiB")
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a regular file of UTF-8 text whole."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file; an invalid file is refused in one line that names it."""
    return parse_json(read_bytes(path, most), path)


def values_in(value: Any) -> int:
    """Return the number of values in a JSON value, as `parse_json` counts them."""
    if isinstance(value, dict):
        return sum(3 + values_in(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(1 + values_in(inner) for inner in value)
    return 0


def parse_json(text: bytes | str, where: object) -> Any:
    """Parse JSON; the error for an invalid text is one line that begins with `where`."""
    comma, colon = (",", ":") if isinstance(text, str) else (b",", b":")
    if text.count(comma) + 2 * text.count(colon) > MOST_VALUES:  # type: ignore[arg-type]
        raise BadInput(
            f"{where} is too large: its commas and colons suggest more than {MOST_VALUES:,} values"
        )
    try:
        return json.loads(text)
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid JSON ({first_line(error)})") from None


def _temporary_name(path: Path) -> Path:
    """Return a path next to `path`; its name is random, so that nobody can place a link there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_temporary(folder: Path, name: str = "*") -> None:
    """Remove temporary files and folders, which killed processes left behind.

    Call it only while no other process writes files of this name in the folder.
    """
    for path in folder.glob(f".{name}.*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success, flush it and rename it to `path`.

    A link at `path` is replaced, not followed.
    """
    temporary = _temporary_name(path)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def path_inside(folder: Path, *parts: str) -> Path:
    """Join a folder and parts to a path; refuse a path outside the folder, e.g. through a link."""
    path = folder.joinpath(*parts)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise BadInput(
            f"{path} is not inside {folder}, after following links, so nothing is written there"
        )
    return path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder to fill; on success, rename it to `path`."""
    temporary = _temporary_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
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
        open_regular(path).close()
        return load_file(path)
    except FileNotFoundError:
        raise FrostlabError(f"{path} is missing") from None
    # For some headers, torch raises an error of its own, such as RuntimeError for a huge shape.
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, FrostlabError):
            raise
        raise FrostlabError(f"{path} is damaged ({first_line(error)})") from None


def save_tensors(path: Path, tensors: "dict[str, Tensor]") -> None:
    """Write a safetensors file atomically.

    safetensors makes a temporary file of its own next to its target. The target is therefore in a
    temporary folder, which `remove_temporary` removes if the process is killed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = _temporary_name(path)
    folder.mkdir()
    try:
        temporary = folder / path.name
        try:
            save_file(plain_tensors(tensors), temporary)
        except SafetensorError as error:  # raise OSError if the system refused, e.g. a full disk
            if code := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
            raise
        use_default_mode(temporary)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_tensors(tensors: "dict[str, Tensor]", copy: bool = False) -> "dict[str, Tensor]":
    """Return tensors as safetensors needs them: contiguous, on the CPU, each only once.

    With `copy`, later changes of the tensors do not change the result.
    """
    seen: dict[tuple[int, int], str] = {}
    plain = {}
    for name, tensor in tensors.items():
        if tensor.numel() and seen.setdefault((tensor.data_ptr(), tensor.numel()), name) != name:
            continue
        plain[name] = tensor.detach().to("cpu", copy=copy).contiguous()
    return plain


class BackgroundWriter:
    """A thread that writes files while the program goes on; it does one thing at a time.

    If writing fails, the next `wait` or `check` raises its error, once.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Call a function in a thread, after the function before it has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._call, args=(write,))
        self._thread.start()

    def _call(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait until everything is written; raise an error if that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise an error if writing has failed, without waiting."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def use_default_mode(path: Path) -> None:
    """Give a file the usual permissions; safetensors makes its files readable only by the owner."""
    mask = os.umask(0o077)  # the mask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


class Lock:
    """A lock on a file or an existing folder that one process holds at a time.

    The system releases it if the process dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self, seconds: float = math.inf) -> bool:
        """Take the lock, waiting at most `seconds`; return whether it was taken."""
        fcntl = _fcntl()
        flags = os.O_RDONLY if self.path.is_dir() else os.O_RDWR | os.O_CREAT
        handle = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(handle)
                    return False
                time.sleep(0.01)
            else:
                self._handle = handle
                return True

    def release(self) -> None:
        """Release the lock for the next process."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of this file; False if the file cannot be read."""
    fcntl = _fcntl()
    with suppress(OSError, BadInput), open_regular(path) as file:
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
            "on Windows, run frostlab inside WSL"
        ) from None
    return fcntl


def cache_folder(asked: Path | None) -> Path:
    """Return the cache folder: `asked`, else FROSTLAB_CACHE, else one in the user's cache."""
    if asked is not None:
        return asked.expanduser()
    named = os.environ.get("FROSTLAB_CACHE")
    folder = Path(named or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser()
    except RuntimeError:  # ~ or ~user without a home folder
        raise BadInput(
            f"the cache {folder}: the home folder that ~ stands for is unknown; "
            "set FROSTLAB_CACHE to a path without ~"
        ) from None
    return folder if named else folder / "frostlab"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder` after checking its files; build it if it is missing or damaged."""
    try:
        if folder.is_dir() and _damaged_cache(folder) is None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Lock(folder.with_name(folder.name + ".lock")):
            remove_temporary(folder.parent, folder.name)
            if folder.is_dir() and (damaged := damaged_file(folder)) is not None:
                warnings.warn(
                    f"{folder} is built again, because {damaged.relative_to(folder)} is missing, "
                    "was changed or does not belong there",
                    DamagedCache,
                    2,
                )
                # renamed in one step, so that no process finds a folder that is partly removed
                os.replace(folder, _temporary_name(folder))
                remove_temporary(folder.parent, folder.name)
            if not folder.is_dir():
                with whole_folder(folder) as temporary:
                    build(temporary)
                    seal(temporary)
                    signatures = _signatures(temporary)
                # no other process writes there, so sizes and times are still these after the
                # renaming
                _remember(folder, signatures, time.time_ns() - _SETTLED)
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        raise BadInput(
            f"{folder} cannot be built or read ({error.strerror or error}{where}); "
            "if this disk is full or read-only, set FROSTLAB_CACHE to a folder on another disk"
        ) from error
    return folder


def _damaged_cache(folder: Path) -> Path | None:
    """Return a damaged file of a cached folder; None if all files are intact.

    A large folder whose files look as they did when they were verified is not verified again. A
    file looks changed if its size, inode, or time of the last change to its content (mtime) or its
    status (ctime) differs. Programs cannot set the ctime, so this misses only changes below the
    file system, such as bits that the disk loses, and those made while the clock was set back.
    """
    settled, signatures = time.time_ns() - _SETTLED, _signatures(folder)
    if _is_large(signatures):
        with suppress(OSError, BadInput):
            if read_json(_verified(folder)) == signatures:
                return None
    damaged = damaged_file(folder)
    if damaged is None:
        _remember(folder, signatures, settled)
    return damaged


def _verified(folder: Path) -> Path:
    """Return the file with the signatures of a cached folder's files, which is next to the folder.

    It is not inside, because other processes would take it for a file that does not belong there.
    """
    return folder.with_name(f"{folder.name}.verified.json")


def _signatures(folder: Path) -> dict[str, list[int]]:
    """Return the size, inode and times of each file in a folder."""
    signatures = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process has just removed it
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                times = [status.st_mtime_ns, status.st_ctime_ns]
                signatures[str(path.relative_to(folder))] = [status.st_size, status.st_ino, *times]
    return signatures


def _is_large(signatures: dict[str, list[int]]) -> bool:
    return sum(size for size, *_ in signatures.values()) >= _LARGE


def _remember(folder: Path, signatures: dict[str, list[int]], settled: int) -> None:
    """Store the signatures that a large folder's files had before they were verified.

    If a file was changed after `settled`, or the folder cannot be written, nothing is stored, and
    the next use verifies the files again.
    """
    # the file of checksums is written last, so it may be newer; it holds no data to be damaged
    own = [times for name, (_, _, *times) in signatures.items() if name != SEAL]
    newest = max(map(max, own), default=0)
    if _is_large(signatures) and newest < settled:
        with suppress(OSError):
            write_whole(_verified(folder), json.dumps(signatures, indent=1))


def seal(folder: Path) -> None:
    """Write the checksums of all files in a folder, so that `damaged_file` can verify them."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL)
    names = sorted(str(path.relative_to(folder)) for path in files)
    write_whole(folder / SEAL, json.dumps(checksums(folder, names), indent=1))


def remove_sealed(folder: Path, name: str) -> None:
    """Remove a file of a sealed folder, and its checksum."""
    (folder / name).unlink(missing_ok=True)
    with suppress(OSError, BadInput):  # a damaged seal stays damaged
        sealed = read_json(folder / SEAL)
        if isinstance(sealed, dict) and sealed.pop(name, None) is not None:
            write_whole(folder / SEAL, json.dumps(sealed, indent=1))


def damaged_file(folder: Path, names: Iterable[str] | None = None) -> Path | None:
    """Return a file that is missing or was changed since `seal`; None if all files are intact.

    Only `names` are checked (default: all files; then a file without a checksum counts as changed).
    The result is the file of checksums itself if that is missing, damaged, or lacks one of `names`.
    """
    try:
        sealed = read_json(folder / SEAL)
        wanted = {name: sealed[name] for name in (sealed if names is None else names)}
    except (OSError, BadInput, LookupError, TypeError):
        return folder / SEAL
    if not isinstance(sealed, dict):
        return folder / SEAL
    present = {name for name in wanted if is_plain(folder, name)}
    actual = checksums(folder, sorted(present))
    damaged = next((folder / name for name in wanted if actual.get(name) != wanted[name]), None)
    if damaged is None and names is None:
        files = (path for path in folder.rglob("*") if not path.is_dir() and path.name != SEAL)
        return next((path for path in files if str(path.relative_to(folder)) not in sealed), None)
    return damaged


def is_plain(folder: Path, name: str) -> bool:
    """Return whether a name is that of a regular file below the folder, and not of a link."""
    with suppress(OSError, ValueError):
        path = folder / name
        inside = ".." not in Path(name).parts and not Path(name).is_absolute()
        return inside and stat.S_ISREG(path.lstat().st_mode)
    return False


def checksums(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    """Return each file's size followed by the sha256 of every block.

    Threads compute them, unless the files are so small that starting threads takes longer.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    blocks = [(folder / name, offset) for name in names for offset in range(0, sizes[name], _BLOCK)]
    digests: Iterator[str]
    if sum(sizes.values()) <= _PIECE:
        digests = map(_block_digest, blocks)
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = iter(list(pool.map(_block_digest, blocks)))
    return {
        name: [size, *(next(digests) for _ in range(0, size, _BLOCK))]
        for name, size in sizes.items()
    }


def _block_digest(block: tuple[Path, int]) -> str:
    path, offset = block
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(offset)
        for _ in range(0, _BLOCK, _PIECE):
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


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
