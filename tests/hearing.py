"""A run on simulated EEG small enough for every test."""

from typing import Any

from tiny import changed

HEARING: dict[str, Any] = {
    "data": {
        "name": "eeg-simulated", "subjects": 2, "unseen": 1, "recordings": 3, "seconds": 13,
        "length": 64,
    },
    "model": {
        "kind": "conformer", "width": 8, "layers": 2, "heads": 2, "kernel": 5, "dropout": 0.1,
        "norm": "layer",
    },
    "optim": {"lr": 3e-3},
    "train": {"batch": 8, "epochs": 2, "threads": 1},
}  # fmt: skip


def hearing(**changes: Any) -> dict[str, Any]:
    """The recipe with `section__key=value` or `section={…}` changed."""
    return changed(HEARING, changes)
