"""Groups of experiments: which recipes belong together, and how they are compared.

A group is a YAML file. Its experiments are recipes, in the order in which to run them, each with
the numbers that its sources (the published studies that it repeats) reported. `published` holds the
comparisons that the sources made, whose arms (the alternatives that are compared) are experiments;
`fair` holds comparisons that ask the same questions with arms that differ only in what is compared.
`further` holds other data on which the models are evaluated, and `interactions` questions about two
of the comparisons.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import read_yaml, shown, shown_key
from frostlab.recipe.load import (
    load_recipe,
    recipe_name,
    shipped_comparisons,
    shipped_groups,
    shipped_recipes,
)
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import MOST_LISTED, Strict
from frostlab.text import NONE, columns, number

_ENDINGS = (".yaml", ".yml")
_TUNED = {"tune": "lr"}  # the default of every fair comparison


class Experiment(Strict):
    """Facts that the sources (published studies) state about an experiment besides its recipe."""

    # metric → value; accuracies as shares of 1, times in seconds
    reported: dict[str, float] = Field(default_factory=dict)
    cost: str | None = None  # expected time on the group's machine
    optional: bool = False  # whether the sources only suggest this experiment


class Interaction(Strict):
    """A question about how the effect of an arm differs between two comparisons of the group."""

    question: str
    arm: str  # the arm's name in both comparisons
    comparison: str
    against: str  # the other comparison


def _as_comparison(value: Any) -> Any:
    """Turn the list of a comparison's arms into a mapping."""
    return {"arms": value} if isinstance(value, list) else value


def _as_tuned(value: Any) -> Any:
    """Return the keys of a fair comparison, which by default tunes the learning rate.

    A text is the name of a shipped comparison.
    """
    if isinstance(value, str):
        shipped = shipped_comparisons()
        if value not in shipped:
            raise ValueError(f"no comparison is called {shown_key(value)}{nearest(value, shipped)}")
        value = shipped[value]
    return _TUNED | value if isinstance(value, dict) else value


Published = Annotated[dict[str, Any], BeforeValidator(_as_comparison)]
Fair = Annotated[dict[str, Any], BeforeValidator(_as_tuned)]


class Group(Strict):
    """The experiments of one study, and the comparisons of them."""

    about: str
    machine: str | None = None  # the sources' machine, which `cost` is for
    # id, or path of a recipe's file → experiment
    experiments: dict[str, Experiment] = Field(default_factory=dict, max_length=MOST_LISTED)
    # name → keys of a comparison whose `arms` are ids; the first is the baseline
    published: dict[str, Published] = Field(default_factory=dict, max_length=MOST_LISTED)
    # name → keys of a comparison, or the name of a shipped one
    fair: dict[str, Fair] = Field(default_factory=dict, max_length=MOST_LISTED)
    # name → settings of a further evaluation of every run's best weights
    further: dict[str, dict[str, Any]] = Field(default_factory=dict, max_length=MOST_LISTED)
    interactions: tuple[Interaction, ...] = Field(default=(), max_length=MOST_LISTED)
    _name: str = PrivateAttr("group")
    _folder: Path | None = PrivateAttr(None)

    @property
    def name(self) -> str:
        """The group's name: its file's name without the ending."""
        return self._name

    @property
    def folder(self) -> Path | None:
        """The folder of the group's file; None if the group is shipped."""
        return self._folder

    def source_of(self, experiment: str) -> str:
        """Return the name of an experiment's recipe, or the path of its file."""
        if self._folder is not None and experiment.endswith(_ENDINGS):
            return str(self._folder / experiment)
        return experiment

    def recipe(self, experiment: str, settings: Mapping[str, Any] | None = None) -> Recipe:
        """Load the recipe of an experiment, with settings on top."""
        return load_recipe(self.source_of(experiment), settings)

    def recipes(self, settings: Mapping[str, Any] | None = None) -> dict[str, Recipe]:
        """Load the recipes of the experiments, the fair comparisons and their further evaluations.

        The settings are put on top of each of them. A fair comparison is left out if its `recipe`
        is not a name or path, but a mapping in the group's file.
        """
        recipes = {name: self.recipe(name, settings) for name in self.experiments}
        for comparison in self.fair.values():
            recipe, own = comparison.get("recipe"), comparison.get("set") or {}
            if not isinstance(recipe, str):
                continue
            name, own = recipe_name(recipe), {**own, **(settings or {})}
            recipes.setdefault(name, self.recipe(recipe, own))
            for further, changes in self.further.items():
                recipes.setdefault(f"{name} ({further})", self.recipe(recipe, {**own, **changes}))
        return recipes

    def arms(self, comparison: str) -> tuple[str, ...]:
        """Return the ids of a published comparison's arms, the baseline first."""
        return tuple(self.published[comparison]["arms"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the group's keys, and each experiment's main settings."""
        experiments = [
            {"id": name, **_main_settings(self.recipe(name)), **facts.model_dump(mode="json")}
            for name, facts in self.experiments.items()
        ]
        return {"name": self.name, **self.model_dump(mode="json"), "experiments": experiments}


def _main_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that distinguish an experiment from others, and its recipe's digest."""
    deep = ["supervise: all"] if recipe.supervise.layers == "all" else []
    treatment = [] if deep and recipe.treatment_name == "none" else [recipe.treatment_name]
    return {
        "about": recipe.about,
        "data": recipe.data.name,
        "method": ", ".join([*treatment, *deep]),
        "lr": recipe.optim.lr,
        "metric": recipe.metric,
        "digest": recipe.digest,
    }


def group_table(group: Group, width: int | None) -> list[str]:
    """Return the lines of a table of a group's experiments; empty if it has none."""
    experiments = group.to_dict()["experiments"]
    if not experiments:
        return []
    metrics = {values["metric"] for values in experiments}
    reported = metrics.pop() if len(metrics) == 1 else "reported"
    longest = max(len(values["id"]) for values in experiments)
    rows: list[tuple[str, ...]] = [("id", "data", "method", "lr", reported, "time")]
    rows += [_row(values, reported) for values in experiments]
    kept = [i for i in range(6) if i < 4 or any(row[i] != NONE for row in rows[1:])]
    # Users type the ids, so these must stay whole. `columns` shortens no column that is aligned
    # right, so the ids are padded here and their column is aligned right.
    table = [(row[0].ljust(longest), *(row[i] for i in kept[1:])) for row in rows]
    lines = columns(table, [0, 3], width)
    names = [rows[0][i] for i in kept if i > 3]
    if names:
        machine = f", on {group.machine}" if group.machine else ""
        them = "them" if len(names) > 1 else "it"
        lines += ["", f"{' and '.join(names)}: as the sources reported {them}{machine}"]
    return lines


def _row(values: dict[str, Any], reported: str) -> tuple[str, ...]:
    """Return the cells of an experiment's row; `reported` is the heading of the fifth column."""
    metric, value = values["metric"], values["reported"].get(values["metric"])
    result = "optional" if values["optional"] else NONE
    if value is not None:
        result = number(value) if reported == metric else f"{metric} {number(value)}"
    lr = re.sub(r"\.?0*e([+-])0*", r"e\1", f"{values['lr']:.2e}")
    return (values["id"], values["data"], values["method"], lr, result, values["cost"] or NONE)


def group_names() -> list[str]:
    """Return the names of the shipped groups."""
    return list(shipped_groups())


def load_group(name: str) -> Group:
    """Read a group by its shipped name or path, and check it."""
    if name.endswith(_ENDINGS):
        path = Path(name)
        try:
            return group_from(read_yaml(path), path.name.rpartition(".")[0], name, path.parent)
        except FileNotFoundError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    if name not in group_names():
        raise BadInput(
            f"no group is called {shown(name)}{nearest(name, group_names())} "
            f"(there are {', '.join(group_names())})"
        )
    return _shipped_group(name)


@cache
def _shipped_group(name: str) -> Group:
    return group_from(shipped_groups()[name], name, name, None)


def group_from(values: dict[str, Any], name: str, label: str, folder: Path | None) -> Group:
    """Return the keys of a group's file as a group, or raise an error of one line.

    Args:
        name: the group's name.
        label: the file's name in errors.
        folder: the file's folder; None if the group is shipped.
    """
    try:
        group = Group.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = shown_key(".".join(map(str, problem["loc"])))
        if problem["type"] == "extra_forbidden":
            kinds: dict[str, type[Strict]] = {
                "experiments": Experiment,
                "interactions": Interaction,
            }
            kind = kinds.get(str(problem["loc"][0]), Group)
            hint = nearest(str(problem["loc"][-1]), kind.model_fields)
            raise BadInput(f"{label}: {key} is not a key of a group{hint}") from None
        if problem["type"] == "missing":
            raise BadInput(f"{label}: {key} is missing") from None
        reason = problem["msg"].removeprefix("Value error, ")
        raise BadInput(f"{label}: {key} {shown(problem['input'])}: {reason}") from None
    group._name, group._folder = name, folder
    for line in _problems(group):
        raise BadInput(f"{label}: {line}")
    return group


def _problems(group: Group) -> Iterator[str]:
    """Yield a line for each problem with the experiments, comparisons and interactions."""
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
    comparisons = {**group.published, **group.fair}
    for interaction in group.interactions:
        for name in (interaction.comparison, interaction.against):
            if name not in comparisons:
                hint = nearest(name, comparisons)
                yield f"interactions: {shown_key(name)} is not a comparison of the group{hint}"
        if interaction.comparison == interaction.against:
            yield f"interactions: {shown_key(interaction.against)} is compared with itself"
    if not group.published and not group.fair:
        yield "the group has no comparison; add published or fair"
