"""Splits of recordings: whole files and whole subjects are held out, never single windows.

A file holds a recording or, if the folder has val_ or test_ files, a part of one. The roles of
splits are train, tune (to select checkpoints), report (for the final scores) and unseen (for the
scores of subjects that are not in train).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frostlab.data.eeg.recordings import ROLES
from frostlab.errors import BadInput, nearest
from frostlab.storage import digest_of

PREFIXES = {"train": "train", "tune": "val", "report": "test"}  # role → prefix of file names
Division = dict[str, list[str]]  # role → names of recordings


@dataclass(frozen=True)
class Heading:
    """The facts about a recording that decide its split."""

    name: str
    subject: str
    stimulus: str  # identifies the speech that the subject heard, by a name or a digest
    role: str | None = None  # the role that the file's prefix names; None without a prefix


@dataclass(frozen=True)
class HoldOut:
    """The subjects and recordings to hold out."""

    seen: tuple[str, ...] | None = None  # subjects to train on; None: all that are not unseen
    unseen: tuple[str, ...] | float | None = None  # subjects to hold out: names, or a share
    tune: int | None = None  # recordings per subject; None: the val_ files or, without any, 1
    report: int | None = None  # recordings per subject; None: the test_ files or, without any, 1
    # If given, replaces tune and report: the position, from 1, of the recording for report among a
    # subject's recordings. The next recording is for tune (after the last recording: the first).
    held_out: int | None = None


def divide(headings: Sequence[Heading], rule: HoldOut, place: str) -> tuple[Division, str | None]:
    """Return each role's recordings, and a warning if train has speech of held-out recordings."""
    counts = Counter(heading.name for heading in headings)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise BadInput(f"{place}: {counts[repeated[0]]} recordings are called {repeated[0]}")
    seen, unseen = _subjects(sorted({heading.subject for heading in headings}), rule, place)
    by_prefix = any(heading.role not in (None, "train") for heading in headings)
    division: Division = {role: [] for role in ROLES}
    if by_prefix:
        _assign_by_prefix(headings, rule, seen, unseen, division, place)
    else:
        for subject in seen:
            names = [h.name for h in headings if h.subject == subject]
            _assign_by_order(subject, names, rule, division)
        division["unseen"] = [h.name for h in headings if h.subject in unseen]
    division = {role: names for role, names in division.items() if names}
    if by_prefix:
        # Files with prefixes are parts of recordings, cut at the same times for every subject. So
        # train, val and test files of one stimulus hold different parts of its speech.
        return division, None
    stimuli = {heading.name: heading.stimulus for heading in headings}
    return division, shared_speech_warning(stimuli, division)


def _subjects(
    subjects: list[str], rule: HoldOut, place: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the subjects to train on, and the unseen subjects."""
    for key, named in (("seen", rule.seen), ("unseen", rule.unseen)):
        for name in named if isinstance(named, tuple) else ():
            if name not in subjects:
                hint = nearest(name, subjects) or f"; there are {', '.join(subjects[:8])}"
                raise BadInput(f"data.{key} {name} is not a subject of {place}{hint}")
    unseen = rule.unseen
    if isinstance(unseen, float):
        count = max(1, round(unseen * len(subjects)))
        candidates = [name for name in subjects if name not in (rule.seen or ())]
        if len(candidates) < count:
            raise BadInput(
                f"data.unseen {unseen:g} is {count} of the {len(subjects)} subjects of {place}, "
                f"but data.seen leaves {len(candidates)}"
            )
        # The order by digest is pseudo-random, but the same in every run.
        unseen = tuple(sorted(sorted(candidates, key=digest_of)[:count]))
    unseen = unseen or ()
    if both := [name for name in rule.seen or () if name in unseen]:
        raise BadInput(f"subject {both[0]} is both in data.seen and in data.unseen")
    seen = tuple(name for name in rule.seen or subjects if name not in unseen)
    if not seen:
        raise BadInput(
            f"data.unseen leaves none of the {len(subjects)} subjects of {place} to train on"
        )
    return tuple(sorted(seen)), unseen


def _assign_by_prefix(
    headings: Sequence[Heading],
    rule: HoldOut,
    seen: tuple[str, ...],
    unseen: tuple[str, ...],
    division: Division,
    place: str,
) -> None:
    """Assign files to roles by prefix; of unseen subjects, use only test files.

    Test files share no speech with train and val files.
    """
    for heading in headings:
        assert heading.role is not None
        if heading.subject in seen:
            division[heading.role].append(heading.name)
        elif heading.subject in unseen and heading.role == "report":
            division["unseen"].append(heading.name)
    trained = {h.subject for h in headings if h.role == "train" and h.subject in seen}
    for role in ("train", "tune", "report"):
        if not division[role]:
            raise BadInput(
                f"{place} has no file named {PREFIXES[role]}_-_… for the subjects to train on; "
                "train, val and test files are needed, or only train files"
            )
    for role, count in (("tune", rule.tune), ("report", rule.report)):
        if count is not None:
            raise BadInput(
                f"data.{role} {count} is given, but {place} has train, val and test files"
            )
    for heading in headings:
        if heading.subject in seen and heading.subject not in trained:
            raise BadInput(
                f"{place}: {heading.subject} has no file named train_-_…; name the subject in "
                "data.unseen, or leave it out of data.seen"
            )
    for subject in unseen:
        if not any(h.subject == subject and h.role == "report" for h in headings):
            raise BadInput(f"{place}: {subject} of data.unseen has no file named test_-_…")


def _assign_by_order(subject: str, names: list[str], rule: HoldOut, division: Division) -> None:
    """Hold out a subject's last recordings, or the one at `rule.held_out` and the next."""
    count = len(names)
    tune, report = rule.tune or 1, rule.report or 1
    if count < tune + report + 1:
        raise BadInput(
            f"{subject} has {count} recording{'s' * (count != 1)}; at least {tune + report + 1} "
            f"are needed: {report} to report on, {tune} to tune on, 1 to train on"
        )
    if rule.held_out is not None:
        if rule.held_out > count:
            raise BadInput(f"data.held_out {rule.held_out}, but {subject} has {count} recordings")
        start = rule.held_out % count
        names = names[start:] + names[:start]  # the tuning recording first, the reporting one last
        names = [*names[1:-1], names[0], names[-1]]
    division["train"] += names[: count - tune - report]
    division["tune"] += names[count - tune - report : count - report]
    division["report"] += names[count - report :]


def shared_speech_warning(stimuli: Mapping[str, str], division: Division) -> str | None:
    """Return a warning that counts the held-out recordings whose speech is also in training."""
    trained = {stimuli[name] for name in division["train"]}
    counts = [
        f"{count} of {len(names)} {role}"
        for role, names in division.items()
        if role != "train" and (count := sum(stimuli[name] in trained for name in names))
    ]
    if not counts:
        return None
    return f"speech of {' and '.join(counts)} recordings was also heard in training"
