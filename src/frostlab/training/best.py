"""A finished run's recipe and its best weights, read back from its folder."""

from typing import Any

import torch
import yaml

from frostlab.data import Material
from frostlab.errors import BadInput
from frostlab.recipe import Recipe
from frostlab.recipe.loading import recipe_from
from frostlab.records.checkpoints import Checkpoint
from frostlab.records.record import RunRecord
from frostlab.training.boundary import build_grown, load_weights
from frostlab.training.stages import stages_of
from frostlab.training.treating import state_digest


def recipe_of(record: RunRecord) -> Recipe:
    """What a run trained."""
    path = record.folder / "recipe.yaml"
    try:
        values: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInput(f"{path} cannot be read ({error})") from None
    return recipe_from(values, str(path))


def best_model(record: RunRecord, recipe: Recipe, prepared: Material) -> torch.nn.Module:
    """The model that was reported, down to its digest; its data must be what they were."""
    if prepared.digest != record.digests["data"]:
        raise BadInput(f"the data of {record.folder} cannot be made again: they changed")
    stages = stages_of(recipe, len(prepared.splits["train"]))
    model, _ = build_grown(recipe, prepared, stages)
    result = record.result
    load_weights(model, Checkpoint(record.folder / result["checkpoint"], result["best"]["step"]))
    if state_digest(model) != result["weights_digest"]:
        raise BadInput(f"{record.folder}/{result['checkpoint']} is not what was reported")
    return model
