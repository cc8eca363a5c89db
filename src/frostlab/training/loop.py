"""The training loop: steps, timing, evaluations, checkpoints and early stopping.

A run has one or more stages. All steps of a stage train the same weights.
"""

import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.devices import prepares_kernels
from frostlab.errors import FrostlabError
from frostlab.flow.measurements import parts_event
from frostlab.flow.probe import own_gradient
from frostlab.flow.tensors import local
from frostlab.flow.watch import LiveFlow, watch
from frostlab.launcher import Turn
from frostlab.recipe.settings import Every
from frostlab.records.checkpoint import (
    Checkpoint,
    keep_only,
    save_checkpoint,
    save_frozen,
)
from frostlab.storage import file_digest, load_tensors, plain_tensors, save_tensors
from frostlab.surgery.freeze import frozen_tensors
from frostlab.timing.clock import TURN, Stopwatch
from frostlab.training.batches.batch import Batch, order_digest
from frostlab.training.distributed import Compute, full_tensor, place_like, reshard
from frostlab.training.evaluate import evaluate
from frostlab.training.restore import next_stage
from frostlab.training.setup import make_feed, make_step
from frostlab.training.stages import (
    Stage,
    in_epochs,
    in_steps,
    most_steps,
    stage_at,
    steps_per_epoch,
)
from frostlab.training.state import Progress, RunContext, reaches
from frostlab.training.step.eager import Diverged, EagerStep, seed_step
from frostlab.training.step.optimizer import optimizer_tensors, rate_at, restore_optimizer
from frostlab.training.step_log import Entry, StepLog
from frostlab.training.treatment import count_parameters

# Fewest steps between two evaluations that write histograms. The last step of a stage writes them
# in any case, unless early stopping ended the stage.
_HISTOGRAM_STEPS = 100
# Seconds between two attempts to take a turn. A turn is the permission to take steps, which a run
# needs if its queue has more runs on a device than may train at once.
_TURN_SECONDS = 0.02


class Stopped(Exception):
    """Raised when a run was asked to stop; a checkpoint holds its steps, if it took any."""


def train(
    context: RunContext, progress: Progress, clock: Stopwatch, resumed: Checkpoint | None
) -> None:
    """Train all stages, each to its end or to early stopping; raise `Stopped` if asked to stop."""
    per_epoch = _steps_per_epoch(context)
    total = most_steps(context.stages, progress.lengths)
    context.display.begin(
        progress.step, total, per_epoch, context.prepared.caution, sum(progress.lengths)
    )
    clock.start()
    state = {} if resumed is None else resumed.optimizer()  # the optimizer's tensors
    should_stop = StopRequest(context.asked_to_stop, context.compute)
    with Turn() as turn:
        while True:
            step_once = _train_stage(context, progress, clock, state, should_stop, turn)
            progress.seconds = clock.seconds
            if progress.stage == len(context.stages) - 1:
                break
            with clock.phase("checkpoint", device=True):
                wait_for_checkpoints(context)
                progress.seconds = clock.seconds
                state = next_stage(context, progress, step_once)
                del step_once
                gc.collect()  # frees the old model, which is part of reference cycles
            _save_checkpoint(context, progress, clock, state)
    clock.stop()
    progress.seconds = clock.seconds


def _train_stage(
    context: RunContext,
    progress: Progress,
    clock: Stopwatch,
    state: dict[str, Tensor],
    should_stop: "StopRequest",
    turn: Turn,
) -> EagerStep:
    """Train a stage to its end or to early stopping; return its step object.

    `state` holds the optimizer's tensors to start from; it may be empty. Before the first step, the
    run waits for a turn.
    """
    recipe, compute, world = context.recipe, context.compute, context.world
    arguments = (context.current, recipe, context.prepared, context.task, compute)
    per_epoch = _steps_per_epoch(context)
    stage = context.current.stage
    end, optim = sum(progress.lengths) + stage.steps, stage.optim(recipe.optim)
    is_last_stage = progress.stage == len(context.stages) - 1

    with clock.phase("data", device=True):
        feed = make_feed(*arguments)
        _record_prefix(context, progress)
    with clock.setup():
        watches_inside = recipe.watch is not None and recipe.watch.inside
        step_once = make_step(*arguments, feed, watches_inside=watches_inside)
        if state:  # at a stage's beginning, weights that begin to learn have no state (`partly`)
            restore_optimizer(context.model, step_once.optimizer, state,
                              partly=not progress.stage_step)  # fmt: skip
        epoch, index = divmod(progress.stage_step, per_epoch)
        # Each stage begins a new epoch. Epochs are counted over the whole run, and this count,
        # with the seed, determines the order of examples.
        past_epochs = sum(-(-steps // per_epoch) for steps in progress.lengths)
        order = feed.order(past_epochs + epoch)
        step_once.warm_up(feed(order[index]), feed.examples.scored(order[index]))
        if prepares_kernels(compute.device):  # so that no timed evaluation loads kernels
            _evaluate(context, _selecting_split(context), most=1)
        watch_stage(context, progress, step_once)
    if not turn.take():
        with clock.outside(TURN):
            _wait_for_turn(context, turn)
    epoch_began = clock.training_seconds() - progress.epoch_seconds
    recorded_reason, histograms_from = "", 0
    with closing(step_once), StepLog(step_once, clock, world, context.folder) as log:
        latest_loss = log.latest_loss if world.size == 1 else lambda: should_stop.loss
        while progress.step < end and not progress.stopped_early:
            _, stage_step = stage_at(context.stages, progress.step, progress.lengths)
            if stage_step == 0:
                record_stage(context, progress)

            with clock.phase("data"):
                rows = order[index]
                batches = feed(rows)
            seed_step(recipe.seed, progress.step, world.rank, compute.device)
            rate = rate_at(stage_step, stage.steps, optim)
            began, shapes = clock.mark(), step_once.prepared_shapes
            outcome = step_once(batches, feed.examples.scored(rows), rate)
            lap = (began, clock.mark())
            if recorded_reason != step_once.reason:
                recorded_reason = step_once.reason
                record_step_kind(context, progress.step, step_once, feed.packs)
            progress.step, index = progress.step + 1, index + 1
            progress.order = order_digest(progress.order, rows)
            tokens = feed.examples.tokens_read(rows)
            padded = sum(batch.padded_tokens for batch in batches)
            log.add(Entry(progress.step, outcome, rate, tokens, padded, len(rows), lap,
                          progress.order, step_once.prepared_shapes != shapes))  # fmt: skip
            context.display.advance(progress.step, latest_loss)
            context.writer.check()

            if index == per_epoch:
                clock.wait_for_device()
                spent = clock.training_seconds() - epoch_began
                _check_order(context, progress)
                log.flush()
                if context.folder:
                    context.folder.event("epoch", progress.step, epoch=epoch, order=progress.order,
                                         seconds=round(spent, 4))  # fmt: skip
                epoch, index, epoch_began = epoch + 1, 0, clock.training_seconds()
                if progress.step < end:
                    with clock.phase("data"):
                        order = feed.order(past_epochs + epoch)

            improved = False
            evaluates = _is_due(recipe.evaluate.every, progress.stage_step, per_epoch, stage.steps)
            if evaluates:
                log.flush()
                if progress.step >= histograms_from or progress.step == end:
                    _write_histograms(context, progress, clock, step_once, batches,
                                      feed.examples.scored(rows))  # fmt: skip
                    histograms_from = progress.step + _HISTOGRAM_STEPS
                improved = _select(context, progress, clock)
                if progress.best.exhausted(stage.patience):
                    progress.stopped_early = True
            stop = should_stop(progress.step, outcome.loss)
            saves = evaluates and (improved or recipe.train.checkpoint is None)
            if saves or stop or _is_due(
                recipe.train.checkpoint, progress.stage_step, per_epoch, stage.steps
            ):  # fmt: skip
                log.flush()
                progress.epoch_seconds = clock.training_seconds() - epoch_began
                _save_checkpoint(context, progress, clock, step_once.optimizer)
            # a run that has taken its last step does not stop, but evaluates the `report` split
            if stop and not (is_last_stage and (progress.step == end or progress.stopped_early)):
                context.writer.wait()
                raise Stopped
        _check_order(context, progress)
    clock.wait_for_device()
    return step_once


def _wait_for_turn(context: RunContext, turn: Turn) -> None:
    """Wait until another run of the queue releases its turn; raise `Stopped` if asked to stop."""
    while not turn.take():
        if context.asked_to_stop():
            raise Stopped
        time.sleep(_TURN_SECONDS)


def _check_order(context: RunContext, progress: Progress) -> None:
    """Refuse to go on if the processes did not take their examples from the same batches.

    Each process computes a digest of all examples of a step, and trains on some of them.
    """
    if not context.world.same(progress.order):
        raise FrostlabError(f"step {progress.step}: the processes have different batches")


def _steps_per_epoch(context: RunContext) -> int:
    return steps_per_epoch(len(context.prepared.splits["train"]), context.recipe.train)


def epochs_done(context: RunContext, progress: Progress) -> float:
    """Return the number of epochs that all stages have done so far."""
    per_epoch = _steps_per_epoch(context)
    current = in_epochs(progress.stage_step, per_epoch)
    return float(f"{sum(stage.epochs for stage in progress.ended) + current:.6g}")


def _is_due(every: Every | None, step: int, per_epoch: int, total: int) -> bool:
    """Return whether an action is due: at every multiple of its interval, and at step `total`."""
    return step == total or (every is not None and step % in_steps(every, per_epoch) == 0)


def _write_histograms(
    context: RunContext,
    progress: Progress,
    clock: Stopwatch,
    step_once: EagerStep,
    batches: list[Batch],
    scored: int,
) -> None:
    """Write histograms of weights and gradients, if the run writes TensorBoard files.

    The gradients are those of the last batch with the weights after its step.
    """
    if context.histograms is None:
        return
    with (
        clock.phase("histograms", device=True),
        step_once.gradients_now(batches, scored) as gradient,
    ):
        context.histograms(progress.step, context.model, gradient)


def _select(context: RunContext, progress: Progress, clock: Stopwatch) -> bool:
    """Evaluate the weights; return whether they are the stage's best so far.

    Also verify that frozen weights have not changed.
    """
    recipe, split, audit = context.recipe, _selecting_split(context), context.current.audit
    before = clock.seconds
    with clock.phase("validation", device=True):
        metrics = measure(context, split, progress.step)
        if audit is not None:
            audit.verify(context.model)
    progress.last = metrics
    value = metrics[recipe.metric]
    improved = progress.best.see(value, progress.step)
    if improved:
        progress.metrics = metrics
    target = recipe.evaluate.target
    if target is not None and progress.target is None and reaches(recipe.metric, value, target):
        progress.target = {"step": progress.step, "epoch": epochs_done(context, progress),
                           "seconds": round(before["total"], 4)}  # fmt: skip
    if context.folder:
        verified = 0 if audit is None else len(audit.digests)
        spent = clock.seconds["validation"] - before.get("validation", 0.0)
        context.folder.event("evaluation", progress.step, split=split, metrics=metrics,
                             best=improved, frozen_verified=verified,
                             epoch=epochs_done(context, progress), seconds=round(spent, 4),
                             total_seconds=round(before["total"], 4))  # fmt: skip
    context.display.evaluated(progress.step, metrics, improved)
    return improved


def measure(
    context: RunContext, split: str, step: int, classes: Tensor | None = None
) -> dict[str, Any]:
    """Return every metric of a split, over all processes; the recipe's metric comes first.

    Raise `Diverged` if the loss is not finite. `classes` is as in `evaluate`: a tensor of zeros
    that receives 1 + the predicted class of each example.
    """
    metric = context.recipe.metric
    metrics = _evaluate(context, split, classes)
    if not math.isfinite(metrics["loss"]):
        parameters = context.model.named_parameters()
        broken = (name for name, p in parameters if not full_tensor(p).isfinite().all())
        raise Diverged(step, next(broken, "the loss of an evaluation"), metrics["loss"])
    return {metric: metrics[metric], **metrics}


def _evaluate(
    context: RunContext, split: str, classes: Tensor | None = None, most: int | None = None
) -> dict[str, Any]:
    metrics = evaluate(
        context.task,
        context.objective,
        context.prepared,
        context.prepared.splits[split],
        context.evaluation_batch,
        context.compute,
        classes=classes,
        layers=context.objective.supervised,
        most=most,
    )
    reshard(context.objective)  # evaluation leaves FSDP parameters gathered
    return metrics


def _selecting_split(context: RunContext) -> str:
    """Return the split that selects the best weights: `tune` or, without it, `report` (test)."""
    return "tune" if "tune" in context.prepared.splits else "report"


def _save_checkpoint(
    context: RunContext,
    progress: Progress,
    clock: Stopwatch,
    optimizer: torch.optim.Optimizer | dict[str, Tensor],
) -> None:
    """Take a checkpoint with the optimizer's state; a thread writes it while training goes on.

    The thread then removes the checkpoints that the new one replaces. Between two stages,
    `optimizer` is the state that the next stage keeps.
    """
    with clock.phase("checkpoint", device=True):
        context.writer.wait()
        model = _weights_to_save(context)
        state = optimizer
        if not isinstance(state, dict):
            state = optimizer_tensors(context.model, state)
        state = {name: full_tensor(value) for name, value in state.items()}
        progress.seconds = clock.seconds
        if context.folder:
            path, step, stage, best = (
                context.folder.path, progress.step, progress.stage, progress.best.step
            )  # fmt: skip
            saved = (plain_tensors(model, copy=True), plain_tensors(state, copy=True),
                     progress.to_dict(), stage, context.current.frozen)  # fmt: skip

            def write() -> None:
                save_checkpoint(path, step, *saved)
                keep_only(path, step, best, stage)

            context.folder.event("checkpoint", step, best=best)
            context.writer.start(write)
        context.world.wait()


def wait_for_checkpoints(context: RunContext) -> None:
    """Wait until the last checkpoint is written, so that every process can read it."""
    context.writer.wait()
    context.world.wait()


def _weights_to_save(context: RunContext) -> dict[str, Tensor]:
    """Return the weights for a checkpoint, gathered if they are sharded.

    Unless the recipe asks for all weights, frozen weights are left out. The first checkpoint of a
    stage stores them in a folder of their own.
    """
    current, tensors = context.current, context.model.state_dict()
    if current.audit is None or context.recipe.train.checkpoint_what == "all":
        return {name: full_tensor(value) for name, value in tensors.items()}
    frozen = {n: rows for n, rows in frozen_tensors(context.model).items() if n in tensors}
    partly = {name: rows for name, rows in frozen.items() if rows is not None}
    learning = {name: full_tensor(value) for name, value in tensors.items()
                if name not in frozen or name in partly}  # fmt: skip
    if current.frozen is None:
        stored = {name: full_tensor(tensors[name]) for name in frozen if name not in partly}
        stored |= {name: rows.frozen_rows(learning[name]) for name, rows in partly.items()}
        weights = save_frozen(context.path, stored, partly) if context.folder else None
        context.current = replace(current, frozen=context.world.agree(weights))
    return learning | {name: rows.trainable_rows(learning[name]) for name, rows in partly.items()}


def record_stage(context: RunContext, progress: Progress) -> None:
    """Record a stage's settings and parameter counts; show them if the recipe has stages."""
    recipe, stage, entered = context.recipe, context.current.stage, context.current.entered
    counts = count_parameters(context.model)
    supervision = context.objective.supervision
    best = asdict(progress.ended[-1].best) if progress.ended else None
    if context.folder:
        context.folder.event(
            "stage", progress.step, name=stage.name, steps=stage.steps, patience=stage.patience,
            train=None if stage.train is None else list(stage.train),
            freeze=list(recipe.surgery.frozen), changed=list(entered.changed),
            added=list(entered.new) if stage.add else [], trainable=counts["trainable"],
            total=counts["total"], lr=dict(stage.rates) or stage.optim(recipe.optim).lr,
            best_before=best, supervise=supervision and supervision.to_dict(),
        )  # fmt: skip
    if recipe.stages:
        line = _stage_line(context, stage, counts)
        context.display.stage(line, progress.step, most_steps(context.stages, progress.lengths))


def _stage_line(context: RunContext, stage: Stage, counts: dict[str, int]) -> str:
    rates: Any = stage.rates or {"": stage.optim(context.recipe.optim).lr}
    lr = ", ".join(f"{name} {rate:g}".strip() for name, rate in rates.items())
    layers = 0 if stage.add is None else stage.add.layers
    added = f"{layers} layer{'s' if layers > 1 else ''} added, " if layers else ""
    return (
        f"stage {context.current.index + 1} of {len(context.stages)}, {stage.name}: {added}"
        f"{counts['trainable']:,} of {counts['total']:,} parameters learn, lr {lr}"
    )


def record_step_kind(context: RunContext, step: int, step_once: EagerStep, packed: bool) -> None:
    """Record and show the kind of step (eager, compiled or captured) and the reason for it."""
    context.display.say(f"{step_once.kind} steps: {step_once.reason}")
    if context.folder:
        context.folder.event("stepping", step, how=step_once.kind, reason=step_once.reason,
                             packed=packed)  # fmt: skip


def _record_prefix(context: RunContext, progress: Progress) -> None:
    """Record the prefix cache (stored outputs of the frozen lowest layers), if there is one."""
    prefix = context.objective.prefix
    if prefix is not None and context.folder:
        context.folder.event("prefix", progress.step, **prefix.facts)


def flow_start(folder: Path, stage: int) -> Path:
    """Return the path of the file with the trainable weights at the start of a stage."""
    return folder / f"flow-start{f'-stage-{stage + 1}' if stage else ''}.safetensors"


def watch_stage(context: RunContext, progress: Progress, step: EagerStep) -> None:
    """Make a stage's step measure gradient flow, if the recipe asks for it.

    Gradient flow is the norms of gradients and updates in each part of the model at some steps.
    """
    settings = context.recipe.watch
    if settings is None:
        return
    # verify=False, because `_select` already verifies the frozen weights
    flow = watch(
        context.model, step.optimizer, settings.every_n_steps, distance=settings.distance,
        gradient_cosine=settings.gradient_cosine, dead_units=settings.dead_units,
        attention_entropy=settings.attention_entropy, verify=False,
        gradient=own_gradient if step.copies is None else step.copies.gradient,
    )  # fmt: skip
    flow.step, flow.first = progress.step, sum(progress.lengths)  # counted over the whole run
    if settings.distance:
        _measure_from_stage_start(context, progress, flow)
    if context.folder is not None:
        layout = flow.probe.layout
        front = [layout.names[i] for i in layout.front]
        event = parts_event(flow, settings.every_n_steps, front)
        context.folder.event("flow_parts", progress.step, stage=context.current.stage.name, **event)
    step.flow = flow.start(hooks=False)  # the step calls the flow itself


def _measure_from_stage_start(context: RunContext, progress: Progress, flow: LiveFlow) -> None:
    """Save the weights at the start of a stage, or load them if the stage is resumed.

    The distance that each weight has moved is measured from these values.
    """
    path = flow_start(context.path, progress.stage)
    names = {id(p): name for name, p in context.model.named_parameters()}
    trainable: dict[str, nn.Parameter] = {names[id(p)]: p for p in flow.probe.layout.parameters}
    if progress.stage_step == 0:
        weights = {name: full_tensor(p.detach()) for name, p in trainable.items()}
        if context.folder is not None:
            save_tensors(path, weights)
            progress.flow_start = file_digest(path)
            if progress.stage > 1:  # a run is never resumed more than one stage back
                flow_start(context.path, progress.stage - 2).unlink(missing_ok=True)
        context.world.wait()
        return
    stored = load_tensors(path)
    if file_digest(path) != progress.flow_start:
        raise FrostlabError(f"{path} was changed (its checksum differs)")
    if any(name not in stored or stored[name].shape != p.shape for name, p in trainable.items()):
        raise FrostlabError(f"{path} does not fit the model")
    flow.probe.start_at([local(place_like(stored[name], p)) for name, p in trainable.items()])


_EXCHANGE_SECONDS = 2.0  # approximate time between two exchanges of stop requests
_EXCHANGE_STEPS = 50  # the most steps between two exchanges


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT and SIGTERM; yield a function that returns whether one has arrived.

    A second signal raises KeyboardInterrupt at once. Only the main thread can catch signals; in
    other threads, the function always returns False.
    """
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


class StopRequest:
    """A function that returns whether the run must stop after a step.

    All processes must stop at the same step. They exchange their requests about every two seconds,
    and at least every 50 steps; more exchanges would make steps wait for the device. `loss` is the
    loss over all processes at the last exchange; a single process makes no exchange.
    """

    def __init__(self, asked: Callable[[], bool], compute: Compute) -> None:
        self._asked, self._world, self._device = asked, compute.world, compute.device
        # the steps of the next and the last exchange, and the time of the last one
        self._next, self._last, self._at = 1, 0, time.monotonic()
        self.loss: float | None = None

    def __call__(self, step: int, loss: Tensor) -> bool:
        """Return whether to stop; `loss` is this process's summand of the step's loss."""
        if self._world.size == 1:
            return self._asked()
        if step < self._next:
            return False
        now = time.monotonic()
        # seconds per step; the other processes add 0, so that the sum is the pace of rank 0
        pace = (now - self._at) / max(step - self._last, 1) if self._world.writes else 0.0
        answers = torch.tensor([float(self._asked()), pace, 0.0], device=self._device)
        answers[2] = loss.detach()
        asked, pace, self.loss = self._world.total(answers).tolist()
        self._next = step + max(1, min(_EXCHANGE_STEPS, int(_EXCHANGE_SECONDS / max(pace, 1e-9))))
        self._last, self._at = step, now
        return asked > 0
