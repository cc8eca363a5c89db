"""Compare the memory that `frostlab run RECIPE --check` shows with the peak of the run; CUDA only.

The check and a run of 60 steps are commands of their own, started together for each recipe, so the
data and the compiled kernels of the recipe may be prepared by either. A line of JSON per recipe.

python benchmarks/check_memory.py --data-dir ../shared/data >> docs/records/h200.jsonl
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import device, device_name, report

RECIPES = (
    "docstrings-decoder", "docstrings-gpt", "docstrings-deep", "eeg-conformer-v2", "imdb-lm-gpt",
)  # fmt: skip
STEPS = 60
SETTINGS = {"train.epochs": "null", "train.steps": str(STEPS), "optim.warmup": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--scale", default=None, help="tiny: to see on a CPU that it works")
    parser.add_argument("--data-dir", default=None)
    options = parser.parse_args()
    extra = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    extra += [] if options.scale is None else ["--scale", options.scale]
    extra += [] if options.data_dir is None else ["--data-dir", options.data_dir]
    for recipe in options.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            command = [sys.executable, "-m", "frostlab", "run", recipe, *extra]
            check = start([*command, "--check", "--json"])
            run = start([*command, "--out", str(out)])
            printed, problem = check.communicate()
            _, failure = run.communicate()
            if check.returncode or run.returncode:
                lines = (problem if check.returncode else failure).strip().splitlines()
                report("memory of --check", {"recipe": recipe, "problem": lines[-1:]})
                continue
            result = json.loads((out / "result.json").read_text())
        report("memory of --check", compared(recipe, json.loads(printed)["checked"][0], result))


def start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def compared(recipe: str, checked: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    shown, peak = checked["memory_peak"], result["device_memory_peak"]
    return {
        "recipe": recipe, "steps": STEPS, "step": checked["kind"], "check_bytes": shown,
        "formula_bytes": checked["memory_estimated"], "run_bytes": peak,
        "ratio": round(shown / peak, 4) if shown and peak else None,
        "device": device_name(device()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
