"""Time the whole commands `frostlab runs` and `status` with thousands of runs, cold and warm.

python benchmarks/index.py [--runs 5000]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report
from frostlab.matrix.store import SCHEMA, MatrixFolder, MatrixPlan, PlannedRun
from frostlab.recipe.load import recipe_from
from frostlab.training.run import run

RECIPE = {
    "data": {"name": "majority", "examples": 64},
    "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2},
    "train": {"steps": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        first = run(RECIPE, runs=root).folder
        shutil.rmtree(first / "checkpoints")
        recipe = (first / "recipe.yaml").read_text()
        for i in range(count - 1):
            shutil.copytree(first, root / f"copy-{i}")
            rate = f"lr: {1e-6 * (1 + i // 10):.6f}"  # ten seeds of each learning rate
            changed = recipe.replace("lr: 0.0003", rate).replace("seed: 0", f"seed: {i % 10}")
            (root / f"copy-{i}" / "recipe.yaml").write_text(changed)
        for state in ("cold", "warm", "warm"):
            seconds, output = timed_command("runs", "--runs", name, "--json")
            assert len(json.loads(output)) == count
            report("runs", {"runs": count, "state": state, "seconds": round(seconds, 2)})
        plan_all(root)
        for state in ("warm", "warm", "warm"):
            seconds, output = timed_command("status", "--runs", name)
            assert f"{count:,} finished" in output
            report("status", {"runs": count, "state": state, "seconds": round(seconds, 2)})


def timed_command(*arguments: str) -> tuple[float, str]:
    """Run a command of frostlab; return its seconds and what it printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "frostlab", *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return time.perf_counter() - began, done.stdout


def plan_all(root: Path) -> None:
    """Write the plan of a matrix that consists of all runs in a folder."""
    recipe = {key: value for key, value in recipe_from(RECIPE).to_dict().items() if key != "seed"}
    runs = [
        PlannedRun(path.name, path.name, "all", "majority", "none", 0, "accuracy", 0)
        for path in root.iterdir() if path.is_dir()
    ]  # fmt: skip
    plan = MatrixPlan(SCHEMA, "all", "all.yaml", time.time(), None, runs, [recipe])
    MatrixFolder(root, "all").write_plan(plan)


if __name__ == "__main__":
    main()
