"""A tiny group of experiments on text of its own."""

from pathlib import Path

import yaml

from comparing import own_data

BASE = {
    "data": {"name": "own", "path": "texts", "length": 8, "splits": "published"},
    "tokenizer": {"kind": "words"},
    "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2},
    "optim": {"lr": 3e-3},
    "train": {"batch": 16, "steps": 3, "threads": 1},
}
GROUP = {
    "about": "a tiny group",
    "experiments": {
        "plain.yaml": {"reported": {"accuracy": 0.9}},
        "oelm.yaml": {"reported": {"accuracy": 0.93}},
        "random.yaml": {"optional": True},
    },
    "published": {
        "rates": {"arms": ["plain.yaml", "oelm.yaml"], "clock": {"seconds": 0.5}},
        "random": {"arms": ["plain.yaml", "random.yaml"], "clock": False},
    },
    "fair": {
        "rates": {
            "recipe": "plain.yaml",
            "set": {"data.splits": "honest"},
            "arms": ["baseline", "oelm"],
            "tune": None,
            "clock": False,
        }
    },
    "further": {
        "more": {"data.path": "more.csv"},
        "validation": {"data.report": "validation"},
    },
}


def write_group(folder: Path) -> Path:
    """Write the group, its recipes and their data; return the path of the group's file."""
    for split, first in (("train", 0), ("validation", 1000), ("test", 2000)):
        own_data(folder / "texts" / f"{split}.csv", first)
    validation = folder / "texts" / "validation.csv"
    validation.write_text("".join(validation.read_text().splitlines(keepends=True)[:98]))
    own_data(folder / "more.csv", 3000)
    recipes = {
        "plain": BASE,
        "oelm": {"extends": "plain.yaml", "treatment": "oelm", "optim": {"lr": 1e-2}},
        "random": {"extends": "plain.yaml", "treatment": "oelm-random", "optim": {"lr": 1e-2}},
        "mine": GROUP,
    }
    for name, values in recipes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "mine.yaml"
