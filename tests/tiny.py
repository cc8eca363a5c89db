"""A run small enough for every test: a toy task, a toy model, one thread."""

import copy
from typing import Any

from frostlab.recipe.load import recipe_from
from frostlab.recipe.recipe import Recipe

TINY: dict[str, Any] = {
    "data": {"name": "majority", "examples": 256, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2, "dropout": 0.1},
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "epochs": 2, "threads": 1},
    "evaluate": {"batch": 256},
}


def tiny(**changes: Any) -> dict[str, Any]:
    """The tiny recipe with `section__key=value` or `section={…}` changed."""
    return changed(TINY, changes)


def changed(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a recipe with `section__key=value` or `section={…}` changed."""
    made = copy.deepcopy(recipe)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            made.setdefault(section, {})[key] = value
        else:
            made[section] = value
    return made


def frozen_and_not() -> dict[str, Recipe]:
    """Two arms: everything learns, and query and key do not."""
    frozen = {"freeze": ["query", "key"]}
    return {"all": recipe_from(tiny()), "qk": recipe_from(tiny(treatment=frozen))}
