"""`Recipe`: everything that defines a run, checked as a whole.

This module defines the section `stages`; recipe.data, recipe.model, recipe.treatment and
recipe.settings define the other sections. Each section checks its own settings, and `Recipe` checks
for contradictions between sections.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from frostlab.errors import BadInput
from frostlab.recipe.bounded_yaml import MOST_DEPTH, shown_key
from frostlab.recipe.data import Data, Docstrings, Tokenizer, Words
from frostlab.recipe.model import EnvelopeLoss, GPTModel, Model
from frostlab.recipe.settings import METRICS, Evaluate, Metric, Optim, Supervise, Train, Watch
from frostlab.recipe.treatment import (
    MOST_LISTED,
    SAME,
    TREATMENTS,
    Layers,
    Positive,
    Selections,
    Strict,
    Treatment,
    TreatmentName,
)

Rate = Annotated[float, Field(gt=0)]
PATHS = (("data", "path"), ("model", "name"), ("tokenizer", "name"))  # keys that may hold a path
Scale = Literal["tiny", "small", "full"]  # frostlab.recipe.scale has the sizes of each
AGES = ("new", "old")  # keys of a stage's `lr`: the newest layers, and all other weights


class Add(Strict):
    """Layers to add before a stage: their number, position and initial weights."""

    layers: Layers = 1
    # a number: index of the first new layer
    at: Literal["top", "bottom"] | Annotated[int, Field(ge=0, le=1000)] = "top"
    # identity: the model's outputs stay the same at first; copy: a copy of the neighbouring layer
    init: Literal["identity", "random", "copy"] = "random"


class StageSettings(Strict):
    """One stage of a run: a period with its own trainable weights, learning rate and duration.

    Most settings that are null are taken from the rest of the recipe.
    """

    name: str | None = None  # null: the stage's number
    train: Selections | None = None  # null: all weights that the treatment does not freeze
    add: Add | None = None  # null: no new layers
    # a mapping: selection, `new` or `old` → rate; null: optim.lr
    lr: Rate | Annotated[dict[str, Rate], Field(min_length=1)] | None = None
    epochs: Positive | None = None  # epochs and steps null: the duration in the section `train`
    steps: Positive | None = None
    patience: Positive | None = None  # null: evaluate.patience
    supervise: Supervise | None = None  # null: the recipe's
    keep_state: bool = True  # keep the optimizer state of weights that the stage before trained

    @model_validator(mode="after")
    def _one_duration(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs {self.epochs} and steps {self.steps} both set the duration")
        return self


def stage_names(stages: tuple[StageSettings, ...]) -> tuple[str, ...]:
    """Return the stages' names, by default their numbers; `train` if there are no stages."""
    return tuple(stage.name or str(number) for number, stage in enumerate(stages, 1)) or ("train",)


def _data_problems(recipe: "Recipe") -> Iterator[str]:
    data, metric, tokenizer = recipe.data, recipe.evaluate.metric, recipe.tokenizer
    metrics = METRICS[data.task]
    if metric is not None and metric not in metrics:
        listed = ", ".join(metrics)
        yield f"evaluate.metric {metric} does not exist for {data.task}; there are {listed}"
    if tokenizer is not None and data.form != "text":
        yield f"data.name {data.name} is made of {data.form}; tokenizer must be null"
    yield from data.problems()
    counted_too = tokenizer.also if isinstance(tokenizer, Words) else ()
    if "tune" in counted_too and getattr(data, "splits", None) == "published":
        yield "tokenizer.also names tune, but splits: published has train and report only"
    batching = recipe.train.batching
    if data.form == "signals" and batching in ("packed", "fixed"):
        yield f"train.batching {batching} is for tokens; data.name {data.name} is EEG: use bucketed"
    if batching == "fixed" and recipe.train.cache_prefix is not None:
        yield "train.batching fixed pads, and train.cache_prefix packs; set one to its default"
    if data.form == "signals" and recipe.train.cache_prefix is not None:
        yield f"train.cache_prefix is for tokens; data.name {data.name} is EEG; set it to null"


def _model_problems(recipe: "Recipe") -> Iterator[str]:
    model, data, loss = recipe.model, recipe.data, recipe.loss
    if data.task not in model.tasks:
        kinds = [
            get_args(kind.model_fields["kind"].annotation)[0]
            for kind in get_args(get_args(Model)[0])
            if data.task in kind.tasks
        ]
        yield (
            f"model.kind {model.kind} is for {' or '.join(model.tasks)}; data.name {data.name} has "
            f"data.task {data.task}: use model.kind {' or '.join(kinds)}"
        )
    yield from model.problems(data)
    if loss is not None and data.task not in loss.tasks:
        yield (
            f"loss is for {' or '.join(loss.tasks)}; data.task {data.task} has cross-entropy: "
            "set loss to null"
        )
    if loss is not None:
        yield from loss.problems(data)


def _supervision_problems(recipe: "Recipe") -> Iterator[str]:
    if recipe.supervise == Supervise():
        return
    if recipe.data.task != "language":
        yield f"supervise.layers is for language models; data.task is {recipe.data.task}"
    if recipe.supervise.frozen and recipe.train.cache_prefix is not None:
        yield (
            "supervise.frozen needs the frozen layers that train.cache_prefix skips; "
            "set one of them to its default"
        )


def _stage_problems(recipe: "Recipe") -> Iterator[str]:
    stages, names = recipe.stages, stage_names(recipe.stages)
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"stages.{index}.name {name} is the name of stages.{names.index(name)} too"
    if stages and not stages[0].keep_state:
        yield "stages.0.keep_state is given, but there is no state before the first stage"
    for index, stage in enumerate(stages):
        if stage.add is not None and recipe.surgery.peft is not None:
            yield (
                f"stages.{index}.add and treatment.peft exclude each other: "
                "new layers would be frozen"
            )


def shorten_paths(values: dict[str, Any]) -> None:
    """Replace paths by their last part, in place; this part is the same on all machines."""
    for section, key in PATHS:
        part = values.get(section)
        name = part.get(key) if isinstance(part, dict) else None
        if isinstance(name, str) and (key == "path" or os.path.isabs(name)):
            values[section][key] = os.path.basename(name.rstrip("/"))


class Recipe(Strict):
    """Complete definition of a run, except for the contents of its files and the machine."""

    about: str = ""
    data: Data = Docstrings()
    tokenizer: Tokenizer | None = None  # null: the pretrained model's, else BPE; only for text
    model: Model = GPTModel(kind="gpt")
    loss: EnvelopeLoss | None = None  # null: cross-entropy; for envelopes mse-pearson
    treatment: TreatmentName | Treatment = "none"
    optim: Optim = Optim()
    train: Train = Train(epochs=3)
    supervise: Supervise = Supervise()
    evaluate: Evaluate = Evaluate()
    watch: Watch | None = None  # null: gradient flow is not measured
    # empty: the run is one stage
    stages: tuple[StageSettings, ...] = Field(default=(), max_length=MOST_LISTED)
    # tiny, small: fewer examples, fewer steps and narrower layers
    scale: Scale = "full"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise an error for the first contradiction within or between sections."""
        checks = (_data_problems, _model_problems, _supervision_problems, _stage_problems)
        for problem in (problem for check in checks for problem in check(self)):
            raise ValueError(problem)
        return self

    def __repr__(self) -> str:
        stages = f", {len(self.stages)} stages" if self.stages else ""
        return (
            f"Recipe(data {self.data.name}, model {self.model.kind}, treatment "
            f"{self.treatment_name}{stages}, seed {self.seed}; digest {self.digest})"
        )

    __str__ = __repr__

    @property
    def metric(self) -> Metric:
        """The metric that chooses the best checkpoint."""
        return self.evaluate.metric or next(iter(METRICS[self.data.task]))

    @property
    def surgery(self) -> Treatment:
        """The treatment in full, also if the recipe gives only its name."""
        treatment = self.treatment
        return treatment if isinstance(treatment, Treatment) else TREATMENTS[treatment]

    @property
    def treatment_name(self) -> str:
        """The treatment's name; if it has none, its PEFT method, or else `explicit`."""
        if not isinstance(self.treatment, Treatment):
            return str(self.treatment)
        return "explicit" if self.treatment.peft is None else self.treatment.peft.method

    @property
    def stand_ins(self) -> dict[str, str]:
        """The stand-ins for missing data, tokenizers and weights.

        Keys are sections of the recipe, values are texts such as `docstrings for tinystories`.
        """
        parts = {"data": self.data, "tokenizer": self.tokenizer, "model": self.model}
        missing = {name: getattr(part, "stands_for", None) for name, part in parts.items()}
        named = {"data": self.data.name, "tokenizer": getattr(self.tokenizer, "kind", "")}
        named["model"] = f"{getattr(self.model, 'name', '')} with random weights"
        return {name: f"{named[name]} for {other}" for name, other in missing.items() if other}

    @property
    def caution(self) -> str | None:
        """A warning to show with every number of a run that is scaled or uses stand-ins."""
        parts = [] if self.scale == "full" else [f"scale {self.scale}"]
        if self.stand_ins:
            parts.append(f"stand-in: {', '.join(self.stand_ins.values())}")
        return "; ".join(parts) or None

    @property
    def marks(self) -> str:
        """The mark in the name of a run that is scaled or uses stand-ins, such as `-tiny`."""
        scale = "" if self.scale == "full" else f"-{self.scale}"
        return scale + "-stand-in" * bool(self.stand_ins)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON, including all defaults."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Stable digest of a run's definition, used to find stored runs.

        It ignores `about`, and is equal for all names of the same treatment. Of a path, only the
        last part counts, so that the digest is the same where the files lie in another folder; a
        run records a digest of the data and the weights themselves.
        """
        values = self.model_dump(mode="json", exclude={"about"})
        shorten_paths(values)
        if isinstance(self.treatment, str):
            values["treatment"] = SAME.get(self.treatment, self.treatment)
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Return the dotted keys at which two recipes differ, except `about`, the description."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [] if left == right else [path]
    keys = [key for key in {**left, **right} if (path or key != "about")]
    return [
        difference
        for key in keys
        for difference in differences(left.get(key), right.get(key), f"{path}.{key}".strip("."))
    ]


def set_nested(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted key `a.b` in nested values, or `a.0.b` in an existing item of a list."""
    *path, last = key.split(".")
    if len(path) >= MOST_DEPTH:
        raise BadInput(f"{shown_key(key)} is nested too deeply; {MOST_DEPTH} levels is the most")
    inner: Any = values
    for name in path:
        inner = (
            inner[_index(inner, name, key)]
            if isinstance(inner, list)
            else (inner.setdefault(name, {}))
        )
        if not isinstance(inner, dict | list):
            raise BadInput(f"{shown_key(key)}: {shown_key(name)} has no settings below it")
    inner[_index(inner, last, key) if isinstance(inner, list) else last] = value


def _index(items: list[Any], name: str, key: str) -> int:
    """Return `name`, a part of the dotted key `key`, as an index of a list."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10) or int(name) >= len(items):
        raise BadInput(
            f"{shown_key(key)}: {shown_key(name)} is not an index of a list of {len(items)} items"
        )
    return int(name)
