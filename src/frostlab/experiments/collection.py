"""The comparisons and groups inside a folder that `frostlab report` is called with.

A group is a folder of comparisons that belong together. Comparisons and groups are named by their
path from the folder of the report, which is called the reported folder.
"""

from dataclasses import dataclass
from pathlib import Path

from frostlab.comparison.evidence import Evidence, read_evidence
from frostlab.errors import BadInput
from frostlab.experiments.means import task_of
from frostlab.experiments.summary import SUMMARY, GroupSummary, read_summary
from frostlab.records.finding.index import is_comparison, is_group

EVIDENCE = "evidence.json"


@dataclass(frozen=True)
class Member:
    """A comparison inside the reported folder."""

    name: str  # its path from the reported folder
    evidence: Evidence | None
    problem: str | None = None  # why there is no evidence
    group: str | None = None  # path of its group; empty: the reported folder; None: no group


def is_several(folder: Path) -> bool:
    """Return whether a folder is a group, or has comparisons or groups in it."""
    return is_group(folder) or any(
        is_comparison(path) or is_group(path) for path in _folders(folder)
    )


def sources(folder: Path) -> tuple[str, ...]:
    """Return the paths of the records that the report of a folder is made from."""
    names = [f"{name}/{EVIDENCE}" for name, _ in _comparisons(folder)]
    groups = [group for group in _groups(folder) if (folder / group / SUMMARY).exists()]
    return tuple(sorted([*names, *(str(Path(group) / SUMMARY) for group in groups)]))


def reported_folders(folder: Path) -> list[Path]:
    """Return the folders of comparisons and groups inside, each of which gets its own report.

    Symbolic links are left out, because their reports would be written outside the folder.
    """
    names = [name for name, _ in _comparisons(folder)] + [name for name in _groups(folder) if name]
    paths = [folder / name for name in names]
    return [path for path in paths if not path.is_symlink() and not path.parent.is_symlink()]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error.strerror})") from None


def _groups(folder: Path) -> list[str]:
    """Return the names of the groups in a folder, or one empty name if it is a group itself."""
    if is_group(folder):
        return [""]
    return [path.name for path in _folders(folder) if is_group(path)]


def _comparisons(folder: Path) -> list[tuple[str, str | None]]:
    """Return each comparison's path from a folder, and the path of its group."""
    comparisons: list[tuple[str, str | None]] = []
    if not is_group(folder):
        comparisons += [(path.name, None) for path in _folders(folder) if is_comparison(path)]
    for group in _groups(folder):
        inside = [path for path in _folders(folder / group) if is_comparison(path)]
        comparisons += [(path.relative_to(folder).as_posix(), group) for path in inside]
    return comparisons


def read_members(folder: Path) -> tuple[Member, ...]:
    """Read the comparisons in a folder; one that cannot be read has the reason as its problem."""
    members = []
    for name, group in _comparisons(folder):
        try:
            evidence = read_evidence(folder / name / EVIDENCE)
            if evidence is not None:
                task_of(evidence)  # raises BadInput if its recipe cannot be loaded here
            problem = "not finished" if evidence is None else None
        except BadInput as error:
            evidence, problem = None, f"cannot be read: {error}"
        members.append(Member(name, evidence, problem, group))
    return tuple(members)


def read_groups(folder: Path) -> tuple[dict[str, GroupSummary], list[str]]:
    """Read the summaries of a folder's groups, by path; also return why others cannot be read."""
    summaries, problems = {}, []
    for group in _groups(folder):
        try:
            summaries[group] = read_summary(folder / group)
        except BadInput as error:
            problems.append(str(error))
    return summaries, problems
