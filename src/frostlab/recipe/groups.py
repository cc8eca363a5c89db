"""Groups of experiments: which recipes belong together, and how they are compared.

A group is a YAML file. Its experiments are recipes, in the order in which to run them, each with
the numbers that the sources reported. `published` holds the comparisons that the sources made,
whose arms are experiments; `fair` holds comparisons that ask the same questions with arms that
differ in their treatment only.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import read_yaml, shown, shown_key
from frostlab.recipe.load import load_recipe, shipped_groups, shipped_recipes
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import MOST_LISTED, Strict

_ENDINGS = (".yaml", ".yml")
_TUNED = {"tune": "lr"}  # the default of every fair comparison


class Experiment(Strict):
    """What the sources say about an experiment besides its recipe."""

    # metric → value; accuracies as shares of 1, times in seconds
    reported: dict[str, float] = Field(default_factory=dict)
    cost: str | None = None  # expected time, and on which machine
    optional: bool = False  # whether the sources left it to the reader


def _as_comparison(value: Any) -> Any:
    """Turn the list of a comparison's arms into a mapping."""
    return {"arms": value} if isinstance(value, list) else value


def _as_tuned(value: Any) -> Any:
    """Tune the learning rate of a fair comparison, unless it says what to tune."""
    return _TUNED | value if isinstance(value, dict) else value


Published = Annotated[dict[str, Any], BeforeValidator(_as_comparison)]
Fair = Annotated[dict[str, Any], BeforeValidator(_as_tuned)]


class Group(Strict):
    """Experiments that answer one question, and the comparisons among them."""

    about: str
    # by id, baselines first
    experiments: dict[str, Experiment] = Field(default_factory=dict, max_length=MOST_LISTED)
    # name → keys of a comparison whose `arms` are ids; the first is the baseline
    published: dict[str, Published] = Field(default_factory=dict, max_length=MOST_LISTED)
    fair: dict[str, Fair] = Field(default_factory=dict, max_length=MOST_LISTED)
    # name → settings of a further evaluation of every run's best weights
    further: dict[str, dict[str, Any]] = Field(default_factory=dict, max_length=MOST_LISTED)
    _name: str = PrivateAttr("group")
    _folder: Path | None = PrivateAttr(None)

    @property
    def name(self) -> str:
        """The group's name: its file's name without the ending."""
        return self._name

    def source_of(self, experiment: str) -> str:
        """Return the name of an experiment's recipe, or the path of its file."""
        if self._folder is not None and experiment.endswith(_ENDINGS):
            return str(self._folder / experiment)
        return experiment

    def recipe(self, experiment: str, settings: Mapping[str, Any] | None = None) -> Recipe:
        """Load the recipe of an experiment, with settings on top."""
        return load_recipe(self.source_of(experiment), settings)

    def arms(self, comparison: str) -> tuple[str, ...]:
        """Return the ids of a published comparison's arms, the baseline first."""
        return tuple(self.published[comparison]["arms"])


def group_names() -> list[str]:
    """Return the names of the shipped groups."""
    return list(shipped_groups())


def load_group(name: str) -> Group:
    """Read a group by its shipped name or path, and check it."""
    if name.endswith(_ENDINGS):
        path = Path(name)
        try:
            return _checked(read_yaml(path), path.name.rpartition(".")[0], name, path.parent)
        except FileNotFoundError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if name not in group_names():
        raise BadInput(
            f"no group is called {shown(name)}{nearest(name, group_names())} "
            f"(there are {', '.join(group_names())})"
        )
    return _shipped_group(name)


@cache
def _shipped_group(name: str) -> Group:
    return _checked(shipped_groups()[name], name, name, None)


def _checked(values: dict[str, Any], name: str, label: str, folder: Path | None) -> Group:
    """Return the values of a group's file as a group, or raise an error of one line."""
    try:
        group = Group.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = shown_key(".".join(map(str, problem["loc"])))
        if problem["type"] == "extra_forbidden":
            kind = Experiment if problem["loc"][0] == "experiments" else Group
            hint = nearest(str(problem["loc"][-1]), kind.model_fields)
            raise BadInput(f"{label}: {key} is not a key of a group{hint}") from None
        if problem["type"] == "missing":
            raise BadInput(f"{label}: {key} is missing") from None
        raise BadInput(f"{label}: {key} {shown(problem['input'])}: {problem['msg']}") from None
    group._name, group._folder = name, folder
    for line in _problems(group):
        raise BadInput(f"{label}: {line}")
    return group


def _problems(group: Group) -> Iterator[str]:
    """Yield a line for each id that is unknown, and each comparison that cannot be made."""
    recipes = shipped_recipes()
    for experiment in group.experiments:
        if not experiment.endswith(_ENDINGS) and experiment not in recipes:
            hint = nearest(experiment, recipes)
            yield f"no recipe is called {shown_key(experiment)}{hint}"
    for name, comparison in group.published.items():
        arms = comparison.get("arms")
        if not isinstance(arms, list) or not all(isinstance(arm, str) for arm in arms):
            yield f"published.{shown_key(name)}.arms should be a list of experiments"
            continue
        if len(arms) < 2 or len(set(arms)) < len(arms):
            yield f"published.{shown_key(name)}.arms needs two or more different experiments"
        for arm in arms:
            if arm not in group.experiments:
                hint = nearest(arm, group.experiments)
                yield (
                    f"published.{shown_key(name)}: {shown_key(arm)} is not among the group's "
                    f"experiments{hint}"
                )
    if not group.published and not group.fair:
        yield "has no comparison; add published or fair"
