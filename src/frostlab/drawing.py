"""Drawing of charts in a second process, while this process goes on.

The drawing library, vl-convert, runs JavaScript and takes half a second to start. While it works,
no other thread of its process runs. This file is also the program of the second process, which
imports nothing else of frostlab.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ParamSpec, TypeVar

_Values = ParamSpec("_Values")
_Result = TypeVar("_Result")


class Drawer:
    """A second process that draws charts and bundles scripts; it ends with the `with` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1)  # one thread, so calls run one after another

    def __enter__(self) -> "Drawer":
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()  # so that a call that waits for an answer ends
        self._thread.shutdown(cancel_futures=True)
        self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        from frostlab.errors import require

        library = Path(require("vl_convert", "report", "drawing a chart").__file__).parent.parent
        # -I and -S: the program imports from the standard library and from `library` only
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._process

    def stop(self) -> None:
        """End the process, which frees its memory; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _piped(process.stdout).close()
            with suppress(BrokenPipeError):  # a request that was not sent whole
                _piped(process.stdin).close()

    def later(
        self, work: Callable[_Values, _Result], *values: _Values.args, **options: _Values.kwargs
    ) -> "Future[_Result]":
        """Call a function in the drawer's thread, after the functions of earlier calls."""
        return self._thread.submit(work, *values, **options)

    def svg(self, text: str) -> str:
        """Draw a Vega-Lite specification, JSON on one line, as SVG."""
        return self._ask("svg", text)

    def bundle(self) -> str:
        """Return the scripts that draw charts in a page."""
        return self._ask("bundle", "")

    def _ask(self, kind: str, text: str) -> str:
        from frostlab.errors import FrostlabError

        process = self._process or self._start()
        try:
            _piped(process.stdin).write(f"{kind} {text}\n".encode())
            _piped(process.stdin).flush()
            line = _piped(process.stdout).readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            code = process.wait()
            self.stop()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise FrostlabError(f"the process that draws charts ended ({how})")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["drawn"])


def _piped(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # `_start` has asked for pipes
    return stream


# The second process


def _main(library: str) -> None:
    """Answer each line of the standard input; before the first one, start the drawing library."""
    sys.path.append(library)
    vl_convert: Any = importlib.import_module("vl_convert")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else is written among the answers
    vl_convert.vegalite_to_svg({"data": {"values": []}, "mark": "point"})
    draw = {
        "svg": vl_convert.vegalite_to_svg,
        "bundle": lambda text: vl_convert.javascript_bundle(),
    }
    for line in sys.stdin.buffer:
        kind, _, text = line.decode().partition(" ")
        try:
            answer = {"drawn": draw[kind](text)}
        except ValueError as error:  # the library's only error
            answer = {"error": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
