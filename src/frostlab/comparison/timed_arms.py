"""Interleaved timing of whole training steps of several arms, with A/A controls.

All arms (variants of one recipe) run in one process and take blocks of steps in turn; one round is
one block of every arm. Every two rounds are a pair and use the same batches. After a few pairs, all
models are built again (a build). The controls are further copies of the baseline, which differ only
in their memory addresses. An arm is called faster or slower only if it differs from the copies by
more than they differ from each other. If a control differs so much itself, the timing is unproven.
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
from typing import Any, NoReturn

import numpy as np
import torch

from frostlab.comparison.plan import Plan
from frostlab.data.prepare import PreparedData, prepare
from frostlab.devices import (
    captures_graphs,
    choose_device,
    release_cached_memory,
    runs_ahead,
    synchronize,
)
from frostlab.errors import BadInput, FrostlabError, UnknownArchitecture, nearest
from frostlab.recipe.recipe import Recipe
from frostlab.records.telemetry import Watched, Watching
from frostlab.timing.clock import BlockClock, BlockSeconds, Meter
from frostlab.timing.flops import StepSavings, step_savings, unexplained_gain
from frostlab.timing.interleave import (
    FEWEST_BUILDS,
    MOST_BATCHES,
    Blocks,
    Drift,
    Ratio,
    StopRule,
    batches_to_keep,
    drift_of,
    interleave_arms,
    plan_build,
)
from frostlab.training.batches.batch import Order
from frostlab.training.distributed import Compute
from frostlab.training.setup import (
    BuiltModel,
    build_model,
    check_model,
    choose_precision,
    default_modes,
    make_feed,
    make_step,
    place_model,
    with_threads,
)
from frostlab.training.stages import stages_of
from frostlab.training.step.compiled import shape_key
from frostlab.training.step.eager import Outcome, seed_step
from frostlab.training.step.optimizer import optimizer_tensors
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import count_parameters

CONTROLS = tuple(f"baseline again {number}" for number in range(1, 5))
_SHORTEST_BLOCK = 0.2  # seconds that a block should take at least
_SHORTEST_BLOCK_AHEAD = 0.05  # the same on a device that works asynchronously, such as a GPU
_TRIAL_BATCHES = 4  # enough to estimate the time of a step
_WARM_UP_SECONDS = 10.0  # after this time, warm-up with eager steps drops the remaining batches
# torch.compile stops compiling a function after this many recompilations. All arms share the limit,
# because they share the classes of layers.
_RECOMPILE_LIMIT = 256


@dataclass(frozen=True)
class BuiltArm:
    """An arm's model on the CPU after its treatment; each `TimedArm` uses a copy of it."""

    recipe: Recipe
    built: BuiltModel
    savings: StepSavings | None  # against the baseline; None if an architecture is unknown


class TimedArm:
    """One arm on its device: its model, optimizer, step and batches.

    `order` holds the batches to use; by default, they are the first batches of a training run. The
    constructor warms up the step on every batch, and refuses a loss or gradient that is not finite.
    But an eager step for which `order` is given is warmed up on the largest batch alone or, if not
    `metered`, not at all. The time and memory of building and warming up are measured only if
    `metered`, because measuring takes time itself.
    """

    def __init__(
        self,
        arm: BuiltArm,
        prepared: PreparedData,
        device: torch.device,
        order: Order | None = None,
        metered: bool = True,
    ) -> None:
        self.recipe, self.device = arm.recipe, device
        recipe, task = arm.recipe, TASKS[arm.recipe.data.task]
        meter = Meter(device) if metered else None
        compute = Compute(device, choose_precision(recipe.train, device))
        stage = stages_of(recipe, len(prepared.splits["train"]))[0]
        built = replace(arm.built, model=deepcopy(arm.built.model))
        current = place_model(built, recipe, stage, 0, task, compute)
        self.model = current.model
        self.feed = make_feed(current, recipe, prepared, task, compute)
        self.step = make_step(current, recipe, prepared, task, compute, self.feed)
        self.order = self.feed.order(0)[:MOST_BATCHES] if order is None else order
        self.scored = [self.feed.examples.scored(rows) for rows in self.order]  # target counts
        if order is None or self.step.kind != "eager":
            self._warm_up_every_shape(shorten=order is None)
        if metered and self.step.kind == "eager":
            # The first step makes the optimizer's state; the second has it next to the activations.
            self._warm_up(self._largest_batch(), repeats=2)
        self.prepare_seconds, self.peak_bytes = meter.read() if meter else (0.0, None)

    def take(self, batches: Sequence[int]) -> Outcome:
        """Take a training step on each of these batches of `order`, with a learning rate of 0."""
        for index in batches:
            micro_batches = self.feed(self.order[index])
            seed_step(self.recipe.seed, index, 0, self.device)
            outcome = self.step(micro_batches, self.scored[index], 0.0)
        return outcome

    def _warm_up_every_shape(self, shorten: bool) -> None:
        """Take a step on every batch, and refuse a loss or gradient that is not finite.

        A compiled or captured step is taken three times for each new shape, so that a captured
        graph is replayed. With `shorten`, drop the remaining batches if eager steps are slow.
        """
        shapes, began = set(), perf_counter()
        repeats = 1 if self.step.kind == "eager" else 3
        for index, rows in enumerate(self.order):
            slow = repeats == 1 and perf_counter() - began > _WARM_UP_SECONDS
            if shorten and slow and index >= _TRIAL_BATCHES:
                self.order = self.order[:index]
                return
            shape = shape_key(self.feed(rows))
            self._warm_up(index, 1 if shape in shapes else repeats)
            shapes.add(shape)

    def _warm_up(self, index: int, repeats: int) -> None:
        """Take steps on a batch, and refuse a loss or gradient that is not finite."""
        loss, norm, broken = self.take([index] * repeats).values.tolist()
        if broken >= 0:
            self._refuse(f"the gradient of {self.step.name_of(int(broken))}", index, loss)
        if not (abs(loss) < torch.inf and norm < torch.inf):
            self._refuse("the loss or the norm of the gradient", index, loss)

    def _largest_batch(self) -> int:
        """Return the index of the batch with the largest micro-batch, which needs most memory."""

        def size(index: int) -> int:
            micro_batches = self.feed(self.order[index])
            return max(sum(t.nbytes for t in batch.tensors()) for batch in micro_batches)

        return max(range(len(self.order)), key=size)

    def _refuse(self, what: str, batch: int, loss: float) -> NoReturn:
        raise FrostlabError(
            f"{what} is not finite in batch {batch}, before any training (loss {loss:.4g}), so the "
            "steps cannot be timed; clock: false skips the timing"
        )

    def trial_batches(self) -> list[int]:
        """Return the indices of a few batches, enough to estimate the time of a step."""
        return [number % len(self.order) for number in range(_TRIAL_BATCHES)]

    @property
    def optimizer_bytes(self) -> int:
        """The size of the optimizer's state."""
        return sum(t.nbytes for t in optimizer_tensors(self.model, self.step.optimizer).values())

    def model_bytes(self, trainable: bool) -> int:
        """Return the size of the trainable or of all parameters; tied parameters count once."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad or not trainable)


def check_arms(recipes: Mapping[str, Recipe], baseline: str) -> None:
    """Refuse arms that cannot be timed in one process on the same batches."""
    if baseline not in recipes:
        hint = nearest(baseline, recipes)
        choices = ", ".join(recipes)
        raise BadInput(f"time_arms: unknown baseline {baseline}; choose from: {choices}{hint}")
    for name in CONTROLS:
        if name in recipes:
            raise BadInput(f"time_arms: rename the arm `{name}`, because it is a control's name")
    base = recipes[baseline]
    for name, recipe in recipes.items():
        for key, value, expected in (
            ("data", recipe.data, base.data),
            ("tokenizer", recipe.tokenizer, base.tokenizer),
            ("seed", recipe.seed, base.seed),
            ("train.batch", recipe.train.batch, base.train.batch),
            ("train.threads", recipe.train.threads, base.train.threads),
        ):
            if value != expected:
                raise BadInput(
                    f"time_arms: {key} is {value} in {name} but {expected} in {baseline}; "
                    "arms are timed on the same batches in one process"
                )


def build_arms(
    recipes: Mapping[str, Recipe], prepared: PreparedData, baseline: str
) -> dict[str, BuiltArm]:
    """Build the model of every arm once; the controls share the model of the baseline."""
    arms: dict[str, BuiltArm] = {}
    of_baseline: StepSavings | None = None
    for name in (baseline, *(name for name in recipes if name != baseline)):
        recipe = recipes[name]
        built = build_model(recipe, prepared)
        precision = choose_precision(recipe.train, choose_device(recipe.train.device))
        check_model(built, recipe, prepared, TASKS[recipe.data.task], precision)
        savings = _savings_of(built, recipe, prepared)
        of_baseline = savings if name == baseline else of_baseline
        against = (
            None if savings is None or of_baseline is None else savings.relative_to(of_baseline)
        )
        arms[name] = BuiltArm(recipe, built, against)
        for control in CONTROLS:
            arms.setdefault(control, arms[baseline])
    return arms


def _savings_of(built: BuiltModel, recipe: Recipe, prepared: PreparedData) -> StepSavings | None:
    """Return a treatment's savings for examples of mean length; None for unknown architectures."""
    length = float(prepared.splits["train"].lengths.mean())
    try:
        tokens = recipe.train.batch * length
        return step_savings(built.model, round(length), tokens, recipe.optim.facts)
    except UnknownArchitecture:
        return None


def place_arms(
    arms: Mapping[str, BuiltArm],
    prepared: PreparedData,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
    order: Order | None = None,
    metered: bool = True,
) -> dict[str, TimedArm]:
    """Copy the arms to the device one by one, and warm up each before the next is copied.

    `order` holds the batches of all arms; by default, the first arm chooses them. If steps are
    eager, only the arm that chooses the batches is warmed up on all of them; the others are warmed
    up on the largest batch or, if not `metered`, not at all.
    """
    timed: dict[str, TimedArm] = {}
    for name, arm in arms.items():
        timed[name] = placed = TimedArm(arm, prepared, device, order, metered)
        order = placed.order if order is None else order
        kind = f"{placed.step.kind} steps ({placed.step.reason})"
        say(f"{name}: {kind}, built and warmed up in {placed.prepare_seconds:.1f} s")
    return timed


def choose_block(timed: Mapping[str, TimedArm], clock: BlockClock) -> tuple[int, float]:
    """Return the steps per block, and the seconds of one step of every arm together.

    The fastest arm's block is long enough to time. The number of steps is a power of 2 or, beyond
    `MOST_BATCHES`, a multiple of `MOST_BATCHES`.
    """
    shortest = _SHORTEST_BLOCK_AHEAD if runs_ahead(clock.device) else _SHORTEST_BLOCK
    seconds = [
        clock.time(partial(arm.take, arm.trial_batches())).host / _TRIAL_BATCHES
        for arm in timed.values()
    ]
    steps = shortest / min(seconds)
    if steps > MOST_BATCHES:
        return MOST_BATCHES * math.ceil(steps / MOST_BATCHES), sum(seconds)
    return 1 << math.ceil(math.log2(max(1.0, steps))), sum(seconds)


@dataclass(frozen=True)
class ArmTiming:
    """The time and the memory that one arm's steps need."""

    ratio: Ratio | None  # its time over that of the baseline's copies; None for the baseline itself
    ms_median: float  # per step, on the device's clock
    ms_mean: float  # per step, on the device's clock
    host_ms_median: float  # per step, on the host's clock
    blocks: tuple[float, ...]  # seconds of each block, by round
    step: str  # kind of step: eager, compiled or captured
    step_reason: str  # why this kind was chosen
    prepare_seconds: float  # of the first build and warm-up; if eager, the baseline warms up longer
    peak_bytes: int | None  # peak memory of the first build and warm-up; None without CUDA
    optimizer_bytes: int  # size of the optimizer's state
    trainable: int  # number of trainable parameters
    checkpoint_bytes: int  # size of the trainable parameters
    model_bytes: int  # size of all parameters
    savings: StepSavings | None  # the arm's FLOPs and memory traffic, and the baseline's


@dataclass(frozen=True)
class Timing:
    """The timing of all arms, and whether it is proven, that is, whether it can be trusted."""

    baseline: str
    arms: dict[str, ArmTiming]  # including the baseline and the controls
    proven: bool
    reasons: tuple[str, ...]  # why the timing is not proven
    notes: tuple[str, ...]  # drift of the baseline, and load by other processes
    steps_per_block: int
    batches: int  # distinct batches that were timed
    builds: int  # how often every arm was built and timed
    rounds: int  # in each round, every arm takes one block of steps
    seconds: float  # duration of the rounds and of rebuilding the arms
    stopped_by: str  # `width` (every interval was narrow enough) or `time` (limit reached)
    width: float  # target width of the 95 % intervals (see `time_arms`)
    device: str
    drift: Drift  # change of the baseline's time during the measurement
    watched: Watched  # load of the machine by other processes

    @property
    def control(self) -> str:
        """The control whose time differs most from that of the other copies of the baseline."""

        def difference(name: str) -> float:
            ratio = self.arms[name].ratio
            assert ratio is not None
            return abs(math.log(ratio.estimate))

        return max(CONTROLS, key=difference)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def time_arms(
    recipes: Mapping[str, Recipe],
    prepared: PreparedData,
    *,
    baseline: str,
    device: torch.device,
    seconds: float = 120.0,
    width: float = 0.01,
    alpha: float = 0.05,
    block: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Timing:
    """Time whole steps of every arm, until the intervals of all ratios are narrow or time is up.

    Args:
        seconds: time limit for the rounds and the builds between them. It does not include the
            first two or three builds, whose durations are needed to plan the rounds. It is twice as
            long if fewer than `FEWEST_BUILDS` builds were timed. Two builds are always timed.
        width: target width of every 95 % interval over the builds, including the controls',
            relative to the ratio: 0.01 means ±0.5 %. The reported intervals can be wider: they hold
            for all arms at once, and they allow for differences between the copies of the baseline.
        alpha: the reported intervals of all arms hold simultaneously with confidence 1 − alpha.
            Those of all controls hold simultaneously with 95 %.
        block: steps per block; by default, enough steps for an accurate time, or fewer if `seconds`
            is too short for them.
    """
    check_arms(recipes, baseline)
    if block is not None and block < 1:
        raise BadInput(f"time_arms: block is {block} steps, but must be at least 1")
    device = choose_device(str(device))
    clock = BlockClock(device)
    threads = recipes[baseline].train.threads  # time with as many threads as a training run
    limit = _raised_recompile_limit(recipes.values(), device)
    with default_modes(device), with_threads(threads), limit:
        arms = build_arms(recipes, prepared, baseline)
        timed = place_arms(arms, prepared, device, say)
        order, draw = timed[baseline].order, np.random.default_rng(0)
        preparation = {name: (arm.prepare_seconds, arm.peak_bytes) for name, arm in timed.items()}

        def measure(name: str, batches: Sequence[int]) -> BlockSeconds:
            """Time a block after an untimed step, which refills the caches for this arm."""
            timed[name].take(batches[:1])
            return clock.time(lambda: timed[name].take(batches))

        def rebuild() -> float:
            """Build all arms again, in random order, at other memory addresses; return seconds."""
            began = perf_counter()
            timed.clear()
            gc.collect()
            release_cached_memory()
            names = [tuple(arms)[i] for i in draw.permutation(len(arms))]
            again = {name: arms[name] for name in names}
            timed.update(place_arms(again, prepared, device, order=order, metered=False))
            synchronize(device)
            return perf_counter() - began

        steps, step_seconds = choose_block(timed, clock)
        build_seconds = rebuild()
        warms_up_all = timed[baseline].step.kind != "eager"  # in every build, on every batch
        if warms_up_all and (fewer := batches_to_keep(seconds, build_seconds)) < len(order):
            order = order[:fewer]
            build_seconds = rebuild()
        planned, round_pairs = plan_build(seconds, block or steps, step_seconds, build_seconds)
        blocks = Blocks(block or planned, len(order))
        with Watching(str(device)) as watching:
            rounds = interleave_arms(
                tuple(arms), measure, rebuild, StopRule(seconds, width),
                controls=CONTROLS, blocks=blocks, pairs=round_pairs, seed=0, say=say,
            )  # fmt: skip
    timed_batches = {
        index for pair in range(len(rounds.starts) // 2) for index in blocks.of_pair(pair)
    }
    drift = drift_of(rounds.device_seconds(baseline), rounds.began, rounds.starts)
    watched, controls = watching.watched(), {name: rounds.ratios()[name] for name in CONTROLS}
    ratios = rounds.ratios(alpha) | controls
    reasons, notes = reasons_unproven(rounds.builds, controls), timing_notes(drift, watched)
    ended = "all intervals are narrow" if rounds.stopped_by == "width" else "the time is up"
    say(
        f"{rounds.builds} builds, {len(rounds.starts)} rounds of {blocks.steps} steps in "
        f"{rounds.seconds:.0f} s; {ended}: {'; '.join((*(reasons or ('proven',)), *notes))}"
    )
    return Timing(
        baseline=baseline,
        arms={
            name: _arm_timing(
                timed[name],
                arms[name],
                preparation[name],
                rounds.blocks[name],
                blocks.steps,
                ratios.get(name),
            )
            for name in arms
        },
        proven=not reasons,
        reasons=reasons,
        notes=notes,
        steps_per_block=blocks.steps,
        batches=len(timed_batches),
        builds=rounds.builds,
        rounds=len(rounds.starts),
        seconds=rounds.seconds,
        stopped_by=rounds.stopped_by,
        width=width,
        device=str(device),
        drift=drift,
        watched=watched,
    )


def reasons_unproven(builds: int, controls: Mapping[str, Ratio]) -> tuple[str, ...]:
    """Return the reasons why a timing cannot be trusted; empty if it can."""
    reasons = [
        f"the time of {name}, a copy of the baseline, is not that of the others: "
        f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
        for name, ratio in controls.items()
        if not ratio.holds(1.0)
    ]
    if builds < FEWEST_BUILDS:
        needed = f"{builds} of at least {FEWEST_BUILDS} (raise clock.seconds)"
        reasons.append(f"the models were built too few times: {needed}")
    return tuple(reasons)


def timing_notes(drift: Drift, watched: Watched) -> tuple[str, ...]:
    """Describe a drift of the baseline and the load of other processes.

    Both widen the intervals. They affect all arms alike on average, so they bias no ratio.
    """
    notes = watched.notes()
    if drift.drifted:
        change = f"{drift.halves - 1:+.1%}"
        notes.insert(0, f"the baseline drifted: its time changed by {change} in the second half")
    return tuple(notes)


def _arm_timing(
    timed: TimedArm,
    arm: BuiltArm,
    preparation: tuple[float, int | None],
    blocks: list[BlockSeconds],
    steps: int,
    ratio: Ratio | None,
) -> ArmTiming:
    """Summarize an arm's blocks; `preparation` is the time and peak memory of its first build."""
    seconds = [block.device for block in blocks]
    return ArmTiming(
        ratio=ratio,
        ms_median=1e3 * statistics.median(seconds) / steps,
        ms_mean=1e3 * statistics.fmean(seconds) / steps,
        host_ms_median=1e3 * statistics.median(block.host for block in blocks) / steps,
        blocks=tuple(seconds),
        step=timed.step.kind,
        step_reason=timed.step.reason,
        prepare_seconds=preparation[0],
        peak_bytes=preparation[1],
        optimizer_bytes=timed.optimizer_bytes,
        trainable=count_parameters(timed.model)["trainable"],
        checkpoint_bytes=timed.model_bytes(trainable=True),
        model_bytes=timed.model_bytes(trainable=False),
        savings=arm.savings,
    )


@contextmanager
def _raised_recompile_limit(recipes: Iterable[Recipe], device: torch.device) -> Iterator[None]:
    """Raise torch's recompile limit in this context if any arm may compile its step."""
    kinds = {recipe.train.step for recipe in recipes}
    if "compiled" not in kinds and not (kinds - {"eager"} and captures_graphs(device)):
        yield
        return
    import torch._dynamo  # imported here because it takes seconds

    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        yield


def time_steps(
    plan: Plan, data_dir: Path | None, say: Callable[[str], None], device: str | None = None
) -> dict[str, Any]:
    """Time every arm of a comparison against the baseline, and return the values of steps.json.

    `device` replaces the recipe's.
    """
    assert plan.clock is not None
    seed = plan.seeds[0]
    recipes = {arm.name: plan.recipe_of(arm, seed) for arm in plan.arms}
    base = recipes[plan.baseline.name]
    prepared = prepare(base, data_dir)
    copies = f"{len(CONTROLS)} more copies of the baseline"
    say(f"timing {len(recipes)} arms and {copies} for about {plan.clock.seconds:.0f} s")
    timing = time_arms(
        recipes, prepared, baseline=plan.baseline.name,
        device=choose_device(device or base.train.device), seconds=plan.clock.seconds,
        width=plan.clock.width, alpha=plan.rules.time_level, say=say,
    )  # fmt: skip
    arms = {name: _arm_evidence(name, timing) for name in timing.arms}
    return timing.to_dict() | {"arms": arms, "control": arms[timing.control]}


def _arm_evidence(name: str, timing: Timing) -> dict[str, Any]:
    """Return one arm's values in steps.json.

    `ceiling` is the lowest ratio that the saved FLOPs allow (the ceiling of the speed-up); None for
    a control, and if an architecture is unknown.
    """
    arm = timing.arms[name]
    ratio, saved = arm.ratio, None if name in CONTROLS else arm.savings
    word, sentence = (None, None) if ratio is None else judge_time(ratio, saved, timing)
    flag = None
    if ratio is not None and saved is not None:
        flag = unexplained_gain(ratio, saved, timing.proven, timing.reasons)
    return {
        "ms": arm.ms_median,
        "ms_mean": arm.ms_mean,
        "ratio": None if ratio is None else ratio.estimate,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "ceiling": None if saved is None else 1 / saved.speed_up,
        "limits": None if saved is None else saved.to_dict(),
        "flag": flag,
        "word": word,
        "sentence": sentence,
        "step": arm.step,
        "peak_bytes": arm.peak_bytes,
        "optimizer_bytes": arm.optimizer_bytes,
        "checkpoint_bytes": arm.checkpoint_bytes,
        "trainable": arm.trainable,
        "blocks": list(arm.blocks),
    }


def judge_time(ratio: Ratio, saved: StepSavings | None, timing: Timing) -> tuple[str, str]:
    """Return the verdict on an arm's time, and a sentence with its numbers."""
    numbers = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of the baseline's time"
    if saved is not None:
        numbers += f"; FLOPs allow {1 / saved.speed_up:.4f}"
    if not timing.proven:
        reasons = "; ".join(timing.reasons)
        return "unproven", f"unproven: a step took {numbers}, but {reasons}."
    if ratio.holds(1.0):
        limit = 100 * max(ratio.high - 1, 1 - ratio.low)
        return "no difference found", (
            f"no difference found: a step takes {numbers}; "
            f"a difference of more than {limit:.2f} % is excluded."
        )
    word, speed = ("better", "faster") if ratio.high < 1 else ("worse", "slower")
    return word, f"{speed}: a step takes {numbers}."
