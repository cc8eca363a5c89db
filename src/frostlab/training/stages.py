"""A run is a list of stages; which stage a step is in is a pure function."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.data.eeg.recordings import Material
from frostlab.errors import BadInput, UnknownArchitecture
from frostlab.recipe.recipe import WORDS, Add, Recipe, StageSettings, stage_names
from frostlab.recipe.settings import Every, Optim, StepDecay, Supervise, Train
from frostlab.roles.parts import Rows
from frostlab.roles.read import anatomy, survey
from frostlab.storage import derive_seed
from frostlab.surgery.freeze import learn_only, thaw
from frostlab.surgery.grow import grow
from frostlab.training.batches.prefix import check_prefix, prefix_depth
from frostlab.training.distributed import full_tensor
from frostlab.training.step.objective import resolve_supervision


@dataclass(frozen=True)
class Stage:
    """Steps with one set of trainable weights, one schedule and one patience."""

    name: str
    steps: int  # at most
    patience: int | None = None
    train: tuple[str, ...] | None = None  # None: what the treatment leaves
    add: Add | None = None
    lr: float | None = None  # the highest of the rates; None: optim.lr
    rates: Mapping[str, float] = field(default_factory=dict)  # by selection, `new` or `old`
    supervise: Supervise = field(default_factory=Supervise)
    keep_state: bool = True
    per_epoch: int = 1  # steps

    def optim(self, optim: Optim) -> Optim:
        """The run's settings with this stage's learning rate, its schedule counted in steps."""
        schedule = optim.schedule
        if isinstance(schedule, StepDecay):
            steps = in_steps(schedule.every, self.per_epoch)
            schedule = schedule.model_copy(update={"every": steps})
        return optim.model_copy(update={"lr": self.lr or optim.lr, "schedule": schedule})


def in_steps(every: Every, per_epoch: int) -> int:
    """How many steps lie between two of what happens every so many steps or epochs."""
    if isinstance(every, int):
        return every
    return per_epoch * (1 if every == "epoch" else int(every.removesuffix(" epochs")))


def stage_at(stages: Sequence[Stage], step: int, ended: Sequence[int] = ()) -> tuple[int, int]:
    """The stage that a step (from 0) belongs to, and the step's place inside it.

    `ended` says how many steps the stages took that are over, perhaps fewer than planned.
    """
    if step < 0:
        raise BadInput(f"step {step} is before the first stage")
    place = step
    for index, stage in enumerate(stages):
        steps = ended[index] if index < len(ended) else stage.steps
        if place < steps:
            return index, place
        place -= steps
    raise BadInput(f"step {step} is past the end of the last stage")


def most_steps(stages: Sequence[Stage], ended: Sequence[int] = ()) -> int:
    """How many steps a run takes if no stage ends early from now on."""
    return sum(ended) + sum(stage.steps for stage in stages[len(ended) :])


def steps_per_epoch(examples: int, batch: int) -> int:
    """How many steps see every example once; the last may see fewer than a batch."""
    return -(-examples // batch)


def total_steps(train: Train, examples: int) -> int:
    """How many optimizer steps a recipe asks for, of each stage that does not say."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    return train.epochs * steps_per_epoch(examples, train.batch)


def stages_of(recipe: Recipe, examples: int) -> tuple[Stage, ...]:
    """A recipe's stages with all that they take from the run; without any, the run is one."""
    given = recipe.stages or (StageSettings(),)
    names = stage_names(recipe.stages)
    made = tuple(_stage(recipe, *item, examples) for item in zip(names, given, strict=True))
    warmup = recipe.optim.warmup
    for index, stage in enumerate(made):
        if warmup >= 1 and warmup >= stage.steps:
            where = f" of stages.{index}" if recipe.stages else ""
            raise BadInput(
                f"optim.warmup {warmup:g} takes all {stage.steps} steps{where}; "
                "a share below 1 would not"
            )
    return made


def _stage(recipe: Recipe, name: str, given: StageSettings, examples: int) -> Stage:
    steps = given.steps or total_steps(recipe.train, examples)
    if given.epochs is not None:
        steps = given.epochs * steps_per_epoch(examples, recipe.train.batch)
    rates = given.lr if isinstance(given.lr, dict) else {}
    return Stage(
        name,
        steps,
        patience=given.patience or recipe.evaluate.patience,
        train=given.train,
        add=given.add,
        lr=max(rates.values()) if isinstance(given.lr, dict) else given.lr,
        rates=rates,
        supervise=given.supervise or recipe.supervise,
        keep_state=given.keep_state,
        per_epoch=steps_per_epoch(examples, recipe.train.batch),
    )


Kept = dict[str, list[tuple[Rows, dict[str, Tensor]]]]  # an optimizer's state, by slot


@dataclass(frozen=True)
class Entered:
    """What entering a stage left: where the newest layers are, and what tensors were called."""

    new: tuple[str, ...] = ()  # prefixes of the layers added last
    before: dict[str, str] | None = None  # old names by new ones, where layers moved
    changed: tuple[str, ...] = ()  # old tensors that growing changed

    def is_new(self, name: str) -> bool:
        """Whether a tensor is in one of the newest layers."""
        return any(name.startswith(f"{prefix}.") for prefix in self.new)


def enter(model: nn.Module, recipe: Recipe, stage: Stage, index: int, last: Entered) -> Entered:
    """Add a stage's layers and set what learns; the same seed and stage draw the same layers."""
    if not recipe.stages:
        return last
    entered = Entered(last.new)
    if stage.add is not None:
        entered = _grow(model, recipe, stage, index)
    chosen = _learning(model, recipe, stage, index)
    if not chosen:
        raise BadInput(f"stages.{index}.train trains nothing: the treatment freezes all of it")
    learn_only(model, chosen)
    return entered


def _grow(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> Entered:
    add = stage.add
    assert add is not None
    try:
        thaw(model)
        before = list(survey(model)[1])
        with torch.random.fork_rng([]):
            torch.manual_seed(derive_seed(recipe.seed, f"stage {index}"))
            grown = grow(model, add.layers, add.at, add.init)
    except BadInput as error:
        raise _at(f"stages.{index}.add", error) from None
    made = Entered(grown.names)
    after = [name for name in survey(model)[1] if not made.is_new(name)]
    return Entered(grown.names, dict(zip(after, before, strict=True)), grown.changed)


def _learning(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> set[str]:
    """The parts that learn: those selected, less what the treatment freezes."""
    found, frozen = anatomy(model), recipe.surgery.frozen
    chosen = {part.key for part in found.parts if part.state != "fixed"}
    try:
        if stage.train is not None:
            chosen &= {part.key for part in found.select(*stage.train)}
    except BadInput as error:
        raise _at(f"stages.{index}.train", error) from None
    return chosen - {part.key for part in found.select(*frozen)} if frozen else chosen


def lr_scales(model: nn.Module, stage: Stage, index: int, entered: Entered) -> dict[str, float]:
    """Return each trainable parameter's part of the stage's learning rate; empty: all of it.

    A selection's rate comes before that of `new` and `old`; two that overlap are refused.
    """
    if not stage.rates:
        return {}
    (found, slots), at = survey(model), f"stages.{index}.lr"
    named: dict[str, str] = {}
    learning = [part for part in found.parts if part.state == "trainable"]
    for selection in (key for key in stage.rates if key not in WORDS):
        try:
            keys = {part.key for part in found.select(selection)}
        except BadInput as error:
            raise _at(f"{at}.{selection}", error) from None
        for part in (part for part in learning if part.key in keys):
            other = named.setdefault(part.key, selection)
            if other != selection:
                raise BadInput(f"{at}: `{other}` and `{selection}` both name {part.key}")
    if "new" in stage.rates and not entered.new:
        raise BadInput(f"{at}.new: no layer has been added by then; add one with stages.*.add")
    names = {id(p): name for name, p in model.named_parameters()}
    given: dict[str, str] = {}
    for part in learning:
        word = named.get(part.key, "new" if entered.is_new(part.name) else "old")
        if word not in stage.rates:
            raise BadInput(f"{at} has no rate for {part.key}, which learns; add `{word}`")
        name = names[id(slots[part.name].piece_of(part.rows).parameter)]
        other = given.setdefault(name, word)
        if other != word:
            raise BadInput(f"{at}: `{other}` and `{word}` share one tensor, {part.name}")
    for key in stage.rates:
        if key not in given.values():
            raise BadInput(f"{at}.{key}: all that it could give a rate to is frozen in this stage")
    assert stage.lr is not None
    return {name: stage.rates[word] / stage.lr for name, word in given.items()}


def kept_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    """The optimizer's state, whole, by the slots of the model and the rows it is of."""
    return {
        slot.name: [
            (piece.rows, {key: full_tensor(value) for key, value in state.items()})
            for piece in slot.pieces
            if (state := optimizer.state.get(piece.parameter))
        ]
        for slot in survey(model)[1].values()
    }


def survivors(model: nn.Module, entered: Entered, kept: Kept) -> dict[str, Tensor]:
    """What of the state before a boundary is of tensors that go on learning, as `name//key`."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    for slot in survey(model)[1].values():
        before = slot.name if entered.before is None else entered.before.get(slot.name, "")
        for piece in slot.pieces:
            name = names.get(id(piece.parameter))
            for rows, state in kept.get(before, []) if name is not None else []:
                for key, value in state.items():
                    if rows == piece.rows or not value.ndim:
                        found[f"{name}//{key}"] = value
                    elif len(rows) == rows.size:  # it was whole: a frozen part was split off
                        found[f"{name}//{key}"] = piece.rows.take(value, slot.axis).contiguous()
    return _complete(found)


def _complete(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what has lost its moments: a step count alone is no state."""
    whole_ones = {name.rpartition("//")[0] for name, value in found.items() if value.ndim}
    return {name: value for name, value in found.items() if name.rpartition("//")[0] in whole_ones}


def rehearse(
    model: nn.Module,
    recipe: Recipe,
    stages: Sequence[Stage],
    prepared: Material,
    precision: torch.dtype,
) -> None:
    """Go through all stages on a copy: what cannot be is refused before anything is written."""
    if not recipe.stages:
        return
    copied, entered, cached = copy.deepcopy(model), Entered(), False
    for index, stage in enumerate(stages):
        try:
            entered = enter(copied, recipe, stage, index, entered)
        except UnknownArchitecture as error:
            raise _at("stages", error) from None
        lr_scales(copied, stage, index, entered)
        try:
            resolve_supervision(stage.supervise, copied)
        except BadInput as error:
            raise _at(f"stages.{index}", error) from None
        last = index == len(stages) - 1
        if recipe.train.cache_prefix is not None and (
            prefix_depth(copied) or (last and not cached)
        ):
            check_prefix(copied, prepared, recipe.train, precision)
            cached = True


def _at(where: str, error: Any) -> BadInput:
    return BadInput(f"{where}: {error}")
