"""Time a compiled and captured step with some parts frozen, in turn with everything trained.

No selection that does less work may take longer. `flops_allow` is the ratio that the saved matmul
FLOPs allow. CUDA only.

    python benchmarks/frozen_parts.py [--case "gpt classifies"] [--rounds 20]
"""

import argparse
import functools
from typing import Any

import numpy as np
import torch

import frostlab as fl
from common import device_name, report, timed
from frostlab.models.stack import is_causal
from frostlab.timing.flops import savings
from frostlab.training.step.objective import Objective
from kinds import CASES, CUDA, prepare, take

SELECTIONS = ("", "key", "query", "value", "query,key")  # "": everything trained, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="gpt classifies")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    build, draw, shape = CASES[options.case]
    batch = draw(*shape)

    def objective(frozen: str) -> Objective:
        built = build()
        if frozen:
            fl.freeze(built.model, *frozen.split(","))
        return built

    base = prepare(functools.partial(objective, ""), batch)
    sides = {name: prepare(functools.partial(objective, name), batch) for name in SELECTIONS}
    times: dict[str, list[float]] = {name: [] for name in ("base", *SELECTIONS)}
    for number in range(options.rounds + 1):
        steps = [("base", base), *sides.items()]
        for name, step in steps if number % 2 else reversed(steps):
            times[name].append(100 * timed(functools.partial(take, step, batch, 10), CUDA))
    theirs = np.array(times["base"][1:])
    for name, step in sides.items():
        ours = np.array(times[name][1:])
        model = objective(name).model
        saved = savings(fl.anatomy(model), shape[1], causal=is_causal(model))
        facts: dict[str, Any] = {
            "case": options.case,
            "shape": shape,
            "frozen": name,
            "became": step.kind,
            "reason": step.reason,
            "ms": round(float(np.median(ours)), 4),
            "trained_ms": round(float(np.median(theirs)), 4),
            "ratio": round(float(np.median(ours / theirs)), 4),
            "ratio_p10_p90": [round(float(np.quantile(ours / theirs, q)), 4) for q in (0.1, 0.9)],
            "flops_allow": round(1 / saved.speed_up, 4),
            "rounds": options.rounds,
        }
        report("frozen parts", facts | {"device": device_name(CUDA), "torch": torch.__version__})


if __name__ == "__main__":
    main()
