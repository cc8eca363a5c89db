"""The setup of training: from recipe, data and device to a model that can take a step.

    prepared = prepare(recipe, data_dir)              data
    built    = build_model(recipe, prepared, stages)  the model on the CPU, changed and frozen by
                                                      the recipe's treatment and stages
    current  = place_model(built, …)                  the model on its device, with its loss
    feed     = make_feed(current, …)                  the training batches
    step     = make_step(current, …, feed)            the step, with its optimizer

A treatment changes, adapts or freezes weights before training. A stage is a sequence of steps that
train the same weights. Runs, later stages, resumed runs and the timed arms (variants) of
comparisons use these functions.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.data.eeg.recordings import PreparedData, as_token_data
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import default_precision, free_bytes
from frostlab.errors import BadInput, FrostlabError, UnfinishedRun, first_line
from frostlab.models.build import build_for, config_json, weight_source
from frostlab.models.stack import take_apart
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Train
from frostlab.records.checkpoint import PROGRESS, Checkpoint, checkpoint_name, checkpoints_in
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import build_stored
from frostlab.records.schema import Stage as StageRecord
from frostlab.roles.read import anatomy
from frostlab.storage import file_digest, finite
from frostlab.surgery.audit import Audit
from frostlab.timing.memory import estimated_memory, least_memory
from frostlab.training.batches.batch import TokenExamples, collate, evaluation_order
from frostlab.training.batches.feed import Feed, fixed_width, packs_examples
from frostlab.training.batches.prefix import build_prefix, check_prefix, prefix_depth
from frostlab.training.distributed import (
    Compute,
    World,
    blocks,
    place_like,
    preserve_buffers,
    reshard,
    sync_batch_norms,
)
from frostlab.training.stages import (
    Entered,
    Stage,
    check_stages,
    enter_stage,
    in_epochs,
    lr_scales,
    stages_of,
    state_by_slot,
    steps_per_epoch,
    surviving_state,
)
from frostlab.training.state import Best, Progress, RunContext, StageModel, Task
from frostlab.training.step import build_step
from frostlab.training.step.compiled import uncompile
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import check_stack, logits_of, resolve_supervision
from frostlab.training.step.optimizer import build_optimizer
from frostlab.training.treatment import (
    audit_frozen,
    count_parameters,
    state_digest,
    treat,
    wants_types,
    weight_digests,
)
from frostlab.typed import read

# Preparing a batch width on a GPU takes as long as training on _WIDTH_WORK / n tokens, where n is
# the number of elements of a layer's largest weight; both take longer with more layers. With
# imdb-gpt (n is 512 × 2048), a width took 0.22 s on an H200, and a step of 4,500 tokens 3 ms.
_WIDTH_WORK = 3.3e11


def choose_precision(train: Train, device: torch.device) -> torch.dtype:
    """Return the precision that a recipe sets; `auto` is bf16 on CUDA and float32 elsewhere."""
    if train.precision == "auto":
        return default_precision(device)
    return torch.bfloat16 if train.precision == "bf16" else torch.float32


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads inside this context; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_modes(device: torch.device) -> Iterator[None]:
    """Set three modes of torch as in a new process: the caller's modes must not change a run.

    Gradients are on, autocast is off (the step turns it on if the precision asks for it), and the
    default dtype is float32.
    """
    dtype = torch.get_default_dtype()
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", device.type)}
    # Leaving the outermost autocast empties its cache of cast weights. Inside a caller's autocast,
    # the step's autocast would not be the outermost: every step would use the first step's weights.
    depth = torch.autocast_increment_nesting()
    _set_autocast(dict.fromkeys(autocast, False), -depth)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        _set_autocast(autocast, depth - 1)


@contextmanager
def modes_of(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Compute as in the recipe's training: torch's default modes, and the recipe's threads."""
    with default_modes(device), with_threads(recipe.train.threads):
        yield


def _set_autocast(enabled: dict[str, bool], deeper: int) -> None:
    """Set autocast for each device, empty its cache, and add `deeper` levels of nesting."""
    torch.clear_autocast_cache()
    for kind, value in enabled.items():
        torch.set_autocast_enabled(kind, value)
    move = torch.autocast_increment_nesting if deeper > 0 else torch.autocast_decrement_nesting
    for _ in range(abs(deeper)):
        move()


def prepare_data(
    recipe: Recipe, data_dir: str | Path | None, task: Task, world: World
) -> PreparedData:
    """Prepare and check the data in rank 0 first; the other processes then read its cache."""
    folder = None if data_dir is None else Path(data_dir)
    if not world.writes:
        world.wait()
    prepared = prepare(recipe, folder)
    task.check(prepared)
    if world.writes:
        world.wait()
    return prepared


@dataclass(frozen=True)
class BuiltModel:
    """A recipe's model on the CPU, changed by its treatment and by the stages entered so far."""

    model: nn.Module
    # keys of the parts (`frostlab.roles.parts`) that the treatment changed or added
    touched: frozenset[str]
    entered: Entered  # the result of entering the last stage


def build_model(recipe: Recipe, prepared: PreparedData, stages: Sequence[Stage] = ()) -> BuiltModel:
    """Build the recipe's model, apply its treatment, and enter these stages one after another.

    The result has initial weights: entering a stage adds layers and freezes weights, but does not
    train them.
    """
    model = build_for(recipe, prepared)
    touched = treat(model, recipe)
    return BuiltModel(model, frozenset(touched), _enter_stages(model, recipe, stages))


def _enter_stages(model: nn.Module, recipe: Recipe, stages: Sequence[Stage]) -> Entered:
    """Enter stages one after another; return the result of entering the last one."""
    entered = Entered()
    for index, stage in enumerate(stages):
        entered = enter_stage(model, recipe, stage, index, entered)
    return entered


def place_model(
    built: BuiltModel, recipe: Recipe, stage: Stage, index: int, task: Task, compute: Compute
) -> StageModel:
    """Combine a stage's model with its loss and move both to the device."""
    objective = task.objective(built.model, recipe)
    objective.supervision = resolve_supervision(stage.supervise, built.model)
    objective.to(compute.device)
    sync_batch_norms(built.model, compute.world.size, compute.device)
    return StageModel(index, stage, built.entered, objective)


def make_feed(
    current: StageModel, recipe: Recipe, prepared: PreparedData, task: Task, compute: Compute
) -> Feed:
    """Return the training batches; first build the prefix cache if the recipe asks for one.

    The cache holds outputs of the frozen lowest layers; a stage without such layers has no cache.
    Call this function before `make_step` wraps the model, because the cache is computed with the
    model itself.
    """
    model, train = current.model, recipe.train
    types = wants_types(model)
    if train.cache_prefix is not None and (not recipe.stages or prefix_depth(model)):
        current.objective.prefix = build_prefix(model, prepared, train, compute.precision, types)
    examples = task.examples(prepared, prepared.splits["train"], compute.device, types)
    if isinstance(examples, TokenExamples):
        # of a language model's example, the last token is only a target
        longest = recipe.data.length + (recipe.data.task == "language")
        examples = replace(examples, width=fixed_width(train, longest))
    feed = Feed(examples, train, recipe.seed, compute, current.objective.prefix)
    # adapters do not change the largest tensor, so arms with and without them get equal widths
    largest = max(p.numel() for block in blocks(model) or [model] for p in block.parameters())
    feed.use_few_widths(current.stage.steps, _WIDTH_WORK / largest)
    return feed


def make_step(
    current: StageModel,
    recipe: Recipe,
    prepared: PreparedData,
    task: Task,
    compute: Compute,
    feed: Feed,
    *,
    watches_inside: bool = False,
) -> EagerStep:
    """Return a stage's step with its optimizer; recipe, batches and device decide its kind.

    `watches_inside`: whether the measurement of gradient flow (norms of gradients and updates)
    also reads activations of the forward pass.
    """
    current.objective.train()
    return build_step(
        current.objective,
        current.stage.optim(recipe.optim),
        recipe.train,
        compute,
        steps=current.stage.steps,
        tokens=_tokens_per_step(recipe, prepared, compute),
        shapes=feed.number_of_shapes,
        unused=_has_unused(current, recipe, prepared, task, compute),
        lr_scales=lr_scales(current.model, current.stage, current.index, current.entered),
        watches_inside=watches_inside,
        one_shape=compute.world.size > 1 and feed.one_shape,
    )


def _tokens_per_step(recipe: Recipe, prepared: PreparedData, compute: Compute) -> float:
    """Return the mean number of tokens, or EEG samples, that a process reads in a step."""
    return recipe.train.batch / compute.world.size * _mean_length(recipe, prepared)


def _mean_length(recipe: Recipe, prepared: PreparedData) -> float:
    """Return the mean length of a training example; padding counts if its width is fixed."""
    train = prepared.splits["train"]
    if isinstance(train, Tokens) and fixed_width(recipe.train, recipe.data.length) is None:
        return max(1.0, float(train.lengths.mean()) - (prepared.task == "language"))
    return float(recipe.data.length)


def _has_unused(
    current: StageModel, recipe: Recipe, prepared: PreparedData, task: Task, compute: Compute
) -> bool:
    """Return whether a trainable parameter gets no gradient on a small batch.

    DDP needs to know this in advance; without DDP, return False.
    """
    if compute.world.size == 1 or recipe.train.parallel == "fsdp":
        return False
    model, types = current.model, wants_types(current.model)
    examples = task.examples(prepared, prepared.splits["train"], torch.device("cpu"), types)
    batch = examples.collate(examples.epoch_order(2, recipe.seed, 0, bucket=False)[0])
    optimizer = build_optimizer(model, recipe.optim, fused=False)
    one_process = replace(compute, world=World())
    step = EagerStep(current.objective, optimizer, one_process, clip=None)
    with preserve_buffers(model):
        step.gradients([batch.to(compute.device)], batch.scored)
    unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
    optimizer.zero_grad(set_to_none=True)
    return unused


def check_model(
    built: BuiltModel, recipe: Recipe, prepared: PreparedData, task: Task, precision: torch.dtype
) -> None:
    """Refuse a model that cannot read the data in the form that the recipe asks for."""
    model = built.model
    if isinstance(recipe.model, PretrainedModel):
        _try_longest_example(model, as_token_data(prepared), recipe.model.name)
    packs = packs_examples(recipe.train)
    check_stack(task.objective(model, recipe), prepared, wants_types(model), packs)
    if recipe.train.cache_prefix is not None and not recipe.stages:
        check_prefix(model, prepared, recipe.train, precision)


def check_memory(
    model: nn.Module, recipe: Recipe, prepared: PreparedData, compute: Compute
) -> None:
    """Refuse a batch for which even a lower bound of a step's memory exceeds the free memory.

    Nothing is checked if the device does not report its free memory, if frostlab cannot run the
    model layer by layer, or with FSDP.
    """
    free, train, world = free_bytes(compute.device), recipe.train, compute.world
    if free is None or take_apart(model) is None or train.parallel == "fsdp":
        return
    structure, examples = anatomy(model), len(prepared.splits["train"])
    # at least one batch has a mean length of this or more, whatever the order
    length = _mean_length(recipe, prepared)
    micro_batches = train.accumulate * world.size  # of which a device holds one at a time
    least = least_memory(structure, compute.precision.itemsize, recipe.optim.facts)
    needed = least.of(min(train.batch, examples) / micro_batches * length)
    if needed <= free:
        return
    problem = (
        f"train.batch {train.batch} cannot fit: a step needs at least {needed / 1e9:.3g} GB, and "
        f"{compute.device} has {free / 1e9:.3g} GB free"
    )
    estimate = estimated_memory(
        structure, compute.precision.itemsize, language=False, optimizer=recipe.optim.facts
    )
    largest = int(estimate.tokens_in(free) / length) * micro_batches
    if largest < micro_batches:
        raise BadInput(f"{problem}; this model is too large for it, even with the smallest batch")
    advice = f"a batch of about {largest} would fit, or a larger one with train.accumulate"
    raise BadInput(f"{problem}; {advice}")


def _try_longest_example(model: nn.Module, prepared: Prepared, name: str) -> None:
    """Refuse a Hugging Face model that cannot read the longest training examples."""
    tokens = prepared.splits["train"]
    rows = evaluation_order(tokens.lengths, 2)[0]
    batch = collate(tokens, rows, prepared.pad, types=wants_types(model))
    model.eval()
    try:
        with torch.no_grad():
            shape = tuple(logits_of(model, batch.inputs).shape)
    except Exception as error:  # models raise errors of many types
        length = int(tokens.lengths.max())
        problem = f"model.name {name} cannot read an example of {length} tokens"
        raise BadInput(f"{problem} ({first_line(error)})") from None
    if len(shape) != (2 if prepared.classes else 3):
        raise BadInput(f"model.name {name} returns shape {shape}, not the shape of logits")


@dataclass(frozen=True)
class FirstStage:
    """A recipe's stages, and the model of the first one on the CPU."""

    stages: tuple[Stage, ...]
    built: BuiltModel
    digests: dict[str, Any]  # contents of digests.json, without the digests of frozen weights
    config: str | None  # a Hugging Face model's config.json; None for frostlab's own models


def build_first_stage(
    recipe: Recipe, prepared: PreparedData, task: Task, precision: torch.dtype
) -> FirstStage:
    """Build the first stage's model for prepared data; refuse invalid settings early."""
    stages = stages_of(recipe, len(prepared.splits["train"]))
    built = build_model(recipe, prepared)
    digests = {
        "data": prepared.digest,
        **weight_source(recipe.model),
        "weights": weight_digests(built.model),
        "touched": sorted(built.touched),
    }
    config = None
    if isinstance(recipe.model, PretrainedModel):  # before a stage adds layers
        config = config_json(built.model)
    check_model(built, recipe, prepared, task, precision)
    check_stages(built.model, recipe, stages, prepared, precision)
    entered = enter_stage(built.model, recipe, stages[0], 0, built.entered)
    return FirstStage(stages, replace(built, entered=entered), digests, config)


@dataclass(frozen=True)
class Assembly:
    """A recipe's data, its stages and the model of its first stage, ready to train."""

    prepared: PreparedData
    stages: tuple[Stage, ...]
    current: StageModel
    digests: dict[str, Any]  # contents of digests.json
    config: str | None  # as in `FirstStage`


def assemble(
    first: FirstStage, recipe: Recipe, prepared: PreparedData, task: Task, compute: Compute
) -> Assembly:
    """Move the first stage's model to its device; refuse a batch that cannot fit."""
    check_memory(first.built.model, recipe, prepared, compute)
    placed = place_model(first.built, recipe, first.stages[0], 0, task, compute)
    current = _audited(placed, recipe)
    frozen = {} if current.audit is None else current.audit.digests
    digests = {**first.digests, "frozen": frozen}
    return Assembly(prepared, first.stages, current, digests, first.config)


def _audited(current: StageModel, recipe: Recipe) -> StageModel:
    """Return the stage's model with digests of its frozen weights, to verify them later."""
    return replace(current, audit=audit_frozen(current.model, recipe))


def next_stage(context: RunContext, progress: Progress, step: EagerStep) -> dict[str, Tensor]:
    """End the current stage and enter the next one, from the best weights of the current stage.

    Return the optimizer state that the next stage keeps.
    """
    reshard(context.objective)
    state = state_by_slot(context.model, step.optimizer)
    if getattr(step, "compiles", False):
        uncompile(context.objective)
    best = best_checkpoint(context.path, progress)
    progress.ended.append(stage_facts(context, progress))
    progress.best, progress.stopped_early = Best(context.recipe.metric), False
    progress.epoch_seconds, progress.metrics, progress.flow_start = 0.0, {}, None
    progress.began = progress.seconds["total"]
    index = progress.stage
    built = build_model(context.recipe, context.prepared, context.stages[:index])
    load_weights(built.model, best)
    stage = context.stages[index]
    # The model is still on the CPU, so all processes draw equal new layers.
    entered = enter_stage(built.model, context.recipe, stage, index, built.entered)
    _replace_model(context, replace(built, entered=entered), index)
    audit = context.current.audit
    progress.frozen = {} if audit is None else audit.digests
    context.world.wait()  # until every process has read the checkpoint
    return surviving_state(context.model, entered, state) if stage.keep_state else {}


def read_progress(context: RunContext, checkpoint: Checkpoint) -> Progress:
    """Return a checkpoint's progress; refuse one that does not fit checkpoint and recipe."""
    where = checkpoint.folder / "progress.json"
    progress = Progress.from_dict(checkpoint.progress(), where)
    stage_step, best = progress.stage_step, progress.best
    if (progress.step, progress.stage) != checkpoint.place:
        raise BadInput(f"{where}: `step` and `ended` belong to another checkpoint")
    if progress.stage >= len(context.stages) or min(progress.lengths, default=0) < 0:
        raise BadInput(f"{where}: `ended` does not fit the stages of the recipe")
    if not 0 <= stage_step <= context.stages[progress.stage].steps:
        raise BadInput(f"{where}: step {progress.step} is not a step of this stage")
    if best.metric != context.recipe.metric or (best.value is None) != (best.step is None):
        raise BadInput(
            f"{where}: `best` should be of {context.recipe.metric}, with both value and step, or "
            "with neither"
        )
    return progress


def restore(context: RunContext, progress: Progress, checkpoint: Checkpoint) -> None:
    """Rebuild the model if the checkpoint is of a later stage, and load the saved weights."""
    if progress.stage:
        stages = context.stages[: progress.stage + 1]
        built = build_model(context.recipe, context.prepared, stages)
        _replace_model(context, built, progress.stage)
        if (audit := context.current.audit) is not None:
            context.current = replace(context.current, audit=Audit(audit.model, progress.frozen))
    context.current = replace(context.current, frozen=checkpoint.frozen())
    load_weights(context.model, checkpoint)


def _replace_model(context: RunContext, built: BuiltModel, index: int) -> None:
    """Place a built model and make it the current stage's model."""
    placed = place_model(
        built, context.recipe, context.stages[index], index, context.task, context.compute
    )
    context.current = _audited(placed, context.recipe)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a model, sharded or not.

    A checkpoint stores tied weights once, so their other names may be missing from it.
    """
    stored = checkpoint.model()
    state = model.state_dict()
    for name, value in stored.items():
        own = state.get(name)
        if own is None or value.shape != own.shape or value.dtype != own.dtype:
            raise FrostlabError(f"{checkpoint.folder} does not fit the model ({name!a:.80})")
    for name in state.keys() - stored.keys():
        if not any(state[name].data_ptr() == state[tied].data_ptr() for tied in stored):
            raise FrostlabError(f"{checkpoint.folder} does not fit the model ({name})")
    weights = {name: place_like(value, state[name]) for name, value in stored.items()}
    model.load_state_dict(weights, strict=False)


def best_checkpoint(folder: Path, progress: Progress) -> Checkpoint:
    """Return the current stage's best checkpoint."""
    if progress.best.step is None:
        raise FrostlabError(f"no evaluation gave a finite {progress.best.metric}")
    place = (progress.best.step, progress.stage)
    for checkpoint in checkpoints_in(folder):
        if checkpoint.place == place:
            return checkpoint
    raise FrostlabError(f"{folder}/checkpoints/{checkpoint_name(*place)} is missing")


def stage_facts(context: RunContext, progress: Progress) -> StageRecord:
    """Return the record of the current stage; epochs are counted from the stage's beginning."""
    best, counts = progress.best, count_parameters(context.model)
    per_epoch = steps_per_epoch(len(context.prepared.splits["train"]), context.recipe.train)
    began = sum(progress.lengths)
    values = {
        "name": context.stages[progress.stage].name,
        "steps": progress.stage_step,
        "epochs": in_epochs(progress.stage_step, per_epoch),
        "stopped_early": progress.stopped_early,
        "best": {
            "metric": best.metric,
            "value": best.value,
            "step": best.step,
            "epoch": None if best.step is None else in_epochs(best.step - began, per_epoch),
        },
        "metrics": progress.metrics,
        "seconds": round(progress.seconds.get("total", 0.0) - progress.began, 4),
        "trainable": counts["trainable"],
        "total": counts["total"],
    }
    return read(StageRecord, finite(values), "the record of a stage")


def best_model(record: RunRecord) -> nn.Module:
    """Load a run's best weights into its model, on the CPU and ready to evaluate.

    Only the run's folder is read, unless the model has Python code of its own. Changed files are
    refused. For a run that has not finished, a warning names the step of the weights: the best of
    the current stage so far, or the newest if the stage has not been evaluated yet.
    """
    recipe, _ = record.recipe, record.start  # `start` refuses a record of another schema
    checkpoint, is_best = _best_saved(record)
    stages = stages_of(recipe, record.data.splits["train"].examples)[: checkpoint.stage + 1]
    with default_modes(torch.device("cpu")), torch.random.fork_rng(devices=[]):
        model = build_stored(recipe, record.folder)
        treat(model, recipe, init=False)
        _enter_stages(model, recipe, stages)
    load_weights(model, checkpoint)
    finished = record.ending == "finished"
    if finished and state_digest(model) != record.result.weights_digest:
        raise BadInput(f"{checkpoint.folder} does not hold the reported weights")
    if not finished:
        which = "best weights so far" if is_best else "newest weights"
        warnings.warn(
            f"{record.folder} has not finished; its {which} are used, those of "
            f"step {checkpoint.step}",
            UnfinishedRun,
            stacklevel=3,
        )
    return model.eval()


def _best_saved(record: RunRecord) -> tuple[Checkpoint, bool]:
    """Return the checkpoint whose weights to use, and whether they are the best.

    This is the checkpoint that `result.json` of a finished run names, or else the current stage's
    best one, or the newest one if the stage has not been evaluated yet.
    """
    saved = {checkpoint.place: checkpoint for checkpoint in checkpoints_in(record.folder)}
    if record.ending == "finished":
        name = record.result.checkpoint
        for checkpoint in saved.values():
            if f"checkpoints/{checkpoint.folder.name}" == name:
                return checkpoint, True
        raise BadInput(f"{record.folder} has no weights: {name} is missing")
    for checkpoint in reversed(saved.values()):
        if checkpoint.damaged_file(PROGRESS) is None:
            where = checkpoint.folder / PROGRESS
            step = Progress.from_dict(checkpoint.progress(), where).best.step
            best = None if step is None else saved.get((step, checkpoint.stage))
            return (checkpoint, False) if best is None else (best, True)
    ended = record.ending == "diverged"
    advice = "train it again" if ended else "continue it with --resume"
    raise BadInput(f"{record.folder} has no weights: the run has no undamaged checkpoint; {advice}")


def check_same_data(record: RunRecord, prepared: PreparedData) -> None:
    """Refuse data other than those of the run."""
    if prepared.digest != record.digests.data:
        changed = ", ".join(_changed_files(record)[:3])
        listed = f": {changed}" if changed else ""
        raise BadInput(f"the data of {record.folder} have changed since the run{listed}")


def _changed_files(record: RunRecord) -> list[str]:
    """Return the files of a run's data that are missing or have another content now."""
    recorded = {file.path: file for split in record.data.splits.values() for file in split.files}
    return [
        path
        for path, file in recorded.items()
        if not Path(path).is_file() or file_digest(Path(path)) != file.sha256
    ]
