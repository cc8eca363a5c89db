"""Time the whole command `frostlab runs` with thousands of runs, cold and warm.

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
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "frostlab", "runs", "--runs", name, "--json"],
                capture_output=True, check=True,
            )  # fmt: skip
            seconds = time.perf_counter() - began
            assert len(json.loads(done.stdout)) == count
            report("runs", {"runs": count, "state": state, "seconds": round(seconds, 2)})


if __name__ == "__main__":
    main()
