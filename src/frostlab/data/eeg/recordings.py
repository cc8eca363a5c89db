"""EEG recordings of subjects who hear speech: their files in the cache, and windows cut from them.

The envelope of the speech is its loudness over time, which the models decode from the EEG.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from frostlab.data.arrays import map_npy
from frostlab.data.split_record import FileRecord, SplitRecord
from frostlab.data.tokens import load_facts, save_facts
from frostlab.errors import BadInput
from frostlab.storage import digest_of

Signal = NDArray[np.float32]
Starts = NDArray[np.int64]  # (windows, 2): index of the recording, first sample in the recording
ROLES = ("train", "tune", "report", "unseen")  # names of splits, explained in data.eeg.splits
MOST_VALUES = 1 << 28  # the most values of a recording: 64 channels at 1 kHz for more than an hour
# Marks a subject that is not in train, and so has no row (learned vector) in the model's subject
# embedding.
UNSEEN = -1


@dataclass(frozen=True)
class Recording:
    """EEG and the envelope of the speech that a subject heard, aligned sample by sample."""

    name: str
    subject: str
    eeg: Signal  # (samples, channels); channels have mean 0 and deviation 1, or are 0 if flat
    envelope: Signal  # (samples,), with mean 0 and standard deviation 1; zeros if unknown
    other: Signal | None = None  # envelope of a second speaker, whom the subject ignored

    def __len__(self) -> int:
        return len(self.envelope)


@dataclass(frozen=True)
class Recordings:
    """A recipe's recordings by split, with the sampling rate, channels and subjects."""

    rate: float  # Hz
    channels: tuple[str, ...]
    splits: dict[str, tuple[Recording, ...]]  # role → recordings; unseen may be missing
    subjects: tuple[str, ...]  # subjects in train, in the order of the subject embedding's rows
    known: dict[str, float]  # reference scores, such as best_r, an upper bound on correlations
    origin: dict[str, str]  # role → where the recordings come from
    caution: str | None  # a warning to show with every score
    digest: str
    files: dict[str, tuple[FileRecord, ...]] = field(default_factory=dict)  # role → files


@dataclass(frozen=True)
class Windows:
    """Windows of one split; a window's number is its first sample, counted over all recordings."""

    recordings: tuple[Recording, ...]
    subjects: tuple[int, ...]  # each recording's row of the subject embedding, or UNSEEN
    length: int  # samples per window
    hop: int | None  # samples from one start to the next; None: starts are redrawn every epoch
    digest: str
    drawn: int | None = None  # windows per recording if hop is None; None: as many as fit

    def __len__(self) -> int:
        return len(self._first)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of samples in each window of an epoch."""
        return np.full(len(self), self.length)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First sample of each recording, counted over all recordings, and their total length."""
        return np.array([0, *accumulate(map(len, self.recordings))])

    def draw(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of an epoch's windows, in the order of the recordings."""
        starts = windows(self.recordings, self.length, self.hop, seed, epoch, self.drawn)
        return self.bounds[starts[:, 0]] + starts[:, 1]

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        return self.draw(0, 0)

    @property
    def grid(self) -> NDArray[np.int64]:
        """Numbers of all windows of a split with a hop, which are the same in every epoch."""
        assert self.hop is not None
        return self._first

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the recording that each window (by number) is cut from."""
        return np.searchsorted(self.bounds, rows, side="right") - 1

    def cut(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """Cut windows, given by number: EEG (B, T, channels), envelopes (B, T), subjects (B,)."""
        owners = self.owners(rows)
        starts = zip(owners, rows - self.bounds[owners], strict=True)
        cuts = [(self.recordings[n], slice(start, start + self.length)) for n, start in starts]
        eeg = np.stack([recording.eeg[window] for recording, window in cuts])
        envelopes = np.stack([recording.envelope[window] for recording, window in cuts])
        return eeg, envelopes, np.array(self.subjects)[owners]


@dataclass(frozen=True)
class Signals:
    """A recipe's EEG data, ready to be batched; `Prepared` is the counterpart for token data."""

    splits: dict[str, Windows]  # train, tune, report, and unseen if subjects are held out
    rate: float  # Hz
    channels: tuple[str, ...]
    # `subjects`, `origin`, `caution` and `known` are as in `Recordings`
    subjects: tuple[str, ...]
    origin: dict[str, str]
    caution: str | None
    known: dict[str, float]
    digest: str  # of the recordings and of how they are cut into windows
    described: dict[str, SplitRecord] = field(default_factory=dict)  # role → its record
    task: Literal["envelope"] = "envelope"
    labels: None = None  # EEG has no classes
    notes: tuple[str, ...] = ()


def windows(
    recordings: Sequence[Recording],
    length: int = 640,
    hop: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    drawn: int | None = None,
) -> Starts:
    """Return the recording and the first sample of each window.

    With a hop, windows start every `hop` samples, and the last window ends with the recording.
    Without a hop, starts are random. Each recording has `drawn` windows, or as many as fit without
    overlap; the possible starts are divided into that many equal ranges, and one start is drawn
    from each range.
    """
    parts: list[Starts] = []
    for index, recording in enumerate(recordings):
        last = len(recording) - length  # the last possible start
        if last < 0:
            raise BadInput(
                f"{recording.name} has {len(recording)} samples, but a window has {length}; "
                f"set data.length to {len(recording)} or less"
            )
        if hop is None:
            random = np.random.default_rng([seed, epoch, index])
            count = drawn or len(recording) // length
            starts = (np.arange(count) + random.random(count)) * (last + 1) / count
            starts = starts.astype(np.int64)
        else:
            starts = np.unique(np.append(np.arange(0, last + 1, hop), last))
        parts.append(np.stack([np.full_like(starts, index), starts], axis=1))
    return np.concatenate(parts) if parts else np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class _Entry:
    """A stored recording."""

    role: str
    name: str
    subject: str


@dataclass(frozen=True)
class _StoreFacts:
    """Cached metadata of stored recordings, listed in `entries`; the rest is as in `Recordings`."""

    rate: float
    channels: tuple[str, ...]
    entries: tuple[_Entry, ...]
    known: dict[str, float]
    origin: dict[str, str]
    caution: str | None
    digest: str
    files: dict[str, tuple[FileRecord, ...]]


class Store:
    """Writer that stores recordings in a folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[_Entry] = []
        self._digests: list[str] = []
        self._first: tuple[str, int] | None = None  # first recording's name, number of channels

    def add(self, role: str, recording: Recording) -> None:
        """Write one recording of a split."""
        self._first = self._first or (recording.name, recording.eeg.shape[1])
        check_channels(recording.name, recording.eeg.shape[1], *self._first)
        for kind, array in _signals(recording):
            np.save(self.folder / f"{len(self.entries)}.{kind}.npy", array)
        self._digests.append(recording_digest(role, recording))
        self.entries.append(_Entry(role, recording.name, recording.subject))

    def finish(
        self,
        rate: float,
        channels: tuple[str, ...],
        origin: dict[str, str],
        known: dict[str, float] | None = None,
        caution: str | None = None,
        files: dict[str, tuple[FileRecord, ...]] | None = None,
    ) -> None:
        """Write the metadata that all recordings share."""
        check_channels("the list of channels", len(channels), *(self._first or ("", 0)))
        facts = _StoreFacts(
            rate=rate,
            channels=channels,
            entries=tuple(self.entries),
            known=known or {},
            origin=origin,
            caution=caution,
            digest=digest_of([rate, channels, self._digests]),
            files=files or {},
        )
        save_facts(self.folder, facts)


def load_store(folder: Path) -> Recordings:
    """Memory-map the recordings that a `Store` wrote."""
    facts = load_facts(_StoreFacts, folder)
    splits: dict[str, list[Recording]] = {"train": []}
    for number, entry in enumerate(facts.entries):
        signals = {
            kind: map_npy(path, "float32")
            for kind in ("eeg", "envelope", "other")
            if (path := folder / f"{number}.{kind}.npy").exists() or kind != "other"
        }
        splits.setdefault(entry.role, []).append(Recording(entry.name, entry.subject, **signals))
    return Recordings(
        rate=facts.rate,
        channels=facts.channels,
        splits={role: tuple(splits[role]) for role in ROLES if role in splits},
        subjects=subjects_of(splits["train"]),
        known=facts.known,
        origin=facts.origin,
        caution=facts.caution,
        digest=facts.digest,
        files=facts.files,
    )


def subjects_of(recordings: Iterable[Recording]) -> tuple[str, ...]:
    """Return the subjects of recordings, sorted by name."""
    return tuple(sorted({recording.subject for recording in recordings}))


def check_channels(name: str, count: int, first: str, expected: int) -> None:
    """Raise an error if `name` has `count` channels, but `first` has another number, `expected`."""
    if count != expected:
        raise BadInput(f"{name} has {count} channels, but {first} has {expected}")


def recording_digest(role: str, recording: Recording) -> str:
    """Return a digest of a recording and its role."""
    digest = hashlib.sha256(f"{role}\0{recording.name}\0{recording.subject}".encode())
    for kind, array in _signals(recording):
        digest.update(f"\0{kind} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _signals(recording: Recording) -> Iterator[tuple[str, Signal]]:
    for kind in ("eeg", "envelope", "other"):
        array = getattr(recording, kind)
        if array is not None:
            yield kind, array
