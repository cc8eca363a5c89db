"""What a recipe can say about its stages: what learns when, and what is added before it does."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from frostlab.recipe.settings import Supervise
from frostlab.recipe.treatment import Positive, Selections, Strict

Rate = Annotated[float, Field(gt=0)]
WORDS = ("new", "old")  # what a stage's rates can name beside selections


class Add(Strict):
    """Layers to add before a stage, where, and what they start as."""

    layers: Positive = 1
    at: Literal["top", "bottom"] | Annotated[int, Field(ge=0)] = "top"
    init: Literal["identity", "random", "copy"] = "random"


class StageSettings(Strict):
    """One stage; what it does not say is as the run has it."""

    name: str | None = None  # null: its number
    train: Selections | None = None  # what learns; null: all that the treatment leaves
    add: Add | None = None
    lr: Rate | Annotated[dict[str, Rate], Field(min_length=1)] | None = None  # null: optim.lr
    epochs: Positive | None = None  # null: as long as `train` says
    steps: Positive | None = None
    patience: Positive | None = None  # null: evaluate.patience
    supervise: Supervise | None = None  # null: the run's
    keep_state: bool = True  # of the optimizer, for what learned in the stage before too

    @model_validator(mode="after")
    def _one_duration(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs {self.epochs} and steps {self.steps} both say how long")
        return self


def stage_names(stages: tuple[StageSettings, ...]) -> tuple[str, ...]:
    """What the stages are called, by default by their numbers; a run of one trains."""
    return tuple(stage.name or str(number) for number, stage in enumerate(stages, 1)) or ("train",)
