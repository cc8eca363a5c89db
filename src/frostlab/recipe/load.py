"""Loading of recipes: YAML files, the files they extend, and settings on top.

A file that another file extends is its parent. Settings, such as those of --set, replace values of
a recipe. `Layers` merges files and settings.
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import (
    check_plain,
    parse_mapping,
    parse_yaml,
    read_yaml,
    shown,
)
from frostlab.recipe.data import RECORDED, Corpus, EEGData
from frostlab.recipe.invalid import first_problem, section_tags
from frostlab.recipe.model import PRESETS
from frostlab.recipe.recipe import PATHS, Recipe
from frostlab.recipe.scale import ORDER, scaled_values
from frostlab.text import plain, short

Files = dict[str, str]  # real path of a file, or its name if it is shipped → name in errors
Settings = Mapping[str, Any]  # dotted keys, such as optim.lr, or whole sections
_ENDINGS = (".yaml", ".yml")
# For the short runs of `frostlab diagnose`: approximate number of measurements of gradient flow per
# stage, and maximum number of examples in an evaluation.
_MEASUREMENTS, _EXAMPLES = 20, 500
_MOST_PARENTS = 20  # the longest chain of recipes, each of which extends the next
_MOST_TEXT = 100  # the most characters of a setting in an error message
_MOST_NAME = 100  # the most characters of what `recipe_name` returns
_RUN_NAME = re.compile(r"[\w.-]+")  # `recipe_name` drops other characters
# Keys in an error message, such as optim.lr.
_KEY_IN_TEXT = re.compile(r"\b[a-z]+\.[a-z_]+\b|\btokenizer\b")


def load_recipe(name: str, settings: Settings | None = None, seed: int | None = None) -> Recipe:
    """Read a recipe by its shipped name or path, put settings on top, and check it.

    Args:
        settings: values by dotted key, such as `{"optim.lr": 1e-4}`, or by section.
    """
    layers = Layers()
    _add_file(name, layers, origin=None, children={})
    layers.add_settings(settings or {})
    if seed is not None:
        layers.add({"seed": seed}, f"--seed {seed}")
    return _validated(layers)


def recipe_from(
    values: dict[str, Any], source: str = "recipe", settings: Settings | None = None
) -> Recipe:
    """Build a recipe from plain values, as in a YAML file, with settings on top, and check it."""
    if not isinstance(values, dict):
        raise BadInput(f"{source}: a recipe is a mapping of `key: value`, not {shown(values)}")
    check_plain(values, source)
    layers = Layers()
    _add_values(with_paths(values), source, layers, origin=None, children={})
    layers.add_settings(settings or {})
    return _validated(layers)


def shipped_recipes() -> dict[str, str]:
    """Return the name and description of every shipped recipe, parents included."""
    return {name: values.get("about", "") for name, values in _shipped("frostlab.recipes").items()}


def shipped_experiments() -> list[str]:
    """Return the names of the shipped recipes that repeat experiments of published studies."""
    folder = resources.files("frostlab.recipes") / "experiments"
    names = sorted(file.name for file in folder.iterdir())
    return [name.removesuffix(".yaml") for name in names if name.endswith(".yaml")]


def shipped_comparisons() -> dict[str, dict[str, Any]]:
    """Return the values of every shipped comparison by its name."""
    return copy.deepcopy(_shipped("frostlab.comparisons"))


def shipped_groups() -> dict[str, dict[str, Any]]:
    """Return the values of every shipped group of experiments by its name, unchecked."""
    return copy.deepcopy(_shipped("frostlab.groups"))


def read_values(path: str) -> dict[str, Any]:
    """Return the values of a YAML file or of a shipped recipe, unchecked."""
    return _find(path, None).values


def recipe_name(name: str) -> str:
    """Return a recipe's name without ending and special characters; names of runs begin with it."""
    path = Path(name)
    stem = path.name.removesuffix(path.suffix) if path.suffix in _ENDINGS else path.name
    return "".join(_RUN_NAME.findall(stem)).lstrip(".")[:_MOST_NAME] or "recipe"


# Settings


class SettingKey(str):
    """A dotted key that keeps the user's text of the whole setting, so that errors can quote it."""

    __slots__ = ("text",)
    text: str


def parse_setting(text: str) -> tuple[str, Any]:
    """Split the text of a --set option, `key=value`, and parse its value as YAML."""
    path, equals, value = text.partition("=")
    key = SettingKey(path.strip())
    key.text = plain(short(f"--set {text}", _MOST_TEXT))
    if not equals or not all(key.split(".")):
        raise BadInput(f"{key.text} should be key=value, e.g. optim.lr=1e-4")
    try:
        return key, parse_yaml(value, key.text)
    except BadInput as error:
        raise BadInput(f"{error}; {shown(value)} is not a valid value") from None


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of all --set options by key; the last value of a repeated key wins."""
    settings: dict[str, Any] = {}
    for key, value in map(parse_setting, texts):
        settings.pop(key, None)
        settings[key] = value
    return settings


def short_run_settings(
    recipe: Recipe, *, steps: int | None = None, epochs: int | None = None
) -> dict[str, Any]:
    """Return settings that shorten a run to `steps` or `epochs` and measure its gradient flow.

    The duration is divided evenly among the stages. With `steps`, the run is evaluated at the end
    of each stage; with `epochs`, at the recipe's interval.
    """
    unit, other, total = (
        ("epochs", "steps", epochs) if steps is None else ("steps", "epochs", steps)
    )
    assert total is not None
    duration = max(1, total // max(1, len(recipe.stages)))
    settings: dict[str, Any] = {f"train.{unit}": duration}
    if recipe.watch is None or steps is not None:
        settings["watch.every_n_steps"] = 10 if steps is None else watch_interval(duration)
    if recipe.stages:
        stages = [stage.model_dump(mode="json", exclude_defaults=True) for stage in recipe.stages]
        settings["stages"] = [{**stage, unit: duration, other: None} for stage in stages]
    warmup = recipe.optim.warmup
    if warmup >= 1:  # a number of steps: shorten it with the run; 10 % if the length is unknown
        share = min(0.5, warmup / (recipe.train.steps or 10 * warmup))
        settings["optim.warmup"] = float(f"{share:g}")
    if steps is not None:
        settings["evaluate.every"] = duration
        if isinstance(recipe.data, Corpus):
            limit = min(recipe.data.evaluation_limit or _EXAMPLES, _EXAMPLES)
            settings["data.evaluation_limit"] = limit
    return settings


def watch_interval(steps: int) -> int:
    """Return the number of steps between measurements of gradient flow in a short run."""
    return max(1, steps // _MEASUREMENTS)


# Files


@cache
def _shipped(package: str) -> dict[str, dict[str, Any]]:
    """Return the values of every YAML file of a package by the file's name."""
    files = _files(package).items()
    return {name: parse_mapping(file.read_text("utf-8"), file.name) for name, file in files}


def _files(package: str) -> dict[str, Traversable]:
    """Return a package's YAML files by name: those in its folder, then those in sub-folders."""
    folder = resources.files(package)
    folders = [folder, *(entry for entry in folder.iterdir() if entry.is_dir())]
    return {
        file.name.removesuffix(".yaml"): file
        for folder in folders
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }


class _File(NamedTuple):
    """A recipe's file."""

    values: dict[str, Any]
    label: str  # its name in errors
    identity: str  # the same for all spellings of its path
    folder: Path | None  # None if the recipe is shipped


def _find(name: str, origin: Path | None) -> _File:
    """Read a recipe by its shipped name or path.

    A path is relative to `origin`, the folder of the file that extends it; None: working folder.
    """
    if name.endswith(_ENDINGS):
        path = Path(name) if origin is None else origin / name
        try:
            return _File(read_yaml(path), str(path), os.path.realpath(path), path.parent)
        except FileNotFoundError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    shipped = _files("frostlab.recipes")
    if name not in shipped:
        raise BadInput(
            f"no recipe is called {shown(name)}{_suggestion(name, shipped)}"
            " (`frostlab recipes` lists them; a file of your own ends in .yaml)"
        )
    return _File(parse_mapping(shipped[name].read_text("utf-8"), name), name, name, None)


def _suggestion(name: str, shipped: Iterable[str]) -> str:
    if name in _files("frostlab.comparisons"):
        return f"; it is a comparison: `frostlab compare {name}`"
    if name in _files("frostlab.groups"):
        return f"; it is a group of experiments: `frostlab compare {name}`"
    return nearest(name, shipped)


def with_paths(
    values: dict[str, Any], folder: Path | None = None, label: str = "recipe"
) -> dict[str, Any]:
    """Return a recipe's values with the paths to existing files and folders made absolute.

    Paths are relative to `folder`, the folder of the recipe's file; None: to the working folder. A
    name that does not exist there stays as it is, because it may be in the data folder or on the
    hub; only the path of a user's own data in a recipe's file is always made absolute.
    """
    for section, key in PATHS:
        part = values.get(section)
        name = part.get(key) if isinstance(part, dict) else None
        if not isinstance(name, str) or not name or os.path.isabs(name):
            continue
        is_there = os.path.exists if key == "path" else os.path.isdir
        path = os.path.expanduser(name)
        place = os.path.abspath(os.path.join(folder or "", path))
        if folder is not None and not is_there(place) and is_there(path):
            raise BadInput(
                f"{label}: {section}.{key} {shown(name)} is not in {os.path.abspath(folder)}, the "
                f"recipe's folder, but in the working folder; write {plain(os.path.abspath(path))}"
            )
        own = folder is not None and key == "path" and values[section].get("name") == "own"
        if own or is_there(place):  # a user's own data are nowhere else
            values = {**values, section: {**values[section], key: place}}
    return values


# Layers


@dataclass
class Layers:
    """A recipe's values, merged from files and settings, and the source of each key."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)  # key → source; latest last
    settings: set[tuple[str, ...]] = field(default_factory=set)  # keys whose source is a setting
    # keys that are set together with `scale` or after it, so that the scale does not change them
    fixed: set[tuple[str, ...]] = field(default_factory=set)

    def add_settings(self, settings: Settings) -> None:
        """Put settings on top.

        A setting stays even if a later one changes the kind of its section, such as `model.kind`.
        """
        # the scale comes first, because it changes only what is not set later
        for key, value in sorted(settings.items(), key=lambda item: item[0] != "scale"):
            source = key.text if isinstance(key, SettingKey) else "settings"
            if not isinstance(key, str):
                raise BadInput(f"{source}: the key {shown(key)} is not a text")
            for name in reversed(key.split(".")):
                value = {name: value}
            check_plain(value, source)
            self.add(with_paths(value), source)
            self.settings.update(_paths(value))

    def add(self, values: dict[str, Any], source: str) -> None:
        """Merge values on top.

        A new kind of model, data or tokenizer drops the old kind's keys, except those that
        `add_settings` added. A path to recordings on top of simulated EEG keeps the keys that all
        kinds of EEG have.
        """
        given, values = values, self._with_implied_kind(values)
        if "scale" in values:
            self._check_scale(values["scale"], source)
            self.fixed = set()
        self.fixed.update(_paths(values))
        kept = () if values is given else tuple(EEGData.model_fields)
        for section, tag in section_tags().items():
            new, old = values.get(section), self.values.get(section)
            if not (isinstance(new, dict) and isinstance(old, dict) and tag in new):
                continue
            if new[tag] != old.get(tag):
                self.values[section] = {
                    key: value
                    for key, value in old.items()
                    if self._was_set(section, key) or (section == "data" and key in kept)
                }
        self._drop_other_duration(values.get("train"))
        self._drop_preset_keys(values.get("model"))
        self._merge(self.values, values, source, ())

    def _check_scale(self, scale: Any, source: str) -> None:
        """Refuse to enlarge a recipe: the values of its full scale are not known."""
        old = self.values.get("scale", "full")
        if scale in ORDER and old in ORDER and ORDER.index(scale) > ORDER.index(old):
            raise BadInput(
                f"{source}: scale {scale}, but {self.source_of(['scale'])} has scale {old}; a "
                "scaled recipe cannot be enlarged, so start from the full one"
            )

    def _with_implied_kind(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add the `data.name` of recorded data if a path is put on top of simulated data."""
        new, old = values.get("data"), self.values.get("data")
        if isinstance(new, dict) and "path" in new and "name" not in new:
            name = old.get("name") if isinstance(old, dict) else None
            if isinstance(name, str) and name in RECORDED:
                return values | {"data": {"name": RECORDED[name]} | new}
        return values

    def _drop_other_duration(self, new: Any) -> None:
        """Drop the old steps if new values set epochs, and the old epochs if they set steps."""
        old = self.values.get("train")
        if isinstance(new, dict) and isinstance(old, dict):
            for unit, other in (("steps", "epochs"), ("epochs", "steps")):
                if new.get(unit) is not None and new.get(other) is None:
                    old.pop(other, None)

    def _drop_preset_keys(self, new: Any) -> None:
        """Drop the values that a new preset replaces, unless they come from settings."""
        old = self.values.get("model")
        if isinstance(new, dict) and isinstance(old, dict):
            for key in PRESETS.get(str(new.get("preset")), {}):
                if not self._was_set("model", key):
                    old.pop(key, None)

    def _was_set(self, section: str, key: str) -> bool:
        return (section, str(key)) in self.settings

    def _merge(
        self, into: dict[str, Any], values: dict[str, Any], source: str, path: tuple[str, ...]
    ) -> None:
        for key, value in values.items():
            here = (*path, str(key))
            self.sources.pop(here, None)
            self.sources[here] = source
            self.settings.discard(here)
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(into[key], value, source, here)
            else:
                into[key] = copy.deepcopy(value)

    def source_of(self, path: Sequence[Any]) -> str:
        """Return the source of a key; if it has none, its section's, or else the latest source."""
        for end in range(len(path), 0, -1):
            source = self.sources.get(tuple(map(str, path[:end])))
            if source is not None:
                return source
        return next(reversed(self.sources.values()), "recipe")

    def source_of_text(self, text: str) -> str:
        """Return the latest source of a key that the text mentions, or else the latest source."""
        keys = {tuple(key.split(".")) for key in _KEY_IN_TEXT.findall(text)}
        sources = [source for path, source in self.sources.items() if path in keys]
        return sources[-1] if sources else self.source_of(())


def _paths(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, at any depth."""
    for key, value in values.items():
        yield (*path, str(key))
        if isinstance(value, dict):
            yield from _paths(value, (*path, str(key)))


def _add_file(name: str, layers: Layers, origin: Path | None, children: Files) -> None:
    """Add a recipe file to `layers`, after its parents; `children` are the files that extend it."""
    file = _find(name, origin)
    chain = children | {file.identity: file.label}
    if file.identity in children:
        shown_chain = " → ".join([*children.values(), file.label])
        raise BadInput(f"{file.label} extends itself ({shown_chain})")
    if len(chain) > _MOST_PARENTS:
        raise BadInput(
            f"{file.label} ends a chain of more than {_MOST_PARENTS} recipes, each of which "
            "extends the next"
        )
    values = (
        file.values if file.folder is None else with_paths(file.values, file.folder, file.label)
    )
    _add_values(values, file.label, layers, file.folder, chain)


def _add_values(
    values: dict[str, Any], label: str, layers: Layers, origin: Path | None, children: Files
) -> None:
    """Add a recipe's values to `layers`, after its parents."""
    values = dict(values)
    parent = values.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise BadInput(f"{label}: extends = {shown(parent)} should be the name of a recipe")
        _add_file(parent, layers, origin, children)
        layers.values.pop("about", None)
    layers.add(values, label)


def _validated(layers: Layers) -> Recipe:
    try:
        text = json.dumps(layers.values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{layers.source_of(())}: a value does not fit JSON ({error})") from None
    try:
        recipe = Recipe.model_validate_json(text)
        if recipe.scale == "full":
            return recipe
        return Recipe.model_validate_json(json.dumps(scaled_values(recipe, layers.fixed)))
    except ValidationError as error:
        path, problem = first_problem(error, layers.values)
        source = layers.source_of(path) if path else layers.source_of_text(problem)
        raise BadInput(f"{source}: {problem}") from None
