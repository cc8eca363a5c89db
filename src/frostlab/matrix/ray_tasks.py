"""An executor on a Ray cluster: every run is a Ray task that needs one CPU and perhaps a GPU.

The code and the recipe are sent to a run's node; the data are looked for there, in the same folder
as here or else where FROSTLAB_DATA says. A run writes to a temporary folder of its node, and a
thread sends what has changed to an actor on the driver's node (the driver is the process that works
through the queue). The actor writes it into the folder of runs: first new files, with result.json
as the last, and then it removes old files. In this order, the copy can be resumed whenever the node
dies: the node's runs start elsewhere from the last checkpoint that arrived.
"""

import importlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import frostlab
from frostlab.errors import BadInput, first_line, require
from frostlab.launcher import AT_ONCE
from frostlab.matrix.queue import Ended, Reason
from frostlab.matrix.task import Outcome, Task, disk_problem_in, run_task
from frostlab.matrix.workers import output_to
from frostlab.records.finding.index import EVENTS, LOCK, RESULT
from frostlab.storage import path_inside
from frostlab.training.progress import Display, Lines

_JOIN = (
    "run `ray start --address=HEAD:PORT` here first, or start frostlab on a machine of the cluster"
)
_ALIVE = 0  # Ray's number for the state of a live node
_NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty SETTINGS frame of HTTP/2
_CONNECT_SECONDS = 5.0  # how long to wait for the cluster's head
_LOOK_SECONDS = 2.0  # time between two queries of the cluster's resources and nodes
_SEND_SECONDS = 1.0  # time between two checks of a run's folder for changes
_PIECE_BYTES = 32 << 20  # the most bytes of one piece of a file
Signature = tuple[int, int]  # time of the last change in ns, size in bytes


def check_address(address: str) -> None:
    """Refuse an address at which no cluster answers, or one that this machine is not part of.

    `auto` is the cluster of this machine.
    """
    require("ray", "ray", "--ray")
    if address == "auto":
        return
    if "://" in address:
        raise BadInput(
            f"--ray {address:.80}: addresses with :// (Ray Client) are not supported; log in to a "
            "machine of the cluster, and use --ray HEAD:PORT there, usually with port 6379"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"--ray {address!r:.80} should be HEAD:PORT, such as 10.0.0.1:6379")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS") != "1" and not _speaks_http2(connection):
                raise BadInput(
                    f"--ray {address}: another program answers there; the port of Ray's head is "
                    "the one that `ray start --head` prints, usually 6379"
                )
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise BadInput(f"--ray {address}: no Ray cluster answers there ({reason})") from None
    nodes = _addresses_of_nodes(address)
    if nodes is not None and not nodes & _own_addresses():
        raise BadInput(f"--ray {address}: this machine is not part of the cluster; {_JOIN}")


def _speaks_http2(connection: socket.socket) -> bool:
    """Return whether a server begins HTTP/2 with its settings, as Ray's head does.

    Ray itself waits for minutes if something else, such as its dashboard, has the port.
    """
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _NO_SETTINGS)
    answer = b""
    with suppress(OSError):
        while len(answer) < len(_NO_SETTINGS) and (piece := connection.recv(16)):
            answer += piece
    return answer[3:4] == _NO_SETTINGS[3:4]  # the type of the frame


def _addresses_of_nodes(address: str) -> set[str] | None:
    """Return the addresses of a cluster's machines; None if the cluster cannot be asked."""
    # This class is not part of Ray's public interface; if it fails, ray.init shows the problem.
    with suppress(Exception):
        raylet: Any = importlib.import_module("ray._raylet")
        nodes = raylet.GcsClient(address=address).get_all_node_info(timeout=_CONNECT_SECONDS)
        return {node.node_manager_address for node in nodes.values() if node.state == _ALIVE}
    return None


def _own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


# Copies of a run's folder


@dataclass(frozen=True)
class Piece:
    """A part of a file to write, or the removal of a file."""

    name: str  # path inside the run's folder
    data: bytes | None  # None: the file was removed
    offset: int = 0
    last: bool = True  # whether the file is complete with this piece
    appended: bool = False  # whether it belongs at the end of a file that grows


class Sender:
    """The sender of a folder: it finds what has changed since the last call of `changes`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, Signature] = {}

    def skip_present(self) -> None:
        """Count the present files as sent, because the receiver has them already."""
        self._sent = self._signatures()

    def changes(self) -> Iterator[Piece]:
        """Yield what has changed; a file that changes meanwhile is sent again the next time."""
        now = self._signatures()
        for name in sorted(now, key=lambda name: (name == RESULT, name)):
            if self._sent.get(name) != now[name]:
                with suppress(FileNotFoundError):  # it was removed a moment ago
                    yield from self._pieces(name, now[name])
                    self._sent[name] = now[name]
        for name in [name for name in self._sent if name not in now]:
            del self._sent[name]
            yield Piece(name, None)

    @contextmanager
    def sending(self) -> Iterator[list[Piece]]:
        """Yield what has changed; if the block raises an error, it is sent again the next time."""
        before = dict(self._sent)
        try:
            yield list(self.changes()) if self._folder.is_dir() else []
        except BaseException:
            self._sent = before
            raise

    def _signatures(self) -> dict[str, Signature]:
        signatures = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            hidden = any(part.startswith(".") for part in name.parts)
            with suppress(FileNotFoundError):
                if not hidden and name.name != LOCK and path.is_file():
                    status = path.stat()
                    signatures[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return signatures

    def _pieces(self, name: str, signature: Signature) -> Iterator[Piece]:
        before, size = self._sent.get(name, (0, 0))[1], signature[1]
        appended = name == EVENTS and 0 < before <= size
        with (self._folder / name).open("rb") as file:
            offset = file.seek(before if appended else 0)
            while True:
                data = file.read(min(_PIECE_BYTES, size - offset))
                end = offset + len(data)
                yield Piece(name, data, offset, end >= size or not data, appended)
                offset = end
                if end >= size or not data:
                    return


class Receiver:
    """The writer of pieces into the copy of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def apply(self, piece: Piece) -> None:
        """Write a piece.

        A file is written under a temporary name until it is complete, unless the piece is appended.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = path_inside(self._folder, *piece.name.split("/"))
        if piece.data is None:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder of a checkpoint whose last file this was
                path.parent.rmdir()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path if piece.appended else path.with_name(f".{path.name}.incoming.tmp")
        with target.open("r+b" if target.exists() else "wb") as file:
            file.seek(piece.offset)
            file.write(piece.data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        if piece.last and not piece.appended:
            os.replace(target, path)


def all_pieces(folder: Path) -> list[Piece]:
    """Return the whole content of a folder; empty if it does not exist."""
    return list(Sender(folder).changes()) if folder.is_dir() else []


# On the driver's node, and on the node of a run


class _Store:
    """An actor on the driver's node: it writes what runs send, and knows which should stop."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()
        self._nodes: dict[str, tuple[str, str]] = {}

    def begin(self, path: str, node: str, name: str) -> None:
        """Remember the node on which a run trains."""
        self._nodes[path] = (node, name)

    def write(self, path: str, pieces: list[Piece], log: str, text: bytes) -> bool:
        """Write pieces of a run's folder and of its log; return whether the run should stop."""
        receiver = Receiver(Path(path))
        for piece in pieces:
            receiver.apply(piece)
        if text:
            with open(log, "ab") as file:
                file.write(text)
        return path in self._stopped

    def stop(self, paths: list[str]) -> None:
        """Ask runs to stop the next time that they send something."""
        self._stopped |= set(paths)

    def nodes(self) -> dict[str, tuple[str, str]]:
        """Return the id and the name of every run's node, by the run's folder."""
        return self._nodes


def _train(
    task: Task, pieces: list[Piece], data_dir: Path | None, log: str, store: Any, at_once: int
) -> Outcome:
    """Train a run on a node, in a temporary folder that is copied to the driver's node all along.

    Args:
        pieces: the content of the run's folder so far.
        log: path of the run's log on the driver's node.
        at_once: how many runs the node may train at the same time on one device.
    """
    os.environ[AT_ONCE] = str(at_once)
    ray = require("ray", "ray", "--ray")
    path, host = str(task.path), socket.gethostname()
    node = ray.get_runtime_context().get_node_id()
    ray.get(store.begin.remote(path, node, f"{host} {node[:6]}"))
    folder = Path(tempfile.mkdtemp(prefix="frostlab-run-")) / task.path.name
    output = folder.parent / f"{folder.name}.log"
    output.touch()
    receiver, sender = Receiver(folder), Sender(folder)
    for piece in pieces:
        receiver.apply(piece)
    sender.skip_present()
    ended, sending = threading.Event(), threading.Lock()
    written = output.open("rb")  # the run's output

    def send() -> None:
        with sending:
            begin = written.tell()
            try:
                with sender.sending() as changed:
                    stop = ray.get(store.write.remote(path, changed, log, written.read()))
            except BaseException:
                written.seek(begin)
                raise
            if stop and not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # the run stops after a step

    def follow() -> None:
        while not ended.wait(_SEND_SECONDS):
            with suppress(Exception):  # if the problem lasts, the `send` after the run raises it
                send()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    here = data_dir if data_dir is not None and data_dir.is_dir() else None
    try:
        with output_to(folder.parent, task):
            outcome = run_task(replace(task, path=folder), here, Display(Lines()))
    except KeyboardInterrupt:
        outcome = Outcome("stopped", "stopped")
    finally:
        ended.set()
        thread.join()
    last_line = f"{outcome.kind}: {outcome.text}\n".encode()
    try:
        send()
        ray.get(store.write.remote(path, [], log, last_line))
    finally:
        written.close()
        shutil.rmtree(folder.parent, ignore_errors=True)
    return outcome


def _cause(error: BaseException) -> BaseException:
    """Return the error that a run's code or the actor raised, without Ray's errors around it."""
    inner = getattr(error, "cause", None)
    return _cause(inner) if isinstance(inner, BaseException) else error


class RayTasks:
    """An executor whose tasks run on a Ray cluster.

    A run needs one GPU where the cluster has any, and one CPU.
    """

    def __init__(self, address: str, data_dir: Path | None, logs: Path) -> None:
        check_address(address)
        self._ray = ray = require("ray", "ray", "--ray")
        # Ray's processes have other working folders.
        self._data_dir = None if data_dir is None else data_dir.resolve()
        self._logs = logs
        package = str(Path(frostlab.__file__).parent)
        try:
            ray.init(
                address=address, log_to_driver=False, logging_level="error",
                runtime_env={"py_modules": [package]},
            )  # fmt: skip
        except Exception as error:  # Ray raises errors of many kinds
            raise BadInput(f"--ray {address}: {first_line(error)}; {_JOIN}") from None
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_Store)
        self._store = actor.remote()
        self._running: dict[Any, Task] = {}
        self._nodes: dict[str, tuple[str, str]] = {}
        self._looked, self._capacity, self._gpus, self._shared = -_LOOK_SECONDS, 1, 0, 1
        self._look()

    def _look(self) -> None:
        """Ask the cluster what it has and where runs train, at most every `_LOOK_SECONDS`."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        resources = self._ray.cluster_resources()
        self._gpus = int(resources.get("GPU", 0))
        self._capacity = self._gpus or max(1, int(resources.get("CPU", 1)))
        nodes = [entry["Resources"] for entry in self._ray.nodes() if entry["Alive"]]
        largest = max((int(node.get("CPU", 1)) for node in nodes), default=1)
        self._shared = 1 if self._gpus else max(1, largest)  # most runs that share a node's device
        with suppress(Exception):  # a busy actor; the next look asks again
            self._nodes = self._ray.get(self._store.nodes.remote(), timeout=_LOOK_SECONDS)
        self._looked = time.monotonic()

    def free(self) -> int:
        """Return how many more runs the cluster has room for."""
        self._look()
        return self._capacity - len(self._running)

    def start(self, task: Task) -> None:
        """Submit a run, with what its folder holds so far."""
        needs = {"num_cpus": 1, "num_gpus": 1 if self._gpus else 0, "max_retries": 0}
        log = str(self._logs.resolve() / f"{task.path.name}.log")
        self._nodes.pop(str(task.path), None)
        reference = self._ray.remote(**needs)(_train).remote(
            replace(task, path=task.path.resolve()), all_pieces(task.path), self._data_dir, log,
            self._store, self._shared,
        )  # fmt: skip
        self._running[reference] = task

    def wait(self, seconds: float) -> list[Ended]:
        """Return the runs that have ended, or whose worker or node has died."""
        if not self._running:
            time.sleep(seconds)
            return []
        self._look()
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        ended: list[Ended] = []
        for reference in done:
            task = self._running.pop(reference)
            try:
                ended.append((task, self._ray.get(reference)))
            except Exception as error:
                ended.append((task, self._problem(task, error)))
        return ended

    def _problem(self, task: Task, error: Exception) -> Outcome:
        """Return the outcome of a run whose Ray task has raised an error.

        The outcome is "failed" if the run's code raised the error, "blocked" if a disk is full,
        "lost" if the run's node has died, and "crashed" if only its process has died.
        """
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            cause = _cause(error)
            if (problem := disk_problem_in(cause)) is not None:
                return Outcome("blocked", problem)
            return Outcome("failed", first_line(cause))
        node, name = self._nodes.get(str(task.path.resolve()), ("", "its node"))
        alive = {entry["NodeID"] for entry in self._ray.nodes() if entry["Alive"]}
        lost = isinstance(error, errors.NodeDiedError) or (node and node not in alive)
        if lost or isinstance(error, errors.ObjectLostError):
            return Outcome("lost", f"{name} has died")
        return Outcome("crashed", f"its process on {name} died ({type(error).__name__})")

    def running(self) -> dict[Path, str]:
        """Return the node of every running task."""
        return {
            task.path: self._nodes.get(str(task.path.resolve()), ("", "Ray"))[1]
            for task in self._running.values()
        }

    def stop(self, paths: Iterable[Path]) -> None:
        """Ask runs to stop after a step, with a checkpoint."""
        self._ray.get(self._store.stop.remote([str(path.resolve()) for path in paths]))

    def close(self, reason: Reason = "done") -> None:
        """Leave the cluster; runs that have not ended are cancelled."""
        for reference in self._running:
            with suppress(Exception):
                self._ray.cancel(reference, force=reason != "done")
        self._running.clear()
        self._ray.shutdown()
