"""Measure what the queue adds to a run: many trivial runs in one warm worker.

The seconds of a run are those that the worker itself measures around it, from its start to the end
of its record. Everything else counts as the queue's: starting the worker, importing torch once,
sending tasks, cleaning up between two runs, and the driver's files.

python benchmarks/overhead.py --runs 1000 >> docs/records/cpu.jsonl
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from common import report
from frostlab.matrix import drive as driver
from frostlab.matrix.places import Places
from frostlab.matrix.plan import matrix_plan
from frostlab.matrix.store import MatrixFolder

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 64, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 8, "layers": 1, "heads": 1},
    "train": {"steps": 1, "batch": 8, "threads": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    count = parser.parse_args().runs
    seconds: list[float] = []
    ended = driver._Driver._ended

    def noted(self: Any, task: Any, outcome: Any, number: int) -> None:
        assert outcome.kind == "finished", outcome
        seconds.append(outcome.seconds)
        ended(self, task, outcome, number)

    driver._Driver._ended = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trivial.yaml").write_text(yaml.safe_dump(RECIPE))
        values = {"recipes": ["trivial.yaml"], "seeds": count}
        (folder / "many.yaml").write_text(yaml.safe_dump(values))
        began = time.perf_counter()
        plan = matrix_plan(str(folder / "many.yaml"))
        driver.drive(plan, MatrixFolder(folder / "runs", "many"), Places("cpu"))
        total = time.perf_counter() - began
    report("overhead", {
        "runs": count, "seconds": round(total, 2), "own_seconds": round(sum(seconds), 2),
        "median_run_seconds": round(statistics.median(seconds), 4),
        "overhead_seconds_a_run": round((total - sum(seconds)) / count, 4),
    })  # fmt: skip


if __name__ == "__main__":
    main()
