"""A run's folder: one writer, append-only events, files that are whole or absent."""

import errno
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from frostlab.errors import BadInput, FrostlabError
from frostlab.storage import Lock, finite, write_whole

SCHEMA = 1
KINDS = (
    "start", "resume", "stage", "stepping", "prefix", "epoch", "step", "evaluation", "checkpoint",
    "end", "flow_parts", "flow", "timing", "note",
)  # fmt: skip


class RunFolder:
    """A folder that this process alone writes; the lock is freed even by kill -9."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Lock | None = None
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
            lock = Lock(self.path / "run.lock")
            taken = lock.acquire(seconds=0.2)  # a listing may hold it for a moment
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written ({error.strerror})") from None
        if not taken:
            raise BadInput(f"{self.path}: another process is running in it")
        self._lock = lock
        mend_events(self.path / "events.jsonl")
        self._events = (self.path / "events.jsonl").open("a", encoding="utf-8")
        return self

    def close(self) -> None:
        """Let go of the folder, even one that can no longer be written."""
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


def new_folder(runs: Path, name: str) -> Path:
    """The first free `name`, `name-2`, … under `runs`."""
    path, number = runs / name, 2
    while path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        path, number = runs / f"{name}-{number}", number + 1
    return path


def given_folder(
    path: Path, resume: bool, digest: str, values: dict[str, Any]
) -> tuple[Path, bool]:
    """A folder the user names, and whether it holds a run to go on with."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"--out {path}: is a file, not a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return path, False
    if _digest(path) is None:
        raise BadInput(f"--out {path}: is not empty; choose another folder")
    if not resume:
        raise BadInput(f"--out {path}: holds a run already; add --resume, or choose another")
    if (status := finished_status(path)) in ("finished", "diverged"):
        raise BadInput(f"--resume: the run in {path} is {status}")
    if _digest(path) != digest:
        changed = ", ".join(_changed(path / "recipe.yaml", values)) or "its settings"
        raise BadInput(f"--resume: {path} was started with another recipe ({changed} differ)")
    return path, True


def own_folder(runs: Path, name: str, resume: bool, digest: str) -> tuple[Path, bool]:
    """A place under `runs`, and whether it holds a run to go on with.

    Resuming takes the newest unfinished run of this very recipe, and starts one where there is
    none, so that the same command can be given again and again.
    """
    known = (
        [path for path in runs.glob(f"{glob.escape(name)}*") if _digest(path) == digest]
        if resume
        else []
    )
    unfinished = [p for p in known if finished_status(p) not in ("finished", "diverged")]
    if unfinished:
        return max(unfinished, key=lambda p: (p / "events.jsonl").stat().st_mtime_ns), True
    if known:
        raise BadInput(f"--resume: {known[0]} is {finished_status(known[0])} already")
    return new_folder(runs, name), False


def _changed(stored: Path, values: dict[str, Any]) -> list[str]:
    import yaml  # listings do without it

    try:
        return differences(yaml.safe_load(stored.read_text(encoding="utf-8")), values)
    except (OSError, ValueError, yaml.YAMLError):
        return []


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The dotted keys at which two recipes differ, descriptions aside."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path]
    keys = [key for key in {**one, **other} if (path or key != "about")]
    return [
        found
        for key in keys
        for found in differences(one.get(key), other.get(key), f"{path}.{key}".strip("."))
    ]


def finished_status(path: Path) -> str | None:
    """The status in a run's result, if it has one."""
    try:
        return str(json.loads((path / "result.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def supersede_result(folder: RunFolder) -> None:
    """Set the result of an attempt that stopped aside, as `result-1.json`, `result-2.json` …"""
    path, number = folder.path / "result.json", 1
    if path.exists():
        while (kept := folder.path / f"result-{number}.json").exists():
            number += 1
        path.rename(kept)


def _digest(path: Path) -> str | None:
    for event in read_events(path / "events.jsonl"):
        return event.get("recipe_digest")
    return None


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind; everything is read from `folder`."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a str will do

    @property
    def result(self) -> dict[str, Any]:
        """The result, once there is one."""
        return self._json("result.json")

    @property
    def status(self) -> str:
        """finished, stopped, failed or diverged."""
        return str(self.result["status"])

    @property
    def metrics(self) -> dict[str, float]:
        """The reported metrics, of the last layer."""
        return {n: v for n, v in (self.result["report"] or {}).items() if n != "layers"}

    @property
    def layers(self) -> dict[int, dict[str, float]]:
        """The reported metrics of every supervised layer; none where only the last one is."""
        found = (self.result["report"] or {}).get("layers", {})
        return {int(number): dict(metrics) for number, metrics in found.items()}

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran."""
        return self._json("environment.json")

    @property
    def digests(self) -> dict[str, Any]:
        """What it started from: weights, data, order, frozen tensors."""
        return self._json("digests.json")

    def events(self) -> list[dict[str, Any]]:
        """The events that count, in order."""
        return effective(read_events(self.folder / "events.jsonl"))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadInput(f"{path} does not exist (yet)") from None
        except ValueError as error:
            raise BadInput(f"{path} is damaged ({error})") from None


def load_run(folder: str | Path) -> RunRecord:
    """Return the record of the run in a folder, finished or still running."""
    path = Path(folder)
    if not (path / "events.jsonl").is_file():
        problem = "it has no events.jsonl" if path.is_dir() else "it is not a folder"
        raise BadInput(f"{path} does not hold a run: {problem}")
    return RunRecord(path)


SCORES = "scores.json"
SPLITS = {  # that are reported, and what they are
    "report": "other recordings of subjects trained on",
    "unseen": "subjects not trained on",
}
REPORTED = tuple(SPLITS)
_BEST = {"report": "best_r", "unseen": "best_r_unseen"}  # what is known beforehand, by split


def scores_file(scores: Mapping[str, Mapping[str, Any]], known: Mapping[str, float]) -> Any:
    """What `scores.json` says: raw scores by split and decoder, and the best achievable."""
    return {
        "schema": 1,
        "best": {split: known[key] for split, key in _BEST.items() if key in known},
        "splits": {
            split: {name: each.to_dict() for name, each in decoders.items()}
            for split, decoders in scores.items()
        },
    }


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """A run's scores by split and decoder, checked against their digests and the run's result."""
    from frostlab.envelopes.scores import EnvelopeScores

    try:
        said = json.loads((folder / SCORES).read_text(encoding="utf-8"))
        found = {
            split: {name: EnvelopeScores.from_dict(each) for name, each in decoders.items()}
            for split, decoders in said["splits"].items()
        }
        kept = RunRecord(folder).result["scores"]
        if _digests(kept, lambda each: each["digest"]) != _digests(found, lambda each: each.digest):
            raise BadInput("these scores were edited: they are not those of result.json")
        return found
    except BadInput as error:
        raise BadInput(f"{folder / SCORES}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder / SCORES} cannot be read ({error})") from None


def _digests(scores: Mapping[str, Mapping[str, Any]], digest: Callable[[Any], str]) -> Any:
    return {split: {name: digest(each) for name, each in d.items()} for split, d in scores.items()}


def scores_lines(folder: Path) -> list[str]:
    """Tables of a run's scores, a split each; nothing where there are none."""
    if not (folder / SCORES).exists():
        return []
    from frostlab.envelopes.scores import scores_table

    try:
        scores = read_scores(folder)
        best = json.loads((folder / SCORES).read_text(encoding="utf-8")).get("best", {})
        tables = [
            (SPLITS.get(split, split), scores_table(decoders, best.get(split)))
            for split, decoders in scores.items()
        ]
    except BadInput as error:
        return [str(error)]
    return [line for title, table in tables for line in (f"{title}:", *table.splitlines(), "")][:-1]
