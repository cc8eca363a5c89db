"""Steps on windows of EEG are timed."""

import pytest
import torch

from frostlab.comparison.timed_arms import time_arms
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
from hearing import hearing


@pytest.mark.slow
def test_steps_on_windows_are_timed() -> None:
    recipes = {name: recipe_from(hearing(model__layers=n)) for name, n in (("a", 1), ("b", 2))}
    timing = time_arms(
        recipes, prepare(recipes["a"]), baseline="a", device=torch.device("cpu"), seconds=0.5
    )
    assert all(timing.arms[name].ms_median > 0 for name in recipes)
    assert timing.arms["a"].trainable < timing.arms["b"].trainable
