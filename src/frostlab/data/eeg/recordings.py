"""Recordings and their splits, written once and read through the page cache."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frostlab.data.cache import digest_of
from frostlab.data.tokens import load_facts, save_facts
from frostlab.errors import BadInput

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
