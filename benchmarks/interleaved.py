"""What interleaved timing finds: the same arm again, arms with a known amount of work more, and
real treatments, with the ceiling beside each.

The work added to every step is matmuls, whose cost is measured by itself, before and after.

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
from frostlab.comparison import timed_arms as timing
from frostlab.comparison.timed_arms import TimedArm
from frostlab.data.prepare import prepare
from frostlab.recipe.load import load_recipe, parse_settings
from frostlab.recipe.recipe import Recipe
from frostlab.timing.clock import BlockClock
from frostlab.timing.flops import flag
from frostlab.timing.interleave import FEWEST, Ratio, paired_logs, ratio_of

TOGETHER = 20  # calls timed as one: a GPU is then never waiting for the host


class Extra:
    """Matmuls that take about as long as they are told to."""

    def __init__(self, seconds: float, clock: BlockClock) -> None:
        self.clock, where = clock, clock.device
        size, dtype = (2048, torch.bfloat16) if where.type == "cuda" else (256, torch.float32)
        self.left, self.right = (torch.randn(size, size, device=where, dtype=dtype) for _ in "lr")
        self.made = torch.empty_like(self.left)
        self.times = 1
        self.times = max(1, round(seconds / self.cost()))

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.left, self.right, out=self.made)

    def cost(self) -> float:
        """Seconds of one call, the median of many."""
        times = [self.clock.block(self._several).device / TOGETHER for _ in range(30)]
        return statistics.median(times)

    def _several(self) -> None:
        for _ in range(TOGETHER):
            self()


def burden(side: TimedArm, extra: Callable[[], None]) -> None:
    """Let an arm do more at every step."""
    take = side.take

    def more(places: Sequence[int]) -> Any:
        for place in places:
            outcome = take([place])
            extra()
        return outcome

    side.take = more  # type: ignore[method-assign]


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
    clock, build = BlockClock(where), timing.place_arms

    def build_burdened(*given: Any, **again: Any) -> dict[str, TimedArm]:
        sides = build(*given, **again)
        if not extras:
            base, every = sides["all"], range(len(sides["all"].order))
            blocks = [clock.block(lambda: base.take(every)).device for _ in range(3)]
            step = statistics.median(blocks) / len(base.order)
            extras.update({name: Extra(share * step, clock) for name, share in more.items()})
            before.update({name: extra.cost() for name, extra in extras.items()})
        for name, extra in extras.items():
            burden(sides[name], extra)
        return sides

    timing.place_arms = build_burdened
    prepared = prepare(recipe, options.data_dir)
    found = timing.time_arms(
        {"all": recipe, **dict.fromkeys(more, recipe), **treated}, prepared, baseline="all",
        device=where, seconds=options.seconds, width=options.width, say=print,
    )  # fmt: skip
    facts = {
        "recipe": options.recipe, "set": options.set, "device": device_name(where),
        "torch": torch.__version__, "proven": found.proven, "reasons": found.reasons,
        "stopped_by": found.stopped_by, "seconds": round(found.seconds, 1),
        "builds": found.builds, "rounds": found.rounds, "steps_per_block": found.steps_per_block,
        "batches": found.batches, "drift_halves": round(found.drift.halves, 4),
        "cores_of_others": found.watched.cores_of_others, "cores": found.watched.cores,
    }  # fmt: skip
    base, pairs = found.arms["all"].blocks, found.rounds // (2 * found.builds)
    for name, arm in found.arms.items():
        if arm.ratio is None:
            continue
        told: dict[str, Any] = {}
        if name in extras:
            costs = (before[name], extras[name].cost())
            shares = [found.steps_per_block * cost / np.array(base) for cost in costs]
            told = {"expected": [round(float(np.exp(np.log1p(s).mean())), 4) for s in shares]}
        if name in treated and (bound := arm.limits) is not None:
            told = {
                "ceiling": round(1 / bound.speed_up, 4),
                "flag": flag(arm.ratio, bound, found.proven, found.reasons),
            }
        ratio = {key: round(value, 5) for key, value in arm.ratio.to_dict().items()}
        report("interleaved", facts | {
            "arm": name, "step": arm.step, "ms_median": round(arm.ms_median, 4), **ratio, **told,
            "width": round(arm.ratio.width, 5),
            "pair_spread": round(float(paired_logs(arm.blocks, base).std(ddof=1)), 5),
            "build_spread": round(float(paired_logs(arm.blocks, base, pairs).std(ddof=1)), 5),
            "seconds_to_width": seconds_until(arm.blocks, base, pairs, found.seconds,
                                              lambda r: r.width < options.width),
            "seconds_to_find": seconds_until(arm.blocks, base, pairs, found.seconds,
                                             lambda r: not r.holds(1.0)),
            "peak_bytes": arm.peak_bytes, "optimizer_bytes": arm.optimizer_bytes,
        })  # fmt: skip


def seconds_until(
    arm: Sequence[float],
    base: Sequence[float],
    pairs: int,
    seconds: float,
    reached: Callable[[Ratio], bool],
) -> float | None:
    """Seconds of the timing after which this arm's interval was first, and stayed, like that."""
    each, total = 2 * pairs, len(base) // (2 * pairs)
    unlike = [n for n in range(FEWEST, total + 1)
              if not reached(ratio_of(arm[: each * n], base[: each * n], pairs))]  # fmt: skip
    first = max(unlike, default=FEWEST - 1) + 1
    return round(seconds * first / total, 1) if first <= total else None


if __name__ == "__main__":
    main()
