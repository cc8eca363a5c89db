"""Measure how freezing query and key changes the gradients and updates of all other weights.

Every arm trains the recipe's model on its data in its order, seed by seed, watched every n-th step.
For each role, over all layers, the tables show the gradient norm after clipping and update/weight,
as geometric means over the reports, and the relative weight change at the end; each as the ratio to
the baseline with the same seed. A table shows the geometric mean over seeds and the smallest and
largest seed. `frozen-qk` freezes the weights as initialized, `orthogonal-trainable` orthogonalises
and freezes nothing; oelm does both.

python benchmarks/oelm_flow.py [--recipe docstrings-gpt] [--steps 100] [--seeds 3] [--every 5]
    [--arms oelm,oelm-k] [--set key=value] [--device cuda] [--data-dir D] [--out record.json]
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import frostlab as fl
from common import device_name
from frostlab.data.prepare import prepare
from frostlab.devices import choose_device
from frostlab.models.build import build_model
from frostlab.recipe.recipe import Recipe
from frostlab.training.batches.batch import scored_counts, token_examples
from frostlab.training.batches.feed import Feed
from frostlab.training.distributed import Compute
from frostlab.training.setup import choose_precision
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import build_optimizer, rate_at
from frostlab.training.treatment import treat, wants_types

ARMS = ("oelm", "oelm-k", "oelm-q", "frozen-qk", "orthogonal-trainable")
ROLES = ("query", "key", "value", "output", "up", "down")
QUANTITIES = {
    "gradient": "gradient norm",
    "ratio": "update / weight",
    "change": "weight change at the end",
}


def train(recipe: Recipe, steps: int, every: int, data_dir: Path | None) -> tuple[fl.Flow, float]:
    """Train one arm with one seed; return its flow and the mean loss of the last tenth of steps."""
    device, prepared = choose_device(recipe.train.device), prepare(recipe, data_dir)
    model = build_model(recipe, prepared.vocabulary, prepared.classes, prepared.pad)
    treat(model, recipe)
    objective = Objective(model.to(device)).train()
    optimizer = build_optimizer(model, recipe.optim, fused=device.type == "cuda")
    compute = Compute(device, choose_precision(recipe.train, device))
    step_once = EagerStep(objective, optimizer, compute, recipe.optim.clip)
    examples = token_examples(prepared, prepared.splits["train"], device, wants_types(model))
    feed = Feed(examples, recipe.train, recipe.seed, compute)
    scored = scored_counts(prepared.splits["train"])
    losses, epoch, order = [], 0, feed.order(0)
    with fl.watch(model, optimizer, every=every, change=True) as flow:
        for step in range(steps):
            place = step % len(order)
            if step and place == 0:
                epoch, order = epoch + 1, feed.order(epoch + 1)
            seed_step(recipe.seed, step, 0, device)
            rows = order[place]
            rate = rate_at(step, steps, recipe.optim)
            losses.append(step_once(feed(rows), int(scored[rows].sum()), rate).loss)
    last = torch.stack(losses[-max(1, steps // 10) :]).mean()
    return flow, float(last)


def role_series(flow: fl.Flow, role: str, quantity: str) -> list[float]:
    """Return one quantity over all layers of a role, one number per report; empty if frozen."""
    indices = [i for i, p in enumerate(flow.parts) if p.peers == role and p.state == "trainable"]
    if not indices:
        return []
    series = []
    for report in flow.reports:
        weight = [report.of("weight", i) for i in indices]
        if quantity == "gradient":
            series.append(math.hypot(*(report.of("gradient", i) for i in indices)))
        elif quantity == "ratio":
            series.append(
                math.hypot(*(report.of("update", i) for i in indices)) / math.hypot(*weight)
            )
        else:  # the mean over layers, each relative to its start
            series.append(sum(report.of("change", i) for i in indices) / len(indices))
    return series


def summary(flow: fl.Flow) -> dict[str, dict[str, float]]:
    """Return a number per quantity and role: geometric means over reports, change at the end."""
    numbers: dict[str, dict[str, float]] = {quantity: {} for quantity in QUANTITIES}
    for quantity, roles in numbers.items():
        for role in ROLES:
            series = role_series(flow, role, quantity)
            if series:
                roles[role] = series[-1] if quantity == "change" else geometric(series)
    return numbers


def geometric(numbers: Sequence[float]) -> float:
    return math.exp(sum(math.log(x) for x in numbers) / len(numbers))


def table(runs: dict[str, list[dict[str, Any]]], quantity: str) -> str:
    """Return the ratios to the baseline with the same seed as a Markdown table."""
    arms = [arm for arm in runs if arm != "baseline"]
    lines = [f"| {QUANTITIES[quantity]} | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for role in ROLES:
        cells = []
        for arm in arms:
            pairs = zip(runs[arm], runs["baseline"], strict=True)
            ratios = [
                run["summary"][quantity][role] / base["summary"][quantity][role]
                for run, base in pairs
                if role in run["summary"][quantity]
            ]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else ""
            cells.append(f"{geometric(ratios):.2f} ({spread})" if ratios else "frozen")
        lines.append(f"| {role} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shortened(value: Any) -> Any:
    """Round all numbers to five digits."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="docstrings-gpt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), help="arms besides the baseline")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    options = parser.parse_args()
    began, runs = time.perf_counter(), dict[str, list[dict[str, Any]]]()
    shared = [*options.settings, f"train.device={options.device}"]
    for arm in ("baseline", *options.arms.split(",")):
        for seed in range(options.seeds):
            settings = [*shared, f"treatment={arm}"]
            recipe = fl.load_recipe(options.recipe, settings, seed=seed)
            flow, loss = train(recipe, options.steps, options.every, options.data_dir)
            runs.setdefault(arm, []).append({
                "seed": seed, "loss": loss, "accidents": sorted(flow.frozen_by_accident()),
                "summary": summary(flow),
                "series": {q: {r: role_series(flow, r, q) for r in ROLES} for q in QUANTITIES},
                "steps": [report.step for report in flow.reports],
            })  # fmt: skip
    device = choose_device(options.device)
    print(f"{options.recipe}, {options.steps} steps, {options.seeds} seeds, a report every "
          f"{options.every}; ratio to the baseline: mean (smallest–largest seed)\n")  # fmt: skip
    print("\n\n".join(table(runs, quantity) for quantity in QUANTITIES))
    print("\n| arm | training loss at the end |\n|---|---|")
    for arm, arm_runs in runs.items():
        losses = [run["loss"] for run in arm_runs]
        print(f"| {arm} | {sum(losses) / len(losses):.3f} ({min(losses):.3f}–{max(losses):.3f}) |")
    if options.out:
        record = {
            "benchmark": "oelm_flow", "recipe": options.recipe, "settings": options.settings,
            "steps": options.steps, "every": options.every, "device": device_name(device),
            "torch": torch.__version__, "seconds": round(time.perf_counter() - began, 1),
            "runs": runs,
        }  # fmt: skip
        options.out.write_text(json.dumps(shortened(record)) + "\n")


if __name__ == "__main__":
    main()
