"""Where runs live: a new run gets a free name, a resumed one is found again."""

import glob
import json
from pathlib import Path
from typing import Any

import yaml

from frostlab.errors import BadInput
from frostlab.records.folder import RunFolder, read_events


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
