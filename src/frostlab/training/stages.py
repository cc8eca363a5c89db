"""The stages of a run: their settings, their steps, and the change of the model between them.

Entering a stage adds its layers and sets which weights learn. By default, weights that continue to
learn keep their optimizer state. A part is a parameter, or the rows of a parameter that have one
role, such as query; a fixed part is one that the architecture never trains.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from frostlab.data.prepare import PreparedData
from frostlab.errors import BadInput, UnknownArchitecture
from frostlab.recipe.recipe import AGES, Add, Recipe, StageSettings, stage_names
from frostlab.recipe.settings import Every, Optim, StepDecay, Supervise, Train
from frostlab.roles.parts import Rows, Slot
from frostlab.roles.read import anatomy, survey
from frostlab.storage import derive_seed
from frostlab.surgery.freeze import learn_only, thaw
from frostlab.surgery.grow import grow
from frostlab.training.batches.prefix import check_prefix, prefix_depth
from frostlab.training.distributed import full_tensor
from frostlab.training.step.objective import resolve_supervision


@dataclass(frozen=True)
class Stage:
    """The settings of one stage, a sequence of steps that train the same weights."""

    name: str
    steps: int  # most steps; the stage may end earlier by `patience`
    patience: int | None = None  # evaluations without improvement before the stage ends
    # selections of parts to train, such as `query` or `layers[0]` (None: all); parts that the
    # treatment freezes never learn
    train: tuple[str, ...] | None = None
    add: Add | None = None  # layers to add at the beginning
    lr: float | None = None  # the highest learning rate; None: optim.lr
    # a selection, `new` (the newest layers) or `old` (all others) → learning rate
    rates: Mapping[str, float] = field(default_factory=dict)
    supervise: Supervise = field(default_factory=Supervise)
    keep_state: bool = True  # whether weights that learned before keep their optimizer state
    per_epoch: int = 1  # steps per epoch

    def optim(self, optim: Optim) -> Optim:
        """Return the run's optimizer settings for this stage, with intervals converted to steps."""
        schedule = optim.schedule
        if isinstance(schedule, StepDecay):
            steps = in_steps(schedule.every, self.per_epoch)
            schedule = schedule.model_copy(update={"every": steps})
        return optim.model_copy(update={"lr": self.lr or optim.lr, "schedule": schedule})


def in_steps(every: Every, per_epoch: int) -> int:
    """Convert an interval in steps or epochs to a number of steps."""
    if isinstance(every, int):
        return every
    return per_epoch * (1 if every == "epoch" else int(every.removesuffix(" epochs")))


def stage_at(stages: Sequence[Stage], step: int, ended: Sequence[int] = ()) -> tuple[int, int]:
    """Return the index of the stage that a step belongs to, and the step's index within the stage.

    Stages and steps are counted from 0. `ended` holds the number of steps of each finished stage,
    which may be fewer than planned.
    """
    if step < 0:
        raise BadInput(f"step {step} is before the first stage")
    remaining = step
    for index, stage in enumerate(stages):
        steps = ended[index] if index < len(ended) else stage.steps
        if remaining < steps:
            return index, remaining
        remaining -= steps
    raise BadInput(f"step {step} is past the end of the last stage")


def most_steps(stages: Sequence[Stage], ended: Sequence[int] = ()) -> int:
    """Return how many steps a run takes if no further stage ends early."""
    return sum(ended) + sum(stage.steps for stage in stages[len(ended) :])


def steps_per_epoch(examples: int, train: Train) -> int:
    """Return the number of steps in an epoch; one batch may be smaller without `drop_last`."""
    if not train.drop_last:
        return -(-examples // train.batch)
    if examples < train.batch:
        raise BadInput(
            f"train.drop_last leaves no step: {examples:,} training examples do not fill "
            f"train.batch {train.batch}"
        )
    return examples // train.batch


def in_epochs(steps: int, per_epoch: int) -> float:
    """Convert a number of steps to epochs, with six significant digits."""
    return float(f"{steps / per_epoch:.6g}")


def total_steps(train: Train, examples: int) -> int:
    """Return the number of steps of a stage that does not set its own number."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    return train.epochs * steps_per_epoch(examples, train)


def stages_of(recipe: Recipe, examples: int) -> tuple[Stage, ...]:
    """Return a recipe's stages, completed by the run's settings; by default, a single stage."""
    settings = recipe.stages or (StageSettings(),)
    names = stage_names(recipe.stages)
    stages = tuple(_stage(recipe, *item, examples) for item in zip(names, settings, strict=True))
    warmup = recipe.optim.warmup
    for index, stage in enumerate(stages):
        if warmup >= 1 and warmup >= stage.steps:
            where = f" of stages.{index}" if recipe.stages else ""
            raise BadInput(
                f"optim.warmup {warmup:g} takes all {stage.steps} steps{where}; "
                "lower it, or set a fraction below 1"
            )
    return stages


def _stage(recipe: Recipe, name: str, settings: StageSettings, examples: int) -> Stage:
    steps = settings.steps or total_steps(recipe.train, examples)
    if settings.epochs is not None:
        steps = settings.epochs * steps_per_epoch(examples, recipe.train)
    rates = settings.lr if isinstance(settings.lr, dict) else {}
    return Stage(
        name,
        steps,
        patience=settings.patience or recipe.evaluate.patience,
        train=settings.train,
        add=settings.add,
        lr=max(rates.values()) if isinstance(settings.lr, dict) else settings.lr,
        rates=rates,
        supervise=settings.supervise or recipe.supervise,
        keep_state=settings.keep_state,
        per_epoch=steps_per_epoch(examples, recipe.train),
    )


# Slot → optimizer state. A slot is a parameter of the unmodified model, which freezing may split
# into several parameters. For each of these that was trained, the list has its rows and its state.
StateBySlot = dict[str, list[tuple[Rows, dict[str, Tensor]]]]


@dataclass(frozen=True)
class Entered:
    """The result of entering a stage: the model's newest layers, and its tensors' former names."""

    new: tuple[str, ...] = ()  # name prefixes of the layers that were added last
    old_names: dict[str, str] | None = None  # present name → former name; None: no layer was added
    changed: tuple[str, ...] = ()  # older tensors whose values changed when layers were added

    def is_new(self, name: str) -> bool:
        """Return whether a tensor is in one of the newest layers."""
        return any(name.startswith(f"{prefix}.") for prefix in self.new)


def enter_stage(
    model: nn.Module, recipe: Recipe, stage: Stage, index: int, last: Entered
) -> Entered:
    """Add a stage's layers and set which weights learn.

    `last` is the result of entering the previous stage. The seed of new layers depends on the
    run's seed and on the stage. If the recipe has no stages, the model is left as it is.
    """
    if not recipe.stages:
        return last
    entered = Entered(last.new)
    if stage.add is not None:
        entered = _grow(model, recipe, stage, index)
    learning = _parts_that_learn(model, recipe, stage, index)
    if not learning:
        raise BadInput(
            f"stages.{index}.train trains nothing: the treatment freezes all parts that it "
            "selects, or the architecture fixes them"
        )
    learn_only(model, learning)
    return entered


def _grow(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> Entered:
    """Add the stage's layers to the model; record the names that the other tensors had before."""
    add = stage.add
    assert add is not None
    try:
        thaw(model)  # `enter_stage` freezes parts again
        names = list(survey(model)[1])
        with torch.random.fork_rng([]):
            torch.manual_seed(derive_seed(recipe.seed, f"stage {index}"))
            grown = grow(model, add.layers, add.at, add.init)
    except BadInput as error:
        raise _at(f"stages.{index}.add", error) from None
    entered = Entered(grown.names)
    moved = [name for name in survey(model)[1] if not entered.is_new(name)]
    return Entered(grown.names, dict(zip(moved, names, strict=True)), grown.changed)


def _parts_that_learn(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> set[str]:
    """Return the keys of the selected parts that are neither fixed nor frozen by the treatment."""
    structure, frozen = anatomy(model), recipe.surgery.frozen
    learning = {part.key for part in structure.parts if part.state != "fixed"}
    try:
        if stage.train is not None:
            learning &= {part.key for part in structure.select(*stage.train)}
    except BadInput as error:
        raise _at(f"stages.{index}.train", error) from None
    return learning - {part.key for part in structure.select(*frozen)} if frozen else learning


def lr_scales(model: nn.Module, stage: Stage, index: int, entered: Entered) -> dict[str, float]:
    """Return each trainable parameter's factor of the stage's learning rate; empty: all are 1.

    A selection's rate takes precedence over `new` and `old`; selections that overlap are refused.
    """
    if not stage.rates:
        return {}
    (structure, slots), at = survey(model), f"stages.{index}.lr"
    selected_by: dict[str, str] = {}
    learning = [part for part in structure.parts if part.state == "trainable"]
    for selection in (key for key in stage.rates if key not in AGES):
        try:
            keys = {part.key for part in structure.select(selection)}
        except BadInput as error:
            raise _at(f"{at}.{selection}", error) from None
        for part in (part for part in learning if part.key in keys):
            other = selected_by.setdefault(part.key, selection)
            if other != selection:
                raise BadInput(f"{at}: `{other}` and `{selection}` both name {part.key}")
    if "new" in stage.rates and not entered.new:
        raise BadInput(f"{at}.new: no stage has added a layer so far; add one with stages.*.add")
    names = {id(p): name for name, p in model.named_parameters()}
    rate_keys: dict[str, str] = {}
    for part in learning:
        key = selected_by.get(part.key, "new" if entered.is_new(part.name) else "old")
        if key not in stage.rates:
            raise BadInput(f"{at} has no rate for {part.key}, which learns; add `{key}`")
        name = names[id(slots[part.name].piece_of(part.rows).parameter)]
        other = rate_keys.setdefault(name, key)
        if other != key:
            raise BadInput(f"{at}: `{other}` and `{key}` set two rates for one tensor, {part.name}")
    for key in stage.rates:
        if key not in rate_keys.values():
            raise BadInput(f"{at}.{key} applies to no part that learns in this stage")
    assert stage.lr is not None
    return {name: stage.rates[key] / stage.lr for name, key in rate_keys.items()}


def state_by_slot(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBySlot:
    """Return the optimizer's state, unsharded, by the name of the slot."""
    return {
        slot.name: [
            (piece.rows, {key: full_tensor(value) for key, value in state.items()})
            for piece in slot.pieces
            if (state := optimizer.state.get(piece.parameter))
        ]
        for slot in survey(model)[1].values()
    }


def surviving_state(model: nn.Module, entered: Entered, state: StateBySlot) -> dict[str, Tensor]:
    """Return the optimizer state of parameters that continue to learn.

    Rows that begin to learn have zero moments and the step count of their parameter's other rows.
    The keys are `parameter//entry`, as in checkpoints.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    surviving: dict[str, Tensor] = {}
    for slot in survey(model)[1].values():
        moved = entered.old_names
        old_name = slot.name if moved is None else moved.get(slot.name, "")
        for piece in slot.pieces:
            if (name := names.get(id(piece.parameter))) is not None:
                kept = _state_of_rows(piece.rows, slot, state.get(old_name, []))
                surviving |= {f"{name}//{key}": value for key, value in kept.items()}
    return surviving


def _state_of_rows(
    rows: Rows, slot: Slot, state: list[tuple[Rows, dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """Return the state of these rows of a slot; empty if none of them has learned."""
    learned, whole = torch.zeros(rows.size, dtype=torch.bool), dict[str, Tensor]()
    for old_rows, values in state:
        if old_rows == rows:
            return values
        old_rows.put(learned, torch.ones(len(old_rows), dtype=torch.bool))
        for key, value in values.items():
            if value.ndim:  # a moment
                old_rows.put(whole.setdefault(key, value.new_zeros(slot.shape)), value, slot.axis)
            else:  # the step count
                whole[key] = torch.maximum(value, whole.get(key, value))
    if not rows.take(learned).any():
        return {}
    return {
        key: rows.take(value, slot.axis).contiguous() if value.ndim else value
        for key, value in whole.items()
    }


def check_stages(
    model: nn.Module,
    recipe: Recipe,
    stages: Sequence[Stage],
    prepared: PreparedData,
    precision: torch.dtype,
) -> None:
    """Enter all stages on a copy of the model; refuse an impossible stage before a run begins."""
    if not recipe.stages:
        return
    copied, entered, cached = copy.deepcopy(model), Entered(), False
    for index, stage in enumerate(stages):
        try:
            entered = enter_stage(copied, recipe, stage, index, entered)
        except UnknownArchitecture as error:
            raise _at("stages", error) from None
        lr_scales(copied, stage, index, entered)
        try:
            resolve_supervision(stage.supervise, copied)
        except BadInput as error:
            raise _at(f"stages.{index}", error) from None
        last = index == len(stages) - 1
        # at least one stage must have layers to cache
        if recipe.train.cache_prefix is not None and (
            prefix_depth(copied) or (last and not cached)
        ):
            check_prefix(copied, prepared, recipe.train, precision)
            cached = True


def _at(where: str, error: Exception) -> BadInput:
    """Return a `BadInput` that names the recipe key at fault."""
    return BadInput(f"{where}: {error}")
