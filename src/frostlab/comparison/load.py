"""Loading of a comparison's plan from a recipe, a YAML file, a dict or runs, with all checks.

A comparison has the keys of a `Plan`, except `name`, `quick` and `runs`, in a shorter notation:
`seeds: 6` and `arms: baseline,oelm` replace lists, a rule such as `alpha: 0.05` is not nested in
`rules`, and `set` changes the recipe. To compare runs that have ended, the plan is made from their
recipes: each group of runs is an arm, named after its differences from the others.
"""

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from frostlab.records.finding.index import is_run
from frostlab.records.folder import RunRecord
from frostlab.storage import check_name
from frostlab.text import short

Source = str | Path | dict[str, Any] | Recipe

_RULES = ("metric", "alpha", "minimum_effect", "margin", "looks")
_SET_HERE = ("name", "rules", "quick", "runs")  # keys of a plan that its file may not set
PLAN_KEYS = ("set", *_RULES, *(key for key in Plan.model_fields if key not in _SET_HERE))
_INSTEAD = {"treatment": "arms", "seed": "seeds"}  # key that `set` refuses → key to use
_TUNABLE = {"lr": "optim.lr", "decay": "optim.decay"}  # short name → setting with a default grid
_GRID = (1 / 3, 1.0, 3.0)  # default grid, in multiples of the recipe's value
_LEFT_OUT = {"about", "seed", "treatment"}  # recipe keys that are not compared as settings
_ENDINGS = (".yaml", ".yml")  # endings of recipe and comparison files
_LONG_PATH = 300  # most characters of a path in an error message
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
    rules = _rules(values, recipe)
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
        "allow_confounds": _as_list(values.get("allow_confounds")),
        "vary": _as_list(values.get("vary")),
        "contrasts": _as_list(values.get("contrasts")),
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
    plan = _validated(plan_values, label)
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


def _validated(values: dict[str, Any], label: str) -> Plan:
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


def _as_list(value: Any) -> Any:
    """Split the string `a,b` into a list, and turn None into an empty list.

    Other iterables become lists; a value of the wrong type is returned for validation to refuse.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, dict) or not isinstance(value, Iterable) else list(value)


def _arms(value: Any, label: str) -> Any:
    arms = _as_list(value)
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

    Other values are treated as by `_as_list`.
    """
    if value is None:
        value = _QUICK_SEEDS if quick else DEFAULT_SEEDS
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise BadInput(f"seeds {value}: a comparison needs at least one seed")
        if value > MOST_RUNS:
            raise BadInput(f"seeds {value}: a comparison has at most {MOST_RUNS} runs")
        return list(range(value))
    return _as_list(value)


def _rules(values: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
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
        return _as_list(value)
    if value not in _TUNABLE:
        raise BadInput(
            f"--tune {shown_key(value)} has no default grid{nearest(value, _TUNABLE)}; "
            f"choose from: {', '.join(_TUNABLE)}"
        )
    key = _TUNABLE[value]
    own_value = getattr(recipe.optim, key.rpartition(".")[2])
    return [{"key": key, "values": [float(f"{own_value * factor:.3g}") for factor in _GRID]}]


# Plans of runs that have ended

RunsOf = str | Path | RunRecord | Iterable[str | Path | RunRecord]  # the runs of one arm


def plan_of_runs(groups: Sequence[RunsOf], changes: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan that compares groups of runs, each of which becomes an arm.

    The first group is the baseline. Arms are named after their treatments and the settings that
    differ. The paths of the runs in the plan are absolute.

    Args:
        groups: for each arm a run's folder, a folder of runs, a pattern such as `runs/a-*`, or a
            list of these.
        changes: values of the rules (`metric`, `alpha`, …), and `allow_confounds`.
    """
    changes = changes or {}
    if len(groups) < 2:
        listed = ", ".join(str(name) for group in groups for name in _names(group)) or "nothing"
        raise BadInput(
            f"{listed}: a comparison needs the runs of two arms, such as 'runs/a-*' 'runs/b-*'; "
            "the first is the baseline"
        )
    baseline, *others = arms = [_ChosenRuns.of(group) for group in groups]
    _check_distinct(arms)
    for arm in others:
        _check_pairable(baseline, arm)
    first = baseline.first.recipe
    if changes.get("metric") is None:
        for arm in others:
            if arm.first.recipe.metric != first.metric:
                raise BadInput(
                    f"checkpoints of {baseline.label} were selected by {first.metric}, and those "
                    f"of {arm.label} by {arm.first.recipe.metric}; choose a metric with --metric"
                )
    rules = _rules(dict(changes), first)
    for arm in arms:
        arm.check_metric(rules["metric"])
    settings = [dict(_changed(baseline.settings, arm.settings)) for arm in arms]
    names = _arm_names(arms, settings)
    plan_values = {
        "name": _name_of(arms),
        "recipe": first.to_dict() | {"treatment": "none", "seed": 0},
        "arms": [
            {
                "name": name,
                "treatment": arm.first.recipe.to_dict()["treatment"],
                "set": changed,
            }
            for name, arm, changed in zip(names, arms, settings, strict=True)
        ],
        "seeds": sorted({seed for arm in arms for seed in arm.runs}),
        "rules": rules,
        "allow_confounds": _as_list(changes.get("allow_confounds")),
        "vary": _compared_settings(arms, settings),
        "clock": None,
        "runs": {
            name: {seed: str(run.folder) for seed, run in arm.runs.items()}
            for name, arm in zip(names, arms, strict=True)
        },
    }
    plan = _validated(plan_values, "runs")
    plan.check()
    from frostlab.comparison.oelm_json import check_names  # imported here because it loads scipy

    check_names(plan)
    return plan


@dataclass(frozen=True)
class _ChosenRuns:
    """The runs of one arm by seed, whose treatment and settings are equal."""

    label: str  # the user's text, for error messages
    runs: dict[int, RunRecord]

    @classmethod
    def of(cls, group: RunsOf) -> "_ChosenRuns":
        """Read the runs of a group; refuse runs that do not make one arm."""
        names = _names(group)
        label = ", ".join(map(str, names))
        folders = dict.fromkeys(folder for name in names for folder in _folders(name))
        if not folders:
            raise BadInput("an arm has no runs: the list is empty")
        first, *others = records = [RunRecord(folder) for folder in folders]
        for run in others:
            keys = ["treatment"] * (run.recipe.surgery != first.recipe.surgery)
            keys += [key for key, _ in _changed(_settings(first.recipe), _settings(run.recipe))]
            if keys:
                raise BadInput(
                    f"{label}: the runs of an arm may differ only in the seed, but {run.folder} "
                    f"differs from {first.folder} in {', '.join(keys)}"
                )
        runs: dict[int, RunRecord] = {}
        for run in records:
            same = runs.setdefault(run.start.seed, run)
            if same is not run:
                raise BadInput(
                    f"{label}: {same.folder} and {run.folder} both have seed {run.start.seed}; "
                    "leave one of them out"
                )
        if not any(map(_has_ended, records)):
            listed = ", ".join(run.folder.name for run in records[:5])
            raise BadInput(f"{label}: no run has ended; frostlab run --resume finishes {listed}")
        return cls(label, dict(sorted(runs.items())))

    @property
    def first(self) -> RunRecord:
        """The run with the smallest seed."""
        return next(iter(self.runs.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the runs share."""
        return _settings(self.first.recipe)

    @property
    def data(self) -> set[str]:
        """The digests of the runs' data; one, unless files were changed between two runs."""
        return {run.digests.data for run in self.runs.values()}

    def check_metric(self, metric: str) -> None:
        """Refuse a finished run that does not report the metric."""
        for run in self.runs.values():
            if _has_ended(run) and run.status == "finished" and metric not in run.metrics:
                hint = nearest(metric, run.metrics)
                raise BadInput(f"{run.folder} reports no {shown_key(metric)}{hint}")


def _has_ended(run: RunRecord) -> bool:
    return (run.folder / "result.json").exists()


def _name_of(arms: Sequence[_ChosenRuns]) -> str:
    """Return the name that the arms' runs share, else the names of their data and model.

    A run is named after its recipe or, in a planned comparison, after its arm.
    """
    first, names = arms[0].first, {arm.first.start.name for arm in arms}
    if len(names) > 1:
        return recipe_name(f"{first.recipe.data.name}-{first.recipe.model.kind}")
    return recipe_name(first.start.name)


def _names(group: RunsOf) -> list[str | Path]:
    """Return the folders and patterns that name the runs of an arm."""
    if isinstance(group, RunRecord):
        return [group.folder]
    if isinstance(group, str | Path):
        return [group]
    if not isinstance(group, Iterable):
        raise BadInput(f"{group!r:.80} is not a run, a folder of runs or a pattern")
    return [name for item in group for name in _names(item)]


def _folders(name: str | Path) -> list[Path]:
    """Return the folder of a run, of all runs in a folder, or of all runs that match a pattern."""
    text, path = str(name), Path(name)
    if not text:
        raise BadInput("an arm has no runs: the name of a run or the pattern is empty")
    if os.path.exists(path / "plan.json"):
        raise BadInput(f"{text} is a comparison; name an arm's runs, such as {path}/runs/oelm-*")
    pattern = os.path.join(glob.escape(text), "*") if os.path.isdir(text) else text
    single = os.path.isdir(text) and is_run(path)
    matches = [text] if single else list(filter(os.path.isdir, glob.glob(pattern)))
    if not matches:
        raise BadInput(_no_match(text))
    for match in matches:
        if not is_run(Path(match)):
            raise BadInput(f"{text}: {match} is not a run; choose a pattern that matches only runs")
    return [Path(match).resolve() for match in sorted(matches)]


def _no_match(text: str) -> str:
    """Return the error message for a name or pattern without runs, with the nearest run's name."""
    if text in {*shipped_recipes(), *shipped_comparisons()} or text.endswith((".yaml", ".json")):
        return f"{text} is not a run: --runs compares runs that have ended, and trains no recipe"
    parent = Path(text) if os.path.isdir(text) else Path(text).parent
    text = short(text, _LONG_PATH)
    if not os.path.isdir(parent):
        return f"no run matches {text}: {short(str(parent), _LONG_PATH)} is not a folder"
    paths = map(Path, glob.glob(os.path.join(glob.escape(str(parent)), "*")))
    names = [path.name for path in paths if is_run(path)]
    if not names:
        return f"no run matches {text}: {parent} has no runs"
    hint = nearest(Path(text).name, names) or f"; there is `{min(names)}`"
    return f"no run matches {text}{hint}"


def _check_distinct(arms: Sequence[_ChosenRuns]) -> None:
    """Refuse a run that is in two arms, and two arms that were trained in the same way."""
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            own = {run.folder for run in arm.runs.values()}
            if both := sorted(own & {run.folder for run in other.runs.values()}):
                raise BadInput(f"{both[0]} is in two arms, {other.label} and {arm.label}")
            same = arm.first.recipe.surgery == other.first.recipe.surgery
            if same and not list(_changed(other.settings, arm.settings)):
                raise BadInput(
                    f"{other.label} and {arm.label} were trained in the same way, so they are one "
                    "arm; put a pattern that stands for several runs in quotes: 'runs/a-*'"
                )


def _check_pairable(baseline: _ChosenRuns, arm: _ChosenRuns) -> None:
    """Refuse an arm whose task, scale or data are not the baseline's, or that shares no seed."""
    tasks = [either.first.recipe.data.task for either in (baseline, arm)]
    if tasks[0] != tasks[1]:
        raise BadInput(
            f"the task of {baseline.label} is {tasks[0]}, and that of {arm.label} is {tasks[1]}"
        )
    scales = dict.fromkeys(either.first.recipe.scale for either in (baseline, arm))
    if len(scales) > 1:
        listed = " and ".join(scales)
        raise BadInput(f"{baseline.label} and {arm.label} differ in scale ({listed})")
    for key, value in _changed(baseline.settings["data"], arm.settings["data"], "data"):
        values = f"{shown(_value(baseline.settings, key))} and {shown(value)}"
        raise BadInput(
            f"{baseline.label} and {arm.label} differ in {key} ({values}): arms must see the same "
            "data"
        )
    if not baseline.data & arm.data:
        digests = " and ".join(min(either.data) for either in (baseline, arm))
        raise BadInput(
            f"{baseline.label} and {arm.label} were trained on different data (digests {digests})"
        )
    if not baseline.runs.keys() & arm.runs.keys():
        a, b = (", ".join(map(str, either.runs)) for either in (baseline, arm))
        raise BadInput(f"no seed in common: {baseline.label} has {a}, and {arm.label} has {b}")


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that define an arm, without the path of the data."""
    values = recipe.model_dump(mode="json", exclude=_LEFT_OUT)
    values["data"] = {key: value for key, value in values["data"].items() if key != "path"}
    return values


def changed_settings(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """Return the settings of `other` in which it differs from a recipe, besides its treatment."""
    left, right = (either.model_dump(mode="json", exclude=_LEFT_OUT) for either in (recipe, other))
    return dict(_changed(left, right))


def _changed(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys at which `right` differs from `left`, with the values of `right`.

    Mappings with different keys, such as two kinds of model, differ as a whole.
    """
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from _changed(left[key], right[key], f"{path}.{key}".strip("."))
    elif left != right:
        yield path, right


def _compared_settings(
    arms: Sequence[_ChosenRuns], settings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the settings that are compared like treatments.

    A setting is compared if it is the only difference between an arm and the baseline. If it
    differs together with the treatment or another setting in any arm, it is a confound instead.
    """
    compared, together = list[str](), set[str]()
    for arm, changed in zip(arms, settings, strict=True):
        if len(changed) == 1 and arm.first.recipe.surgery == arms[0].first.recipe.surgery:
            compared += changed
        else:
            together |= set(changed)
    return [key for key in dict.fromkeys(compared) if key not in together]


def _arm_names(arms: Sequence[_ChosenRuns], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each arm by its treatment, if treatments differ, and by the settings that differ."""
    keys = list(dict.fromkeys(key for changed in settings for key in changed))
    surgeries = [arm.first.recipe.surgery for arm in arms]
    names: list[str] = []
    for i, arm in enumerate(arms):
        parts = []
        if any(surgery != surgeries[0] for surgery in surgeries):
            treatment = arm.first.recipe.treatment_name
            # A plan takes the arm named baseline as its baseline, so only the first gets this name.
            is_plain = treatment in ("none", "baseline")
            parts.append(("none" if i else "baseline") if is_plain else treatment)
        for key in keys:
            value = settings[i].get(key, _value(arms[0].settings, key))
            parts.append(f"{key.rpartition('.')[2]}-{_value_text(value)}".rstrip("-"))
        name = unique = recipe_name("-".join(parts))[:90]
        number = 2
        while unique in names:
            unique, number = f"{name}-{number}", number + 1
        names.append(unique)
    return names


def _value(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value[part]
    return value


def _value_text(value: Any) -> str:
    """Return a short text for a setting's value: a section's kind, or a list's length."""
    if isinstance(value, dict):
        return str(value.get("kind", ""))
    if isinstance(value, list):
        return str(len(value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
