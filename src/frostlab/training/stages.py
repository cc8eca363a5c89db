"""A run is a list of stages; which stage a step is in is a pure function."""

from collections.abc import Sequence
from dataclasses import dataclass

from frostlab.errors import BadInput
from frostlab.recipe import Recipe
from frostlab.recipe.settings import Train


@dataclass(frozen=True)
class Stage:
    """Steps with one set of trainable weights, one schedule and one patience."""

    name: str
    steps: int
    freeze: tuple[str, ...] = ()
    patience: int | None = None


def stage_at(stages: Sequence[Stage], step: int) -> tuple[int, int]:
    """The stage that a step (from 0) belongs to, and the step's place inside it."""
    if step < 0:
        raise BadInput(f"step {step} is before the first stage")
    for index, stage in enumerate(stages):
        if step < stage.steps:
            return index, step
        step -= stage.steps
    raise BadInput(f"step {step} is past the end of the last stage")


def steps_per_epoch(examples: int, batch: int) -> int:
    """How many steps see every example once; the last may see fewer than a batch."""
    return -(-examples // batch)


def total_steps(train: Train, examples: int) -> int:
    """How many optimizer steps a recipe asks for."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    return train.epochs * steps_per_epoch(examples, train.batch)


def stages_of(recipe: Recipe, examples: int) -> tuple[Stage, ...]:
    """A recipe's stages: one, until growth and unfreezing add more."""
    steps, warmup = total_steps(recipe.train, examples), recipe.optim.warmup
    if warmup >= 1 and warmup >= steps:
        raise BadInput(
            f"optim.warmup {warmup:g} takes all {steps} steps; a share below 1 would not"
        )
    return (Stage("train", steps, recipe.surgery.frozen, recipe.evaluate.patience),)
