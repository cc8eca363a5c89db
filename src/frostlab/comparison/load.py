"""From what a user says to a plan: a recipe with arms, or a comparison's own file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frostlab.comparison.plan import DEFAULT_SEEDS, Plan, Rules, rules_for
from frostlab.errors import BadInput, nearest
from frostlab.recipe.load import (
    load_recipe,
    read_values,
    recipe_from,
    recipe_name,
    shipped_comparisons,
)
from frostlab.recipe.recipe import METRICS, Recipe
from frostlab.recipe.treatment import TREATMENTS, Strict

_RULES = ("alpha", "minimum_effect", "noninferior", "looks")
_TUNABLE = {"lr": "optim.lr", "decay": "optim.decay"}
_STEPS = (1 / 3, 1.0, 3.0)  # of the recipe's own value


class Said(Strict):
    """The keys of a comparison, as a user gives them."""

    about: str = ""
    recipe: str | dict[str, Any] = ""
    set: dict[str, Any] | None = None
    arms: str | tuple[Any, ...] = ()
    seeds: int | tuple[int, ...] | None = None
    metric: str | None = None
    alpha: float = 0.05
    minimum_effect: float | None = None
    noninferior: float | None = None
    looks: int = 1
    tune: str | dict[str, Any] | tuple[dict[str, Any], ...] | None = None
    allow_confounds: str | tuple[str, ...] | None = None
    vary: str | tuple[str, ...] | None = None
    contrasts: tuple[dict[str, Any], ...] = ()
    rounds: int = 0
    clock: dict[str, Any] | None = None


def _as_json(values: dict[str, Any], label: str) -> str:
    try:
        return json.dumps(values, default=list)
    except TypeError as error:
        raise BadInput(f"{label}: not plain values ({error})") from None


def make_plan(
    source: str | Path | dict[str, Any] | Recipe,
    *,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    **given: Any,
) -> Plan:
    """Read a recipe or a comparison, put what was given on top, and check it whole.

    `given`: any of a comparison's keys.
    """
    values, label = _values(source)
    values |= given
    unknown = next((str(key) for key in values if key not in Said.model_fields), None)
    if unknown is not None:
        known = nearest(unknown, Said.model_fields)
        raise BadInput(f"{label}: {unknown} is no key of a comparison{known}")
    with _in_one_line(label):
        Said.model_validate_json(_as_json(values, label))
    recipe, name = _recipe(
        values.get("recipe"), {**(values.get("set") or {}), **(settings or {})}, label
    )
    name = label if label in shipped_comparisons() else name
    rules = _rules(values, recipe)
    base = recipe.to_dict() | {"treatment": "none", "seed": 0}
    base["evaluate"]["metric"] = rules.metric  # what is compared also chooses checkpoints
    plan = {
        "name": name,
        "recipe": base,
        "arms": [_arm(arm, label) for arm in _listed(values.get("arms"))],
        "seeds": _seeds(values.get("seeds"), quick),
        "rules": rules.model_dump(mode="json"),
        "tune": _tune(values.get("tune"), recipe),
        "allow": _listed(values.get("allow_confounds")),
        "vary": _listed(values.get("vary")),
        "contrasts": _listed(values.get("contrasts")),
        "rounds": values.get("rounds", 0),
        "quick": quick,
    }
    if "clock" in values:
        plan["clock"] = values["clock"]
    elif quick:
        plan["clock"] = {"seconds": 20.0}
    with _in_one_line(label):
        made = Plan.model_validate_json(json.dumps(plan))
    made.check()
    return made


@contextmanager
def _in_one_line(label: str) -> Iterator[None]:
    """What is wrong with a value, where, and why."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{label}: {where} {first.get('input')!r}: {first['msg']}") from None


def _values(source: str | Path | dict[str, Any] | Recipe) -> tuple[dict[str, Any], str]:
    """A comparison's keys; a recipe alone is one of them."""
    if isinstance(source, Recipe):
        return {"recipe": source.to_dict()}, "comparison"
    if isinstance(source, dict):
        whole = "arms" in source or "recipe" in source
        return (dict(source) if whole else {"recipe": source}), "comparison"
    name = str(source)
    shipped = shipped_comparisons()
    if name in shipped:
        return shipped[name], name
    if name.endswith((".yaml", ".yml")):
        values = read_values(name)
        if "arms" in values or "recipe" in values:
            if isinstance(values.get("recipe"), str) and values["recipe"].endswith(
                (".yaml", ".yml")
            ):
                values["recipe"] = str(Path(name).parent / values["recipe"])
            return values, name
    return {"recipe": name}, name


def _recipe(given: Any, settings: Mapping[str, Any], label: str) -> tuple[Recipe, str]:
    if isinstance(given, str):
        return load_recipe(given, settings), recipe_name(given)
    if isinstance(given, dict):
        return recipe_from(given, label, settings), "comparison"
    raise BadInput(f"{label}: recipe is missing; name a shipped one or a YAML file")


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)


def _arm(given: Any, label: str) -> dict[str, Any]:
    if isinstance(given, dict) and "name" in given:
        name = given["name"]
        own = "none" if "set" in given and name not in TREATMENTS else name
        return {**given, "treatment": _treatment(given.get("treatment", own), label)}
    if not isinstance(given, str):
        raise BadInput(f"{label}: arm {given!r} is neither a treatment's name nor has a name")
    return {"name": given, "treatment": _treatment(given, label)}


def _treatment(given: Any, label: str) -> Any:
    if isinstance(given, str) and given not in TREATMENTS:
        raise BadInput(f"{label}: no arm is called `{given}`{nearest(given, TREATMENTS)}")
    return given


def _seeds(given: Any, quick: bool) -> list[int]:
    if given is None:
        return list(range(3 if quick else DEFAULT_SEEDS))
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise BadInput(f"seeds {given}: a comparison needs at least one")
        return list(range(given))
    return list(given)


def _rules(values: dict[str, Any], recipe: Recipe) -> Rules:
    metric, task = values.get("metric") or recipe.metric, recipe.data.task
    if metric not in METRICS[task]:
        listed = ", ".join(METRICS[task])
        raise BadInput(
            f"metric {metric} does not exist for {task}{nearest(metric, METRICS[task])}; "
            f"there are {listed}"
        )
    given = {key: values[key] for key in _RULES if key in values}
    if metric == "perplexity":
        given = {"noninferior": 1.05} | given
    with _in_one_line("rules"):
        return rules_for(metric, **given)


def _tune(given: Any, recipe: Recipe) -> list[dict[str, Any]]:
    if given is None:
        return []
    if isinstance(given, dict):
        return [given]
    if not isinstance(given, str):
        return list(given)
    if given not in _TUNABLE:
        raise BadInput(f"--tune {given}: cannot be tuned{nearest(given, _TUNABLE)}; there are "
                       f"{', '.join(_TUNABLE)}")  # fmt: skip
    key = _TUNABLE[given]
    own = getattr(recipe.optim, key.rpartition(".")[2])
    return [{"key": key, "values": [float(f"{own * step:.3g}") for step in _STEPS]}]
