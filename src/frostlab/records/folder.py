"""Run folders: `RunFolder` writes one, and `RunRecord` reads its files as dataclasses.

Only one process at a time can open the `RunFolder` of a run. A `RunFolder` appends events, and
writes other files atomically, so that they are complete or absent.
"""

import errno
import glob
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, overload

from frostlab.errors import BadInput, FrostlabError
from frostlab.records.events import effective, read_events, start_of
from frostlab.records.manifest import MANIFEST, write_manifest
from frostlab.records.schema import (
    EVENTS,
    DataRecord,
    Digests,
    Ending,
    Event,
    Predictions,
    Result,
    StartEvent,
    read_result,
)
from frostlab.storage import (
    Lock,
    check_name,
    finite,
    open_append,
    read_bytes,
    remove_temporary,
    whole_file,
    whole_folder,
    write_whole,
)
from frostlab.text import number, plain
from frostlab.typed import read_object

if TYPE_CHECKING:
    from frostlab.envelopes.scores_json import Scores
    from frostlab.recipe.recipe import Recipe

_Kind = TypeVar("_Kind", bound=Event)
_BLOCK = 1 << 20  # bytes of events.jsonl that are read at once, from its end
_ABANDONED = 60.0  # s; an unlocked temporary folder that is older than this is removed


class RunFolder:
    """A run's folder, locked by this process; the system frees the lock even after kill -9."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Lock | None = None
        self._events: TextIO | None = None
        self.listener: Callable[[str], None] | None = None  # gets each event as a line of JSON

    @classmethod
    def create(
        cls,
        path: Path,
        files: dict[str, str],
        fill: Callable[[Path], None] | None = None,
        **start: Any,
    ) -> "RunFolder":
        """Create a folder with its first files and its start event in one atomic rename.

        `fill` writes further files into the folder before it gets its name.
        """
        folder = cls(path)
        _remove_abandoned(path.parent)
        try:
            with whole_folder(path) as folder.path:
                folder.open()
                for name, text in files.items():
                    write_whole(folder.path / name, text)
                if fill is not None:
                    fill(folder.path)
                folder.event("start", 0, **start)
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(str(path)) from None
            if isinstance(error, OSError):
                raise BadInput(f"{path} cannot be written ({error.strerror})") from None
            raise
        folder.path = path
        return folder

    def open(self) -> "RunFolder":
        """Lock the folder and open its events; refuse a folder that another process has locked.

        Temporary files that a killed process left behind are removed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path / "run.lock")
            taken = lock.acquire(seconds=0.2)  # a listing may hold the lock for a moment
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written ({error.strerror})") from None
        if not taken:
            raise BadInput(f"{self.path}: another process is running in it")
        self._lock = lock
        try:
            remove_temporary(self.path)
            self._events = _open_events(self.path / "events.jsonl")
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Unlock the folder, even if it can no longer be written."""
        if self._events is not None:
            with suppress(OSError):
                self._events.close()
        if self._lock is not None:
            self._lock.release()
        self._events = self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Append an event with the keys of its class, and flush it."""
        if kind not in EVENTS:
            raise FrostlabError(f"{kind} is not a kind of event")
        assert self._events is not None, "the folder is open"
        at = round(time.time(), 3)
        EVENTS[kind](at=at, step=step, **values)  # raises TypeError for an unknown or missing key
        line = json.dumps(finite({"kind": kind, "at": at, "step": step, **values}))
        self._events.write(line + "\n")
        self._events.flush()
        if self.listener is not None:
            self.listener(line)

    def write(self, name: str, value: Any) -> None:
        """Write plain values or a dataclass as a JSON file, atomically."""
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        write_whole(self.path / name, json.dumps(finite(value), indent=1) + "\n")

    def write_result(self, result: Result) -> None:
        """Write result.json; the folder of a run that will not be resumed also gets a manifest.

        The manifest comes first, so that the result of such a run never exists without it.
        """
        if result.status not in ("finished", "diverged"):
            self.write("result.json", result)
            return
        with whole_file(self.path / "result.json") as temporary:
            text = json.dumps(finite(asdict(result)), indent=1) + "\n"
            temporary.write_text(text, encoding="utf-8")
            write_manifest(self.path, {"result.json": temporary})

    def events(self) -> list[Event]:
        """Return the events; steps that a resumed run repeated appear once."""
        return effective(read_events(self.path / "events.jsonl"))


def _remove_abandoned(parent: Path) -> None:
    """Remove the unfinished folders of processes that were killed while they created a run."""
    for path in parent.glob(".*.tmp"):
        with suppress(OSError):
            lock = Lock(path / "run.lock")
            age = time.time() - path.lstat().st_mtime
            if path.is_symlink() or not lock.path.is_file() or age < _ABANDONED:
                continue
            if lock.acquire(seconds=0):
                shutil.rmtree(path, ignore_errors=True)
                lock.release()


def _open_events(path: Path) -> TextIO:
    """Open the events to append; cut off a last line that a crash left unfinished."""
    file = open_append(path)
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        file.truncate(end)
    return io.TextIOWrapper(file, encoding="utf-8", write_through=True)


def new_folder(runs: Path, name: str) -> Path:
    """Return the first of `name`, `name-2`, … under `runs` that is absent or empty."""
    path, number = runs / check_name(name, "the run's name"), 2
    while path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        path, number = runs / f"{name}-{number}", number + 1
    return path


def given_folder(
    path: Path, resume: bool, digest: str, values: dict[str, Any]
) -> tuple[Path, bool]:
    """Check the folder that the user named; return it, and whether it holds a run to resume."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; choose another folder with --out")
    if not path.is_dir() or not any(path.iterdir()):
        return path, False
    if (start := start_of(path)) is None:
        raise BadInput(f"{path} is not empty and holds no run; choose another folder with --out")
    if not resume:
        raise BadInput(
            f"{path} holds a run already; add --resume, or choose another folder with --out"
        )
    if (status := finished_status(path)) in ("finished", "diverged"):
        raise BadInput(f"--resume: the run in {path} is {status}")
    if start.recipe_digest != digest:
        changed = ", ".join(_changed(path / "recipe.yaml", values)) or "its settings"
        raise BadInput(f"--resume: {path} was started with another recipe ({changed} differ)")
    return path, True


def own_folder(runs: Path, name: str, resume: bool, digest: str) -> tuple[Path, bool]:
    """Choose a folder under `runs`; return it, and whether it holds a run to resume.

    With `resume`, this is the newest unfinished run of the recipe, or a new folder if the recipe
    has no run yet. So the same command with `--resume` can start the run and continue it later.
    """
    check_name(name, "the run's name")
    if not resume:
        return new_folder(runs, name), False
    same = [path for path in runs.glob(f"{glob.escape(name)}*") if _has_recipe(path, digest)]
    unfinished = [p for p in same if finished_status(p) not in ("finished", "diverged")]
    if unfinished:
        return max(unfinished, key=lambda p: (p / "events.jsonl").stat().st_mtime_ns), True
    if same:
        raise BadInput(f"--resume: {same[0]} is {finished_status(same[0])} already")
    return new_folder(runs, name), False


def _has_recipe(folder: Path, digest: str) -> bool:
    """Return whether a folder holds a run of this recipe; False if it cannot be read."""
    with suppress(BadInput):
        start = start_of(folder)
        return start is not None and start.recipe_digest == digest
    return False


def _changed(stored: Path, values: dict[str, Any]) -> list[str]:
    from frostlab.recipe.bounded_yaml import read_yaml  # here, because listings do not need it
    from frostlab.recipe.recipe import differences

    try:
        return differences(read_yaml(stored), values)
    except (OSError, BadInput):
        return []


def finished_status(path: Path) -> Ending | None:
    """Return the status in a run's result; None if the result is missing or damaged."""
    try:
        return RunRecord(path).status
    except (OSError, BadInput):
        return None


def supersede_result(folder: RunFolder) -> None:
    """Rename the result of an earlier attempt to `result-1.json`, `result-2.json`, …

    A manifest of an attempt that was killed before it wrote its result is removed.
    """
    (folder.path / MANIFEST).unlink(missing_ok=True)
    path, number = folder.path / "result.json", 1
    if path.exists():
        while (target := folder.path / f"result-{number}.json").exists():
            number += 1
        path.rename(target)


@dataclass(frozen=True, repr=False)
class RunRecord:
    """The record of a run, read from its folder; each file is read once, when first needed."""

    folder: Path

    def __repr__(self) -> str:
        status = finished_status(self.folder)
        metrics = self.metrics if status == "finished" else {}
        shown = [f"{name} {number(value)}" for name, value in metrics.items()]
        caution = self.result.caution if shown else None
        about = ", ".join([status or "not finished", *shown[:3], *([caution] if caution else [])])
        return f"{type(self).__name__}({plain(str(self.folder))}: {about})"

    def _repr_html_(self) -> str:
        """Return the result as HTML, which notebooks show."""
        from frostlab.records.finding.show import as_html  # here, because it imports this module

        return as_html(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # accepts a str

    @cached_property
    def result(self) -> Result:
        """The result; available when the run has ended."""
        return read_result(self._text("result.json"), self.folder / "result.json")

    @property
    def status(self) -> Ending:
        """How the run ended: finished, stopped, failed or diverged."""
        return self.result.status

    @property
    def ending(self) -> Ending | None:
        """How the run ended; None if it has no result yet. A result of another schema is an error.

        `finished_status` is for lists of runs, where a result that cannot be read is no error.
        """
        return self.status if (self.folder / "result.json").exists() else None

    @cached_property
    def metrics(self) -> dict[str, float | None]:
        """The reported metrics, without those of single layers; None if a metric is not finite."""
        report = self.result.report or {}
        return {name: value for name, value in report.items() if not isinstance(value, dict)}

    @cached_property
    def layers(self) -> dict[int, dict[str, float | None]]:
        """The reported metrics by supervised layer; empty if only the last layer has a loss."""
        layers = (self.result.report or {}).get("layers")
        if not isinstance(layers, dict):
            return {}
        return {int(number): dict(metrics) for number, metrics in layers.items()}

    @cached_property
    def recipe(self) -> "Recipe":
        """The recipe, with every default spelled out."""
        from frostlab.recipe.bounded_yaml import read_yaml
        from frostlab.recipe.load import recipe_from

        path = self.folder / "recipe.yaml"
        try:
            return recipe_from(read_yaml(path), str(path))
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error})") from None

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The machine, the libraries and the command at the start of the run."""
        from frostlab.records.environment import read_environment  # imports psutil

        return read_environment(self.folder)

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """The environment at the start of the run, and at each time when it was resumed."""
        from frostlab.records.environment import read_environment

        resumed = len(list(self.folder.glob("environment-*.json")))
        names = (f"environment-{number}.json" for number in range(1, resumed + 1))
        return [self.environment, *(read_environment(self.folder, name) for name in names)]

    @cached_property
    def digests(self) -> Digests:
        """The digests of the initial weights, the data and the frozen tensors."""
        return read_object(Digests, self._text("digests.json"), self.folder / "digests.json")

    @cached_property
    def data(self) -> DataRecord:
        """The data: classes, and the source, counts and lengths of each split."""
        return read_object(DataRecord, self._text("data.json"), self.folder / "data.json")

    @cached_property
    def predictions(self) -> Predictions | None:
        """The predicted classes of the report split; None if the run has no such file."""
        path = self.folder / "predictions.json"
        try:
            predictions = read_object(Predictions, read_bytes(path), path)
        except FileNotFoundError:
            return None
        if len(predictions.labels) != len(predictions.classes):
            raise BadInput(f"{path}: classes should have as many values as labels")
        return predictions

    @cached_property
    def envelope_scores(self) -> tuple["Scores", dict[str, float]]:
        """The scores of an EEG run by split and decoder, and an upper bound by split.

        No decoder can have a correlation r above the bound; a split without a bound is left out.
        """
        from frostlab.envelopes.scores_json import read_scores  # imports scipy

        return read_scores(self.folder, self.result.scores)

    @cached_property
    def start(self) -> StartEvent:
        """The start event."""
        if (start := start_of(self.folder)) is None:
            raise BadInput(f"{self.folder} is not a run: it has no start event")
        return start

    @overload
    def events(self) -> list[Event]: ...
    @overload
    def events(self, kind: type[_Kind]) -> list[_Kind]: ...
    def events(self, kind: type[Event] = Event) -> list[Any]:
        """Return all events in order, or the events of one class; see `effective`."""
        return [event for event in self._events if isinstance(event, kind)]

    @cached_property
    def _events(self) -> list[Event]:
        return effective(read_events(self.folder / "events.jsonl"))

    def _text(self, name: str) -> bytes:
        try:
            return read_bytes(self.folder / name)
        except FileNotFoundError:
            raise BadInput(f"{self.folder / name} does not exist (yet)") from None
