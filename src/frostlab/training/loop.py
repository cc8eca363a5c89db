"""The one loop: it trains, times, evaluates, keeps checkpoints and knows when to stop."""

import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.flow.measurements import parts_event
from frostlab.flow.probe import own_gradient
from frostlab.flow.tensors import local
from frostlab.flow.watch import LiveFlow, watch
from frostlab.recipe.settings import Every
from frostlab.records.checkpoint import (
    Checkpoint,
    keep_only,
    save_checkpoint,
)
from frostlab.storage import load_tensors, save_tensors
from frostlab.timing.clock import Stopwatch
from frostlab.training.batches.batch import order_digest
from frostlab.training.batches.feed import Feed
from frostlab.training.batches.prefix import build_prefix, prefix_depth
from frostlab.training.distributed import World, gather_nothing, like, whole
from frostlab.training.evaluate import evaluate
from frostlab.training.setup import any_unused, cross
from frostlab.training.stages import (
    Stage,
    in_steps,
    most_steps,
    shares_of,
    stage_at,
    steps_per_epoch,
)
from frostlab.training.state import Progress, Setting, reaches
from frostlab.training.step import build_step
from frostlab.training.step.eager import Diverged, EagerStep, seed_step
from frostlab.training.step.optimizer import optimizer_tensors, rate_at, restore_optimizer
from frostlab.training.step_log import Entry, Ledger
from frostlab.training.treatment import count_parameters, wants_types


def say_stage(setting: Setting, progress: Progress) -> None:
    """Record and show what a stage trains, before its first step."""
    recipe, stage = setting.recipe, setting.stages[progress.stage]
    counts = count_parameters(setting.model)
    supervision = setting.objective.supervision
    best = progress.ended[-1]["best"] if progress.ended else None
    if setting.folder:
        setting.folder.event(
            "stage", progress.step, name=stage.name, steps=stage.steps, patience=stage.patience,
            train=None if stage.train is None else list(stage.train),
            freeze=list(recipe.surgery.frozen), changed=list(setting.entered.changed),
            added=list(setting.entered.new) if stage.add else [], trainable=counts["trainable"],
            total=counts["total"], lr=dict(stage.rates) or stage.optim(recipe.optim).lr,
            best_before=best, supervise=supervision and supervision.to_dict(),
        )  # fmt: skip
    if recipe.stages:
        line = _stage_line(setting, progress.stage, stage, counts)
        setting.display.stage(line, progress.step, most_steps(setting.stages, progress.lengths))


def _stage_line(setting: Setting, index: int, stage: Stage, counts: dict[str, int]) -> str:
    rates: Any = stage.rates or {"": stage.optim(setting.recipe.optim).lr}
    lr = ", ".join(f"{name} {rate:g}".strip() for name, rate in rates.items())
    added = f"{stage.add.layers} added, " if stage.add else ""
    return (
        f"stage {index + 1} of {len(setting.stages)}, {stage.name}: {added}"
        f"{counts['trainable']:,} of {counts['total']:,} parameters learn, lr {lr}"
    )


def say_how(setting: Setting, step: int, step_once: EagerStep, packed: bool) -> None:
    """Record and show which kind of step is taken, and why, when that changes."""
    setting.display.say(f"{step_once.kind} steps: {step_once.reason}")
    if setting.folder:
        setting.folder.event("stepping", step, how=step_once.kind, reason=step_once.reason,
                             packed=packed)  # fmt: skip


START = "flow-start.safetensors"


def watch_stage(setting: Setting, progress: Progress, step: EagerStep) -> None:
    """Let a stage's step measure what the recipe asks for; steps are counted over the run."""
    asked = setting.recipe.watch
    if asked is None:
        return
    flow = watch(
        setting.model, step.optimizer, asked.every_n_steps, distance=asked.distance,
        gradient_cosine=asked.gradient_cosine, dead_units=asked.dead_units,
        attention_entropy=asked.attention_entropy, verify=False,
        gradient=own_gradient if step.halves is None else step.halves.gradient,
    )  # fmt: skip
    flow.step, flow.first = progress.step, sum(progress.lengths)
    if asked.distance:
        _begin_where_the_stage_began(setting, progress, flow)
    if setting.folder is not None:
        layout = flow.probe.layout
        front = [layout.names[i] for i in layout.front]
        name = setting.stages[progress.stage].name
        event = parts_event(flow, asked.every_n_steps, front)
        setting.folder.event("flow_parts", progress.step, stage=name, **event)
    step.flow = flow.start(hooks=False)


def _begin_where_the_stage_began(setting: Setting, progress: Progress, flow: LiveFlow) -> None:
    """Keep the weights a stage begins with; one that goes on is measured from them."""
    path = Path(setting.path) / START
    names = {id(p): name for name, p in setting.model.named_parameters()}
    learning: dict[str, nn.Parameter] = {names[id(p)]: p for p in flow.probe.layout.parameters}
    if progress.place == 0:
        weights = {name: whole(p.detach()) for name, p in learning.items()}
        if setting.folder is not None:
            save_tensors(path, weights)
        setting.world.wait()
        return
    stored = load_tensors(path)
    flow.probe.start_at([local(like(stored[name], p)) for name, p in learning.items()])


_SECONDS = 2.0  # between looks at whether any of several processes was asked to stop
_STEPS = 50


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Within this, signals are remembered; yields whether one has come."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def remember(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopLook:
    """Whether to stop after a step; several processes agree, every few seconds at most."""

    def __init__(self, asked: Callable[[], bool], world: World, device: torch.device) -> None:
        self._asked, self._world, self._device = asked, world, device
        self._next, self._last, self._at = 1, 0, time.monotonic()

    def __call__(self, step: int) -> bool:
        if self._world.size == 1:
            return self._asked()
        if step < self._next:
            return False
        now = time.monotonic()
        pace = (now - self._at) / max(step - self._last, 1) if self._world.writes else 0.0
        said = torch.tensor([float(self._asked()), pace], device=self._device)
        asked, pace = self._world.total(said).tolist()
        self._next = step + max(1, min(_STEPS, int(_SECONDS / max(pace, 1e-9))))
        self._last, self._at = step, now
        return asked > 0


class Stopped(Exception):
    """The run was asked to stop, and has kept a checkpoint."""


def train(
    setting: Setting, progress: Progress, watch: Stopwatch, resumed: Checkpoint | None
) -> None:
    """Train stage after stage to the end, to exhausted patience, or until asked to stop."""
    per_epoch = steps_per_epoch(len(setting.prepared.splits["train"]), setting.recipe.train.batch)
    total = most_steps(setting.stages, progress.lengths)
    setting.display.begin(
        progress.step, total, per_epoch, setting.prepared.caution, sum(progress.lengths)
    )
    watch.start()
    state = {} if resumed is None else resumed.optimizer()
    asked = StopLook(setting.asked_to_stop, setting.world, setting.device)
    while True:
        step_once = _train_stage(setting, progress, watch, state, asked)
        progress.seconds = watch.seconds
        if progress.stage == len(setting.stages) - 1:
            break
        with watch.phase("checkpoint", device=True):
            state = cross(setting, progress, step_once)
            del step_once
            gc.collect()  # its model, graphs and wrapping hold each other, and memory
        _keep(setting, progress, watch, state)
    watch.stop()
    progress.seconds = watch.seconds


def _train_stage(
    setting: Setting,
    progress: Progress,
    watch: Stopwatch,
    state: dict[str, Tensor],
    asked: StopLook,
) -> EagerStep:
    """Train to a stage's end or until its patience is exhausted; return the step it took."""
    recipe, world = setting.recipe, setting.world
    per_epoch = steps_per_epoch(len(setting.prepared.splits["train"]), recipe.train.batch)
    index, stage = progress.stage, setting.stages[progress.stage]
    end, optim = sum(progress.lengths) + stage.steps, stage.optim(recipe.optim)
    last = index == len(setting.stages) - 1

    setting.objective.train()
    with watch.phase("data", device=True):
        feed = _make_feed(setting, progress)  # while the model is whole
    with watch.setup():
        shares = shares_of(setting.model, stage, index, setting.entered)
        step_once = build_step(
            setting.objective, optim, recipe.train, setting.precision, setting.device, world,
            steps=stage.steps, unused=any_unused(setting), shares=shares,
            inside=recipe.watch is not None and recipe.watch.inside,
        )  # fmt: skip
        if state:
            restore_optimizer(setting.model, step_once.optimizer, state, like,
                              partly=not progress.place)  # fmt: skip
        epoch, place = divmod(progress.place, per_epoch)
        before = sum(-(-steps // per_epoch) for steps in progress.lengths)  # stages begin a new one
        order = feed.order(before + epoch)  # however it is cut into stages, a run sees the same
        step_once.warm_up(feed(order[place]), feed.examples.scored(order[place]))
        if setting.device.type == "cuda":  # the first look of a process loads kernels, too
            _evaluate(setting, _selecting(setting), most=1)
        watch_stage(setting, progress, step_once)
    epoch_began = watch.training_seconds() - progress.epoch_seconds
    said = ""
    with Ledger(step_once, watch, world, setting.folder) as ledger:
        while progress.step < end and not progress.stopped_early:
            _, stage_step = stage_at(setting.stages, progress.step, progress.lengths)
            if stage_step == 0:
                say_stage(setting, progress)

            with watch.phase("data"):
                rows = order[place]
                parts = feed(rows)
            seed_step(recipe.seed, progress.step, world.rank, setting.device)
            rate = rate_at(stage_step, stage.steps, optim)
            began = watch.mark()
            outcome = step_once(parts, feed.examples.scored(rows), rate)
            lap = (began, watch.mark())
            if said != step_once.reason:
                said = step_once.reason
                say_how(setting, progress.step, step_once, feed.packs)
            progress.step, place = progress.step + 1, place + 1
            real, held = feed.examples.read(rows), sum(part.held for part in parts)
            ledger.add(Entry(progress.step, outcome, rate, real, held, len(rows), lap))
            setting.display.advance(progress.step, ledger.loss)

            if place == per_epoch:
                watch.wait_for_device()
                spent = watch.training_seconds() - epoch_began
                progress.order = order_digest(order, progress.order)
                ledger.settle()
                if setting.folder:
                    setting.folder.event("epoch", progress.step, epoch=epoch, order=progress.order,
                                         seconds=round(spent, 4))  # fmt: skip
                epoch, place, epoch_began = epoch + 1, 0, watch.training_seconds()
                if progress.step < end:
                    with watch.phase("data"):
                        order = feed.order(before + epoch)

            improved = False
            looks = _due(recipe.evaluate.every, progress.place, per_epoch, stage.steps)
            if looks:
                ledger.settle()
                improved = _look(setting, progress, watch)
                if progress.best.exhausted(stage.patience):
                    progress.stopped_early = True
            stop = asked(progress.step)
            if (looks and (improved or recipe.train.checkpoint is None)) or stop or _due(
                recipe.train.checkpoint, progress.place, per_epoch, stage.steps
            ):  # fmt: skip
                ledger.settle()
                progress.epoch_seconds = watch.training_seconds() - epoch_began
                _keep(setting, progress, watch, step_once.optimizer)
            if stop and not (last and (progress.step == end or progress.stopped_early)):
                raise Stopped
    watch.wait_for_device()
    return step_once


def _make_feed(setting: Setting, progress: Progress) -> Feed:
    """Batches as the recipe wants them, with the outputs of frozen layers if it wants those."""
    recipe, types = setting.recipe, wants_types(setting.model)
    cached = recipe.train.cache_prefix is not None
    if cached and (not recipe.stages or prefix_depth(setting.model)):
        setting.objective.prefix = build_prefix(
            setting.model, setting.prepared, recipe.train, setting.precision, types
        )
        if setting.folder:
            setting.folder.event("prefix", progress.step, **setting.objective.prefix.facts)
    return Feed(setting.prepared, recipe.train, recipe.seed, setting.world, setting.device,
                types, setting.objective.prefix)  # fmt: skip


def _due(every: Every | None, step: int, per_epoch: int, total: int) -> bool:
    """Whether something done every so many steps, or epochs, is due; at the end it always is."""
    return step == total or (every is not None and step % in_steps(every, per_epoch) == 0)


def _look(setting: Setting, progress: Progress, watch: Stopwatch) -> bool:
    """Evaluate on the split that selects; prove that what is frozen has not moved."""
    recipe, split = setting.recipe, _selecting(setting)
    before = watch.seconds["total"]
    with watch.phase("validation", device=True):
        metrics = measure(setting, split, progress.step)
        if setting.frozen is not None:
            setting.frozen.verify(setting.model)
    progress.last = metrics
    value = metrics[recipe.metric]
    improved = progress.best.see(value, progress.step)
    if improved:
        progress.metrics = metrics
    target = recipe.evaluate.target
    if target is not None and progress.target is None and reaches(recipe.metric, value, target):
        progress.target = {"step": progress.step, "seconds": round(before, 4)}
    if setting.folder:
        verified = 0 if setting.frozen is None else len(setting.frozen.digests)
        setting.folder.event("evaluation", progress.step, split=split, metrics=metrics,
                             best=improved, frozen_verified=verified)  # fmt: skip
    setting.display.evaluated(progress.step, metrics, improved)
    return improved


def measure(
    setting: Setting, split: str, step: int, guesses: Tensor | None = None
) -> dict[str, Any]:
    """Every metric of a split, over all processes, the selecting one first."""
    metric = setting.recipe.metric
    metrics = _evaluate(setting, split, guesses)
    if not math.isfinite(metrics["loss"]):
        spoilt = (n for n, p in setting.model.named_parameters() if not whole(p).isfinite().all())
        raise Diverged(step, next(spoilt, "the loss of an evaluation"), metrics["loss"])
    return {metric: metrics[metric], **metrics}


def _evaluate(
    setting: Setting, split: str, guesses: Tensor | None = None, most: int | None = None
) -> dict[str, Any]:
    train = setting.recipe.train
    metrics = evaluate(
        setting.objective,
        setting.prepared,
        setting.prepared.splits[split],
        setting.recipe.evaluate.batch or train.batch // train.accumulate,
        device=setting.device,
        precision=setting.precision,
        world=setting.world,
        types=wants_types(setting.model),
        guesses=guesses,
        layers=setting.objective.supervised,
        most=most,
    )
    gather_nothing(setting.objective)  # who reads a gathered tensor keeps it from being let go
    return metrics


def _selecting(setting: Setting) -> str:
    """The split by which the best weights are chosen."""
    return "tune" if "tune" in setting.prepared.splits else "report"


def _keep(
    setting: Setting,
    progress: Progress,
    watch: Stopwatch,
    held: torch.optim.Optimizer | dict[str, Tensor],
) -> None:
    """Write a checkpoint, with an optimizer's state; then remove those that it replaces."""
    with watch.phase("checkpoint", device=True):
        model = {name: whole(value) for name, value in setting.model.state_dict().items()}
        state = held if isinstance(held, dict) else optimizer_tensors(setting.model, held)
        state = {name: whole(value) for name, value in state.items()}
        progress.seconds = watch.seconds
        if setting.folder:
            path = setting.folder.path
            save_checkpoint(path, progress.step, model, state, progress.to_dict(), progress.stage)
            setting.folder.event("checkpoint", progress.step, best=progress.best.step)
            keep_only(path, progress.step, progress.best.step, progress.stage)
        setting.world.wait()
