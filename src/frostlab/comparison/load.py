"""Loading of a comparison's plan from a recipe, a YAML file or a dict, with all checks.

A comparison has the keys of a `Plan`, except `name`, `quick` and `runs`, in a shorter notation:
`seeds: 6` and `arms: baseline,oelm` replace lists, a rule such as `alpha: 0.05` is not nested in
`rules`, and `set` changes the recipe. For plans of runs that have ended, see
`frostlab.comparison.chosen_runs`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frostlab.comparison.plan import (
    DEFAULT_SEEDS,
    MOST_RUNS,
    Plan,
    scale_of,
)
from frostlab.errors import BadInput, first_line, nearest
from frostlab.recipe.bounded_yaml import check_plain, shown, shown_key
from frostlab.recipe.load import (
    load_recipe,
    read_values,
    recipe_from,
    recipe_name,
    shipped_comparisons,
    shipped_groups,
    shipped_recipes,
    with_paths,
)
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.scale import SIZES
from frostlab.recipe.settings import METRICS, metric_facts
from frostlab.recipe.treatment import TREATMENTS
from frostlab.storage import check_name

Source = str | Path | dict[str, Any] | Recipe

_RULES = ("metric", "alpha", "minimum_effect", "margin", "looks")  # keys that belong to `rules`
_SET_HERE = ("name", "rules", "quick", "runs")  # keys of a plan that its file may not set
PLAN_KEYS = ("set", *_RULES, *(key for key in Plan.model_fields if key not in _SET_HERE))
_INSTEAD = {"treatment": "arms", "seed": "seeds"}  # key that `set` refuses → key to use
_TUNABLE = {"lr": "optim.lr", "decay": "optim.decay"}  # short name → setting with a default grid
_GRID = (1 / 3, 1.0, 3.0)  # default grid, in multiples of the recipe's value
_LEFT_OUT = {"about", "seed", "treatment"}  # recipe keys that are not compared as settings
_ENDINGS = (".yaml", ".yml")  # endings of recipe and comparison files
_QUICK_SEEDS, _QUICK_TIMING = 3, {"seconds": 20.0}  # defaults of a quick comparison


def make_plan(
    source: Source,
    changes: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    stand_in: Callable[[Recipe], Recipe] | None = None,
) -> Plan:
    """Return the checked plan of a comparison.

    Args:
        source: a comparison, or a recipe if `changes` gives the arms: a shipped name, a YAML file,
            a dict or a `Recipe`.
        changes: keys of a comparison that override the source's keys.
        settings: recipe settings for every arm by dotted key, such as `{"optim.lr": 1e-4}`.
            With `{"scale": "tiny"}`, values that an arm sets itself become smaller, too.
        quick: plan short runs, and by default fewer seeds and shorter step timing.
        stand_in: a function that replaces missing data or weights, for example by built-in data.
    """
    values, label = _read(source)
    values |= changes or {}
    for key in map(str, values):
        if key not in PLAN_KEYS:
            raise BadInput(
                f"{label}: {shown_key(key)} is not a key of a comparison{nearest(key, PLAN_KEYS)}"
            )
    _check_kind(values, "about", str, "a text", label)
    _check_kind(values, "set", dict, "a mapping of settings", label)
    changed = {**(values.get("set") or {}), **(settings or {})}
    for key in ("treatment", "seed"):
        if any(str(name).partition(".")[0] == key for name in changed):
            raise BadInput(f"{label}: {key} cannot be set for all runs; use {_INSTEAD[key]}")
    scale = changed.pop("scale", None)
    recipe, name = _recipe(values.get("recipe"), changed, label)
    rules = rules_of(values, recipe)
    base = recipe.to_dict() | {"treatment": "none", "seed": 0}  # each run sets its own
    base["evaluate"]["metric"] = rules["metric"]  # the compared metric also selects checkpoints
    plan_values = {
        "name": label if label in shipped_comparisons() else name,
        "about": values.get("about") or "",
        "recipe": base,
        "arms": _arms(values.get("arms"), label),
        "seeds": _seeds(values.get("seeds"), quick),
        "rules": rules,
        "tune": _tune(values.get("tune"), recipe),
        "allow_confounds": as_list(values.get("allow_confounds")),
        "vary": as_list(values.get("vary")),
        "contrasts": as_list(values.get("contrasts")),
        "rounds": values.get("rounds", 0),
        "assay": values.get("assay", False),
        "quick": quick,
    }
    if "clock" in values:
        plan_values["clock"] = values["clock"] or None  # `clock: false` turns off step timing
    elif str(scale) in SIZES:
        plan_values["clock"] = {"seconds": SIZES[str(scale)].timing}
    elif quick:
        plan_values["clock"] = _QUICK_TIMING
    plan = validated_plan(plan_values, label)
    plan = plan.changed(scale, settings or {}, stand_in, changed_settings)
    plan.check()
    timed = plan.clock is not None and not plan.has_stages
    plan = plan.model_copy(update={"rules": plan.rules.model_copy(update={"timed": timed})})
    from frostlab.comparison.oelm_json import check_names  # imported here because it loads scipy

    check_names(plan)
    return plan


def is_stored_plan(source: Source, changes: Mapping[str, Any], quick: bool) -> bool:
    """Return whether the source is a .json file, that is, a stored plan; refuse changes to it."""
    if not isinstance(source, str | Path) or not str(source).endswith(".json"):
        return False
    if changes or quick:
        changed = ", ".join([*map(shown_key, changes), *(["quick"] if quick else [])])
        raise BadInput(f"{source} is a plan, which cannot be changed; leave out: {changed}")
    return True


def _read(source: Source) -> tuple[dict[str, Any], str]:
    """Return a comparison's values, and its name for error messages.

    If the source is a recipe, the values have the single key `recipe`.
    """
    if isinstance(source, Recipe):
        return {"recipe": source.to_dict()}, "comparison"
    if isinstance(source, dict):
        is_comparison = "arms" in source or "recipe" in source
        return (dict(source) if is_comparison else {"recipe": source}), "comparison"
    name = str(source)
    shipped = shipped_comparisons()
    if name in shipped:
        return dict(shipped[name]), name
    if name.endswith(_ENDINGS):
        values = read_values(name)
        if "arms" in values or "recipe" in values:
            recipe = values.get("recipe")
            if isinstance(recipe, str) and recipe.endswith(_ENDINGS):
                values["recipe"] = str(Path(name).parent / recipe)
            if isinstance(recipe, dict):
                values["recipe"] = with_paths(recipe, Path(name).parent, name)
            return values, name
    elif name not in (recipes := shipped_recipes()):
        hint = nearest(name, [*shipped, *shipped_groups(), *recipes])
        raise BadInput(f"no comparison, group or recipe is called {shown(name)}{hint}")
    return {"recipe": name}, name


def _check_kind(values: dict[str, Any], key: str, kind: type, wanted: str, label: str) -> None:
    if values.get(key) is not None and not isinstance(values[key], kind):
        raise BadInput(f"{label}: {key} {shown(values[key])} should be {wanted}")


def validated_plan(values: dict[str, Any], label: str) -> Plan:
    """Return the values as a plan, or raise a one-line error about the first invalid value."""
    try:
        text = json.dumps(values, default=list)
        check_plain(json.loads(text), label)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{label}: a value does not fit JSON ({first_line(error)})") from None
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])).removeprefix("rules.")
        raise BadInput(
            f"{label}: {shown_key(key)} {shown(problem.get('input'))}: {problem['msg']}"
        ) from None


def _recipe(recipe: Any, settings: Mapping[str, Any], label: str) -> tuple[Recipe, str]:
    """Return the recipe that all arms share, and its name."""
    if isinstance(recipe, str) and recipe:
        return load_recipe(recipe, settings), recipe_name(recipe)
    if isinstance(recipe, dict):
        return recipe_from(recipe, label, settings), "comparison"
    raise BadInput(f"{label}: recipe is missing; name a shipped one or a YAML file")


def as_list(value: Any) -> Any:
    """Split the string `a,b` into a list, and turn None into an empty list.

    Other iterables become lists; a value of the wrong type is returned for validation to refuse.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, dict) or not isinstance(value, Iterable) else list(value)


def _arms(value: Any, label: str) -> Any:
    arms = as_list(value)
    return [_arm(arm, label) for arm in arms] if isinstance(arms, list) else arms


def _arm(value: Any, label: str) -> dict[str, Any]:
    """Return an arm's keys with its treatment.

    By default, the treatment is the one with the arm's name. If no treatment has this name, and
    the arm has the key `set`, it has no treatment.
    """
    if isinstance(value, str):
        value = {"name": value, "treatment": value}
    if not isinstance(value, dict) or "name" not in value:
        raise BadInput(
            f"{label}: arm {shown(value)} must be a treatment's name, or have a key `name`"
        )
    name = check_name(value["name"], f"{label}: the arm's name")
    default = "none" if "set" in value and name not in TREATMENTS else name
    treatment = value.get("treatment", default)
    if isinstance(treatment, str) and treatment not in TREATMENTS:
        hint = nearest(treatment, TREATMENTS)
        raise BadInput(f"{label}: no treatment is called `{shown_key(treatment)}`{hint}")
    return {**value, "treatment": treatment}


def _seeds(value: Any, quick: bool) -> Any:
    """Turn a number of seeds into the list 0, 1, …, and None into the default seeds.

    Other values are treated as by `as_list`.
    """
    if value is None:
        value = _QUICK_SEEDS if quick else DEFAULT_SEEDS
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise BadInput(f"seeds {value}: a comparison needs at least one seed")
        if value > MOST_RUNS:
            raise BadInput(f"seeds {value}: a comparison has at most {MOST_RUNS} runs")
        return list(range(value))
    return as_list(value)


def rules_of(values: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the values of `Rules`; the recipe's metric and that metric's margin are defaults."""
    metric, task = values.get("metric") or recipe.metric, recipe.data.task
    if not isinstance(metric, str) or metric not in METRICS[task]:
        raise BadInput(
            f"metric {shown_key(str(metric))} does not exist for {task}"
            f"{nearest(str(metric), METRICS[task])}; "
            f"choose from: {', '.join(METRICS[task])}"
        )
    rules = {key: values[key] for key in _RULES if key in values}
    facts = metric_facts(metric)
    margin = rules.setdefault("margin", facts.margin)
    is_factor = facts.compared_by != "difference"
    if is_factor and isinstance(margin, int | float) and margin < 1:
        raise BadInput(f"margin {margin:g} should be a factor of 1 or more, such as 1.05")
    return rules | {"metric": metric} | scale_of(metric)


def _tune(value: Any, recipe: Recipe) -> Any:
    """Return the settings to tune; `lr` and `decay` get a grid around the recipe's value."""
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, str):
        return as_list(value)
    if value not in _TUNABLE:
        raise BadInput(
            f"--tune {shown_key(value)} has no default grid{nearest(value, _TUNABLE)}; "
            f"choose from: {', '.join(_TUNABLE)}"
        )
    key = _TUNABLE[value]
    own_value = getattr(recipe.optim, key.rpartition(".")[2])
    return [{"key": key, "values": [float(f"{own_value * factor:.3g}") for factor in _GRID]}]


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that define an arm, without the path of the data."""
    values = recipe.model_dump(mode="json", exclude=_LEFT_OUT)
    values["data"] = {key: value for key, value in values["data"].items() if key != "path"}
    return values


def changed_settings(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """Return the settings of `other` in which it differs from a recipe, besides its treatment."""
    left, right = (either.model_dump(mode="json", exclude=_LEFT_OUT) for either in (recipe, other))
    return dict(differing_keys(left, right))


def differing_keys(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys at which `right` differs from `left`, with the values of `right`.

    Mappings with different keys, such as two kinds of model, differ as a whole.
    """
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from differing_keys(left[key], right[key], f"{path}.{key}".strip("."))
    elif left != right:
        yield path, right
