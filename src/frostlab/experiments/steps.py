"""The kinds of training steps that a recipe takes in its stages, and their measured times.

The data are not needed. Models are built without values: on the meta device, or in uninitialized
memory if the recipe has stages, because a stage can add layers, which are built in memory.
steps.jsonl has the measured times: the lines that benchmarks/catalogue.py printed on MACHINE.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import nn

from frostlab.data.sources import PUBLIC_SETS
from frostlab.models.build import recipe_blueprint
from frostlab.recipe.data import SimulatedEEG
from frostlab.recipe.recipe import Recipe
from frostlab.roles.read import anatomy
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import digest_of
from frostlab.training.stages import Entered, Stage, enter_stage, stages_of
from frostlab.training.step.objective import Supervision, resolve_supervision
from frostlab.training.treatment import treated_parts

MACHINE = "NVIDIA H200"
# data.name → size of its vocabulary of whole words
VOCABULARIES = {"wikitext2": 28_914, "wikitext2-raw": 69_830}
# digest of the settings on which a model depends → model on the meta device
Models = dict[str, nn.Module]


class Step(NamedTuple):
    """A kind of training step: the properties on which its time depends."""

    model: str  # class of the model
    parameters: int
    trainable: int
    batch: int
    length: int
    precision: str
    losses: int  # layers after which a loss is computed; 1 without deep supervision


@dataclass(frozen=True)
class Measured:
    """How a step was taken, its time (median, smallest and largest round) and its peak memory."""

    how: str  # eager, captured, or compiled and captured
    ms: float
    low: float
    high: float
    peak_bytes: int


@cache
def measured_steps() -> dict[Step, Measured]:
    """Return the steps that were measured on MACHINE."""
    text = files("frostlab.experiments").joinpath("steps.jsonl").read_text(encoding="utf-8")
    return read_measured(text.splitlines())


def read_measured(lines: Iterable[str]) -> dict[Step, Measured]:
    """Read lines that benchmarks/catalogue.py printed; the last one about a kind of step counts."""
    return {
        Step(*(line[name] for name in Step._fields)): Measured(
            *(line[value.name] for value in fields(Measured))
        )
        for line in map(json.loads, lines)
    }


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and the model when the stage begins; entering the next stage changes the model."""

    stage: Stage
    model: nn.Module
    parts: Anatomy
    supervision: Supervision | None
    step: Step


def planned_stages(recipe: Recipe, models: Models) -> Iterator[PlannedStage]:
    """Yield a recipe's stages; `models` keeps the models that several recipes share.

    If the number of training examples is not known, the steps of a stage whose length is given in
    epochs are counted as if there were one example.
    """
    recipe = with_vocabulary(recipe)
    model = _model_of(recipe, models)
    parts = treated_parts(model, recipe)
    entered = Entered()
    for index, stage in enumerate(stages_of(recipe, training_examples(recipe) or 1)):
        if recipe.stages:
            entered = enter_stage(model, recipe, stage, index, entered)
            parts = anatomy(model)
        supervision = resolve_supervision(stage.supervise, model)
        step = step_of(recipe, model, parts, supervision)
        yield PlannedStage(stage, model, parts, supervision, step)


def step_of(
    recipe: Recipe, model: nn.Module, parts: Anatomy, supervision: Supervision | None
) -> Step:
    """Return the kind of step that this model takes on a GPU."""
    return Step(
        type(model).__name__,
        parts.count(),
        parts.count("trainable"),
        recipe.train.batch,
        recipe.data.length,
        precision_of(recipe),
        1 if supervision is None else len(supervision.layers),
    )


def precision_of(recipe: Recipe) -> str:
    """Return the precision of a run on a GPU."""
    return "bfloat16" if recipe.train.precision in ("auto", "bf16") else recipe.train.precision


def with_vocabulary(recipe: Recipe) -> Recipe:
    """Return the recipe with the size of its vocabulary, if that is known without the data."""
    tokenizer = recipe.tokenizer
    size = VOCABULARIES.get(recipe.data.name)
    if size is None or tokenizer is None or tokenizer.kind != "words":
        return recipe
    return recipe.model_copy(update={"tokenizer": tokenizer.model_copy(update={"size": size})})


def training_examples(recipe: Recipe) -> int | None:
    """Return the number of training examples; None if only the data can tell."""
    data = recipe.data
    if isinstance(data, SimulatedEEG):
        fitting = round(data.seconds * data.rate) // data.length
        trained = data.subjects * (data.recordings - data.tune - data.report)
        return trained * (data.windows or fitting)
    limit = getattr(data, "limit", None)
    facts = PUBLIC_SETS.get("mnli" if data.name == "xnli" else data.name)  # XNLI trains on MNLI
    everything = None if facts is None else facts.rows.get("train")
    return limit if everything is None else min(limit or everything, everything)


def _model_of(recipe: Recipe, models: Models) -> nn.Module:
    """Build a recipe's model, or return an equal one that another recipe has left in `models`.

    A recipe with stages or adapters changes its model, so it always gets a new one.
    """
    settings = (recipe.model, recipe.tokenizer, recipe.data)
    key = digest_of([part and part.model_dump(mode="json") for part in settings])
    changes = bool(recipe.stages) or recipe.surgery.peft is not None
    if key in models and not changes:
        return models[key]
    model, _ = recipe_blueprint(recipe)
    if recipe.stages:
        allocate(model)
    if not changes:
        models[key] = model
    return model


def allocate(model: nn.Module) -> None:
    """Move a model from the meta device to memory, without values.

    Unlike `Module.to_empty`, this keeps tied weights tied.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in allocated:
                empty = torch.empty_like(weight, device="cpu")
                allocated[weight] = nn.Parameter(empty, weight.requires_grad)
            setattr(module, name, allocated[weight])
        for name, values in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(values, device="cpu"))
