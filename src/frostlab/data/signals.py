"""Recordings as windows, ready to be batched; a window never crosses from one to another."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from frostlab.data.cache import digest_of
from frostlab.data.eeg import Recording, load_recordings, windows
from frostlab.data.tokens import Prepared
from frostlab.recipe.eeg import EEGData

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


def text_of(prepared: Material) -> Prepared:
    """Data of tokens: what packing, cached layers and early exits are for; recipes see to it."""
    assert isinstance(prepared, Prepared)
    return prepared
