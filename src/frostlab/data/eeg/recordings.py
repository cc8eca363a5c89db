"""Recordings and their splits, written once and read through the page cache."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from frostlab.data.tokens import Prepared, load_facts, save_facts
from frostlab.errors import BadInput
from frostlab.storage import digest_of

Signal = NDArray[np.float32]
ROLES = ("train", "tune", "report", "unseen")


@dataclass(frozen=True)
class Recording:
    """One stretch of EEG with the envelope heard meanwhile, sample by sample."""

    name: str
    subject: str
    eeg: Signal  # (samples, channels), every channel of mean 0 and deviation 1
    envelope: Signal  # (samples,), of mean 0 and deviation 1
    other: Signal | None = None  # the envelope of the speaker who was ignored, where there is one

    def __len__(self) -> int:
        return len(self.envelope)


@dataclass(frozen=True)
class Recordings:
    """A recipe's recordings, divided by recording and by subject."""

    rate: float  # Hz
    channels: tuple[str, ...]
    splits: dict[str, tuple[Recording, ...]]  # train, tune, report and, held-out subjects, unseen
    subjects: tuple[str, ...]  # those of train, in the order of an embedding's rows
    known: dict[str, float]  # answers known beforehand: best_r, best_r_unseen, …
    origin: dict[str, str]  # each split's place, and what was held out how
    caution: str | None  # to be shown wherever the numbers are
    digest: str


def same_channels(name: str, count: int, first: str, wanted: int) -> None:
    """Refuse a recording whose channels are not as many as those of the first."""
    if count != wanted:
        raise BadInput(f"{name} has {count} channels, {first} has {wanted}")


def _signals(recording: Recording) -> Iterator[tuple[str, Signal]]:
    for kind in ("eeg", "envelope", "other"):
        array = getattr(recording, kind)
        if array is not None:
            yield kind, array


def mark(role: str, recording: Recording) -> str:
    """Name a recording and its part by everything in it."""
    digest = hashlib.sha256(f"{role}\0{recording.name}\0{recording.subject}".encode())
    for kind, array in _signals(recording):
        digest.update(f"\0{kind} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Store:
    """Writes recordings into a folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[dict[str, str]] = []
        self._marks: list[str] = []
        self._first: tuple[str, int] | None = None

    def add(self, role: str, recording: Recording) -> None:
        """Write one recording of a split."""
        self._first = self._first or (recording.name, recording.eeg.shape[1])
        same_channels(recording.name, recording.eeg.shape[1], *self._first)
        for kind, array in _signals(recording):
            np.save(self.folder / f"{len(self.entries)}.{kind}.npy", array)
        self._marks.append(mark(role, recording))
        entry = {"role": role, "name": recording.name, "subject": recording.subject}
        self.entries.append(entry)

    def finish(
        self,
        rate: float,
        channels: tuple[str, ...],
        origin: dict[str, str],
        known: dict[str, float] | None = None,
        caution: str | None = None,
    ) -> None:
        """Write what is said once."""
        same_channels("the list of names", len(channels), *(self._first or ("", 0)))
        save_facts(
            self.folder,
            {
                "rate": rate,
                "channels": channels,
                "entries": self.entries,
                "known": known or {},
                "origin": origin,
                "caution": caution,
                "digest": digest_of([rate, channels, self._marks]),
            },
        )


def load_store(folder: Path) -> Recordings:
    """Map what a Store wrote into memory."""
    facts = load_facts(folder)
    splits: dict[str, list[Recording]] = {}
    for number, entry in enumerate(facts["entries"]):
        signals = {
            kind: np.load(path, mmap_mode="r")
            for kind in ("eeg", "envelope", "other")
            if (path := folder / f"{number}.{kind}.npy").exists()
        }
        splits.setdefault(entry["role"], []).append(
            Recording(entry["name"], entry["subject"], **signals)
        )
    return Recordings(
        rate=facts["rate"],
        channels=tuple(facts["channels"]),
        splits={role: tuple(splits[role]) for role in ROLES if role in splits},
        subjects=subjects_of(splits["train"]),
        known=facts["known"],
        origin=facts["origin"],
        caution=facts["caution"],
        digest=facts["digest"],
    )


def subjects_of(recordings: Iterable[Recording]) -> tuple[str, ...]:
    """Return the subjects, each once, in the order of their names."""
    return tuple(sorted({recording.subject for recording in recordings}))


Starts = NDArray[np.int64]  # (windows, 2): the recording's place in the list, the first sample


def windows(
    recordings: Sequence[Recording],
    length: int = 640,
    hop: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Starts:
    """Return where the windows of recordings begin.

    With a hop they begin every `hop` samples, the last where it ends with the recording, so that
    every sample is in one. Without, as many as fit side by side are drawn from seed and epoch,
    one from each equal share of the possible beginnings: their number never changes.
    """
    found: list[Starts] = []
    for place, recording in enumerate(recordings):
        spare = len(recording) - length
        if spare < 0:
            raise BadInput(
                f"{recording.name} has {len(recording)} samples, a window {length}; "
                f"set data.length to {len(recording)} or less"
            )
        if hop is None:
            random = np.random.default_rng([seed, epoch, place])
            count = len(recording) // length
            starts = (np.arange(count) + random.random(count)) * (spare + 1) / count
            starts = starts.astype(np.int64)
        else:
            starts = np.unique(np.append(np.arange(0, spare + 1, hop), spare))
        found.append(np.stack([np.full_like(starts, place), starts], axis=1))
    return np.concatenate(found) if found else np.empty((0, 2), dtype=np.int64)


UNSEEN = -1  # the row of subjects that are not trained on


@dataclass(frozen=True)
class Windows:
    """One split; a window is known by its first sample, counted through all recordings."""

    recordings: tuple[Recording, ...]
    subjects: tuple[int, ...]  # each recording's row of the embedding; −1: not among the trained
    length: int  # samples
    hop: int | None  # samples from one window to the next; None: drawn anew for every epoch
    digest: str

    def __len__(self) -> int:
        return len(self._first)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Samples of each window of an epoch."""
        return np.full(len(self), self.length)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Where each recording begins, and where the last one ends."""
        return np.array([0, *accumulate(map(len, self.recordings))])

    def draw(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The windows of an epoch, in the order of the recordings."""
        starts = windows(self.recordings, self.length, self.hop, seed, epoch)
        return self.bounds[starts[:, 0]] + starts[:, 1]

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        return self.draw(0, 0)

    @property
    def grid(self) -> NDArray[np.int64]:
        """All windows, where they lie a hop apart."""
        assert self.hop is not None
        return self._first

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The recording that each window is of."""
        return np.searchsorted(self.bounds, rows, side="right") - 1

    def cut(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """(B, T, channels) EEG, (B, T) envelopes and (B,) subjects of windows."""
        owners = self.owners(rows)
        places = list(zip(owners, rows - self.bounds[owners], strict=True))
        kept = [(self.recordings[n], slice(at, at + self.length)) for n, at in places]
        eeg = np.stack([each.eeg[here] for each, here in kept])
        envelopes = np.stack([each.envelope[here] for each, here in kept])
        return eeg, envelopes, np.array(self.subjects)[owners]


@dataclass(frozen=True)
class Signals:
    """A recipe's recordings, ready to be batched: what `Prepared` is for tokens."""

    splits: dict[str, Windows]  # train, tune, report and, where subjects are held out, unseen
    rate: float  # Hz
    channels: tuple[str, ...]
    subjects: tuple[str, ...]  # of the training split, in the order of the embedding
    origin: dict[str, str]
    caution: str | None
    known: dict[str, float]
    digest: str
    task: Literal["envelope"] = "envelope"


Material = Prepared | Signals


def text_of(prepared: Material) -> Prepared:
    """Data of tokens: what packing, cached layers and early exits are for; recipes see to it."""
    assert isinstance(prepared, Prepared)
    return prepared
