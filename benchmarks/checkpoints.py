"""What a checkpoint of a run with frozen weights costs: bytes and seconds, both ways.

    python benchmarks/checkpoints.py --rounds 5

Every round trains each recipe twice, once with each value of train.checkpoint_what, in alternating
order. A save lasts from the request for a checkpoint until older checkpoints are removed, with
flushes to disk. The first save of a run with `trainable` also stores the frozen weights; it is
reported apart, and so is the first save with `all`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import frostlab.training.loop as loop
from common import device, device_name, report
from frostlab.recipe.load import load_recipe, recipe_from
from frostlab.recipe.recipe import Recipe
from frostlab.training.run import run

STEPS = {"steps": 12, "checkpoint": 2, "batch": 2, "threads": 1}
DATA = {"name": "majority", "length": 16, "examples": 128, "symbols": 8}
WAYS = ("trainable", "all")


def recipe_of(case: str, treatment: str, way: str) -> Recipe:
    train = {**STEPS, "checkpoint_what": way}
    if case == "docstrings-gpt":
        changes: dict[str, Any] = {f"train.{key}": value for key, value in train.items()}
        changes |= {"treatment": treatment, "evaluate.every": 12, "data.evaluation_limit": 64}
        return load_recipe(case, changes)
    # 6 layers of width 512
    values = {"data": DATA, "model": {"kind": "gpt"}, "treatment": treatment, "train": train,
              "evaluate": {"every": 12}}  # fmt: skip
    return recipe_from(values)


def saves_of(recipe: Recipe) -> list[tuple[float, int]]:
    """Train a recipe; return the seconds and the bytes of each of its checkpoints."""
    saves: list[tuple[float, int]] = []
    original, seen = loop._save_checkpoint, set[Path]()

    def timed(context: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        original(context, *arguments)
        seconds = time.perf_counter() - began
        written = set(context.path.glob("checkpoints/*/*")) - seen
        saves.append((seconds, sum(path.stat().st_size for path in written)))
        seen.update(written)

    loop._save_checkpoint = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(recipe, out=Path(folder) / "run")
    finally:
        loop._save_checkpoint = original
    return saves


def measure(case: str, treatment: str, rounds: int) -> dict[str, Any]:
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    later: dict[str, list[float]] = {way: [] for way in WAYS}
    size: dict[str, tuple[int, int]] = {}
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            saves = saves_of(recipe_of(case, treatment, way))
            first[way].append(saves[0][0])
            later[way].append(statistics.median(seconds for seconds, _ in saves[1:]))
            size[way] = saves[0][1], saves[1][1]
    ratios = sorted(a / b for a, b in zip(later["trainable"], later["all"], strict=True))
    values: dict[str, Any] = {"case": f"{case}, {treatment}", "rounds": rounds}
    for way in WAYS:
        values |= {
            f"{way}_first_mb": round(size[way][0] / 1e6, 2),
            f"{way}_mb": round(size[way][1] / 1e6, 2),
            f"{way}_first_s": round(statistics.median(first[way]), 4),
            f"{way}_s": round(statistics.median(later[way]), 4),
        }
    return values | {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(ratios[0], 3),
        "ratio_high": round(ratios[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    where = device_name(device())
    for case, treatment in (
        ("docstrings-gpt", "oelm"),
        ("Medium-512", "oelm"),
        ("Medium-512", "norms"),
    ):
        report("checkpoints", {**measure(case, treatment, options.rounds), "device": where})


if __name__ == "__main__":
    main()
