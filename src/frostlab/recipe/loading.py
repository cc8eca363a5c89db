"""Recipes from YAML: shipped or a user's own, with `extends:` and `--set` on top."""

import json
import re
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from frostlab.errors import BadInput, nearest
from frostlab.recipe.complaint import first_complaint
from frostlab.recipe.layers import Layers
from frostlab.recipe.whole import Recipe

_NAME = re.compile(r"[\w.-]+")


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number and a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{name}` is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"),
    list("+-0123456789"),
)


def shipped_recipes() -> dict[str, str]:
    """Every recipe that ships, with its line of description, parents included."""
    return {name: values.get("about", "") for name, values in _shipped("frostlab.recipes").items()}


def shipped_comparisons() -> dict[str, dict[str, Any]]:
    """The keys of every comparison that ships."""
    return _shipped("frostlab.comparisons")


def _shipped(package: str) -> dict[str, dict[str, Any]]:
    files = _files(package).items()
    return {name: _parse(file.read_text("utf-8"), file.name) for name, file in files}


def _files(package: str) -> dict[str, Traversable]:
    """The YAML files of a package by name, in order."""
    found = {file.name: file for file in resources.files(package).iterdir()}
    names = sorted(name for name in found if name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): found[name] for name in names}


def load_recipe(name: str, settings: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """Read a recipe by shipped name or path, put `a.b=c` settings on top, and check it whole."""
    layers = Layers()
    _read(name, layers, origin=None, seen=())
    _put_on_top(settings, layers)
    if seed is not None:
        layers.add({"seed": seed}, f"--seed {seed}")
    return _checked(layers)


def recipe_from(
    values: dict[str, Any], source: str = "recipe", settings: Iterable[str] = ()
) -> Recipe:
    """Check plain values, as they stand in a YAML file or in a run's record; settings on top."""
    layers = Layers()
    _layer(values, source, layers, origin=None, seen=())
    _put_on_top(settings, layers)
    return _checked(layers)


def _put_on_top(settings: Iterable[str], layers: Layers) -> None:
    for setting in settings:
        layers.add(_setting(setting), f"--set {setting}")


def read_values(path: str) -> dict[str, Any]:
    """The keys of a YAML file, unchecked."""
    text, label, _ = _find(path, None)
    return _parse(text, label)


def recipe_name(name: str) -> str:
    """What runs of a recipe are called: its file's name without the ending."""
    path = Path(name)
    stem = path.name.removesuffix(path.suffix) if path.suffix in (".yaml", ".yml") else path.name
    return "".join(_NAME.findall(stem)) or "recipe"


def _checked(layers: Layers) -> Recipe:
    try:
        text = json.dumps(layers.values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{layers.source_of(())}: not plain values ({error})") from None
    try:
        return Recipe.model_validate_json(text)
    except ValidationError as error:
        path, problem = first_complaint(error, layers.values)
        source = layers.source_of(path) if path else layers.source_of_any(problem)
        raise BadInput(f"{source}: {problem}") from None


def _read(name: str, layers: Layers, origin: Path | None, seen: tuple[str, ...]) -> None:
    """Read a recipe file into layers, its parents first."""
    text, label, folder = _find(name, origin)
    if label in seen:
        raise BadInput(f"{label}: extends itself ({' → '.join([*seen, label])})")
    _layer(_parse(text, label), label, layers, folder, (*seen, label))


def _layer(
    values: dict[str, Any],
    label: str,
    layers: Layers,
    origin: Path | None,
    seen: tuple[str, ...],
) -> None:
    values = dict(values)
    parent = values.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise BadInput(f"{label}: extends = {parent!r} should be the name of a recipe")
        _read(parent, layers, origin, seen)
        layers.values.pop("about", None)
    layers.add(values, label)


def _find(name: str, origin: Path | None) -> tuple[str, str, Path | None]:
    """A recipe's text, what to call it in errors, and the folder its parents are relative to."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name) if origin is None else origin / name
        try:
            return path.read_text("utf-8"), str(path), path.parent
        except UnicodeDecodeError:
            raise BadInput(f"{path}: not a text file") from None
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    shipped = _files("frostlab.recipes")
    if name not in shipped:
        raise BadInput(
            f"no recipe is called `{name}`{_instead(name, shipped)}"
            " (`frostlab recipes` lists them; a file of your own ends in .yaml)"
        )
    return shipped[name].read_text("utf-8"), name, None


def _instead(name: str, shipped: Iterable[str]) -> str:
    if name in _files("frostlab.comparisons"):
        return f"; it is a comparison: `frostlab compare {name}`"
    return nearest(name, shipped)


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{label}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise BadInput(f"{label}: not YAML ({str(error).splitlines()[0]})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadInput(f"{label}: a recipe is a list of `key: value`, not {type(values).__name__}")
    return values


def _setting(text: str) -> dict[str, Any]:
    """`a.b=c` as nested values."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise BadInput(f"--set {text}: should be key=value, e.g. optim.lr=1e-4")
    try:
        parsed = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, TypeError):
        raise BadInput(f"--set {text}: {value!r} is not a YAML value") from None
    for key in reversed(keys):
        parsed = {key: parsed}
    return parsed
