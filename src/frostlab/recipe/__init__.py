"""Recipes: what a run is, typed, as YAML that says only what differs from the defaults."""

from frostlab.recipe.loading import load_recipe
from frostlab.recipe.settings import LOWER_IS_BETTER, Metric
from frostlab.recipe.treatment import Treatment
from frostlab.recipe.whole import METRICS, Recipe

__all__ = ["LOWER_IS_BETTER", "METRICS", "Metric", "Recipe", "Treatment", "load_recipe"]
