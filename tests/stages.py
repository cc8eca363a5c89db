"""A run of three stages, small enough for every test: a layer is added in the second."""

from typing import Any

PROGRESSIVE: dict[str, Any] = {
    "data": {"name": "induction", "examples": 128, "length": 16, "symbols": 16},
    "model": {"kind": "decoder", "width": 16, "layers": 1, "heads": 2},
    "optim": {"lr": 3e-3, "warmup": 0.0, "schedule": "constant"},
    "train": {"batch": 32, "epochs": 2, "threads": 1},
    "evaluate": {"batch": 256},
    "stages": [
        {},
        {"name": "grown", "add": {}, "train": ["layers[1]", "head"], "lr": 1e-3, "epochs": 1},
        {"lr": {"new": 1e-3, "old": 1e-5}, "steps": 5},
    ],
}


def progressive(**changes: Any) -> dict[str, Any]:
    """The recipe with some sections replaced."""
    return {**PROGRESSIVE, **changes}
