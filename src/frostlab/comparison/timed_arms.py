"""Whole training steps of several arms, timed in turn in one process against a control.

The control is a copy of the baseline that differs in nothing but where its memory lies. A timing
that finds a difference there proves nothing about the arms.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from frostlab.comparison.plan import Plan
from frostlab.data.eeg.recordings import Material
from frostlab.data.prepare import prepare
from frostlab.devices import choose_device, default_precision, release_cached_memory, runs_ahead
from frostlab.errors import BadInput, UnknownArchitecture, nearest
from frostlab.recipe.recipe import Recipe
from frostlab.records.telemetry import Watched, Watching
from frostlab.timing.clock import BlockClock, Meter, Spent
from frostlab.timing.flops import Limits, flag, limits
from frostlab.timing.interleave import (
    BATCHES,
    FEWEST,
    Drift,
    Ratio,
    Rounds,
    Rule,
    different,
    drift_of,
    pairs_for,
    places,
    take_turns,
)
from frostlab.training.batches.batch import Order
from frostlab.training.distributed import Compute
from frostlab.training.setup import (
    BuiltModel,
    build_model,
    check_model,
    choose_precision,
    make_feed,
    make_step,
    place_model,
    with_threads,
)
from frostlab.training.stages import stages_of, total_steps
from frostlab.training.step import choose_kind
from frostlab.training.step.compiled import shape_key
from frostlab.training.step.eager import Diverged, Outcome, seed_step
from frostlab.training.step.optimizer import optimizer_tensors
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import count_parameters

CONTROL = "baseline again"
_SHORTEST_BLOCK = 0.2  # seconds; a device with a clock of its own needs less:
_SHORTEST_BLOCK_AHEAD = 0.05
_TRIED = 4  # batches that tell how long a step takes
_PATIENCE = 10.0  # seconds to meet more batches than these


@dataclass(frozen=True)
class BuiltArm:
    """An arm's model on the CPU, treated; timed arms work with copies of it."""

    recipe: Recipe
    built: BuiltModel
    limits: Limits | None  # what its treatment can save; None for a model without an anatomy


class TimedArm:
    """One arm on its device: model, optimizer, step and batches, warmed up while it is alone."""

    def __init__(
        self,
        arm: BuiltArm,
        prepared: Material,
        device: torch.device,
        order: Order | None = None,
    ) -> None:
        self.recipe, self.device = arm.recipe, device
        recipe, task = arm.recipe, TASKS[arm.recipe.data.task]
        meter = Meter(device)
        compute = Compute(device, choose_precision(recipe.train, device))
        stage = stages_of(recipe, len(prepared.splits["train"]))[0]
        built = replace(arm.built, model=deepcopy(arm.built.model))
        current = place_model(built, recipe, stage, 0, task, compute)
        self.model = current.model
        current.objective.train()
        self.feed = make_feed(current, recipe, prepared, task, compute)
        self.step = make_step(current, recipe, prepared, task, compute)
        self.order = self.feed.order(0)[:BATCHES] if order is None else order
        self.scored = [self.feed.examples.scored(rows) for rows in self.order]
        if order is None or self.step.kind != "eager":
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
            shape = shape_key(self.feed(rows))
            outcome = self.take([place] * (1 if shape in met else times))
            met.add(shape)
            loss, norm, broken = outcome.values.tolist()
            if broken >= 0:
                raise Diverged(place, self.step.name_of(int(broken)), loss)
            if not (abs(loss) < torch.inf and norm < torch.inf):
                raise Diverged(place, "the loss", loss)

    def first_places(self) -> list[int]:
        """Return few batches that tell how long a step takes."""
        return [place % len(self.order) for place in range(_TRIED)]

    @property
    def optimizer_bytes(self) -> int:
        """Return the size of the optimizer's state."""
        return sum(t.nbytes for t in optimizer_tensors(self.model, self.step.optimizer).values())

    def model_bytes(self, trainable: bool) -> int:
        """Return the size of all parameters, or of the trainable ones; a tied one counts once."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad or not trainable)


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


def build_arms(
    recipes: Mapping[str, Recipe], prepared: Material, baseline: str
) -> dict[str, BuiltArm]:
    """Build the models of the baseline, of its control and of every other arm, once."""
    arms: dict[str, BuiltArm] = {}
    for name in (baseline, *(name for name in recipes if name != baseline)):
        recipe = recipes[name]
        built = build_model(recipe, prepared)
        precision = choose_precision(recipe.train, choose_device(recipe.train.device))
        check_model(built, recipe, prepared, TASKS[recipe.data.task], precision)
        arms[name] = BuiltArm(recipe, built, limits_of(built, recipe, prepared))
        arms.setdefault(CONTROL, arms[baseline])
    return arms


def limits_of(built: BuiltModel, recipe: Recipe, prepared: Material) -> Limits | None:
    """Return what a treatment can save at the recipe's batch; None without an anatomy."""
    length = float(prepared.splits["train"].lengths.mean())
    try:
        return limits(built.model, round(length), recipe.train.batch * length)
    except UnknownArchitecture:
        return None


def place_arms(
    arms: Mapping[str, BuiltArm],
    prepared: Material,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
    order: Order | None = None,
) -> dict[str, TimedArm]:
    """Bring every arm to the device, one after another, each warmed up while it is alone.

    Args:
        order: of the batches, where arms are built again; the first arm decides it.
    """
    timed: dict[str, TimedArm] = {}
    for name, arm in arms.items():
        timed[name] = placed = TimedArm(arm, prepared, device, order)
        order = placed.order if order is None else order
        kind = f"{placed.step.kind} steps ({placed.step.reason})"
        say(f"{name}: {kind}, {placed.prepare_seconds:.1f} s")
    return timed


def block_for(timed: Mapping[str, TimedArm], clock: BlockClock) -> int:
    """Return the steps of a block, so that the fastest arm's is long enough for the clock."""
    shortest = _SHORTEST_BLOCK_AHEAD if runs_ahead(clock.device) else _SHORTEST_BLOCK
    spent = min(clock.block(partial(a.take, a.first_places())).host for a in timed.values())
    needed = shortest * _TRIED / spent
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
    limits: Limits | None  # what the treatment can save


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
    clock = BlockClock(device)
    threads = recipes[baseline].train.threads  # as a run would compute
    with with_threads(threads), _room_to_compile(recipes.values(), prepared, device):
        arms = build_arms(recipes, prepared, baseline)
        timed = place_arms(arms, prepared, device, say)
        block = block or block_for(timed, clock)
        order, draw = timed[baseline].order, np.random.default_rng(seed)
        first = {name: (arm.prepare_seconds, arm.peak_bytes) for name, arm in timed.items()}

        def measure(name: str, at: Sequence[int]) -> Spent:
            return clock.block(lambda: timed[name].take(at))

        def warm_up(blocks: int) -> float:
            for number in range(blocks):
                at = places(number, block, len(order))
                spent = sum(measure(name, at).host for name in timed)
            return spent

        def rebuild() -> None:
            timed.clear()
            gc.collect()
            release_cached_memory()
            names = [tuple(arms)[i] for i in draw.permutation(len(arms))]
            timed.update(place_arms({n: arms[n] for n in names}, prepared, device, order=order))
            warm_up(1)

        pairs = pairs_for(seconds, warm_up(max(_WARM, different(block))))
        with Watching(str(device)) as watching:
            rounds = take_turns(
                tuple(arms), baseline, measure, Rule(seconds, width), pairs=pairs,
                rebuild=rebuild, block=block, batches=len(order), seed=seed, say=say,
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
            name: _arm_timing(
                timed[name], arms[name], first[name], rounds.spent[name], ratios.get(name), block
            )
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
    """Return why a timing proves nothing; nothing if it does."""
    reasons = []
    if not control.holds(1.0):
        reasons.append(
            f"the control differs from the baseline: {control.estimate:.4f} "
            f"[{control.low:.4f}, {control.high:.4f}]"
        )
    if drift.drifted:
        reasons.append(f"the baseline drifted: its second half took {drift.halves - 1:+.1%}")
    if rounds.builds < FEWEST:
        reasons.append(f"too few builds: {rounds.builds} of {FEWEST}")
    return (*reasons, *watched.complaints())


def _arm_timing(
    timed: TimedArm,
    arm: BuiltArm,
    first: tuple[float, int | None],
    spent: list[Spent],
    ratio: Ratio | None,
    block: int,
) -> ArmTiming:
    seconds = [block_time.device for block_time in spent]
    return ArmTiming(
        ratio=ratio,
        ms_median=1e3 * statistics.median(seconds) / block,
        ms_mean=1e3 * statistics.fmean(seconds) / block,
        host_ms_median=1e3 * statistics.median(block_time.host for block_time in spent) / block,
        blocks=tuple(seconds),
        step=timed.step.kind,
        step_reason=timed.step.reason,
        prepare_seconds=first[0],
        peak_bytes=first[1],
        optimizer_bytes=timed.optimizer_bytes,
        trainable=count_parameters(timed.model)["trainable"],
        checkpoint_bytes=timed.model_bytes(trainable=True),
        model_bytes=timed.model_bytes(trainable=False),
        limits=arm.limits,
    )


@contextmanager
def _room_to_compile(
    recipes: Iterable[Recipe], prepared: Material, device: torch.device
) -> Iterator[None]:
    """Let every arm compile as often as it may alone."""
    examples = len(prepared.splits["train"])
    compute = Compute(device, default_precision(device))
    steps = ((recipe.train.step, total_steps(recipe.train, examples)) for recipe in recipes)
    if not any(choose_kind(kind, compute, count).compiles for kind, count in steps):
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
    arms = {name: _arm_facts(name, timing) for name in timing.arms}
    return timing.to_dict() | {"arms": arms, "control": arms[CONTROL]}


def _arm_facts(name: str, timing: Timing) -> dict[str, Any]:
    """Return one arm's timing for the evidence; the control has no limits of its own."""
    arm = timing.arms[name]
    ratio, bound = arm.ratio, None if name == CONTROL else arm.limits
    word, sentence = (None, None) if ratio is None else judge_time(ratio, bound, timing)
    flagged = None
    if ratio is not None and bound is not None:
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
