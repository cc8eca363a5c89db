"""Plans of a group's comparisons, as published or fair.

As published, the arms (variants to compare) are experiments of the sources (published studies):
each has its own treatment, and every setting in which it differs from the first arm is declared
as a confound. In a fair comparison, the arms differ only in what is compared, and by default the
learning rate of each arm is tuned.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from frostlab.comparison.load import changed_settings, make_plan
from frostlab.comparison.plan import Plan
from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import shown_key
from frostlab.recipe.groups import Group, group_names
from frostlab.recipe.load import read_values, recipe_name, with_paths
from frostlab.recipe.recipe import Recipe
from frostlab.storage import check_name
from frostlab.text import plain

_ENDINGS = (".yaml", ".yml")
# a file with one of these keys is a group's
_GROUP_KEYS = {"experiments", "published", "fair", "further"}
# settings of the machine: a change of one leaves the experiment the same
SAME_EXPERIMENT = ("train.device", "data.path")


def is_group_source(source: object) -> bool:
    """Return whether a source is the name of a shipped group, or the path of a group's file."""
    if not isinstance(source, str | Path):
        return False
    name = str(source)
    if not name.endswith(_ENDINGS):
        return name in group_names()
    return bool(_GROUP_KEYS & read_values(name).keys())


def names_in(names: str | Iterable[str] | None) -> list[str]:
    """Return the names in `a,b`, or in a list, as a list; None gives an empty list."""
    if names is None:
        return []
    parts = names.split(",") if isinstance(names, str) else list(names)
    return [str(part).strip() for part in parts]


def folder_name(group: Group, as_published: bool, quick: bool, scale: str = "full") -> str:
    """Return the default name of the folder for a group's comparisons."""
    scaled = "" if scale == "full" else f"-{scale}"
    name = f"{group.name}{'-as-published' * as_published}{scaled}{'-quick' * quick}"
    return check_name(name, "the group's name")


def comparison_names(group: Group, as_published: bool) -> tuple[str, ...]:
    """Return the names of a group's comparisons in the order in which they run."""
    comparisons = group.published if as_published else group.fair
    if not comparisons:
        kind, other = ("published", "without") if as_published else ("fair", "with")
        raise BadInput(f"{group.name} has no {kind} comparisons; compare it {other} --as-published")
    # A comparison's name is also the name of its folder.
    return tuple(check_name(name, f"{group.name}: the comparison's name") for name in comparisons)


def group_plans(
    group: Group,
    *,
    as_published: bool = False,
    only: Iterable[str] = (),
    changes: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    stand_in: Callable[[Recipe], Recipe] | None = None,
) -> dict[str, Plan]:
    """Return the checked plans of a group's comparisons, by name.

    Args:
        only: names of the comparisons to plan; all if it is empty.
        changes: keys to set in every comparison's plan, such as `seeds`.
        settings: settings of the recipe for every arm of every comparison; may include `scale`.
        quick: plan short runs, and by default fewer seeds and shorter step timing.
        stand_in: a function that replaces missing data, tokenizers and weights in an arm's recipe
            by built-in data, a learned tokenizer and random weights.
    """
    names = comparison_names(group, as_published)
    wanted = list(only)
    for name in wanted:
        if name not in names:
            hint = nearest(name, names) or f"; there are {', '.join(names)}"
            raise BadInput(f"--only {shown_key(name)} is not a comparison of {group.name}{hint}")
    plans = {}
    for name in names if not wanted else [name for name in names if name in wanted]:
        try:
            keys = _published(group, name, settings or {}) if as_published else _fair(group, name)
            plan = make_plan(keys, changes, settings=settings, quick=quick, stand_in=stand_in)
        except BadInput as error:
            raise BadInput(f"{group.name}, {name}: {error}") from None
        about = _about(group, name, as_published, settings or {})
        label = f"{folder_name(group, as_published, False)}-{name}"
        plans[name] = plan.model_copy(update={"name": label, "about": about})
    return plans


def _published(group: Group, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a comparison that the sources made, with its confounds declared."""
    keys = dict(group.published[name])
    settings = {key: value for key, value in settings.items() if key != "scale"}  # make_plan scales
    first, *others = recipes = [group.recipe(arm, settings) for arm in keys["arms"]]
    changed = [{}, *(changed_settings(first, recipe) for recipe in others)]
    arms = [
        {"name": arm_name(arm), "treatment": recipe.to_dict()["treatment"], "set": differing}
        for arm, recipe, differing in zip(keys["arms"], recipes, changed, strict=True)
    ]
    confounds = list(dict.fromkeys(key for differing in changed for key in differing))
    return {**keys, "recipe": first.to_dict(), "arms": arms, "allow_confounds": confounds}


def arm_name(experiment: str) -> str:
    """Return the name of an experiment's arm: its id, or its file's name without the ending."""
    return recipe_name(experiment)


def _fair(group: Group, name: str) -> dict[str, Any]:
    """Return the keys of a fair comparison; a recipe's path is relative to the group's file."""
    keys = dict(group.fair[name])
    recipe = keys.get("recipe")
    if isinstance(recipe, str):
        keys["recipe"] = group.source_of(recipe)
    elif isinstance(recipe, dict) and group.folder is not None:
        keys["recipe"] = with_paths(recipe, group.folder, group.name)
    return keys


def _about(group: Group, name: str, as_published: bool, settings: Mapping[str, Any]) -> str:
    """Describe a comparison of the group, for its comparison.md and its report."""
    text = f"The comparison {name} of the group {group.name} ({group.about}), "
    text += (
        "as published: the arms have the treatments, settings, splits and baseline of the "
        "published studies; if arms differ in more than the treatment, the verdict is confounded"
        if as_published
        else "fair: the arms differ only in what is compared"
    )
    changed = [
        f"{key} {plain(value)}" for key, value in settings.items() if key not in SAME_EXPERIMENT
    ]
    ending = f" {other_settings(as_published)}: {', '.join(changed)}." if changed else ""
    return f"{text}.{ending}"


def other_settings(as_published: bool) -> str:
    """Return the words that introduce settings that the user changed."""
    return "Not as published" if as_published else "Not as in the group"
