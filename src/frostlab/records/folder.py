"""A run's folder: one writer, append-only events, files that are whole or absent."""

import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from frostlab.errors import BadInput, FrostlabError

SCHEMA = 1
KINDS = (
    "start", "resume", "stage", "stepping", "prefix", "epoch", "step", "evaluation", "checkpoint",
    "end", "flow_parts", "flow", "timing", "note",
)  # fmt: skip


class RunFolder:
    """A folder that this process alone writes; the lock is freed even by kill -9."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None
        self._events: TextIO | None = None

    @classmethod
    def create(cls, path: Path, files: dict[str, str], **start: Any) -> "RunFolder":
        """Make a folder with its first files and its start event: all of it appears at once."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        folder = cls(temporary)
        try:
            folder.open()
            for name, text in files.items():
                write_whole(temporary / name, text)
            folder.event("start", 0, **start)
            os.replace(temporary, path)
        except BaseException as error:
            folder.close()
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(str(path)) from None
            if isinstance(error, OSError):
                raise BadInput(f"{path}: cannot be written ({error.strerror})") from None
            raise
        folder.path = path
        return folder

    def open(self) -> "RunFolder":
        """Take the folder; refuse one that another process holds."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "run.lock").open("a")
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written ({error.strerror})") from None
        if not _locked(self._lock):
            self._lock.close()
            raise BadInput(f"{self.path}: another process is running in it")
        mend_events(self.path / "events.jsonl")
        self._events = (self.path / "events.jsonl").open("a", encoding="utf-8")
        return self

    def close(self) -> None:
        """Let go of the folder, even one that can no longer be written."""
        for file in (self._events, self._lock):
            if file is not None:
                with suppress(OSError):
                    file.close()
        self._events = self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Append an event; it is the operating system's once this returns."""
        if kind not in KINDS:
            raise FrostlabError(f"{kind} is not a kind of event")
        assert self._events is not None, "the folder is open"
        line = {"kind": kind, "at": round(time.time(), 3), "step": step, **values}
        self._events.write(json.dumps(finite(line)) + "\n")
        self._events.flush()

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, json.dumps(finite(value), indent=1) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """The events that count: what a resumed run did again is counted once."""
        return effective(read_events(self.path / "events.jsonl"))


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


def mend_events(path: Path) -> None:
    """Cut off a last line that a crash left unfinished."""
    try:
        with path.open("rb+") as file:
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    except FileNotFoundError:
        pass


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every event of a file, a torn or damaged line left out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and "kind" in event:
                    yield event
    except FileNotFoundError:
        return


def effective(events: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what came after the checkpoint that a run was later resumed from."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event.get("kind") == "resume":
            back = event.get("step", 0)
            kept = [earlier for earlier in kept if _survives(earlier, back)]
        kept.append(event)
    return kept


def _survives(event: dict[str, Any], step: int) -> bool:
    """Whether an event still counts after the run went back to a step."""
    kind, at = event.get("kind"), event.get("step", 0)
    if kind in ("start", "resume", "note"):
        return True
    if kind in ("stage", "flow_parts"):  # said before the first step they are about
        return bool(at < step)
    final = kind == "end" or "checkpoint" in event  # the report is made again
    return not final and at <= step
