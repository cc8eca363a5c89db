"""Plans of matrices: from a group of experiments, or from a user's YAML file.

The file of a matrix names recipes, treatments, settings and seeds; every combination is a run:

    about: which learning rate does freezing need?
    recipes: [docstrings-gpt]
    treatments: [baseline, oelm]
    settings: {optim.lr: [1.0e-4, 1.0e-3]}
    seeds: 3
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from frostlab.data.fetch import needs_of
from frostlab.errors import BadInput, nearest
from frostlab.matrix.store import SCHEMA, MatrixPlan, PlannedRun
from frostlab.matrix.task import Task
from frostlab.recipe.bounded_yaml import read_yaml, shown, shown_key
from frostlab.recipe.groups import Group, group_from, group_names, load_group
from frostlab.recipe.load import load_recipe, recipe_from, recipe_name
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import MOST_LISTED, TREATMENTS, Strict
from frostlab.storage import MOST_VALUES, check_name, digest_of, values_in

_ENDINGS = (".yaml", ".yml")
_GROUP_KEYS = {"experiments", "published", "fair"}  # a file with one of them is a group's
_MOST_RUNS = 100_000
_MOST_SEEDS = 10_000
_RUN_VALUES = 3 * len(fields(PlannedRun)) + 1  # in the JSON text of a plan
_DEVICE_KINDS = ("auto", "cuda", "cpu", "mps")  # allowed values of `train.device`
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_ALLOWED = {  # key of a matrix's file → its allowed values, for errors
    "about": "a text",
    "recipes": f"a list of 1 to {MOST_LISTED:,} names or files of recipes",
    "treatments": f"a list of at most {MOST_LISTED:,} names of treatments",
    "set": f"at most {MOST_LISTED:,} settings, each `key: value`",
    "settings": f"at most {MOST_LISTED:,} settings, each `key: [value, value]`, or a list of "
    "combinations, each `{key: value, key: value}`",
    "seeds": f"a number from 1 to {_MOST_SEEDS:,}, or a list of 1 to {_MOST_SEEDS:,} whole "
    "numbers from 0 on",
}


class MatrixFile(Strict):
    """The keys of a matrix's file."""

    about: str = ""
    recipes: tuple[str, ...] = Field(min_length=1, max_length=MOST_LISTED)
    # empty: each recipe has its own treatment
    treatments: tuple[str, ...] = Field(default=(), max_length=MOST_LISTED)
    # settings of every run
    set: dict[str, Any] = Field(default_factory=dict, max_length=MOST_LISTED)
    # a grid, setting → values; or a list of combinations, each setting → value
    settings: dict[str, tuple[Any, ...]] | tuple[dict[str, Any], ...] = Field(
        default=(), max_length=MOST_LISTED
    )
    seeds: (
        Annotated[int, Field(ge=1, le=_MOST_SEEDS)]
        | Annotated[tuple[Seed, ...], Field(min_length=1, max_length=_MOST_SEEDS)]
    ) = 1

    @property
    def number_of_variants(self) -> int:
        """The number of recipes with their treatments and settings; each runs with every seed."""
        given = self.settings
        lists = given.values() if isinstance(given, dict) else [given] if given else []
        return len(self.recipes) * max(1, len(self.treatments)) * math.prod(map(len, lists))

    def variants(self) -> list[dict[str, Any]]:
        """Return the combinations of settings; one empty combination if there are none."""
        if isinstance(self.settings, dict):
            keys, values = list(self.settings), list(self.settings.values())
            return [dict(zip(keys, chosen, strict=True)) for chosen in product(*values)]
        return [dict(chosen) for chosen in self.settings] or [{}]


@dataclass(frozen=True)
class _Variant:
    """A recipe of a matrix, which is trained with every seed."""

    id: str
    recipe: Recipe
    optional: bool = False  # whether the published studies only suggest it
    baseline: str | None = None  # id of its baseline; None: it is a baseline itself, or has none


def matrix_plan(
    source: str,
    *,
    seeds: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    only: Iterable[str] = (),
    stand_in: Callable[[Recipe], Recipe] | None = None,
    data_dir: Path | None = None,
) -> MatrixPlan:
    """Return the checked plan of a matrix.

    A run whose data, tokenizer or weights are not on this machine is marked as missing.

    Args:
        source: the name of a shipped group, or a YAML file of a group or a matrix.
        seeds: the seeds of every recipe; None: those of the file or, for a group, each recipe's
            own seed.
        settings: settings that are changed in every recipe; `scale` is one of them.
        only: ids of the recipes to run; all if it is empty.
        stand_in: a function that replaces what a recipe lacks by a stand-in, such as missing data
            by built-in data.
        data_dir: the folder in which data sets are looked for first.
    """
    name, variants, own_seeds = _variants(source, dict(settings or {}), seeds)
    variants = _chosen(variants, list(only), name)
    if stand_in is not None:
        variants = [replace(variant, recipe=stand_in(variant.recipe)) for variant in variants]
    for variant in variants:
        if variant.recipe.train.device not in _DEVICE_KINDS:
            raise BadInput(
                f"{variant.id}: train.device {variant.recipe.train.device} names one device; "
                "use auto, and choose devices with --devices"
            )
    marks = variants[0].recipe.marks  # such as -tiny-stand-in; empty for a full run
    return _planned(f"{name}{marks}", source, variants, seeds or own_seeds, data_dir)


def _variants(
    source: str, settings: dict[str, Any], seeds: Sequence[int] | None
) -> tuple[str, list[_Variant], Sequence[int] | None]:
    """Return the name of a matrix, its recipes, and the seeds of its file.

    `seeds` are those of the command, if it names any.
    """
    if not source.endswith(_ENDINGS):
        if source not in group_names():
            raise BadInput(
                f"no group is called {shown(source)}{nearest(source, group_names())} (there are "
                f"{', '.join(group_names())}); a matrix of your own is a .yaml file"
            )
        return source, _of_group(load_group(source), settings, seeds), None
    path = Path(source)
    try:
        values = read_yaml(path)
    except FileNotFoundError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    name = check_name(path.name.rpartition(".")[0], "the matrix's name")
    if _GROUP_KEYS & values.keys():
        group = group_from(values, name, source, path.parent)
        return name, _of_group(group, settings, seeds), None
    file = matrix_from(values, source)
    own_seeds = list(range(file.seeds) if isinstance(file.seeds, int) else file.seeds)
    if "seed" in settings:
        raise BadInput("--set seed cannot be set for a matrix; use --seeds, or seeds in its file")
    if file.treatments and any(key.partition(".")[0] == "treatment" for key in settings):
        raise BadInput(f"--set treatment: {source} lists treatments; change them there")
    _check_number(source, file.number_of_variants * len(seeds or own_seeds))
    return name, _of_file(file, source, path.parent, settings), own_seeds


def _check_number(source: str, runs: int) -> None:
    if runs > _MOST_RUNS:
        raise BadInput(f"{source}: {runs:,} runs; a matrix can have {_MOST_RUNS:,} at most")


def matrix_from(values: dict[str, Any], label: str) -> MatrixFile:
    """Return the keys of a matrix's file, or raise an error of one line."""
    for key in ("recipes", "treatments"):
        if isinstance(values.get(key), str):
            values = {**values, key: [part.strip() for part in values[key].split(",")]}
    _check_grid(values.get("settings"), label)
    try:
        file = MatrixFile.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problems = error.errors()
        unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
        problem = next(unknown, problems[0])
        key = shown_key(".".join(str(part) for part in problem["loc"][:2]))
        if problem["type"] == "extra_forbidden":
            hint = nearest(str(problem["loc"][0]), MatrixFile.model_fields)
            raise BadInput(f"{label}: {key} is not a key of a matrix{hint}") from None
        if problem["type"] == "missing":
            raise BadInput(f"{label}: {key} is missing") from None
        key = str(problem["loc"][0])
        raise BadInput(f"{label}: {key} {shown(values[key])} should be {_ALLOWED[key]}") from None
    _check_repetitions(file, label)
    for treatment in file.treatments:
        if treatment not in TREATMENTS:
            hint = nearest(treatment, TREATMENTS)
            raise BadInput(f"{label}: no treatment is called {shown(treatment)}{hint}")
    for where, keys in (("set", file.set), *(("settings", keys) for keys in file.variants())):
        for key, instead in (("treatment", "treatments"), ("seed", "seeds")):
            if key in keys:
                raise BadInput(f"{label}: {where}.{key} cannot be set; use {instead}")
    return file


def _check_grid(settings: object, label: str) -> None:
    """Refuse a grid in which a key has no list of values, or which has too many combinations."""
    if not isinstance(settings, dict):
        return
    for key, values in settings.items():
        if not isinstance(values, list) or not values:
            example = "" if isinstance(values, list) or values is None else f", such as [{values}]"
            raise BadInput(
                f"{label}: settings.{shown_key(str(key))} {shown(values)} should be a list of one "
                f"or more values{shown_key(example)}"
            )
    combinations = math.prod(map(len, settings.values()))
    if combinations > _MOST_RUNS:
        raise BadInput(
            f"{label}: settings have {combinations:,} combinations; a matrix can have "
            f"{_MOST_RUNS:,} runs at most"
        )


def _check_repetitions(file: MatrixFile, label: str) -> None:
    """Refuse a value that a list has twice, because both runs would have the same folder."""
    seeds = () if isinstance(file.seeds, int) else file.seeds
    lists = {"recipes": file.recipes, "treatments": file.treatments, "seeds": seeds}
    if isinstance(file.settings, dict):
        lists |= {f"settings.{key}": values for key, values in file.settings.items()}
    else:
        lists["settings"] = file.settings
    for key, values in lists.items():
        counts = Counter(map(json.dumps, values))
        for value in values:
            if counts[json.dumps(value)] > 1:
                raise BadInput(f"{label}: {shown_key(key)}: {shown(value)} is listed twice")


def _of_group(
    group: Group, settings: dict[str, Any], seeds: Sequence[int] | None
) -> list[_Variant]:
    """Return the experiments of a group, each with its baseline.

    For a further arm of a published comparison, the baseline is the comparison's first arm. For any
    other treated experiment, it is the first untreated one on the same data, if there is one.
    """
    if not group.experiments:
        raise BadInput(f"{group.name} has no experiments of its own; use `frostlab compare` for it")
    if seeds is not None and "seed" in settings:
        raise BadInput("--set seed and --seeds exclude each other")
    baselines: dict[str, str] = {}
    for comparison in group.published:
        first, *others = group.arms(comparison)
        for arm in others:
            baselines.setdefault(arm, first)
    recipes = {name: group.recipe(name, settings) for name in group.experiments}
    for name, recipe in recipes.items():
        if name not in baselines and not _is_untreated(recipe):
            same = [
                other for other, facts in recipes.items()
                if facts.data.name == recipe.data.name and _is_untreated(facts)
            ]  # fmt: skip
            baselines |= {name: same[0]} if same else {}
    return [
        _Variant(
            recipe_name(name), recipe, group.experiments[name].optional,
            recipe_name(baselines[name]) if name in baselines else None,
        )
        for name, recipe in recipes.items()
    ]  # fmt: skip


def _of_file(
    file: MatrixFile, label: str, folder: Path, settings: dict[str, Any]
) -> list[_Variant]:
    """Return every combination of recipes, treatments and settings of a matrix's file."""
    variants = []
    for source in file.recipes:
        place = str(folder / source) if source.endswith(_ENDINGS) else source
        for own in file.variants():
            name = f"{recipe_name(source)}{_label(own)}"
            for treatment in file.treatments or (None,):
                named = {} if treatment is None else {"treatment": treatment}
                try:
                    recipe = load_recipe(place, {**file.set, **own, **settings, **named})
                except BadInput as error:
                    raise BadInput(f"{label}: {error}") from None
                variants.append(_Variant(_with_treatment(name, treatment), recipe))
    return list(_with_baselines(variants))


def _with_treatment(name: str, treatment: str | None) -> str:
    return name if treatment is None else f"{name}-{treatment}"


def _with_baselines(variants: Sequence[_Variant]) -> Iterator[_Variant]:
    """Set each treated recipe's baseline: the untreated recipe that is otherwise the same."""
    untreated = {_digest_of_rest(v.recipe): v.id for v in variants if _is_untreated(v.recipe)}
    for variant in variants:
        recipe = variant.recipe
        baseline = None if _is_untreated(recipe) else untreated.get(_digest_of_rest(recipe))
        yield replace(variant, baseline=baseline)


def _digest_of_rest(recipe: Recipe) -> str:
    """Return a digest of everything in a recipe except its treatment and description."""
    return digest_of({**recipe.to_dict(), "treatment": None, "about": None})


def _is_untreated(recipe: Recipe) -> bool:
    return recipe.surgery == TREATMENTS["none"]


def _label(settings: Mapping[str, Any]) -> str:
    """Return settings as a part of a run's name, such as `@lr=0.001`."""
    label = "".join(f"@{key.rpartition('.')[2]}={_text(value)}" for key, value in settings.items())
    return check_name(label, "the settings' name") if label else ""


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isalnum() or c in "+-._" else "_" for c in text)[:40]


def _chosen(variants: list[_Variant], only: list[str], name: str) -> list[_Variant]:
    ids = [variant.id for variant in variants]
    for wanted in only:
        if wanted not in ids:
            hint = nearest(wanted, ids) or f"; there are {', '.join(ids[:20])}"
            raise BadInput(f"--only {shown_key(wanted)} is not in {name}{hint}")
    return [variant for variant in variants if not only or variant.id in only]


def _planned(
    name: str,
    source: str,
    variants: Sequence[_Variant],
    seeds: Sequence[int] | None,
    data_dir: Path | None,
) -> MatrixPlan:
    """Return the plan of all recipes with all seeds, in the order in which they run."""
    missing = missing_data({variant.id: variant.recipe for variant in variants}, data_dir)
    names = {variant.id: _run_name(variant) for variant in variants}
    runs, recipes = [], []
    for index, variant in enumerate(variants):
        recipe = variant.recipe
        recipes.append({k: v for k, v in recipe.to_dict().items() if k != "seed"})
        for seed in [recipe.seed] if seeds is None else seeds:
            against = names.get(variant.baseline or "")
            runs.append(PlannedRun(
                name=check_name(f"{names[variant.id]}-s{seed}", "the run's name"), id=variant.id,
                phase=name, data=recipe.data.name, method=recipe.treatment_name, seed=seed,
                metric=recipe.metric, recipe=index, optional=variant.optional,
                baseline=None if against is None else f"{against}-s{seed}",
                missing=missing.get(variant.id),
            ))  # fmt: skip
    _check_number(source, len(runs))
    twice = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise BadInput(
            f"{source}: two recipes would have the folder {twice[0]}; rename one, or choose "
            "settings that differ in their first six digits"
        )
    return _readable(MatrixPlan(
        schema=SCHEMA, name=check_name(name, "the matrix's name"), source=source,
        planned=round(time.time(), 3), runs=in_order(runs), recipes=recipes,
        data_dir=None if data_dir is None else str(data_dir.expanduser().absolute()),
    ))  # fmt: skip


def _readable(plan: MatrixPlan) -> MatrixPlan:
    """Return a plan; refuse one whose file would be too large to be read."""
    size = sum(map(values_in, plan.recipes)) + _RUN_VALUES * len(plan.runs)
    if size > MOST_VALUES:
        most = len(plan.runs) * MOST_VALUES // size
        raise BadInput(
            f"{plan.source}: {len(plan.runs):,} runs with {len(plan.recipes):,} recipes make too "
            f"large a plan; about {most:,} such runs fit"
        )
    return plan


def _run_name(variant: _Variant) -> str:
    """Return the name of a recipe's runs without the seed; it ends in the treatment."""
    recipe, treatment = variant.recipe, f"-{variant.recipe.treatment_name}"
    return f"{variant.id.removesuffix(treatment)}{recipe.marks}{treatment}"


def in_order(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Sort runs: one data set after another; in each, required runs before optional ones.

    Among the required runs of a data set, and among the optional ones, baselines come first.
    """
    data = {name: place for place, name in enumerate(dict.fromkeys(run.data for run in runs))}

    def place(run: PlannedRun) -> tuple[int, bool, bool]:
        return data[run.data], run.optional, run.baseline is not None

    return sorted(runs, key=place)  # stable


def missing_data(recipes: Mapping[str, Recipe], data_dir: Path | None) -> dict[str, str]:
    """Return what each recipe lacks, by id; recipes that can run are left out."""
    missing: dict[str, list[str]] = {}
    for need in needs_of(dict(recipes), data_dir):
        if need.state == "missing":
            for name in need.recipes:
                missing.setdefault(name, []).append(f"{need.kind} {need.name}")
    return {name: ", ".join(lacking) for name, lacking in missing.items()}


def tasks_of(plan: MatrixPlan, folder: Path) -> list[Task]:
    """Return the tasks of all runs of a plan that lack nothing."""

    @cache
    def recipe_at(index: int) -> Recipe:
        return recipe_from(dict(plan.recipes[index]), f"{plan.name}, recipe {index}")

    return [
        Task(
            run.id, recipe_at(run.recipe).model_copy(update={"seed": run.seed}),
            folder / run.name, run.name,
        )
        for run in plan.runs if run.missing is None
    ]  # fmt: skip


def recipes_of(plan: MatrixPlan) -> list[tuple[str, Recipe, int]]:
    """Return the id of every recipe of a plan, the recipe, and the number of its runs."""
    by_recipe: dict[int, tuple[str, Recipe, int]] = {}
    for run in plan.runs:
        if run.recipe in by_recipe:
            name, recipe, count = by_recipe[run.recipe]
        else:
            values = {**plan.recipes[run.recipe], "seed": run.seed}
            name, recipe, count = run.id, recipe_from(values, run.id), 0
        by_recipe[run.recipe] = (name, recipe, count + 1)
    return list(by_recipe.values())


def merged(old: MatrixPlan, new: MatrixPlan) -> tuple[MatrixPlan, list[PlannedRun]]:
    """Return a plan with the runs of both plans, and the runs that only the new plan has.

    A run that both plans have must have the same recipe in both, or BadInput is raised.
    """
    known = {run.name: run for run in old.runs}
    recipes = list(old.recipes)
    places = {digest_of(recipe): place for place, recipe in enumerate(recipes)}
    added: list[PlannedRun] = []
    changed: list[str] = []
    for run in new.runs:
        before = known.get(run.name)
        if before is None:
            place = places.setdefault(digest_of(new.recipes[run.recipe]), len(recipes))
            if place == len(recipes):
                recipes.append(new.recipes[run.recipe])
            added.append(replace(run, recipe=place))
        elif old.recipes[before.recipe] != new.recipes[run.recipe]:
            changed.append(run.name)
    if changed:
        listed = ", ".join(changed[:5]) + f" and {len(changed) - 5} more" * (len(changed) > 5)
        raise BadInput(
            f"the plan of {old.name} has changed: {listed} would have another recipe; rename the "
            "new plan's file, or choose another folder with --runs"
        )
    missing = {run.name: run.missing for run in new.runs}  # data may have been fetched since
    kept = [replace(run, missing=missing.get(run.name, run.missing)) for run in old.runs]
    runs = in_order([*kept, *added])
    return _readable(replace(old, runs=runs, recipes=recipes, data_dir=new.data_dir)), added
