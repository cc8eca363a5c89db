"""Manifests: the checksums of the files of a finished run or comparison, to find later changes.

A manifest is a JSON object of checksums by file name, like the file that `storage.seal` writes. An
inner folder with a manifest or checksums of its own, such as a run of a comparison or a checkpoint
of a run, is represented only by that manifest or checksum file. A run that has diverged counts as
finished here. Locks, notes, tags, the queue's files, and files that other commands add later, such
as reports, are not listed. A comparison of existing runs in other folders lists their manifests,
by paths that begin with `..`.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.storage import SEAL, checksums, damaged_file, is_plain, read_json, write_whole

MANIFEST = "manifest.json"
QUEUE = "queue"  # a comparison's folder for the output of its runs and Slurm's files
_LOCKS = ("run.lock", "compare.lock")
_CHANGING = (".index.json", "annotations.json")  # a listing's index; users' notes and tags
# `frostlab exits`, `diagnose` and `envelopes` add the first four to a finished run; `report` adds
# the next six to a run, a comparison or a group. The queue's files may change after the last run.
_ADDED = (
    "exits.json", "targets.json", "flow", "envelopes",
    "report.html", "report.md", "report.json", "means.json", "figures", "tables", QUEUE,
)  # fmt: skip
_RECORDS = ("events.jsonl", "plan.json")  # a run has the first file, a comparison the second


@dataclass(frozen=True)
class Problem:
    """A file that is not as its manifest says."""

    path: str
    problem: str  # such as "is missing"
    added: bool = False  # whether the only problem is that the manifest does not list it

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


def write_manifest(
    folder: Path,
    written_next: Mapping[str, Path] | None = None,
    elsewhere: Iterable[str] = (),
) -> None:
    """Write the manifest of a folder.

    `written_next` holds files that will be renamed into the folder after this: final name →
    present path. A crash before the renaming leaves a manifest that lists a missing file.
    `elsewhere` holds the relative paths of runs in other folders; a run without a manifest is left
    out, because it is not finished.
    """
    later = dict(written_next or {})
    names = [name for name in _files(folder) if name not in later and is_plain(folder, name)]
    others = (os.path.join(path, MANIFEST) for path in elsewhere)
    names += [name for name in others if _is_run_elsewhere(folder, name)]
    sums = checksums(folder, names)
    for name, path in later.items():
        sums[name] = checksums(path.parent, [path.name])[path.name]
    write_whole(folder / MANIFEST, json.dumps(dict(sorted(sums.items())), indent=1) + "\n")


def verify(folder: Path) -> tuple[int, list[Problem]]:
    """Check a run, a comparison, or all of them in a folder.

    Return how many runs and comparisons were checked (a comparison with its runs counts once) and
    the problems. A run or comparison without a manifest is a problem, because it is not finished.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")
    records = list(_record_folders(folder))
    if not records:
        raise BadInput(f"{folder} holds no run and no comparison")
    return len(records), [problem for record in records for problem in problems_in(record)]


def check_unchanged(folder: Path) -> None:
    """Refuse a finished run if one of its files was changed or removed.

    Folders with checksums of their own, such as checkpoints, are not read.
    """
    for problem in problems_in(folder, deep=False):
        if not problem.added:
            raise BadInput(f"{problem}; delete {folder} to train it again")


def is_as_listed(folder: Path, name: str) -> bool:
    """Return whether a file has the checksum that the manifest of a folder lists.

    The answer is True if there is no readable manifest, or if it does not list the file.
    """
    try:
        expected = _read(folder).get(name)
    except (FileNotFoundError, BadInput):  # not finished, or damaged, which `verify` reports
        return True
    return expected is None or checksums(folder, [name])[name] == expected


def problems_in(folder: Path, *, deep: bool = True, outermost: bool = True) -> Iterator[Problem]:
    """Yield the differences between a folder and its manifest.

    With `deep`, folders inside are checked against their own manifests and checksums, too. Only the
    manifest of the `outermost` folder may list runs elsewhere: two manifests that list each other
    would be checked without end.
    """
    try:
        listed = _read(folder)
    except FileNotFoundError:
        yield Problem(str(folder), f"has no {MANIFEST}, so it is not finished")
        return
    except BadInput as error:
        yield Problem(str(folder / MANIFEST), f"is damaged ({error})")
        return
    present = [
        name
        for name in listed
        if is_plain(folder, name) or (outermost and _is_run_elsewhere(folder, name))
    ]
    sums = checksums(folder, present)
    for name, expected in listed.items():
        path = folder / name
        if name not in sums:
            yield Problem(str(path), "is not a file" if os.path.lexists(path) else "is missing")
        elif sums[name] != expected:
            yield Problem(str(path), "was changed after it was written")
        if deep and name in sums and path.parent != folder:
            if path.name == MANIFEST:
                yield from problems_in(path.parent, outermost=False)
            elif path.name == SEAL and (damaged := damaged_file(path.parent)) is not None:
                yield Problem(str(damaged), "was changed, added or removed")
    for name in sorted(set(_files(folder)) - listed.keys()):
        yield Problem(str(folder / name), "was added", added=True)


def _is_run_elsewhere(folder: Path, name: str) -> bool:
    """Return whether a name is the manifest of a run outside the folder, and not a link."""
    path = Path(name)
    outside = path.parts[:1] == ("..",) and path.name == MANIFEST
    return outside and is_plain((folder / path).parent, MANIFEST)


def _read(folder: Path) -> dict[str, Any]:
    values = read_json(folder / MANIFEST)
    if not isinstance(values, dict):
        raise BadInput("it should be an object of file names and checksums")
    return values


def _record_folders(folder: Path) -> Iterator[Path]:
    """Yield the outermost folders that hold a run or a comparison."""
    for place, folders, files in os.walk(folder):
        if MANIFEST in files or any(name in files for name in _RECORDS):
            folders.clear()
            yield Path(place)
        folders.sort()


def _files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that its manifest should list."""
    names = []
    for place, folders, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        top = here == Path()
        own_seal = None if top else next((name for name in (MANIFEST, SEAL) if name in files), None)
        if own_seal is not None:
            names.append(str(here / own_seal))
            folders.clear()
            continue
        links = [name for name in folders if (folder / here / name).is_symlink()]
        names += [str(here / name) for name in (*files, *links) if not _is_left_out(name, top)]
        folders[:] = [
            name for name in folders if not (_is_temporary(name) or (top and name in _ADDED))
        ]
    return sorted(names)


def _is_left_out(name: str, top: bool) -> bool:
    """Return whether manifests do not list files of this name."""
    listed_nowhere = name in (*_LOCKS, *_CHANGING) or _is_temporary(name)
    return listed_nowhere or (top and name in (MANIFEST, *_ADDED))


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")
