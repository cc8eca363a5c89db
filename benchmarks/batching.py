"""Compare whole runs of docstrings-gpt: three kinds of batches, and frozen layers cached or not.

Every way runs once per round. Examples per second count training time alone; the seconds of data
include filling the cache.

    python benchmarks/batching.py [--rounds 2]
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import device, device_name, report
from frostlab.recipe.load import load_recipe
from frostlab.training.run import run

FROZEN = {"model.layers": 4, "treatment": {"freeze": ["all", "!layers[-1]", "!head"]}}
WAYS = {
    "bucketed": {"train.epochs": 1, "train.batching": "bucketed"},
    "packed": {"train.epochs": 1, "train.batching": "packed"},
    "padded": {"train.epochs": 1, "train.batching": "padded"},
    "3 of 4 layers frozen": FROZEN,
    "cached in memory": {**FROZEN, "train.cache_prefix": "memory"},
    "cached on disk": {**FROZEN, "train.cache_prefix": "disk"},
}


def measure(settings: dict[str, Any], runs: Path) -> dict[str, Any]:
    record = run(load_recipe("docstrings-gpt", settings), runs=runs)
    clocks = asdict(record.result.clocks)
    names = ("examples_per_second", "padding_share", "data_seconds", "train_seconds")
    return {name: clocks[name] for name in names} | {"accuracy": record.metrics["accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FROSTLAB_CACHE"] = f"{folder}/cache"
        measure(WAYS["bucketed"], Path(folder))  # prepares the data
        for number in range(options.rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                results[way].append(measure(WAYS[way], Path(folder)))
    for way, rounds in results.items():
        speeds = [result["examples_per_second"] for result in rounds]
        facts = {"way": way, "examples_per_second": statistics.median(speeds)}
        report("batching", facts | {"each": rounds, "device": device_name(device())})


if __name__ == "__main__":
    main()
