"""Run the fuzz targets in worker processes with limits on time and memory.

    python tests/fuzz/campaign.py --inputs 250000            # all targets, equally often
    python tests/fuzz/campaign.py --target result --inputs 5000 --save failures

An input fails if its reader raises anything but a FrostlabError of one line, takes more than 5 s,
or brings its process over 1 GB. The exit code is 1 if any input failed.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from frostlab.errors import FrostlabError  # noqa: E402
from fuzz.mutate import Target, inputs  # noqa: E402

SECONDS = 5.0  # for one input
GIGABYTE = 1 << 30
_CHUNK = 250  # inputs of one target in one process, which starts as a copy of a warm one
_ROOM = 3 << 30  # bytes of address space beyond those of the warm process: no 80 GB arrays


class TookTooLong(BaseException):
    """Raised in a worker by the timer; no reader catches it."""


@dataclass(frozen=True)
class Failure:
    """An input that was not answered as it should be."""

    target: str
    kind: str  # traceback, hang, memory or crash
    place: str  # the last line of frostlab in the traceback, and the error
    data: bytes


def load_targets() -> dict[str, Target]:
    """Return the targets of all areas by name."""
    targets: dict[str, Target] = {}
    for path in sorted(HERE.glob("targets_*.py")):
        own = importlib.import_module(f"fuzz.{path.stem}").TARGETS
        assert not targets.keys() & own.keys(), f"{path.stem} repeats a target's name"
        targets |= own
    return targets


def corpus(target: str) -> list[bytes]:
    """Return the inputs of a target that failed once."""
    return [path.read_bytes() for path in sorted((HERE / "corpus" / target).glob("*"))]


def try_input(name: str, target: Target, data: bytes) -> Failure | None:
    """Give one input to its reader, in an empty folder, and return the failure, if any."""
    silence = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            with (
                _timer(SECONDS),
                warnings.catch_warnings(),
                contextlib.redirect_stdout(silence),
                contextlib.redirect_stderr(silence),
            ):
                warnings.simplefilter("ignore")
                target.check(data, Path(folder))
        except FrostlabError as error:
            message = str(error)
            if "\n" in message or not message or len(message) > 4000:
                return Failure(name, "traceback", f"not one line: {message!r:.200}", data)
        except TookTooLong:
            return Failure(name, "hang", f"over {SECONDS:g} s", data)
        except BaseException as error:
            return Failure(name, "traceback", _place(error), data)
    return None


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` after so many seconds of the processor, or after 20 times as many."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    # a busy machine delays a process, but does not use more of its processor time
    limits = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, 20 * seconds),
    }
    before = {number: signal.signal(number, ring) for number, _ in limits.values()}
    for timer, (_, limit) in limits.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in limits:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "frostlab" in frame.filename] or frames[-1:]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return f"{where} {type(error).__name__}: {str(error)[:120]!r}"


def peak_bytes() -> int:
    """Return the largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(name: str, target: Target, seed: int, first: int, count: int, pipe: Any) -> None:
    """Try a chunk of inputs in a forked process; send failures, and the number after each input."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = max(GIGABYTE, peak_bytes() + GIGABYTE // 2)  # a test's process may be large already
    for data in inputs(name, target, seed, first, count):
        pipe.send(data)
        failure = try_input(name, target, data)
        over = peak_bytes() > most
        if failure is None and over:
            failure = Failure(name, "memory", f"{peak_bytes() >> 20} MB", data)
        pipe.send(failure or "ok")
        if over:
            break  # the peak of this process says nothing about the inputs to come
    pipe.send(peak_bytes())
    pipe.close()
    os._exit(0)


@dataclass
class Tally:
    """The outcome of a campaign so far."""

    tried: dict[str, int]
    failures: list[Failure]
    peak: int = 0
    slowest: float = 0.0


def run_chunk(
    name: str, target: Target, seed: int, first: int, count: int, tally: Tally, context: Any
) -> None:
    """Try a chunk in a new process, and go on in another if one input ends it."""
    while count > 0:
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(name, target, seed, first, count, there), daemon=True
        )
        process.start()
        there.close()
        done, current, began = 0, b"", time.monotonic()
        while True:
            if not here.poll(SECONDS + 5):
                process.kill()
                tally.failures.append(Failure(name, "hang", "deaf to the timer", current))
                done += 1
                break
            try:
                message = here.recv()
            except EOFError:
                process.join()
                failure = Failure(name, "crash", f"exit code {process.exitcode}", current)
                tally.failures.append(failure)
                done += 1
                break
            if isinstance(message, bytes):
                current, began = message, time.monotonic()
            elif isinstance(message, int):
                tally.peak = max(tally.peak, message)
                break
            else:
                done += 1
                tally.slowest = max(tally.slowest, time.monotonic() - began)
                if isinstance(message, Failure):
                    tally.failures.append(message)
        process.join(5)
        tally.tried[name] = tally.tried.get(name, 0) + done
        first, count = first + done, count - done


def campaign(targets: dict[str, Target], total: int, seed: int) -> Tally:
    """Try `total` inputs, spread over the targets, after replaying the corpus."""
    tally = Tally({}, [])
    context = multiprocessing.get_context("fork")
    for name, target in targets.items():
        for data in corpus(name):
            tally.tried[name] = tally.tried.get(name, 0) + 1
            if failure := try_input(name, target, data):
                tally.failures.append(failure)
    each = -(-total // len(targets))
    for first in range(0, each, _CHUNK):
        for name, target in targets.items():
            run_chunk(name, target, seed, first, min(_CHUNK, each - first), tally, context)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="only this target; can be repeated")
    parser.add_argument("--save", type=Path, help="folder for the inputs that failed")
    options = parser.parse_args()
    targets = load_targets()
    chosen = {name: targets[name] for name in options.target or targets}
    began = time.monotonic()
    tally = campaign(chosen, options.inputs, options.seed)
    places: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in tally.failures:
        places.setdefault((failure.target, failure.kind, failure.place), []).append(failure)
    for (name, kind, place), failures in sorted(places.items()):
        print(f"{name}: {kind} × {len(failures)}: {place}")
        if options.save:
            data = min((failure.data for failure in failures), key=len)
            folder = options.save / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    counts = {kind: sum(f.kind == kind for f in tally.failures)
              for kind in ("traceback", "hang", "memory", "crash")}  # fmt: skip
    print(json.dumps({
        "inputs": sum(tally.tried.values()), "targets": len(tally.tried), "seed": options.seed,
        **counts, "slowest_seconds": round(tally.slowest, 2), "peak_mb": tally.peak >> 20,
        "seconds": round(time.monotonic() - began),
    }))  # fmt: skip
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
