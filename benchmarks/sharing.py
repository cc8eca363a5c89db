"""Measure what sharing one device is worth: wall-clock a run with several at once, and CUDA MPS.

Runs of one recipe with different seeds go through the queue that `frostlab matrix` uses, with warm
workers on one device. A case is written T, T+S or T+S/mps: T runs take steps at the same time, S
more start or end meanwhile, and CUDA MPS is used or not. The data are prepared and the kernels are
compiled in a run before, which is not counted; starting the workers is. A line of JSON per case;
where MPS does not start, its line says why. No case is started after --limit seconds.

python benchmarks/sharing.py --data-dir ../shared/data            # H200: about 7 minutes
python benchmarks/sharing.py --cases 5+2/mps,8/mps --runs 15 --data-dir ../shared/data
python benchmarks/sharing.py --small                                  # a CPU, to see that it works
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Case:
    """How runs share the device."""

    text: str
    training: int
    starting: int
    mps: bool
    runs: int

    @classmethod
    def read(cls, text: str, runs: int) -> "Case":
        numbers, _, mps = text.partition("/")
        training, _, starting = numbers.partition("+")
        count = min(runs, 3) if numbers == "1" else runs  # one at a time is steady
        return cls(text, int(training), int(starting or 0), mps == "mps", count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="imdb-lm-gpt")
    parser.add_argument("--steps", type=int, default=None, help="of a run, default: the recipe's")
    parser.add_argument("--runs", type=int, default=12, help="of every case; of case 1, at most 3")
    parser.add_argument("--cases", default="1+2,5+2/mps,1", help="T, T+S or T+S/mps")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds until the last start")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--small", action="store_true", help="a toy recipe, and few runs")
    options = parser.parse_args()
    began = time.monotonic()
    recipe, runs = options.recipe, options.runs
    settings: dict[str, Any] = {} if options.steps is None else {"train.steps": options.steps}
    if options.small:
        recipe, runs, settings = "majority-gpt", min(runs, 6), SMALL | settings
    loaded = load_recipe(recipe, settings)
    name = "cuda:0" if device().type == "cuda" else "cpu"
    facts = {
        "recipe": recipe, "steps": loaded.train.steps, "device": device_name(device()),
        "torch": torch.__version__,
    }  # fmt: skip
    warm = measure(loaded, name, Case("1", 1, 0, False, 1), options.data_dir, None)
    report("sharing", {**facts, "what": "warm-up", **warm})
    if warm["problems"]:
        raise SystemExit(f"the warm-up run did not finish: {warm['problems'][0]}")
    with ExitStack() as stack:
        mps: dict[str, str] | None = None
        for case in (Case.read(text, runs) for text in options.cases.split(",")):
            if case.mps and name == "cpu":
                continue
            if time.monotonic() - began > options.limit:
                report("sharing", {**facts, "case": case.text, "what": "not started: --limit"})
                continue
            if case.mps and mps is None:
                service = stack.enter_context(multi_process_service())
                refusal = service.refusal or used_by_cuda(service.variables)
                if refusal is not None:
                    report("sharing", {**facts, "case": case.text, "refusal": refusal})
                    continue
                mps = service.variables
            variables = mps if case.mps else None
            result = measure(loaded, name, case, options.data_dir, variables)
            report("sharing", {**facts, "case": case.text, "mps": case.mps, **result})


def measure(
    recipe: Recipe, name: str, case: Case, data_dir: Path | None, mps: dict[str, str] | None
) -> dict[str, Any]:
    """Train some runs; return seconds of wall-clock a run, and how long the parts of a run took."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            Task("sharing", recipe.model_copy(update={"seed": seed}), Path(folder) / str(seed), "")
            for seed in range(case.runs)
        ]
        (slot,) = make_slots([name], case.training + case.starting, mps=mps)
        slot = replace(slot, training=case.training if case.starting else None)
        peak, looked = 0, 0.0

        def look() -> None:
            nonlocal peak, looked
            if name != "cpu" and time.monotonic() - looked > 1:
                use, looked = gpu_use(name), time.monotonic()
                peak = max(peak, 0 if use is None else use.memory_used)

        began = time.perf_counter()
        queue = Queue(LocalWorkers([slot], data_dir), each_turn=look)
        ended, at = [], []
        for pair in queue.outcomes(tasks):
            ended.append(pair)
            at.append(round(time.perf_counter() - began, 1))
        seconds = at[-1]  # without closing the workers
        clocks = [
            RunRecord(task.path).result.clocks
            for task, outcome in ended if outcome.kind == "finished"
        ]  # fmt: skip
    walls = [clock.wall for clock in clocks if clock.wall is not None]
    problems = {outcome.text for _, outcome in ended if outcome.kind != "finished"}
    return {
        "runs": case.runs, "at_once": slot.at_once, "training": slot.training or slot.at_once,
        "outcomes": sorted({outcome.kind for _, outcome in ended}),
        "problems": sorted(problems)[:3],
        "seconds": round(seconds, 2), "wall_seconds_a_run": round(seconds / case.runs, 2),
        "ended_at": at,
        "median_run_seconds": _median([outcome.seconds for _, outcome in ended]),
        "median_start_seconds": _median([w.data + w.building + w.setup for w in walls]),
        "median_turn_seconds": _median([w.turn for w in walls]),
        "median_train_seconds": _median([clock.train_seconds for clock in clocks]),
        "median_total_seconds": _median([clock.total_seconds for clock in clocks]),
        "median_parts": {
            key: _median([getattr(wall, key) for wall in walls])
            for key in ("data", "building", "setup", "validation", "checkpoints", "report", "other")
        },
        "memory_peak_bytes": peak or None,
    }  # fmt: skip


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


if __name__ == "__main__":
    main()
