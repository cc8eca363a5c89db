"""Copies of a run's folder on another machine: what has changed, as pieces, and their writing.

A run on a cluster writes to a folder of its own node. The pieces of what has changed since the last
look travel to the driver's folder of runs, in an order in which the copy can always be resumed:
new checkpoints before the removal of old ones, and the result last.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from frostlab.records.index import EVENTS, LOCK, RESULT
from frostlab.storage import path_inside

_PIECE_BYTES = 32 << 20  # the most bytes of one piece
Signature = tuple[int, int]  # time of the last change, size


@dataclass(frozen=True)
class Piece:
    """A part of a file, or its removal."""

    name: str  # path inside the run's folder
    data: bytes | None  # None: the file was removed
    offset: int = 0
    last: bool = True  # whether the file is complete with this piece
    appended: bool = False  # whether it belongs at the end of a file that grows


class Sender:
    """The changes of a folder since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, Signature] = {}

    def skip_present(self) -> None:
        """Take the present files as sent; the other side has them."""
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

    def _signatures(self) -> dict[str, Signature]:
        found = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            hidden = any(part.startswith(".") for part in name.parts)
            with suppress(FileNotFoundError):
                if not hidden and name.name != LOCK and path.is_file():
                    status = path.stat()
                    found[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return found

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
        """Write a piece; a file that does not grow gets its name when it is complete."""
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


def remove_copy(folder: Path) -> None:
    """Remove the folder of a node, which the other side has."""
    shutil.rmtree(folder, ignore_errors=True)
