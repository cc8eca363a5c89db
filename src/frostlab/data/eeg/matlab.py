"""Reading of MATLAB's files in a second process, because a damaged file can crash scipy.

These are .mat files with arrays, and EEGLAB's .set files. This file is also the program of that
process: it imports only NumPy, scipy and, for .set files, MNE; it limits its memory, and answers
each request with the arrays of one file.
"""

import importlib
import json
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

MEMORY = 1 << 30  # bytes that one file may take in the second process
SET_SHARE = 8  # bytes beyond MEMORY that are allowed for each byte of a .set and its .fdt file
SECONDS = 5.0  # time limit for a file; each 10 MB of the file adds a second
PROGRAM = __file__
_START = 60.0  # seconds until the second process must be ready
_PIECE = 1 << 20  # the most bytes that are received at once


@dataclass(frozen=True)
class SetFile:
    """The signals of an EEGLAB .set file."""

    channels: list[str]
    types: list[str]  # type of each channel, in MNE's words, such as eeg
    rate: float  # Hz
    signals: Any  # (channels, samples), in V


class MatFiles:
    """A second process that reads MATLAB's files; it runs from the first file until `close`.

    Args:
        mne: whether the process also imports MNE, which `read_set` needs.
    """

    def __init__(self, *, mne: bool = False) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._modules = ["mne"] if mne else []

    def read(self, path: Path, *keys: str) -> dict[str, list[Any]]:
        """Return the variables `keys` as lists: of one array, or of the arrays of a cell array."""
        from frostlab.errors import BadInput  # the second process does not import frostlab

        size = _size(path)
        if size > MEMORY:
            raise BadInput(f"{path} is larger than {MEMORY >> 20} MiB")
        _, arrays = self._ask(path, size, MEMORY, {"keys": keys})
        return {key: arrays[key] for key in keys}

    def read_set(self, path: Path, most: int) -> SetFile:
        """Read a .set file and its .fdt file, if any; refuse signals of more than `most` values."""
        size, partner = _size(path), path.with_suffix(".fdt")
        if partner.is_file():
            size += partner.stat().st_size
        answer, arrays = self._ask(path, size, 8 * most, {"most": most})
        return SetFile(answer["channels"], answer["types"], answer["rate"], arrays["signals"][0])

    def _ask(
        self, path: Path, size: int, most: int, request: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Send a request; return the answer and its arrays, each of at most `most` bytes."""
        from frostlab.errors import BadInput

        if self._owner != os.getpid():  # after a fork, `_process` belongs to the parent
            self._process, self._owner = None, os.getpid()
        try:
            deadline = time.monotonic() + _START
            if self._process is None:
                self._process = _start(self._modules)
                _line(self._process, deadline)
            deadline = time.monotonic() + SECONDS + size / 1e7
            line = json.dumps({"path": str(path.absolute()), **request}) + "\n"
            _pipe(self._process.stdin).write(line.encode())
            _pipe(self._process.stdin).flush()
            answer = json.loads(_line(self._process, deadline))
            if "error" in answer:
                raise BadInput(f"{path}{answer['error']}")
            return answer, {
                key: [_array(self._process, shape, most, deadline) for shape in shapes]
                for key, shapes in answer["shapes"].items()
            }
        except (OSError, EOFError, TimeoutError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            reason = "it took too long"
            if not isinstance(error, TimeoutError):
                reason = f"the process that reads it {self._ending()}"
            self.close()
            raise BadInput(f"{path} cannot be read: {reason}; the file may be damaged") from None

    def _ending(self) -> str:
        """Return how the process failed, such as `ended (signal 11)`."""
        if self._process is None:
            return "did not start"
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "gave a wrong answer"
        return f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()

    def __del__(self) -> None:
        self.close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _size(path: Path) -> int:
    from frostlab.storage import open_regular

    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def _start(modules: list[str]) -> subprocess.Popen[bytes]:
    """Start this file as a program; -P keeps this file's folder out of its imports."""
    return subprocess.Popen(
        [sys.executable, "-P", PROGRAM, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def _receive(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    """Read at least one and at most `size` bytes of an answer, until the deadline."""
    handle = _pipe(process.stdout).fileno()
    if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError
    piece = os.read(handle, min(size, _PIECE))
    if not piece:
        raise EOFError
    return piece


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += _receive(process, 1, deadline)
        if len(line) > _PIECE:
            raise ValueError("the answer has no end")
    return line


def _array(process: subprocess.Popen[bytes], shape: list[int], most: int, deadline: float) -> Any:
    size = 8 * math.prod(shape)
    if size > most or min(shape, default=0) < 0:
        raise ValueError("the answer is too large")
    content = bytearray()
    while len(content) < size:
        content += _receive(process, size - len(content), deadline)
    return np.frombuffer(content, np.float64).reshape(shape)


# The second process


def _serve(modules: list[str]) -> None:
    """Answer requests until the first process closes the pipe."""
    from scipy import io

    mne: Any = importlib.import_module("mne") if "mne" in modules else None
    if mne is not None:
        mne.io.read_raw_eeglab  # noqa: B018  (MNE imports its readers when they are first named)
    limit = _MemoryLimit()
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # so that no print gets into the answers
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        facts: dict[str, Any] = {}
        arrays: dict[str, list[Any]] = {}
        limit.set(MEMORY)
        try:
            if "keys" in request:
                arrays = _load(io, request["path"], request["keys"])
            else:
                facts, arrays = _load_set(mne, request["path"], request["most"], limit)
            shapes = {key: [list(array.shape) for array in arrays[key]] for key in arrays}
            head = json.dumps({**facts, "shapes": shapes})
        except Exception as error:  # scipy and MNE raise many types of errors for a broken file
            arrays, head = {}, json.dumps({"error": _message(error, limit.room)})
        answers.write(head.encode() + b"\n")
        for key in arrays:
            for array in arrays[key]:
                answers.write(np.ascontiguousarray(array).data)
        answers.flush()


class _Refused(Exception):
    """A file that can be read but is refused; the message says why."""


def _message(error: Exception, room: int) -> str:
    if isinstance(error, _Refused):
        return _printable(str(error))
    if isinstance(error, MemoryError):
        return f" cannot be read: it takes more than {room >> 20} MiB of memory"
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f" cannot be read: {_printable(first or type(error).__name__)[:200]}"


def _printable(text: str) -> str:
    """Escape line breaks and control characters, which a damaged file may have in its names."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _load(io: Any, path: str, keys: list[str]) -> dict[str, list[Any]]:
    variables = io.loadmat(path, variable_names=keys)
    for key in keys:
        if key not in variables:
            listed = ", ".join(f"{name!s:.40}" for name, _, _ in io.whosmat(path)[:8])
            raise _Refused(f" has no variable {key}; it has {listed}")
    return {key: _numbers(key, variables[key]) for key in keys}


def _numbers(key: str, value: Any) -> list[Any]:
    """Return an array of numbers, or the arrays of a cell array, as float64."""
    cells = isinstance(value, np.ndarray) and value.dtype.kind == "O"
    arrays = list(value.ravel()) if cells else [value]
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu" or not array.ndim:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise _Refused(f": {key} holds {kind!s:.40}, not an array of integers or floats")
    return [array.astype(np.float64) for array in arrays]


def _load_set(
    mne: Any, path: str, most: int, limit: "_MemoryLimit"
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Read a .set file; MNE finds its .fdt file, which must be in the same folder."""
    limit.set(MEMORY + SET_SHARE * os.path.getsize(path))
    raw = mne.io.read_raw_eeglab(path, preload=False, verbose="ERROR")
    files = {path, *map(str, raw.filenames)}
    for file in files:
        if os.path.dirname(os.path.abspath(file)) != os.path.dirname(os.path.abspath(path)):
            raise _Refused(f" names data in another folder: {file:.200}")
    if raw.n_times * len(raw.ch_names) > most:
        raise _Refused(f" has more than {most:,} values")
    limit.set(MEMORY + SET_SHARE * sum(map(os.path.getsize, files)))
    raw.load_data(verbose="ERROR")
    facts = {
        "channels": raw.ch_names,
        "types": raw.get_channel_types(),
        "rate": float(raw.info["sfreq"]),
    }
    return facts, {"signals": [raw.get_data().astype(np.float64, copy=False)]}


class _MemoryLimit:
    """A limit on the address space: the bytes that the imports took, plus room for one file."""

    def __init__(self) -> None:
        self.room = 0  # bytes that a file may take
        self._imports: int | None = None  # bytes; None on a system without /proc
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            self._imports = pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            pass

    def set(self, room: int) -> None:
        """Allow `room` bytes for a file; without /proc, nothing is limited."""
        self.room = room
        if self._imports is None:
            return
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = self._imports + room
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve(sys.argv[1:])
