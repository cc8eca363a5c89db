"""Whole training steps of several arms in one process, in turn, beside a copy of the baseline.

The copy is the control: it differs in nothing but where its memory lies, so a timing that finds a
difference there proves nothing about the arms.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from frostlab.compare.estimating import FEWEST, Ratio, Rule
from frostlab.compare.sides import (
    CONTROL,
    Side,
    block_for,
    build_sides,
    check_arms,
    treat_all,
)
from frostlab.compare.turns import (
    Clock,
    Rounds,
    Spent,
    different,
    pairs_for,
    places,
    take_turns,
)
from frostlab.compare.watching import Drift, Watched, Watching, drift_of
from frostlab.data import Material
from frostlab.errors import BadInput
from frostlab.recipe import Recipe
from frostlab.training.choosing import choose
from frostlab.training.devices import choose_device, with_threads
from frostlab.training.distributed import World
from frostlab.training.stages import total_steps
from frostlab.training.treating import count_parameters

_WARM = 2  # blocks an arm before any counts, and each different one
_COMPILATIONS = 64  # torch gives up on code compiled more often: arms share that of their layers


@dataclass(frozen=True)
class ArmTiming:
    """One arm: how long its steps take, and what they need."""

    ratio: Ratio | None  # to the baseline; None for the baseline itself
    ms_median: float  # a step, on the device's clock
    ms_mean: float
    host_ms_median: float
    blocks: tuple[float, ...]  # seconds of each, round by round
    step: str  # kind of step
    step_reason: str
    prepare_seconds: float
    peak_bytes: int | None  # on CUDA, built and warmed up alone
    optimizer_bytes: int
    trainable: int  # parameters
    checkpoint_bytes: int  # of the parameters that learn
    model_bytes: int  # of all parameters


@dataclass(frozen=True)
class Timing:
    """Arms timed in turn, and whether the timing can be believed."""

    baseline: str
    arms: dict[str, ArmTiming]  # the baseline's and the control's among them
    proven: bool
    reasons: tuple[str, ...]  # why it is not proven
    steps_per_block: int
    batches: int  # different ones
    builds: int  # how often every arm was built anew
    rounds: int
    seconds: float  # of the rounds, and of building anew
    stopped_by: str  # width or time
    width: float  # that was wanted of every interval
    device: str
    drift: Drift
    watched: Watched

    @property
    def control(self) -> Ratio:
        """The baseline's time over the baseline's: 1, but for noise."""
        ratio = self.arms[CONTROL].ratio
        assert ratio is not None
        return ratio

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"control": self.control.to_dict()}


def time_arms(
    recipes: Mapping[str, Recipe],
    prepared: Material,
    *,
    baseline: str,
    device: torch.device,
    seconds: float = 120.0,
    width: float = 0.01,
    block: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Timing:
    """Time whole steps of every arm against the baseline, until the intervals are narrow.

    Args:
        seconds: for the rounds, and for building anew; the first building comes before.
        width: of every 95 % interval, the control's too, relative: 0.01 is ±0.5 %.
        block: steps at a time; by default long enough for the clock.
        seed: of the order in which arms take their turns.
    """
    check_arms(recipes, baseline)
    if block is not None and block < 1:
        raise BadInput(f"time_arms: a block of {block} steps; at least 1")
    device = choose_device(str(device))
    clock = Clock(device)
    threads = recipes[baseline].train.threads  # those that a run would compute with
    with with_threads(threads), _room_to_compile(recipes.values(), prepared, device):
        arms = treat_all(recipes, prepared, baseline)
        sides = build_sides(arms, prepared, device, say)
        block = block or block_for(sides, clock)
        order, draw = sides[baseline].order, np.random.default_rng(seed)
        first = {name: (side.prepare_seconds, side.peak_bytes) for name, side in sides.items()}

        def measure(name: str, at: Sequence[int]) -> Spent:
            return clock.block(lambda: sides[name].take(at))

        def warm_up(blocks: int) -> float:
            for number in range(blocks):
                at = places(number, block, len(order))
                spent = sum(measure(name, at).host for name in sides)
            return spent

        def build_anew() -> None:
            sides.clear()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            names = [tuple(arms)[i] for i in draw.permutation(len(arms))]
            sides.update(build_sides({n: arms[n] for n in names}, prepared, device, order=order))
            warm_up(1)

        pairs = pairs_for(seconds, warm_up(max(_WARM, different(block))))
        with Watching(device) as watching:
            rounds = take_turns(
                tuple(arms), baseline, measure, Rule(seconds, width), pairs=pairs,
                build_anew=build_anew, block=block, batches=len(order), seed=seed, say=say,
            )  # fmt: skip
    used = {place for n in range(len(rounds.starts) // 2) for place in places(n, block, len(order))}
    drift = drift_of(rounds.device_seconds(baseline), rounds.began, rounds.starts)
    watched, ratios = watching.watched(), rounds.ratios(baseline)
    reasons = doubts(rounds, ratios[CONTROL], drift, watched)
    say(
        f"{rounds.builds} builds, {len(rounds.starts)} rounds of {block} steps in "
        f"{rounds.seconds:.0f} s, "
        f"ended by {rounds.stopped_by}: {'; '.join(reasons) or 'proven'}"
    )
    return Timing(
        baseline=baseline,
        arms={
            name: _arm_timing(sides[name], first[name], rounds.spent[name], ratios.get(name), block)
            for name in arms
        },
        proven=not reasons,
        reasons=reasons,
        steps_per_block=block,
        batches=len(used),
        builds=rounds.builds,
        rounds=len(rounds.starts),
        seconds=rounds.seconds,
        stopped_by=rounds.stopped_by,
        width=width,
        device=str(device),
        drift=drift,
        watched=watched,
    )


def doubts(rounds: Rounds, control: Ratio, drift: Drift, watched: Watched) -> tuple[str, ...]:
    """Why a timing proves nothing; none: it does."""
    found = []
    if not control.holds(1.0):
        found.append(
            f"the control differs from the baseline: {control.estimate:.4f} "
            f"[{control.low:.4f}, {control.high:.4f}]"
        )
    if drift.drifted:
        found.append(f"the baseline drifted: its second half took {drift.halves - 1:+.1%}")
    if rounds.builds < FEWEST:
        found.append(f"too few builds: {rounds.builds} of {FEWEST}")
    return (*found, *watched.complaints())


def _arm_timing(
    side: Side,
    first: tuple[float, int | None],
    spent: list[Spent],
    ratio: Ratio | None,
    block: int,
) -> ArmTiming:
    seconds = [one.device for one in spent]
    return ArmTiming(
        ratio=ratio,
        ms_median=1e3 * statistics.median(seconds) / block,
        ms_mean=1e3 * statistics.fmean(seconds) / block,
        host_ms_median=1e3 * statistics.median(one.host for one in spent) / block,
        blocks=tuple(seconds),
        step=side.step.kind,
        step_reason=side.step.reason,
        prepare_seconds=first[0],
        peak_bytes=first[1],
        optimizer_bytes=side.optimizer_bytes,
        trainable=count_parameters(side.model)["trainable"],
        checkpoint_bytes=side.model_bytes(learns=True),
        model_bytes=side.model_bytes(learns=False),
    )


@contextmanager
def _room_to_compile(
    recipes: Iterable[Recipe], prepared: Material, device: torch.device
) -> Iterator[None]:
    """Let every arm compile as often as it may alone."""
    examples = len(prepared.splits["train"])
    steps = ((recipe.train.step, total_steps(recipe.train, examples)) for recipe in recipes)
    if not any(choose(kind, device, World(), count).compiles for kind, count in steps):
        yield
        return
    import torch._dynamo  # takes seconds

    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
        yield
