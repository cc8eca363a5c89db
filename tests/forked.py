"""Runs and programs in child processes that start at once: a server has imported everything.

A program is what `python -m frostlab …` or `python file.py …` runs, with its own arguments,
environment, output and exit code; two processes of it are those that torchrun would start. A run
may be told to die by kill -9 at a chosen moment; `resume=True` then goes on.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import yaml

from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EpochEvent, EvaluationEvent, StepEvent

# CUDA does not work in a fork of a process that has asked for it, as an import may; beside a GPU,
# every child is a new Python
BESIDE_GPU = os.path.exists("/dev/nvidiactl")
START: Any = multiprocessing.get_context("spawn" if BESIDE_GPU else "forkserver")
PRELOAD = [
    "frostlab.training.run",
    "frostlab.comparison.run",
    "frostlab.cli.main",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "altair",
    "frozen_heap",
]
START.set_forkserver_preload(PRELOAD)


def fork_server() -> None:
    """Make the server of this process, before its tests begin: import everything here, where it
    is needed anyway, and fork instead of starting a Python that imports it once more."""

    def fork(_: bytes, arguments: list[str], kept: list[int]) -> int:
        if child := os.fork():
            return child
        try:
            faulthandler.disable()
            sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in kept:
                    with contextlib.suppress(OSError):  # the one that listed them
                        os.close(descriptor)
            exec(arguments[-1])  # what `python -c` would do: serve
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    start = util.spawnv_passfds
    with warnings.catch_warnings():
        warnings.resetwarnings()  # to those of a new Python: a child's warnings are no errors
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        for module in PRELOAD:
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(module)
        util.spawnv_passfds = fork
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = start


def _process(target: Callable[..., object], *arguments: Any) -> Any:
    """A child of the server, not yet started; the server finds the tests' own modules, too."""
    if BESIDE_GPU:
        return START.Process(target=target, args=arguments)
    before = os.environ.get("PYTHONPATH")
    places = [str(Path(__file__).parent), *filter(None, [before])]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return START.Process(target=target, args=arguments)


def _program(arguments: list[str], environment: dict[str, str], cwd: str, outputs: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        with open(f"{outputs}.{name}", "w") as file:
            os.dup2(file.fileno(), number)
    sys.orig_argv = [sys.executable, *arguments]
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Program:
    """`python ARGUMENTS` in one process, or in several that know of each other by a port."""

    def __init__(
        self,
        *arguments: str,
        processes: int = 1,
        port: int = 0,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.arguments = list(arguments)
        self._outputs = tempfile.TemporaryDirectory()
        self._children = []
        for rank in range(processes):
            environment = dict(env)
            if processes > 1:  # as torchrun says it
                environment |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }  # fmt: skip
            outputs = str(Path(self._outputs.name) / str(rank))
            given = (self.arguments, environment, str(cwd or Path.cwd()), outputs)
            self._children.append(_process(_program, *given))
        for child in self._children:
            child.start()

    def signal(self, number: int) -> None:
        """Send a signal to every process."""
        for child in self._children:
            assert child.pid is not None
            os.kill(child.pid, number)

    def wait(self, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Wait for the end; the exit code is the first that is not 0, outputs come by rank."""
        ends = time.monotonic() + timeout
        try:
            while any(child.is_alive() for child in self._children):
                if time.monotonic() > ends:
                    raise TimeoutError(f"{self.arguments} did not end")
                if any(child.exitcode for child in self._children):  # the others wait for it
                    time.sleep(1.0)
                    break
                time.sleep(0.01)
        finally:
            for child in self._children:
                if child.is_alive():
                    child.kill()
                child.join()
        codes = [child.exitcode for child in self._children]
        out, err = (
            "".join(path.read_text() for path in sorted(Path(self._outputs.name).glob(f"*.{name}")))
            for name in ("out", "err")
        )
        self._outputs.cleanup()
        code = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess(self.arguments, code, out, err)


Command = Callable[..., subprocess.CompletedProcess[str]]


def frostlab_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `frostlab ARGUMENTS`."""
    return Program("-m", "frostlab", *arguments, cwd=cwd).wait()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(count: int, act: Callable[[], None] = die) -> Callable[[], None]:
    left = [count]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return tick


def plant(moment: str, count: int) -> None:
    """Make this process die at the `count`-th time that a moment comes."""
    import safetensors.torch

    from frostlab import storage
    from frostlab.records import checkpoint, folder
    from frostlab.training import evaluate as metrics
    from frostlab.training import loop
    from frostlab.training import run as work
    from frostlab.training.step import eager as step

    tick = _after(count)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            tick()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    if moment == "step":
        before(step.EagerStep, "_measure")
    elif moment == "update":  # the weights have moved, nobody knows yet
        before(loop.StepLog, "add")
    elif moment == "evaluation":
        before(metrics.TextTally, "add")
    elif moment == "report":
        before(work, "_report")
    elif moment == "rename":
        original_flush = storage.flush

        def flush(path: Path) -> None:
            if "checkpoints" in path.parts:
                tick()
            original_flush(path)

        storage.flush = checkpoint.flush = flush
    elif moment == "frozen":  # the frozen weights are stored, the checkpoint is not
        before(loop, "save_checkpoint")
    elif moment == "clean-up":
        before(loop, "keep_only")
    elif moment == "half removed":  # the frozen weights of an old stage
        original_remove = checkpoint.shutil.rmtree

        def remove(path: Path, ignore_errors: bool = False) -> None:
            if path.name.startswith("frozen-"):
                next(path.iterdir()).unlink()
                tick()
            original_remove(path, ignore_errors)

        checkpoint.shutil.rmtree = remove
    elif moment == "boundary":  # a stage has ended, the next has not begun
        before(loop, "next_stage")
    elif moment == "half a file":
        original_save = safetensors.torch.save_file

        def half(tensors: Any, path: Path) -> None:
            original_save(tensors, path)
            os.truncate(path, path.stat().st_size // 2)
            tick()
            original_save(tensors, path)

        safetensors.torch.save_file = half
    elif moment == "half an event":
        original_event = folder.RunFolder.event

        def torn(self: Any, kind: str, step: int, **values: Any) -> None:
            self._events.write('{"kind": "st')
            self._events.flush()
            tick()
            os.truncate(
                self.path / "events.jsonl", os.path.getsize(self.path / "events.jsonl") - 12
            )
            original_event(self, kind, step, **values)

        folder.RunFolder.event = torn  # type: ignore[method-assign]
    elif moment == "result":
        before(folder.RunFolder, "write_result")
    elif moment == "sealed":  # the manifest is written, the result is not
        original_manifest = folder.write_manifest

        def sealed(*args: Any) -> None:
            original_manifest(*args)
            tick()

        folder.write_manifest = sealed
    else:
        raise ValueError(moment)


def _child(recipe: dict[str, Any], out: str, moment: str | None, count: int) -> None:
    from frostlab.training.run import run

    if moment is not None:
        plant(moment, count)
    run(recipe, out=out, resume=True)


def attempt(recipe: dict[str, Any], out: Path, moment: str | None = None, count: int = 1) -> int:
    """Run or go on with a recipe in a child; return its exit code (−9: killed)."""
    child = _process(_child, recipe, str(out), moment, count)
    child.start()
    child.join(120)
    if child.is_alive():
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        raise TimeoutError("a child did not end")
    assert child.exitcode is not None
    return child.exitcode


def attempt_for(recipe: dict[str, Any], out: Path, seconds: float) -> int:
    """Run in a child and kill it from outside after some seconds, wherever it then is."""
    child = _process(_child, recipe, str(out), None, 0)
    child.start()
    child.join(seconds)
    child.kill()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def _save_and_die(moment: str, folder: str) -> None:
    import torch

    import frostlab as fl
    from frostlab import storage
    from frostlab.surgery import save
    from zoo import build

    def dies(*_: object) -> Any:
        die()

    def die_at_a_temporary_file() -> None:
        while not any(path.name.startswith(".tmp") for path in Path(folder).rglob("*")):
            pass
        die()

    model, _ = build("gpt2")
    if moment == "inside safetensors":
        threading.Thread(target=die_at_a_temporary_file).start()
        path = Path(folder) / "trainable-0123456789ab.safetensors"
        storage.save_tensors(path, {"x": torch.zeros(40_000_000)})
    elif moment == "before the first rename":
        storage.os.replace = dies
    elif moment == "between tensors and manifest":
        save.file_digest = dies
    elif moment == "before the clean-up":
        save.remove_temporary = dies
    fl.save_trainable(model, folder)


def killed_save(moment: str, folder: Path) -> int:
    """Save a delta in a child that dies by kill -9 at a moment; return its exit code."""
    child = _process(_save_and_die, moment, str(folder))
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def outcome(folder: Path) -> dict[str, Any]:
    """All of a record that must not depend on how often a run was killed."""
    record = RunRecord(folder)
    result = record.result
    steps = record.events(StepEvent)
    return {
        **{key: getattr(result, key) for key in (
            "status", "steps", "best", "report", "last", "weights_digest", "order_digest",
            "parameters", "checkpoint", "stopped_early", "clipped_steps",
        )},
        "stages": [{**asdict(stage), "seconds": None} for stage in result.stages],
        "losses": [loss for event in steps for loss in event.loss],
        "norms": [norm for event in steps for norm in event.norm],
        "tokens": sum(event.tokens for event in steps),
        "orders": {event.step: event.order for event in record.events(EpochEvent)},
        "evaluations": [(e.step, e.split, e.metrics)
                        for e in record.events(EvaluationEvent)],
        "kept": [(c.step, c.stage) for c in checkpoints_in(folder)],
        "frozen": sorted(p.name for p in folder.glob("checkpoints/frozen-*")),
        "files": sorted(p.name for p in folder.rglob("*") if p.suffix == ".tmp"),
    }  # fmt: skip


def _limited(limit: int, size: int, recipe: dict[str, Any], out: str) -> None:
    if limit == resource.RLIMIT_FSIZE:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    else:
        with open("/proc/self/statm") as file:
            size += int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(limit, (size, resource.RLIM_INFINITY))
    from frostlab.training.run import RunFailed, run

    try:
        run(recipe, out=out, resume=True)
    except RunFailed as error:
        Path(out).with_suffix(".error").write_text(str(error))
        sys.exit(1)


def limited(limit: int, size: int, recipe: dict[str, Any], folder: Path) -> str:
    """Run with less of something than the run needs; return what it said."""
    child = _process(_limited, limit, size, recipe, str(folder))
    child.start()
    child.join(120)
    assert child.exitcode == 1
    return folder.with_suffix(".error").read_text()


def run_command(folder: Path, recipe: dict[str, Any], *more: str, **given: Any) -> Program:
    """Start `frostlab run` of a recipe that is written to a folder first."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return Program("-m", "frostlab", "run", str(path), *more, **given)


def wait_for(path: Path, text: str) -> None:
    for _ in range(1200):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.05)
    raise TimeoutError(f"{path} never had {text}")
