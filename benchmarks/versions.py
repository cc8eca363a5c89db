"""Two versions of frostlab, run in turn: start-up, and the steps of whole runs.

    git worktree add ../before SOME_COMMIT
    python benchmarks/versions.py ../before/src --rounds 5

Every measurement is a process of its own, the version before and this one by turns, so that a
drifting machine slows both. A ratio is this version's time over that of the version before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import device, device_name, report

HERE = Path(__file__).parent.parent / "src"
DATA = {"name": "majority", "length": 128, "examples": 1024, "symbols": 8}
SMALL = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4,
         "intermediate_size": 512}  # fmt: skip


def cases(on_gpu: bool, steps: int) -> dict[str, dict[str, Any]]:
    """The runs whose steps are timed: GPT Medium-512 and BERT-base on a GPU, small ones else."""
    size = {} if on_gpu else {"width": 128, "layers": 2, "heads": 4}
    train = {"batch": 32, "steps": steps}
    return {
        "gpt": {"data": DATA, "model": {"kind": "gpt", **size}, "train": train},
        "bert": {
            "data": DATA,
            "model": {"kind": "pretrained", "name": "bert", "weights": False,
                      "config": {} if on_gpu else SMALL},
            "train": train,
        },
    }  # fmt: skip


def frostlab(source: Path, *arguments: str, folder: Path) -> float:
    """Run a command of one version; return the seconds it took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(
        [str(source.resolve()), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "frostlab", *arguments], cwd=folder, env=environment,
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    return time.perf_counter() - began


def step_ms(source: Path, recipe: dict[str, Any], folder: Path) -> float:
    """Run a recipe with one version; return the median milliseconds of its steps."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        frostlab(source, "run", str(path), "--out", f"{place}/run", folder=folder)
        result = json.loads((Path(place) / "run" / "result.json").read_text())
    return float(result["clocks"]["step_ms"]["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the src folder of the other version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", default="", help="cases, separated by commas, e.g. gpt,--help")
    options = parser.parse_args()
    where = device()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work = {
            name: lambda source, recipe=recipe: step_ms(source, recipe, folder)
            for name, recipe in cases(where.type == "cuda", options.steps).items()
        }
        for words in ("--help", "runs", "recipes"):
            (folder / "runs").mkdir(exist_ok=True)
            (folder / "runs" / "x").mkdir(exist_ok=True)
            work[words] = lambda source, words=words: 1e3 * frostlab(source, words, folder=folder)
        chosen = options.only.split(",") if options.only else list(work)
        for name, measure in ((name, work[name]) for name in chosen):
            measure(HERE), measure(options.before)  # caches, compiled bytecode
            pairs = []
            for number in range(options.rounds):
                order = (options.before, HERE) if number % 2 else (HERE, options.before)
                times = {source: measure(source) for source in order}
                pairs.append((times[HERE], times[options.before]))
            ratios = sorted(now / before for now, before in pairs)
            report("versions", {
                "case": name,
                "now_ms": round(statistics.median(now for now, _ in pairs), 4),
                "before_ms": round(statistics.median(before for _, before in pairs), 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_low": round(ratios[0], 4),
                "ratio_high": round(ratios[-1], 4),
                "rounds": options.rounds,
                "device": device_name(where),
            })  # fmt: skip


if __name__ == "__main__":
    main()
