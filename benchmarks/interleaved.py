"""Validate interleaved timing: A/A controls, arms with a known amount of extra work, and real
treatments with their FLOP bounds.

The extra work of every step is matmuls, whose cost is also measured alone, before and after.

python benchmarks/interleaved.py [--seconds 120] [--width 0.01] [--recipe docstrings-gpt]
    [--more 0.05,0.2] [--arms oelm] [--set data.length=128] [--data-dir FOLDER]
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import device, device_name, report
from frostlab.comparison import timed_arms
from frostlab.comparison.timed_arms import TimedArm
from frostlab.data.prepare import prepare
from frostlab.recipe.load import load_recipe, parse_settings
from frostlab.recipe.recipe import Recipe
from frostlab.timing.clock import BlockClock
from frostlab.timing.flops import unexplained_gain
from frostlab.timing.interleave import FEWEST_BUILDS, Ratio, build_logs, ratio_of

CALLS = 20  # timed together, so that a GPU never waits for the host


class Extra:
    """Matmuls that take about the given seconds."""

    def __init__(self, seconds: float, clock: BlockClock) -> None:
        self.clock, where = clock, clock.device
        size, dtype = (2048, torch.bfloat16) if where.type == "cuda" else (256, torch.float32)
        self.left, self.right = (torch.randn(size, size, device=where, dtype=dtype) for _ in "lr")
        self.product = torch.empty_like(self.left)
        self.repeats = 1
        self.repeats = max(1, round(seconds / self.cost()))

    def __call__(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self.left, self.right, out=self.product)

    def cost(self) -> float:
        """Return the seconds of one call, the median of many."""
        times = [self.clock.time(self._several).device / CALLS for _ in range(30)]
        return statistics.median(times)

    def _several(self) -> None:
        for _ in range(CALLS):
            self()


def add_work(arm: TimedArm, extra: Callable[[], None]) -> None:
    """Add extra work to every step of an arm."""
    take = arm.take

    def take_with_extra(batches: Sequence[int]) -> Any:
        for index in batches:
            outcome = take([index])
            extra()
        return outcome

    arm.take = take_with_extra  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--width", type=float, default=0.01)
    parser.add_argument("--recipe", default="docstrings-gpt")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--more", default="0.05,0.2")
    parser.add_argument("--arms", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = device()
    settings = parse_settings(options.set)
    recipe = load_recipe(options.recipe, settings)
    more = {f"{share} more": float(share) for share in options.more.split(",") if share}
    treated = {
        name: load_recipe(options.recipe, settings | {"treatment": name})
        for name in options.arms.split(",")
        if name
    }
    measure(recipe, more, treated, where, options)


def measure(
    recipe: Recipe,
    more: dict[str, float],
    treated: dict[str, Recipe],
    where: torch.device,
    options: argparse.Namespace,
) -> None:
    extras: dict[str, Extra] = {}
    before: dict[str, float] = {}
    clock, place_arms = BlockClock(where), timed_arms.place_arms

    def place_with_extra(*args: Any, **kwargs: Any) -> dict[str, TimedArm]:
        arms = place_arms(*args, **kwargs)
        if not extras:
            base, every = arms["all"], range(len(arms["all"].order))
            blocks = [clock.time(lambda: base.take(every)).device for _ in range(3)]
            step = statistics.median(blocks) / len(base.order)
            extras.update({name: Extra(share * step, clock) for name, share in more.items()})
            before.update({name: extra.cost() for name, extra in extras.items()})
        for name, extra in extras.items():
            add_work(arms[name], extra)
        return arms

    timed_arms.place_arms = place_with_extra
    prepared = prepare(recipe, options.data_dir)
    timing = timed_arms.time_arms(
        {"all": recipe, **dict.fromkeys(more, recipe), **treated}, prepared, baseline="all",
        device=where, seconds=options.seconds, width=options.width, say=print,
    )  # fmt: skip
    facts = {
        "recipe": options.recipe, "set": options.set, "device": device_name(where),
        "torch": torch.__version__, "proven": timing.proven, "reasons": timing.reasons,
        "notes": timing.notes,
        "stopped_by": timing.stopped_by, "seconds": round(timing.seconds, 1),
        "builds": timing.builds, "rounds": timing.rounds, "steps_per_block": timing.steps_per_block,
        "batches": timing.batches, "drift_halves": round(timing.drift.halves, 4),
        "cores_of_others": timing.watched.cores_of_others, "cores": timing.watched.cores,
    }  # fmt: skip
    copies = {name: timing.arms[name].blocks for name in ("all", *timed_arms.CONTROLS)}
    base, pairs = copies["all"], timing.rounds // (2 * timing.builds)
    for name, arm in timing.arms.items():
        if arm.ratio is None:
            continue
        bounds: dict[str, Any] = {}
        if name in extras:
            costs = (before[name], extras[name].cost())
            shares = [timing.steps_per_block * cost / np.array(base) for cost in costs]
            bounds = {"expected": [round(float(np.exp(np.log1p(s).mean())), 4) for s in shares]}
        if name in treated and (saved := arm.savings) is not None:
            bounds = {
                "ceiling": round(1 / saved.speed_up, 4),
                "flag": unexplained_gain(arm.ratio, saved, timing.proven, timing.reasons),
            }
        others = [blocks for copy, blocks in copies.items() if copy != name]
        ratio = {key: round(value, 5) for key, value in arm.ratio.to_dict().items()}
        report("interleaved", facts | {
            "arm": name, "step": arm.step, "ms_median": round(arm.ms_median, 4), **ratio, **bounds,
            "width": round(arm.ratio.width, 5),
            "pair_spread": spread(arm.blocks, base, 1),
            "build_spread": spread(arm.blocks, base, pairs),
            "seconds_to_width": seconds_until(arm.blocks, others, pairs, timing.seconds,
                                              lambda r: r.width < options.width),
            "seconds_to_find": seconds_until(arm.blocks, others, pairs, timing.seconds,
                                             lambda r: not r.holds(1.0)),
            "peak_bytes": arm.peak_bytes, "optimizer_bytes": arm.optimizer_bytes,
        })  # fmt: skip


def spread(arm: Sequence[float], base: Sequence[float], pairs: int) -> float:
    """Return the standard deviation of the log ratio of this many pairs of rounds."""
    logs = build_logs(arm, pairs) - build_logs(base, pairs)
    return round(float(logs.std(ddof=1)), 5)


def seconds_until(
    arm: Sequence[float],
    copies: Sequence[Sequence[float]],
    pairs: int,
    seconds: float,
    reached: Callable[[Ratio], bool],
) -> float | None:
    """Return the seconds after which this arm's interval satisfied `reached` and stayed so."""
    rounds, builds = 2 * pairs, len(arm) // (2 * pairs)
    unreached = [
        count
        for count in range(FEWEST_BUILDS, builds + 1)
        if not reached(
            ratio_of(arm[: rounds * count], [c[: rounds * count] for c in copies], pairs)
        )
    ]
    first = max(unreached, default=FEWEST_BUILDS - 1) + 1
    return round(seconds * first / builds, 1) if first <= builds else None


if __name__ == "__main__":
    main()
