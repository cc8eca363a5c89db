"""Cutting a recipe short: settings that make a run of a few steps of it, to look at."""

import json

from frostlab.recipe.data import Corpus
from frostlab.recipe.whole import Recipe

_LOOKS = 20  # measured steps a stage
_EXAMPLES = 500  # to evaluate on, at most


def shortened(recipe: Recipe, steps: int) -> list[str]:
    """Settings for so many steps in all, shared among stages, watched and evaluated at the end."""
    each = max(1, steps // max(1, len(recipe.stages)))
    settings = [
        f"train.steps={each}",
        f"evaluate.every={each}",
        f"watch.every={looks_every(each)}",
    ]
    if recipe.stages:
        stages = [stage.model_dump(mode="json", exclude_defaults=True) for stage in recipe.stages]
        cut = [{**stage, "steps": each, "epochs": None} for stage in stages]
        settings.append(f"stages={json.dumps(cut)}")
    warmup = recipe.optim.warmup
    if warmup >= 1:  # the share it has of the whole run
        settings.append(f"optim.warmup={min(0.5, warmup / (recipe.train.steps or 10 * warmup)):g}")
    if isinstance(recipe.data, Corpus):
        limit = min(recipe.data.evaluation_limit or _EXAMPLES, _EXAMPLES)
        settings.append(f"data.evaluation_limit={limit}")
    return settings


def looks_every(steps: int) -> int:
    """How often so many steps are watched."""
    return max(1, steps // _LOOKS)
