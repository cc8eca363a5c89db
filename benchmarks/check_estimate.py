"""Compare the time that `--check` estimates with that of the run.

The time of a run is the one that the estimate covers: from the first step to the end of the report,
without starting. The check and the run alternate, so that both meet the same machine.

python benchmarks/check_estimate.py >> docs/records/cpu.jsonl
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import frostlab as fl
from common import report
from frostlab.matrix.check import check_recipe
from frostlab.recipe.load import load_recipe

RECIPES: dict[str, dict[str, Any]] = {
    "majority-gpt": {"train.steps": 1000, "evaluate.every": 50},
    "docstrings-gpt": {"scale": "tiny", "train.steps": 1000, "evaluate.every": 20},
    "eeg-conformer-v2": {"scale": "tiny", "train.steps": 200, "evaluate.every": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for name, settings in RECIPES.items():
        changes = {**settings, "train.threads": 1, "evaluate.patience": None}
        recipe = load_recipe(name, changes)
        pairs = []
        for _ in range(rounds):
            checked = check_recipe(name, recipe)
            assert checked.problem is None, checked.problem
            with tempfile.TemporaryDirectory() as folder:
                clocks = fl.run(recipe, out=Path(folder) / "run", progress=False).result.clocks
            pairs.append((checked, clocks.total_seconds + clocks.wall.report, clocks))
        ratios = [checked.seconds / truth for checked, truth, _ in pairs]
        checked, truth, clocks = pairs[-1]
        report("check_estimate", {
            "recipe": name, "settings": settings, "rounds": rounds,
            "ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios],
            "estimated": round(checked.seconds, 3), "true": round(truth, 3),
            "steps_estimated": round(checked.steps * checked.step_seconds, 3),
            "steps_true": round(clocks.train_seconds + clocks.data_seconds, 3),
            "evaluations_estimated": round(checked.evaluations * checked.evaluation_seconds, 3),
            "evaluations_true": round(clocks.validation_seconds, 3),
            "report_estimated": round(checked.report_seconds, 3),
            "report_true": round(clocks.wall.report, 3),
            "checkpoints_estimated": round(checked.checkpoints * checked.checkpoint_seconds, 3),
            "checkpoints_true": round(clocks.checkpoint_seconds, 3),
        })  # fmt: skip


if __name__ == "__main__":
    main()
