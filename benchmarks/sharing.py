"""Measure what sharing one device is worth: wall-clock a run with N runs at once, and CUDA MPS.

Runs of one recipe with different seeds go through the queue that `frostlab matrix` uses, with warm
workers on one device, for every number of runs at once and, on a GPU, without and with CUDA MPS.
The data are prepared and the kernels are compiled in a run before, which is not counted; starting
the workers is. A line of JSON per measurement; where MPS does not start, its line says why.

python benchmarks/sharing.py --data-dir ../shared/data            # H200: about 25 minutes
python benchmarks/sharing.py --at-once 5,10 --runs 20 --mps only --data-dir ../shared/data
python benchmarks/sharing.py --small                              # a CPU, to see that it works
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from common import device, device_name, report
from frostlab.matrix.mps import multi_process_service, used_by_cuda
from frostlab.matrix.queue import Queue
from frostlab.matrix.slots import gpu_use, make_slots
from frostlab.matrix.task import Task
from frostlab.matrix.workers import LocalWorkers
from frostlab.recipe.load import load_recipe
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord

SMALL = {
    "data.examples": 2048, "train.epochs": None, "train.steps": 100, "train.threads": 1,
    "evaluate.every": 100,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="imdb-lm-gpt")
    parser.add_argument("--steps", type=int, default=None, help="of a run, default: the recipe's")
    parser.add_argument("--runs", type=int, default=25, help="of every measurement")
    parser.add_argument("--at-once", default="1,2,5,10")
    parser.add_argument("--mps", choices=["no", "both", "only"], default="both")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--small", action="store_true", help="a toy recipe, and few runs")
    options = parser.parse_args()
    recipe, runs = options.recipe, options.runs
    settings: dict[str, Any] = {} if options.steps is None else {"train.steps": options.steps}
    if options.small:
        recipe, runs, settings = "majority-gpt", min(runs, 6), SMALL | settings
    loaded = load_recipe(recipe, settings)
    numbers = [int(text) for text in options.at_once.split(",")]
    name = "cuda:0" if device().type == "cuda" else "cpu"
    facts = {
        "recipe": recipe, "steps": loaded.train.steps, "device": device_name(device()),
        "torch": torch.__version__,
    }  # fmt: skip
    warm = measure(loaded, name, 1, 1, options.data_dir, None)
    report("sharing", {**facts, "what": "warm-up", **warm})
    if warm["problems"]:
        raise SystemExit(f"the warm-up run did not finish: {warm['problems'][0]}")
    kinds = {"no": [False], "both": [False, True], "only": [True]}[options.mps]
    for with_mps in kinds if name != "cpu" else [False]:
        with ExitStack() as stack:
            mps = None
            if with_mps:
                service = stack.enter_context(multi_process_service())
                refusal = service.refusal or used_by_cuda(service.variables)
                if refusal is not None:
                    report("sharing", {**facts, "mps": True, "refusal": refusal})
                    continue
                mps = service.variables
            for at_once in numbers:
                result = measure(loaded, name, runs, at_once, options.data_dir, mps)
                report("sharing", {**facts, "mps": with_mps, **result})


def measure(
    recipe: Recipe,
    name: str,
    runs: int,
    at_once: int,
    data_dir: Path | None,
    mps: dict[str, str] | None,
) -> dict[str, Any]:
    """Train some runs, so many at once; return seconds of wall-clock a run, and what they took."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            Task("sharing", recipe.model_copy(update={"seed": seed}), Path(folder) / str(seed), "")
            for seed in range(runs)
        ]
        workers = LocalWorkers(make_slots([name], at_once, mps=mps), data_dir)
        peak, looked = 0, 0.0

        def look() -> None:
            nonlocal peak, looked
            if name != "cpu" and time.monotonic() - looked > 1:
                use, looked = gpu_use(name), time.monotonic()
                peak = max(peak, 0 if use is None else use.memory_used)

        began = time.perf_counter()
        ended = list(Queue(workers, each_turn=look).outcomes(tasks))
        seconds = time.perf_counter() - began
        kinds = sorted({outcome.kind for _, outcome in ended})
        clocks = [
            RunRecord(task.path).result.clocks
            for task, outcome in ended if outcome.kind == "finished"
        ]  # fmt: skip
    problems = {outcome.text for _, outcome in ended if outcome.kind != "finished"}
    return {
        "runs": runs, "at_once": at_once, "outcomes": kinds, "problems": sorted(problems)[:3],
        "seconds": round(seconds, 2), "wall_seconds_a_run": round(seconds / runs, 2),
        "median_run_seconds": _median([outcome.seconds for _, outcome in ended]),
        "median_train_seconds": _median([clock.train_seconds for clock in clocks]),
        "memory_peak_bytes": peak or None,
    }  # fmt: skip


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


if __name__ == "__main__":
    main()
