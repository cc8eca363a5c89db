"""What interleaved timing finds: the same arm again, and arms with 5 % and 20 % more work.

The work added to every step is matmuls, whose cost is measured by itself, before and after.

python benchmarks/interleaved.py [--seconds 120] [--width 0.01] [--recipe docstrings-gpt]
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from common import device, device_name, report, timed
from frostlab.compare import timing
from frostlab.compare.estimating import FEWEST, ratio_of
from frostlab.compare.sides import Side
from frostlab.data import prepare
from frostlab.recipe.loading import load_recipe

MORE = {"5 % more": 0.05, "20 % more": 0.2}


class Extra:
    """Matmuls that take about as long as they are told to."""

    def __init__(self, seconds: float, where: torch.device) -> None:
        self.where = where
        self.left, self.right = (torch.randn(256, 256, device=where) for _ in range(2))
        self.times = 20
        self.times = max(1, round(seconds / (self.cost() / 20)))

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.left, self.right)

    def cost(self) -> float:
        """Seconds of one call, the median of many."""
        return statistics.median(timed(self, self.where) for _ in range(100))


def burden(side: Side, extra: Callable[[], None]) -> None:
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
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where, recipe = device(), load_recipe(options.recipe)
    extras: dict[str, Extra] = {}
    build = timing.build_sides

    def build_burdened(*given: Any) -> dict[str, Side]:
        sides = build(*given)
        base = sides["all"]
        every = range(len(base.order))
        step = statistics.median(timed(lambda: base.take(every), where) for _ in range(3))
        for name, share in MORE.items():
            extras[name] = Extra(share * step / len(base.order), where)
            burden(sides[name], extras[name])
        before.update({name: extra.cost() for name, extra in extras.items()})
        return sides

    before: dict[str, float] = {}
    timing.build_sides = build_burdened
    found = timing.time_arms(
        {"all": recipe, **dict.fromkeys(MORE, recipe)}, prepare(recipe), baseline="all",
        device=where, seconds=options.seconds, width=options.width,
    )  # fmt: skip
    facts = {
        "recipe": options.recipe, "device": device_name(where), "torch": torch.__version__,
        "proven": found.proven, "reasons": found.reasons, "stopped_by": found.stopped_by,
        "seconds": round(found.seconds, 1), "rounds": found.rounds,
        "steps_per_block": found.steps_per_block, "batches": found.batches,
        "drift_halves": round(found.drift.halves, 4),
        "cores_of_others": found.watched.cores_of_others, "cores": found.watched.cores,
    }  # fmt: skip
    base = np.array(found.arms["all"].blocks)
    for name, arm in found.arms.items():
        if arm.ratio is None:
            continue
        told = {}
        if name in extras:
            costs = (before[name], extras[name].cost())
            means = [np.exp(np.log1p(found.steps_per_block * c / base).mean()) for c in costs]
            told = {"expected_before_and_after": [round(float(m), 4) for m in means]}
        ratio = {key: round(value, 4) for key, value in arm.ratio.to_dict().items()}
        unpaired = np.log(arm.blocks).std() * np.log(base).std()
        report("interleaved", facts | {
            "arm": name, "ms_median": round(arm.ms_median, 3), **ratio, **told,
            "width": round(arm.ratio.width, 4),
            "pair_spread": round(float(pair_logs(arm.blocks, base).std(ddof=1)), 4),
            "block_spread": round(float(unpaired**0.5), 4),
            "seconds_to_width": seconds_to(options.width, arm.blocks, base, found.seconds),
        })  # fmt: skip


def pair_logs(arm: Sequence[float], base: Any) -> Any:
    return np.log(np.asarray(arm) / base).reshape(-1, 2).mean(axis=1)


def seconds_to(width: float, arm: Sequence[float], base: Any, seconds: float) -> float | None:
    """Seconds of the timing after which this arm's interval was first narrow enough."""
    for pairs in range(FEWEST, len(base) // 2 + 1):
        if ratio_of(arm[: 2 * pairs], base[: 2 * pairs]).width < width:
            return round(seconds * 2 * pairs / len(base), 1)
    return None


if __name__ == "__main__":
    main()
