"""Loading of a recipe's EEG recordings: simulated or read once, then mapped from the cache."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from frostlab.data.eeg.readers import (
    Source,
    challenge_sources,
    eeg_files,
    find_folder,
    matlab_sources,
    mne_sources,
    read_eeg,
)
from frostlab.data.eeg.recordings import (
    UNSEEN,
    Recording,
    Recordings,
    Signals,
    Store,
    Windows,
    check_channels,
    load_store,
    recording_digest,
    subjects_of,
)
from frostlab.data.eeg.simulate import write_simulated
from frostlab.data.eeg.splits import Heading, HoldOut, divide, shared_speech_warning
from frostlab.data.split_record import FileRecord, SplitRecord
from frostlab.errors import BadInput
from frostlab.recipe.data import ChallengeEEG, EEGData, MatlabEEG, MneEEG, RecordedEEG, SimulatedEEG
from frostlab.storage import build_once, cache_folder, digest_of, file_digest

_CUT = ("length", "hop", "windows")  # settings of windows; they do not change recordings
FORMAT = 3  # version of stored recordings; raise it when simulation or preprocessing changes


def load_signals(data: EEGData, data_dir: Path | None, cache: Path) -> Signals:
    """Return a recipe's recordings as windows.

    The settings `data.hop` (samples from one window's start to the next) and `data.windows` (random
    windows per recording) apply only to the split train.
    """
    source = load_recordings(data, data_dir, cache)
    rows = {subject: row for row, subject in enumerate(source.subjects)}
    folder = find_folder(data.path, data_dir) if isinstance(data, RecordedEEG) else None
    place = data.name if folder is None else str(folder.resolve())
    splits = {}
    for role, recordings in source.splits.items():
        # except in train, only the last window of a recording may overlap another
        hop = data.hop if role == "train" else data.length
        subjects = tuple(rows.get(recording.subject, UNSEEN) for recording in recordings)
        drawn = data.windows if role == "train" else None
        digest = digest_of([source.digest, role, data.length, hop, *([drawn] if drawn else [])])
        splits[role] = Windows(recordings, subjects, data.length, hop, digest, drawn)
        len(splits[role])  # raises an error if a recording is shorter than a window
    return Signals(
        splits=splits,
        rate=source.rate,
        channels=source.channels,
        subjects=source.subjects,
        origin=source.origin,
        caution=source.caution,
        known=source.known,
        digest=digest_of(
            [source.digest, data.length, data.hop, *([data.windows] if data.windows else [])]
        ),
        described={
            role: SplitRecord(
                source=place,
                examples=len(split),
                digest=split.digest,
                files=list(source.files.get(role, ())),
                note=source.origin[role],
                recordings=len(split.recordings),
                subjects=len({recording.subject for recording in split.recordings}),
                seconds=sum(map(len, split.recordings)) / source.rate,
                seed=data.seed if isinstance(data, SimulatedEEG) else None,
            )
            for role, split in splits.items()
        },
    )


def load_recordings(
    data: EEGData, data_dir: Path | None = None, cache: Path | None = None
) -> Recordings:
    """Return a recipe's recordings, from the cache if they were stored before."""
    stored = cache_folder(cache) / "eeg"
    settings = [FORMAT, data.model_dump(mode="json", exclude={"path", *_CUT})]
    if isinstance(data, SimulatedEEG):
        name = digest_of(settings)[:32]
        return load_store(build_once(stored / name, lambda place: write_simulated(data, place)))
    assert isinstance(data, RecordedEEG)
    folder = find_folder(data.path, data_dir)
    sources = _sources(data, folder)
    stamps = [_stamp(file) for source in sources for file in source.files]
    name = digest_of([settings, str(folder.resolve()), stamps])[:32]
    return load_store(
        build_once(stored / name, lambda place: _write(data, folder, sources, stamps, place))
    )


def recorded_like(data: EEGData, path: str) -> RecordedEEG:
    """Return settings that read the recordings at `path` as a recipe reads its own recordings.

    If the recipe simulates its EEG, `path` has to hold .npy files as in the Auditory EEG Challenge.
    """
    if isinstance(data, RecordedEEG):
        return data.model_copy(update={"path": path})
    return ChallengeEEG(name="eeg-challenge", path=path, rate=data.rate, length=data.length)


def load_undivided(
    data: RecordedEEG,
    channels: Sequence[str],
    subjects: Sequence[str],
    data_dir: Path | None,
    cache: Path,
) -> dict[str, Windows]:
    """Return all recordings of a folder as windows, to evaluate a trained model.

    `subjects` are those that the model was trained on. The result's key `report` has their
    recordings, and `unseen` has all others. All recordings must have the model's `channels`.
    """
    folder = find_folder(data.path, data_dir)
    sources = _sources(data, folder)
    settings = [FORMAT, data.model_dump(mode="json", exclude={"path", *_CUT})]
    stamps = [_stamp(file) for source in sources for file in source.files]
    key = digest_of([settings, str(folder.resolve()), stamps, list(subjects), list(channels)])

    def write(place: Path) -> None:
        store = Store(place)
        for source in sources:
            recording, labels = source.read()
            check_same_channels(recording.name, labels, channels)
            store.add("report" if recording.subject in subjects else "unseen", recording)
        store.finish(data.rate, tuple(channels), {})

    stored = load_store(build_once(cache / "eeg" / key[:32], write)).splits
    return {
        role: windows_of(recordings, subjects, data.length)
        for role, recordings in stored.items()
        if recordings
    }


def load_eeg(
    data: RecordedEEG, path: Path, channels: Sequence[str], subjects: Sequence[str]
) -> Iterator[Windows]:
    """Yield the windows of each EEG file at `path`, a file or a folder; envelopes are unknown."""
    for file in eeg_files(data, path):
        recording, labels = read_eeg(data, file, subjects)
        check_same_channels(recording.name, labels, channels)
        yield windows_of([recording], subjects, data.length)


def windows_of(recordings: Sequence[Recording], subjects: Sequence[str], length: int) -> Windows:
    """Return recordings as windows; only the last window of a recording may overlap another.

    `subjects` are the subjects that the model was trained on.
    """
    rows = {subject: row for row, subject in enumerate(subjects)}
    numbers = tuple(rows.get(recording.subject, UNSEEN) for recording in recordings)
    windows = Windows(tuple(recordings), numbers, length, length, "")
    len(windows)  # raises an error if a recording is shorter than a window
    return windows


def check_same_channels(name: str, channels: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse a recording whose channels are not the channels that the model was trained on."""
    if len(channels) != len(expected):
        raise BadInput(f"{name} has {len(channels)} channels; the run's model has {len(expected)}")
    for channel, wanted in zip(channels, expected, strict=True):
        if channel != wanted:
            raise BadInput(f"{name} has channel {channel} where the run's model has {wanted}")


def gather(
    recordings: Sequence[Recording],
    rate: float,
    channels: tuple[str, ...],
    *,
    tune: int = 1,
    report: int = 1,
    unseen: tuple[str, ...] | float | None = None,
) -> Recordings:
    """Split recordings that are in memory, such as the results of `from_mne`.

    `unseen` names the subjects to hold out, or is a share of the subjects. For every other subject,
    the last `report` recordings are for reporting, and the `tune` recordings before them are for
    tuning.
    """
    if not recordings:
        raise BadInput("there are no recordings to divide")
    for recording in recordings:
        count = recording.eeg.shape[1]
        check_channels(recording.name, count, "the list of channels", len(channels))
    headings = [Heading(r.name, r.subject, _speech_digest(r)) for r in recordings]
    division, caution = divide(headings, HoldOut(None, unseen, tune, report), "these recordings")
    by_name = {recording.name: recording for recording in recordings}
    splits = {role: tuple(by_name[name] for name in names) for role, names in division.items()}
    digests = [recording_digest(role, r) for role, split in splits.items() for r in split]
    return Recordings(
        rate=rate,
        channels=channels,
        splits=splits,
        subjects=subjects_of(splits["train"]),
        known={},
        origin=dict.fromkeys(splits, "recordings in memory"),
        caution=caution,
        digest=digest_of([rate, channels, digests]),
    )


def _sources(data: RecordedEEG, folder: Path) -> list[Source]:
    if isinstance(data, ChallengeEEG):
        return challenge_sources(data, folder)
    if isinstance(data, MatlabEEG):
        return matlab_sources(data, folder)
    assert isinstance(data, MneEEG)
    return mne_sources(data, folder)


def _hold_out(data: RecordedEEG) -> HoldOut:
    if isinstance(data, MatlabEEG):
        return HoldOut(data.seen, data.unseen, held_out=data.held_out)
    assert isinstance(data, ChallengeEEG | MneEEG)
    return HoldOut(data.seen, data.unseen, data.tune, data.report)


def _stamp(path: Path) -> list[str | int]:
    """Return a file's name, size and modification time, to detect when the file changes."""
    state = path.stat()
    return [path.name, state.st_size, state.st_mtime_ns]


def _write(
    data: RecordedEEG,
    folder: Path,
    sources: Sequence[Source],
    stamps: Sequence[list[str | int]],
    place: Path,
) -> None:
    """Read the recordings of `folder`, split them, and store them in the folder `place`."""
    division, caution = divide([s.heading for s in sources], _hold_out(data), str(folder))
    by_name = {source.heading.name: source for source in sources}
    store = Store(place)
    channels: tuple[str, ...] = ()
    speech: dict[str, str] = {}  # recording → digest of its envelope
    for role, names in division.items():
        for name in names:
            recording, labels = by_name[name].read()
            if channels and len(labels) == len(channels) and labels != channels:
                pairs = zip(labels, channels, strict=True)
                label, expected = next(pair for pair in pairs if len(set(pair)) > 1)
                raise BadInput(f"{name} has channel {label} where others have {expected}")
            channels = channels or labels
            store.add(role, recording)
            speech[name] = _speech_digest(recording)
    if [_stamp(file) for source in sources for file in source.files] != list(stamps):
        raise BadInput(f"{folder} changed while it was read; run the command again")
    origin = {
        role: f"{folder}: {_count(len(names), 'recording')} of "
        + _count(len({by_name[name].heading.subject for name in names}), "subject")
        for role, names in division.items()
    }
    caution = caution or shared_speech_warning(speech, division)
    files = {
        role: tuple(
            FileRecord(str(path), path.stat().st_size, file_digest(path))
            for path in sorted({file.resolve() for name in names for file in by_name[name].files})
        )
        for role, names in division.items()
    }
    store.finish(data.rate, channels, origin, caution=caution, files=files)


def _speech_digest(recording: Recording) -> str:
    """Return a digest of the envelope, by which recordings of the same speech are found."""
    return hashlib.sha256(recording.envelope.tobytes()).hexdigest()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
