"""A run is a list of stages; which stage a step is in is a pure function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from frostlab.errors import BadInput
from frostlab.recipe import Recipe
from frostlab.recipe.settings import Every, Optim, StepDecay, Supervise, Train
from frostlab.recipe.stages import Add, StageSettings, stage_names


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
