"""Which recordings train, tune and report: whole recordings and whole subjects, never windows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frostlab.data.eeg.recordings import ROLES
from frostlab.errors import BadInput, nearest
from frostlab.storage import digest_of

PREFIXES = {"train": "train", "tune": "val", "report": "test"}  # of files that say their role


@dataclass(frozen=True)
class Heading:
    """A recording before it is read."""

    name: str
    subject: str
    stimulus: str
    role: str | None = None  # what its file's name says it is for


@dataclass(frozen=True)
class Rule:
    """Who is held out."""

    seen: tuple[str, ...] | None = None  # None: every subject that is not unseen
    unseen: tuple[str, ...] | float | None = None  # names, or a share of the subjects
    tune: int | None = None  # recordings of each subject; None: as the files say, else 1
    report: int | None = None
    held_out: int | None = None  # instead of both: the recording, from 1, that reports


Division = dict[str, list[str]]  # the names of each split's recordings


def divide(headings: Sequence[Heading], rule: Rule, place: str) -> tuple[Division, str | None]:
    """Return each split's recordings, and what is to be said where stimuli are shared."""
    counts = Counter(heading.name for heading in headings)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise BadInput(f"{place}: {counts[twice[0]]} recordings are called {twice[0]}")
    seen, unseen = _subjects(sorted({heading.subject for heading in headings}), rule, place)
    roles = {heading.name: role for heading in headings if (role := heading.role)}
    told = bool(set(roles.values()) - {"train"})
    found: Division = {role: [] for role in ROLES}
    if told:
        _by_files(headings, rule, seen, unseen, found, place)
    else:
        for subject in seen:
            _carve(subject, [h.name for h in headings if h.subject == subject], rule, found)
        found["unseen"] = [h.name for h in headings if h.subject in unseen]
    division = {role: names for role, names in found.items() if names}
    if told:  # parts of a recording, cut at the same times for everybody
        return division, None
    return division, shared({heading.name: heading.stimulus for heading in headings}, division)


def _subjects(there: list[str], rule: Rule, place: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for key, named in (("seen", rule.seen), ("unseen", rule.unseen)):
        for name in named if isinstance(named, tuple) else ():
            if name not in there:
                hint = nearest(name, there) or f"; there are {', '.join(there[:8])}"
                raise BadInput(f"data.{key} {name} is not a subject of {place}{hint}")
    unseen = rule.unseen
    if isinstance(unseen, float):
        count = max(1, round(unseen * len(there)))
        among = [name for name in there if name not in (rule.seen or ())]
        if len(among) < count:
            raise BadInput(
                f"data.unseen {unseen:g} is {count} of the {len(there)} subjects of {place}, but "
                f"data.seen leaves {len(among)}"
            )
        unseen = tuple(sorted(sorted(among, key=digest_of)[:count]))  # by lot, fixed by the names
    unseen = unseen or ()
    if both := [name for name in rule.seen or () if name in unseen]:
        raise BadInput(f"subject {both[0]} is both in data.seen and in data.unseen")
    seen = tuple(name for name in rule.seen or there if name not in unseen)
    if not seen:
        raise BadInput(f"data.unseen leaves no subject of {place} to train on; it has {len(there)}")
    return tuple(sorted(seen)), unseen


def _by_files(
    headings: Sequence[Heading],
    rule: Rule,
    seen: tuple[str, ...],
    unseen: tuple[str, ...],
    found: Division,
    place: str,
) -> None:
    """As the files' names say; of held-out subjects only what nobody else's training holds."""
    for heading in headings:
        assert heading.role is not None
        if heading.subject in seen:
            found[heading.role].append(heading.name)
        elif heading.subject in unseen and heading.role == "report":
            found["unseen"].append(heading.name)
    trained = {h.subject for h in headings if h.role == "train" and h.subject in seen}
    for role in ("train", "tune", "report"):
        if not found[role]:
            raise BadInput(
                f"{place} has no {PREFIXES[role]}_-_ file of the subjects to train on; of train, "
                "val and test all are needed, or train alone"
            )
    for role, key in (("tune", rule.tune), ("report", rule.report)):
        if key is not None:
            raise BadInput(f"data.{role} {key} is given, but {place} has train, val and test files")
    for heading in headings:
        if heading.subject in seen and heading.subject not in trained:
            raise BadInput(
                f"{place}: {heading.subject} has no train_-_ file; name it in data.unseen, or "
                "leave it out of data.seen"
            )
    for subject in unseen:
        if not any(h.subject == subject and h.role == "report" for h in headings):
            raise BadInput(f"{place}: {subject} of data.unseen has no test_-_ file")


def _carve(subject: str, names: list[str], rule: Rule, found: Division) -> None:
    """Hold out one subject's recordings: the last, or the one asked for and the one after it."""
    count = len(names)
    tune, report = rule.tune or 1, rule.report or 1
    if count < tune + report + 1:
        raise BadInput(
            f"{subject} has {count} recording{'s' * (count != 1)}; at least {tune + report + 1} "
            f"are needed: {report} to report, {tune} to tune on, 1 to train on"
        )
    if rule.held_out is not None:
        if rule.held_out > count:
            raise BadInput(f"data.held_out {rule.held_out}, but {subject} has {count} recordings")
        start = rule.held_out % count
        names = names[start:] + names[:start]  # what reports comes last, what tunes first
        names = [*names[1:-1], names[0], names[-1]]
    found["train"] += names[: count - tune - report]
    found["tune"] += names[count - tune - report : count - report]
    found["report"] += names[count - report :]


def shared(stimuli: Mapping[str, str], division: Division) -> str | None:
    """Say how many held-out recordings are of speech that somebody heard in training."""
    trained = {stimuli[name] for name in division["train"]}
    said = [
        f"{count} of {len(names)} {role}"
        for role, names in division.items()
        if role != "train" and (count := sum(stimuli[name] in trained for name in names))
    ]
    if not said:
        return None
    return f"speech of {' and '.join(said)} recordings was also heard in training"
