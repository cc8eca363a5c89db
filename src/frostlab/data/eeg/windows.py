"""Where windows begin: a fixed grid, or offsets drawn anew for every epoch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.recordings import Recording
from frostlab.errors import BadInput

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
