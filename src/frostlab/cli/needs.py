"""Data sets, tokenizers and weights that recipes need: `frostlab data check`, `data fetch`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Settings,
    check_data_dir,
    echo,
    settings_from,
    width_of,
)
from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import shown
from frostlab.text import NONE, columns, size_text, wrapped

if TYPE_CHECKING:
    from frostlab.data.fetch import Need
    from frostlab.recipe.recipe import Recipe

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME",
        help="Name of a group, a recipe or a public data set, or the YAML file of a group or "
        "recipe.",
    ),
]


def check(
    names: Names, settings: Settings = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show the data sets, tokenizers and weights that recipes need, and which are missing.

    Nothing is downloaded. The exit code is 1 if something is missing.
    """
    needs = _needs(names, settings, data_dir)
    if as_json:
        echo(json.dumps([need.to_dict() for need in needs], indent=1))
    else:
        echo("\n".join(_lines(needs)))
    if any(need.state == "missing" for need in needs):
        raise typer.Exit(1)


def fetch(names: Names, settings: Settings = None, data_dir: DataDir = None) -> None:
    """Download the missing data sets, tokenizers and weights into the Hugging Face cache.

    Later runs read them from there; with HF_HUB_OFFLINE=1, these runs use no network.
    """
    from frostlab.data.fetch import fetch as fetch_need

    needs = _needs(names, settings, data_dir)
    missing = [need for need in needs if need.state == "missing"]
    problems = []
    for need in missing:
        try:
            fetch_need(need)
        except BadInput as error:
            problems.append(f"{need.kind} {need.name}: {error}")
        else:
            echo(f"fetched {need.kind} {need.name}")
    if problems:
        raise BadInput("; ".join(problems))
    if not missing:
        echo("nothing is missing")


def _needs(names: list[str], settings: list[str] | None, data_dir: Path | None) -> "list[Need]":
    from frostlab.data.fetch import needs_of

    check_data_dir(data_dir)
    changed = settings_from(settings)
    recipes = {name: recipe for asked in names for name, recipe in _recipes(asked, changed).items()}
    return needs_of(recipes, data_dir)


def _recipes(name: str, settings: dict[str, Any]) -> "dict[str, Recipe]":
    """Return name → recipe: all recipes of a group, one recipe, or a recipe made for a data set."""
    from frostlab.data.sources import PUBLIC_SETS
    from frostlab.experiments.plans import is_group_source
    from frostlab.recipe.groups import group_names, load_group
    from frostlab.recipe.load import load_recipe, recipe_from, shipped_recipes

    if is_group_source(name):
        return load_group(name).recipes(settings)
    data_set, _, language = name.partition("/")  # such as xnli/zh
    if data_set in PUBLIC_SETS:
        classes = PUBLIC_SETS[data_set].classes
        data = {"name": data_set, "task": "language" if classes is None else "classification"}
        data |= {"language": language} if language else {}
        return {name: recipe_from({"data": data}, name, settings)}
    if name.endswith((".yaml", ".yml")) or name in shipped_recipes():
        return {name: load_recipe(name, settings)}
    known = [*group_names(), *shipped_recipes(), *PUBLIC_SETS]
    raise BadInput(f"no group, recipe or data set is called {shown(name)}{nearest(name, known)}")


def _lines(needs: "list[Need]") -> list[str]:
    """Return a table of all needs, with notes on those that are missing or incomplete."""
    if not needs:
        return ["nothing needs to be downloaded: the data come from this machine"]
    rows = [
        (need.kind, need.name, need.state, size_text(need.size), need.place or NONE)
        for need in needs
    ]
    width = width_of()
    lines = columns([("kind", "name", "state", "size", "where"), *rows], right=[3], width=width)
    for need in needs:
        lines += [line for note in _notes(need) for line in wrapped(f"{need.name}: {note}", width)]
    missing = [need for need in needs if need.state == "missing"]
    if missing:
        total = sum(need.size or 0 for need in missing)
        unknown = sum(need.size is None for need in missing)
        more = f", and {unknown} of unknown size" if unknown else ""
        lines.append(
            f"missing: {len(missing)} of {len(needs)}, about {size_text(total)} to download{more}"
        )
    return lines


def _notes(need: "Need") -> Iterator[str]:
    if need.problem is not None:
        yield need.problem
    for split, (here, whole) in (need.rows or {}).items():
        if here < whole:
            yield f"{split} has {here:,} of {whole:,} examples"
    if need.is_excerpt:
        here_size, all_of_it = size_text(need.size), size_text(need.whole)
        yield f"an excerpt of {here_size}; the whole set is about {all_of_it}"
    if need.state == "missing":
        yield f"needed by {', '.join(need.recipes)}"
