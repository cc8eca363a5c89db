"""The setup of training: from recipe, data and device to a model that can take a step.

    prepared = prepare(recipe, data_dir)              data
    built    = build_model(recipe, prepared, stages)  the model on the CPU, changed and frozen by
                                                      the recipe's treatment and stages
    current  = place_model(built, …)                  the model on its device, with its loss
    feed     = make_feed(current, …)                  the training batches
    step     = make_step(current, …, feed)            the step, with its optimizer

A treatment changes, adapts or freezes weights before training. A stage is a sequence of steps that
train the same weights. Runs, later stages, resumed runs, the timed arms (variants) of comparisons
and the option `--check` (which estimates the time and memory of a run) use these functions;
`frostlab.training.restore` adds weights that a run has saved.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostlab.data.prepare import PreparedData, as_token_data, prepare
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import default_precision, free_bytes
from frostlab.errors import BadInput, first_line
from frostlab.models.build import build_for, config_json, weight_source
from frostlab.models.stack import take_apart
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Supervise, Train
from frostlab.roles.read import anatomy
from frostlab.timing.memory import estimated_memory, least_memory
from frostlab.training.batches.batch import TokenExamples, collate, evaluation_order
from frostlab.training.batches.feed import Feed, fixed_width, packs_examples
from frostlab.training.batches.prefix import build_prefix, check_prefix, prefix_depth
from frostlab.training.distributed import (
    Compute,
    World,
    blocks,
    preserve_buffers,
    sync_batch_norms,
)
from frostlab.training.stages import (
    Entered,
    Stage,
    check_stages,
    enter_stage,
    lr_scales,
    stages_of,
)
from frostlab.training.state import StageModel, Task
from frostlab.training.step import Batches, build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective, check_stack, logits_of, resolve_supervision
from frostlab.training.step.optimizer import build_optimizer
from frostlab.training.treatment import (
    audit_frozen,
    treat,
    wants_types,
    weight_digests,
)

# On a GPU, the first use of a batch width (the length to which examples are padded) costs as much
# time as training on _WIDTH_WORK / n tokens, where n is the number of elements of a layer's largest
# weight; both times grow with the number of layers. With the recipe imdb-gpt (n is 512 × 2048), a
# first use took 0.22 s on an H200, and a step of 4,500 tokens 3 ms.
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
    """Set autocast for each device, empty its cache, and nest it `deeper` levels (may be < 0)."""
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
    return BuiltModel(model, frozenset(touched), enter_stages(model, recipe, stages))


def enter_stages(model: nn.Module, recipe: Recipe, stages: Sequence[Stage]) -> Entered:
    """Enter stages one after another; return the result of entering the last one."""
    entered = Entered()
    for index, stage in enumerate(stages):
        entered = enter_stage(model, recipe, stage, index, entered)
    return entered


def place_model(
    built: BuiltModel, recipe: Recipe, stage: Stage, index: int, task: Task, compute: Compute
) -> StageModel:
    """Combine a stage's model with its loss and move both to the device."""
    objective = add_loss(built.model, recipe, stage.supervise, task).to(compute.device)
    sync_batch_norms(built.model, compute.world.size, compute.device)
    return StageModel(index, stage, built.entered, objective)


def add_loss(
    model: nn.Module, recipe: Recipe, supervise: Supervise | None, task: Task
) -> Objective:
    """Combine a model with its loss, and with the losses of the layers that are supervised."""
    objective = task.objective(model, recipe)
    if supervise is not None:
        objective.supervision = resolve_supervision(supervise, model)
    return objective


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
    """Return a stage's step with its optimizer.

    Recipe, batches and device decide whether the step is eager, compiled or captured (see
    `frostlab.training.step`).

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
        batches=Batches(
            tokens=_tokens_per_step(recipe, prepared, compute),
            shapes=feed.number_of_shapes,
            one_shape=compute.world.size > 1 and feed.one_shape,
        ),
        unused=_has_unused(current, recipe, prepared, task, compute),
        lr_scales=lr_scales(current.model, current.stage, current.index, current.entered),
        watches_inside=watches_inside,
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
    # in any order, the examples of at least one batch have this mean length or a larger one
    length = _mean_length(recipe, prepared)
    micro_batches = train.accumulate * world.size  # a device holds one of them at a time
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
        raise BadInput(
            f"{problem}; this model is too large for this device, even with the smallest batch"
        )
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
    current = audited(placed, recipe)
    frozen = {} if current.audit is None else current.audit.digests
    digests = {**first.digests, "frozen": frozen}
    return Assembly(prepared, first.stages, current, digests, first.config)


def audited(current: StageModel, recipe: Recipe) -> StageModel:
    """Return the stage's model with digests of its frozen weights, to verify them later."""
    return replace(current, audit=audit_frozen(current.model, recipe))
