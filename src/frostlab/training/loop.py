"""The one loop: it trains, times, evaluates, keeps checkpoints and knows when to stop."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from frostlab.data import Prepared
from frostlab.recipe import Recipe
from frostlab.records.checkpoints import Checkpoint, keep_only, save_checkpoint
from frostlab.records.folder import RunFolder
from frostlab.surgery import Audit
from frostlab.training.batching import (
    collate,
    epoch_order,
    order_digest,
    scored_counts,
    shared,
    widest,
)
from frostlab.training.distributed import World, like, share, whole
from frostlab.training.evaluation import evaluate
from frostlab.training.interruptions import StopLook
from frostlab.training.ledger import Entry, Ledger
from frostlab.training.optimizer import (
    build_optimizer,
    optimizer_tensors,
    rate_at,
    restore_optimizer,
)
from frostlab.training.patience import reaches
from frostlab.training.progress import Display, Progress
from frostlab.training.stages import Stage, stage_at, steps_per_epoch
from frostlab.training.step import Diverged, EagerStep, seed_step
from frostlab.training.stopwatch import Stopwatch
from frostlab.training.treating import wants_types


class Stopped(Exception):
    """The run was asked to stop, and has kept a checkpoint."""


@dataclass
class Setting:
    """All that the loop works with; it changes only the model and the progress."""

    recipe: Recipe
    prepared: Prepared
    model: nn.Module  # on its device, treated, not wrapped
    stages: tuple[Stage, ...]
    device: torch.device
    precision: torch.dtype
    world: World
    folder: RunFolder | None  # None in processes that do not write
    frozen: Audit | None
    display: Display
    asked_to_stop: Callable[[], bool]


def train(
    setting: Setting, progress: Progress, watch: Stopwatch, resumed: Checkpoint | None
) -> None:
    """Train to the end, to exhausted patience, or until asked to stop."""
    recipe, world = setting.recipe, setting.world
    tokens, pad = setting.prepared.splits["train"], setting.prepared.pad
    lengths, scored = tokens.lengths, scored_counts(tokens)
    real = lengths if tokens.labels is not None else lengths - 1  # the last is only a target
    batch, per_epoch = recipe.train.batch, steps_per_epoch(len(tokens), recipe.train.batch)
    total = sum(stage.steps for stage in setting.stages)
    types, most = wants_types(setting.model), widest(tokens, setting.device)

    setting.model.train()
    wrapped = share(setting.model, world, recipe.train.parallel, unused=_any_unused(setting))
    optimizer = build_optimizer(setting.model, recipe.optim, fused=_fusable(setting))
    if resumed is not None:
        restore_optimizer(setting.model, optimizer, resumed.optimizer(), like)
    step_once = EagerStep(wrapped, optimizer, setting.precision, recipe.optim.clip, world)
    ledger = Ledger(step_once, watch, world, setting.folder)
    asked = StopLook(setting.asked_to_stop, world, setting.device)

    setting.display.begin(progress.step, total, per_epoch, setting.prepared.caution)
    watch.start()
    epoch_began = watch.training_seconds() - progress.epoch_seconds
    epoch, place = divmod(progress.step, per_epoch)
    order = epoch_order(lengths, batch, recipe.seed, epoch, recipe.train.bucket)
    while progress.step < total and not progress.stopped_early:
        stage_index, stage_step = stage_at(setting.stages, progress.step)
        stage = setting.stages[stage_index]
        if stage_step == 0 and setting.folder:
            setting.folder.event("stage", progress.step, name=stage.name, steps=stage.steps,
                                 freeze=list(stage.freeze))  # fmt: skip

        with watch.phase("data"):
            rows = order[place]
            parts = [collate(tokens, part, pad, types=types, most=most) for part in
                     shared(rows, world.rank, world.size, recipe.train.accumulate)]  # fmt: skip
        seed_step(recipe.seed, progress.step, world.rank, setting.device)
        rate = rate_at(stage_step, stage.steps, recipe.optim)
        began = watch.mark()
        outcome = step_once(parts, int(scored[rows].sum()), rate)
        watch.lap(began)
        progress.step, place = progress.step + 1, place + 1
        padded = sum(part.inputs["input_ids"].numel() for part in parts) * world.size
        ledger.add(Entry(progress.step, outcome, rate, int(real[rows].sum()), padded, len(rows)))
        setting.display.advance(progress.step, ledger.loss)

        if place == per_epoch:
            watch.wait_for_device()
            spent = watch.training_seconds() - epoch_began
            progress.order = order_digest(order, progress.order)
            ledger.settle()
            if setting.folder:
                setting.folder.event("epoch", progress.step, epoch=epoch, seconds=round(spent, 4),
                                     order=progress.order)  # fmt: skip
            epoch, place, epoch_began = epoch + 1, 0, watch.training_seconds()
            if progress.step < total:
                with watch.phase("data"):
                    order = epoch_order(lengths, batch, recipe.seed, epoch, recipe.train.bucket)

        improved = False
        looks = _due(recipe.evaluate.every, progress.step, per_epoch, total)
        if looks:
            ledger.settle()
            improved = _look(setting, progress, watch)
            if progress.best.exhausted(stage.patience):
                progress.stopped_early = True
        stop = asked(progress.step)
        if (looks and (improved or recipe.train.checkpoint is None)) or stop or _due(
            recipe.train.checkpoint, progress.step, per_epoch, total
        ):  # fmt: skip
            ledger.settle()
            progress.epoch_seconds = watch.training_seconds() - epoch_began
            _keep(setting, progress, watch, optimizer)
        if stop and progress.step < total and not progress.stopped_early:
            raise Stopped
    ledger.settle()
    watch.wait_for_device()
    watch.stop()
    progress.seconds = watch.seconds


def _due(every: int | str | None, step: int, per_epoch: int, total: int) -> bool:
    """Whether something done every so many steps, or epochs, is due; at the end it always is."""
    if every is None:
        return step == total
    return step == total or step % (per_epoch if every == "epoch" else int(every)) == 0


def _look(setting: Setting, progress: Progress, watch: Stopwatch) -> bool:
    """Evaluate on the split that selects; prove that what is frozen has not moved."""
    prepared, recipe = setting.prepared, setting.recipe
    split = "tune" if "tune" in prepared.splits else "report"
    before = watch.seconds["total"]
    with watch.phase("validation", device=True):
        metrics = measure(setting, split, progress.step)
        if setting.frozen is not None:
            setting.frozen.verify(setting.model)
    progress.last = metrics
    value = metrics[recipe.metric]
    improved = progress.best.see(value, progress.step)
    target = recipe.evaluate.target
    if target is not None and progress.target is None and reaches(recipe.metric, value, target):
        progress.target = {"step": progress.step, "seconds": round(before, 4)}
    if setting.folder:
        verified = 0 if setting.frozen is None else len(setting.frozen.digests)
        setting.folder.event("evaluation", progress.step, split=split, metrics=metrics,
                             best=improved, frozen_verified=verified)  # fmt: skip
    setting.display.evaluated(progress.step, metrics, improved)
    return improved


def measure(setting: Setting, split: str, step: int) -> dict[str, float]:
    """Every metric of a split, over all processes, the selecting one first."""
    train, metric = setting.recipe.train, setting.recipe.metric
    metrics = evaluate(
        setting.model,
        setting.prepared,
        setting.prepared.splits[split],
        setting.recipe.evaluate.batch or train.batch // train.accumulate,
        device=setting.device,
        precision=setting.precision,
        world=setting.world,
        types=wants_types(setting.model),
    )
    if not math.isfinite(metrics["loss"]):
        spoilt = (n for n, p in setting.model.named_parameters() if not whole(p).isfinite().all())
        raise Diverged(step, next(spoilt, "the loss of an evaluation"), metrics["loss"])
    return {metric: metrics[metric], **metrics}


def _keep(
    setting: Setting, progress: Progress, watch: Stopwatch, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint; then remove those that it replaces."""
    with watch.phase("checkpoint", device=True):
        model = {name: whole(value) for name, value in setting.model.state_dict().items()}
        state = optimizer_tensors(setting.model, optimizer)
        state = {name: whole(value) for name, value in state.items()}
        progress.seconds = watch.seconds
        if setting.folder:
            path = setting.folder.path
            save_checkpoint(path, progress.step, model, state, progress.to_dict())
            setting.folder.event("checkpoint", progress.step, best=progress.best.step)
            keep_only(path, progress.step, progress.best.step)
        setting.world.wait()


def _fusable(setting: Setting) -> bool:
    """One kernel for all parameters, where they are whole and the device has one."""
    sharded = setting.world.size > 1 and setting.recipe.train.parallel == "fsdp"
    return not (sharded and setting.device.type == "cpu")


def _any_unused(setting: Setting) -> bool:
    """Whether some trainable parameter gets no gradient, which DDP must be told beforehand."""
    if setting.world.size == 1 or setting.recipe.train.parallel == "fsdp":
        return False
    tokens, model = setting.prepared.splits["train"], setting.model
    rows = epoch_order(tokens.lengths, 2, setting.recipe.seed, 0, bucket=False)[0]
    batch = collate(tokens, rows, setting.prepared.pad, types=wants_types(model))
    optimizer = build_optimizer(model, setting.recipe.optim, fused=False)
    EagerStep(model, optimizer, setting.precision, None, World()).gradients([batch], batch.scored)
    unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
    optimizer.zero_grad(set_to_none=True)
    return unused
