"""Whole training steps of several arms in one process, in turn, beside a copy of the baseline.

The copy is the control: it differs in nothing but where its memory lies, so a timing that finds a
difference there proves nothing about the arms.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from frostlab.comparison.plan import Plan
from frostlab.data.eeg.recordings import Material
from frostlab.data.prepare import prepare
from frostlab.errors import BadInput, UnknownArchitecture, nearest
from frostlab.models.build import build_for
from frostlab.recipe.recipe import Recipe
from frostlab.records.telemetry import Watched, Watching
from frostlab.timing.clock import Meter
from frostlab.timing.flops import Limits, flag, limits
from frostlab.timing.interleave import (
    BATCHES,
    FEWEST,
    Clock,
    Drift,
    Ratio,
    Rounds,
    Rule,
    Spent,
    different,
    drift_of,
    pairs_for,
    places,
    take_turns,
)
from frostlab.training.batches.batch import Order
from frostlab.training.batches.feed import Feed
from frostlab.training.batches.prefix import build_prefix, check_prefix
from frostlab.training.distributed import World
from frostlab.training.setup import choose_device, choose_precision, with_threads
from frostlab.training.stages import total_steps
from frostlab.training.step import build_step, choose
from frostlab.training.step.compiled import shape_of
from frostlab.training.step.eager import Diverged, Outcome, seed_step
from frostlab.training.step.envelope_loss import objective_for
from frostlab.training.step.objective import check_pieces, resolve
from frostlab.training.step.optimizer import optimizer_tensors
from frostlab.training.treatment import count_parameters, treat, wants_types

CONTROL = "baseline again"
_LEAST = {"cuda": 0.05, "mps": 0.05}  # seconds a block; elsewhere:
_LEAST_ELSEWHERE = 0.2
_TRIED = 4  # batches
_PATIENCE = 10.0  # seconds to meet more batches than these


class Side:
    """One arm on its device: model, optimizer, step and feed; warmed up while it is alone."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        prepared: Material,
        device: torch.device,
        order: Order | None = None,
        again: bool = False,
    ) -> None:
        self.recipe, self.model, self.device = recipe, model, device
        train = recipe.train
        meter = Meter(device)
        precision, types = choose_precision(train, device), wants_types(self.model)
        objective, packs = objective_for(self.model, recipe), train.batching == "packed"
        check_pieces(objective, prepared, types, packs or train.cache_prefix is not None)
        if train.cache_prefix is not None:
            check_prefix(self.model, prepared, train, precision)
        objective.supervision = resolve(recipe.supervise, self.model)
        self.model.to(device)
        objective.train()
        if train.cache_prefix is not None:
            objective.prefix = build_prefix(self.model, prepared, train, precision, types)
        self.feed = Feed(prepared, train, recipe.seed, World(), device, types, objective.prefix)
        self.step = build_step(
            objective, recipe.optim, train, precision, device, World(),
            steps=total_steps(train, len(self.feed.examples)),
        )  # fmt: skip
        self.order = self.feed.order(0)[:BATCHES] if order is None else order
        self.scored = [self.feed.examples.scored(rows) for rows in self.order]
        if not again or self.step.kind != "eager":
            self._meet_every_shape(shorten=order is None)
        self.prepare_seconds, self.peak_bytes = meter.read()

    def take(self, places: Sequence[int]) -> Outcome:
        """Take a step on each of these batches, as the loop of a run does."""
        for place in places:
            parts = self.feed(self.order[place])
            seed_step(self.recipe.seed, place, 0, self.device)
            outcome = self.step(parts, self.scored[place], 0.0)
        return outcome

    def _meet_every_shape(self, shorten: bool) -> None:
        """Take a step on every batch; where shapes are prepared for, until each is replayed.

        Where steps are slow the list may be shortened.
        """
        met, began = set(), perf_counter()
        times = 1 if self.step.kind == "eager" else 3
        for place, rows in enumerate(self.order):
            slow = times == 1 and perf_counter() - began > _PATIENCE
            if shorten and slow and place >= _TRIED:
                self.order = self.order[:place]
                return
            shape = shape_of(self.feed(rows))
            outcome = self.take([place] * (1 if shape in met else times))
            met.add(shape)
            loss, norm, broken = outcome.values.tolist()
            if broken >= 0:
                raise Diverged(place, self.step.name_of(int(broken)), loss)
            if not (abs(loss) < torch.inf and norm < torch.inf):
                raise Diverged(place, "the loss", loss)

    def first_places(self) -> list[int]:
        """Few batches that tell how long a step takes."""
        return [place % len(self.order) for place in range(_TRIED)]

    @property
    def optimizer_bytes(self) -> int:
        """What the optimizer keeps beside weights and gradients."""
        return sum(t.nbytes for t in optimizer_tensors(self.model, self.step.optimizer).values())

    def model_bytes(self, learns: bool) -> int:
        """The parameters, all or those that learn; a tied one counts once."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad or not learns)


def check_arms(recipes: Mapping[str, Recipe], baseline: str) -> None:
    """Refuse arms that cannot be timed side by side on the same batches."""
    if baseline not in recipes:
        hint = nearest(baseline, recipes)
        raise BadInput(f"time_arms: baseline {baseline} is none of {', '.join(recipes)}{hint}")
    if CONTROL in recipes:
        raise BadInput(f"time_arms: an arm is called `{CONTROL}`, which is the control's name")
    base = recipes[baseline]
    for name, recipe in recipes.items():
        for what, mine, theirs in (
            ("data", recipe.data, base.data),
            ("tokenizer", recipe.tokenizer, base.tokenizer),
            ("seed", recipe.seed, base.seed),
            ("train.batch", recipe.train.batch, base.train.batch),
            ("train.threads", recipe.train.threads, base.train.threads),
        ):
            if mine != theirs:
                raise BadInput(
                    f"time_arms: {what} of {name} is {mine}, of {baseline} {theirs}; "
                    "arms are timed on the same batches in one process"
                )


@dataclass(frozen=True)
class Treated:
    """An arm's model on the CPU, with the treatment done; sides work with copies of it."""

    recipe: Recipe
    model: nn.Module


def treat_all(
    recipes: Mapping[str, Recipe], prepared: Material, baseline: str
) -> dict[str, Treated]:
    """Build the models of the baseline, of its control and of every other arm.

    All are treated before any takes a step: a treatment makes every graph be captured anew.
    """
    made: dict[str, Treated] = {}
    for name in (baseline, *(name for name in recipes if name != baseline)):
        recipe = recipes[name]
        model = build_for(recipe, prepared)
        treat(model, recipe)
        made[name] = Treated(recipe, model)
        made.setdefault(CONTROL, made[baseline])
    return made


def build_sides(
    arms: Mapping[str, Treated],
    prepared: Material,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
    order: Order | None = None,
) -> dict[str, Side]:
    """Build a side for every arm, one after another, each warmed up while it is alone.

    Args:
        order: of the batches, where sides are built anew; the first ones make it.
    """
    sides: dict[str, Side] = {}
    again = order is not None
    for name, arm in arms.items():
        side = Side(arm.recipe, deepcopy(arm.model), prepared, device, order, again)
        sides[name], order = side, side.order
        say(f"{name}: {side.step.kind} steps ({side.step.reason}), {side.prepare_seconds:.1f} s")
    return sides


def block_for(sides: Mapping[str, Side], clock: Clock) -> int:
    """Steps a block, so that the fastest arm's is long enough for the clock."""
    least = _LEAST.get(clock.device.type, _LEAST_ELSEWHERE)
    spent = min(clock.block(partial(s.take, s.first_places())).host for s in sides.values())
    needed = least * _TRIED / spent
    if needed > BATCHES:
        return BATCHES * math.ceil(needed / BATCHES)
    return 1 << math.ceil(math.log2(max(1.0, needed)))


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
        with Watching(str(device)) as watching:
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


def time_steps(plan: Plan, data_dir: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Time every arm against the baseline; plain values for the evidence."""
    assert plan.clock is not None
    seed = plan.seeds[0]
    recipes = {arm.name: plan.recipe_of(arm, seed) for arm in plan.arms}
    base = recipes[plan.baseline.name]
    prepared = prepare(base, data_dir)
    say(f"timing {len(recipes)} arms and a control, {plan.clock.seconds:.0f} s at most")
    timing = time_arms(
        recipes, prepared, baseline=plan.baseline.name, device=choose_device(base.train.device),
        seconds=plan.clock.seconds, width=plan.clock.width, say=say,
    )  # fmt: skip
    bounds = {name: limits_of(recipe, prepared) for name, recipe in recipes.items()}
    arms = {name: _arm_facts(name, timing, bounds.get(name)) for name in timing.arms}
    return timing.to_dict() | {"arms": arms, "control": arms[CONTROL]}


def limits_of(recipe: Recipe, prepared: Material) -> Limits | None:
    """The bound of a recipe's treatment at its batch; None for a model without an anatomy."""
    model = build_for(recipe, prepared)
    treat(model, recipe)
    length = float(prepared.splits["train"].lengths.mean())
    try:
        return limits(model, round(length), recipe.train.batch * length)
    except UnknownArchitecture:
        return None


def _arm_facts(name: str, timing: Timing, bound: Limits | None) -> dict[str, Any]:
    arm = timing.arms[name]
    ratio = arm.ratio
    word, sentence = (None, None) if ratio is None else judge_time(ratio, bound, timing)
    flagged = None
    if ratio is not None and bound is not None and name != CONTROL:
        flagged = flag(ratio, bound, timing.proven, timing.reasons)
    return {
        "ms": arm.ms_median,
        "ms_mean": arm.ms_mean,
        "ratio": None if ratio is None else ratio.estimate,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "ceiling": None if bound is None else 1 / bound.speed_up,
        "limits": None if bound is None else bound.to_dict(),
        "flag": flagged,
        "word": word,
        "sentence": sentence,
        "step": arm.step,
        "peak_bytes": arm.peak_bytes,
        "optimizer_bytes": arm.optimizer_bytes,
        "checkpoint_bytes": arm.checkpoint_bytes,
        "trainable": arm.trainable,
        "blocks": list(arm.blocks),
    }


def judge_time(ratio: Ratio, bound: Limits | None, timing: Timing) -> tuple[str, str]:
    """A verdict on an arm's time, and a sentence with its numbers."""
    shown = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of the baseline's time"
    beside = "" if bound is None else f"; FLOPs allow {1 / bound.speed_up:.4f}"
    if not timing.proven:
        return (
            "unproven",
            f"unproven: a step took {shown}{beside}, but {'; '.join(timing.reasons)}.",
        )
    if ratio.holds(1.0):
        return "no difference found", f"no difference found: a step takes {shown}{beside}."
    word, said = ("better", "faster") if ratio.high < 1 else ("worse", "slower")
    return word, f"{said}: a step takes {shown}{beside}."
