"""Reading of MATLAB's .mat files in a second process, because a damaged file can crash scipy.

This file is also the program of that process: it imports only NumPy and scipy, limits its memory,
and answers each request with the arrays of one file.
"""

import json
import math
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

MEMORY = 1 << 30  # bytes that one file may take in the second process
SECONDS = 5.0  # time limit for a file; every 10 MB of the file add a second
PROGRAM = __file__
_START = 60.0  # seconds until the second process must be ready
_PIECE = 1 << 20


class MatFiles:
    """A second process that reads .mat files; it runs from the first file until `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def read(self, path: Path, *keys: str) -> dict[str, list[Any]]:
        """Return the arrays of each variable: one for an array, several for a cell array."""
        from frostlab.errors import BadInput  # the second process does not import frostlab
        from frostlab.storage import open_regular

        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size > MEMORY:
            raise BadInput(f"{path} is larger than {MEMORY >> 20} MiB")
        if self._owner != os.getpid():  # after a fork, `_process` belongs to the parent
            self._process, self._owner = None, os.getpid()
        try:
            deadline = time.monotonic() + _START
            if self._process is None:
                self._process = _start()
                _line(self._process, deadline)
            deadline = time.monotonic() + SECONDS + size / 1e7
            request = json.dumps({"path": str(path.absolute()), "keys": keys}) + "\n"
            _pipe(self._process.stdin).write(request.encode())
            _pipe(self._process.stdin).flush()
            answer = json.loads(_line(self._process, deadline))
            if "error" in answer:
                raise BadInput(f"{path}{answer['error']}")
            return {
                key: [_array(self._process, shape, deadline) for shape in answer["shapes"][key]]
                for key in keys
            }
        except (OSError, EOFError, TimeoutError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            reason = f"it took more than {SECONDS:.0f} s"
            if not isinstance(error, TimeoutError):
                reason = f"the process that reads it ended ({self._ending()})"
            self.close()
            raise BadInput(f"{path} cannot be read: {reason}; the file may be damaged") from None

    def _ending(self) -> str:
        """Return how the process ended, such as `signal 11`."""
        if self._process is None:
            return "it did not start"
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "wrong answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

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


def _start() -> subprocess.Popen[bytes]:
    """Start this file as a program; -P keeps the working folder out of its imports."""
    return subprocess.Popen(
        [sys.executable, "-P", PROGRAM],
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


def _array(process: subprocess.Popen[bytes], shape: list[int], deadline: float) -> Any:
    size = 8 * math.prod(shape)
    if size > MEMORY or min(shape, default=0) < 0:
        raise ValueError("the answer is too large")
    content = bytearray()
    while len(content) < size:
        content += _receive(process, size - len(content), deadline)
    return np.frombuffer(content, np.float64).reshape(shape)


# The second process


def _serve() -> None:
    """Answer requests until the first process closes the pipe."""
    from scipy import io

    _limit_memory()
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            arrays = _load(io, request["path"], request["keys"])
            shapes = {key: [list(array.shape) for array in arrays[key]] for key in arrays}
            head = json.dumps({"shapes": shapes})
        except Exception as error:  # scipy raises many types of errors for a broken file
            arrays, head = {}, json.dumps({"error": _message(error)})
        answers.write(head.encode() + b"\n")
        for key in arrays:
            for array in arrays[key]:
                answers.write(np.ascontiguousarray(array).data)
        answers.flush()


class _Refused(Exception):
    """A file that scipy reads, but that has no samples in the wanted variables."""


def _message(error: Exception) -> str:
    if isinstance(error, _Refused):
        return _printable(str(error))
    if isinstance(error, MemoryError):
        return f" cannot be read: it takes more than {MEMORY >> 20} MiB of memory"
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
            raise _Refused(f": {key} holds {kind!s:.40}, not samples")
    return [array.astype(np.float64) for array in arrays]


def _limit_memory() -> None:
    """Limit the address space to its size after the imports plus MEMORY bytes."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):  # a system without /proc or limits
        pass


if __name__ == "__main__":
    _serve()
