"""A recipe's recordings: simulated or read once, then found as they were."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from frostlab.data.eeg.readers import (
    Source,
    challenge_sources,
    find_folder,
    matlab_sources,
    mne_sources,
)
from frostlab.data.eeg.recordings import (
    UNSEEN,
    Recording,
    Recordings,
    Signals,
    Store,
    Windows,
    load_store,
    mark,
    same_channels,
    subjects_of,
)
from frostlab.data.eeg.simulate import write_simulated
from frostlab.data.eeg.splits import Heading, Rule, divide, shared
from frostlab.errors import BadInput
from frostlab.recipe.data import ChallengeEEG, EEGData, MatlabEEG, MneEEG, RecordedEEG, SimulatedEEG
from frostlab.storage import build_once, cache_folder, digest_of


def load_signals(data: EEGData, data_dir: Path | None, cache: Path) -> Signals:
    """Recordings as windows: the training split's as the recipe says, others on a grid."""
    found = load_recordings(data, data_dir, cache)
    rows = {subject: row for row, subject in enumerate(found.subjects)}
    splits = {}
    for role, recordings in found.splits.items():
        hop = data.hop if role == "train" else data.length
        subjects = tuple(rows.get(each.subject, UNSEEN) for each in recordings)
        digest = digest_of([found.digest, role, data.length, hop])
        splits[role] = Windows(recordings, subjects, data.length, hop, digest)
        len(splits[role])  # refuses a recording shorter than a window, before anything begins
    return Signals(
        splits=splits,
        rate=found.rate,
        channels=found.channels,
        subjects=found.subjects,
        origin=found.origin,
        caution=found.caution,
        known=found.known,
        digest=digest_of([found.digest, data.length, data.hop]),
    )


FORMAT = 2  # raise it when what is simulated or stored, or how it is made, changes


def load_recordings(
    data: EEGData, data_dir: Path | None = None, cache: Path | None = None
) -> Recordings:
    """Return the recordings of a recipe, made now or found as they were made before."""
    place = cache_folder(cache) / "eeg"
    settings = [FORMAT, data.model_dump(mode="json", exclude={"path", "length", "hop"})]
    if isinstance(data, SimulatedEEG):
        name = digest_of(settings)[:32]
        folder = build_once(place / name, lambda part: write_simulated(data, part))
        return load_store(folder)
    assert isinstance(data, RecordedEEG)
    source = find_folder(data.path, data_dir)
    sources = _sources(data, source)
    stamp = [_stamp(file) for one in sources for file in one.files]
    name = digest_of([settings, str(source.resolve()), stamp])[:32]
    return load_store(
        build_once(place / name, lambda part: _write(data, source, sources, stamp, part))
    )


def gather(
    recordings: Sequence[Recording],
    rate: float,
    channels: tuple[str, ...],
    *,
    tune: int = 1,
    report: int = 1,
    unseen: tuple[str, ...] | float | None = None,
) -> Recordings:
    """Divide recordings that are in memory, such as those of `from_mne`."""
    if not recordings:
        raise BadInput("there are no recordings to divide")
    for one in recordings:
        same_channels(one.name, one.eeg.shape[1], "the list of names", len(channels))
    headings = [Heading(one.name, one.subject, _heard(one)) for one in recordings]
    division, caution = divide(headings, Rule(None, unseen, tune, report), "these recordings")
    named = {one.name: one for one in recordings}
    splits = {role: tuple(named[name] for name in names) for role, names in division.items()}
    marks = [mark(role, one) for role, split in splits.items() for one in split]
    return Recordings(
        rate=rate,
        channels=channels,
        splits=splits,
        subjects=subjects_of(splits["train"]),
        known={},
        origin=dict.fromkeys(splits, "recordings in memory"),
        caution=caution,
        digest=digest_of([rate, channels, marks]),
    )


def _sources(data: RecordedEEG, folder: Path) -> list[Source]:
    if isinstance(data, ChallengeEEG):
        return challenge_sources(data, folder)
    if isinstance(data, MatlabEEG):
        return matlab_sources(data, folder)
    assert isinstance(data, MneEEG)
    return mne_sources(data, folder)


def _rule(data: RecordedEEG) -> Rule:
    if isinstance(data, MatlabEEG):
        return Rule(data.seen, data.unseen, held_out=data.held_out)
    assert isinstance(data, ChallengeEEG | MneEEG)
    return Rule(data.seen, data.unseen, data.tune, data.report)


def _stamp(path: Path) -> list[str | int]:
    """Tell one state of a file from another without reading it."""
    state = path.stat()
    return [path.name, state.st_size, state.st_mtime_ns]


def _write(
    data: RecordedEEG,
    folder: Path,
    sources: Sequence[Source],
    stamp: Sequence[list[str | int]],
    part: Path,
) -> None:
    division, caution = divide([one.heading for one in sources], _rule(data), str(folder))
    named = {one.heading.name: one for one in sources}
    store = Store(part)
    channels: tuple[str, ...] = ()
    heard: dict[str, str] = {}
    for role, names in division.items():
        for name in names:
            recording, found = named[name].read()
            if channels and len(found) == len(channels) and found != channels:
                other = next(
                    pair for pair in zip(found, channels, strict=True) if len(set(pair)) > 1
                )
                raise BadInput(f"{name} has channel {other[0]} where others have {other[1]}")
            channels = channels or found
            store.add(role, recording)
            heard[name] = _heard(recording)
    if [_stamp(file) for one in sources for file in one.files] != list(stamp):
        raise BadInput(f"{folder} changed while it was read; run it again")
    origin = {
        role: f"{folder}: {_count(len(names), 'recording')} of "
        + _count(len({named[name].heading.subject for name in names}), "subject")
        for role, names in division.items()
    }
    store.finish(data.rate, channels, origin, caution=caution or shared(heard, division))


def _heard(recording: Recording) -> str:
    """Tell one speech from another, whatever their files are called."""
    return hashlib.sha256(recording.envelope.tobytes()).hexdigest()


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
