"""Recipes from YAML: shipped or a user's own, with `extends:` and `--set` on top.

A section that names another kind (`model.kind`, `tokenizer.kind`, `data.name`) starts anew:
nothing of the parent's section is kept. Of `--set` such keys come first, in whatever order.
"""

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from frostlab.errors import BadInput, nearest
from frostlab.recipe.complaint import first_complaint
from frostlab.recipe.whole import Recipe

_KIND = {"model": "kind", "tokenizer": "kind", "data": "name"}
_BY_PATH = {"eeg-simulated": "eeg-challenge"}  # what a path means beside data that are made
_FIRST = {"model.kind": 0, "tokenizer.kind": 0, "data.name": 0, "data.path": 1}  # of --set
_KEY = re.compile(r"\b[a-z]+\.[a-z_]+\b|\btokenizer\b")
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


@dataclass
class _Layers:
    """A recipe's keys so far, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, values: dict[str, Any], source: str) -> None:
        values = self._found_by_path(values)
        for section, kind in _KIND.items():
            given, known = values.get(section), self.values.get(section)
            if isinstance(given, dict) and isinstance(known, dict) and kind in given:
                self.values[section] = known if given[kind] == known.get(kind) else {}
        self._forget_duration(values.get("train"))
        self._merge(self.values, values, source, ())

    def _found_by_path(self, values: dict[str, Any]) -> dict[str, Any]:
        """A path given to data that are made names the kind of data that lie at paths."""
        given, known = values.get("data"), self.values.get("data")
        if isinstance(given, dict) and "path" in given and "name" not in given:
            made = known.get("name") if isinstance(known, dict) else None
            if made in _BY_PATH:
                return values | {"data": {"name": _BY_PATH[made]} | given}
        return values

    def _forget_duration(self, given: Any) -> None:
        """Epochs replace a parent's steps, and steps its epochs."""
        known = self.values.get("train")
        if isinstance(given, dict) and isinstance(known, dict):
            for new, old in (("steps", "epochs"), ("epochs", "steps")):
                if given.get(new) is not None and given.get(old) is None:
                    known.pop(old, None)

    def _merge(
        self, into: dict[str, Any], values: dict[str, Any], source: str, path: tuple[str, ...]
    ) -> None:
        for key, value in values.items():
            here = (*path, str(key))
            self.sources.pop(here, None)
            self.sources[here] = source  # last given, last listed
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(into[key], value, source, here)
            else:
                into[key] = copy.deepcopy(value)

    def source_of(self, path: Sequence[Any]) -> str:
        for end in range(len(path), 0, -1):
            found = self.sources.get(tuple(map(str, path[:end])))
            if found is not None:
                return found
        return next(reversed(self.sources.values()), "recipe")

    def source_of_any(self, text: str) -> str:
        """Where the last given of the keys that a text names came from."""
        named = {tuple(key.split(".")) for key in _KEY.findall(text)}
        found = [source for path, source in self.sources.items() if path in named]
        return found[-1] if found else self.source_of(())


def shipped_recipes() -> dict[str, str]:
    """Every recipe that ships, with its line of description, parents included."""
    return {name: values.get("about", "") for name, values in _shipped("frostlab.recipes").items()}


def shipped_comparisons() -> dict[str, dict[str, Any]]:
    """The keys of every comparison that ships."""
    return _shipped("frostlab.comparisons")


def _shipped(package: str) -> dict[str, dict[str, Any]]:
    folder = resources.files(package)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name.removesuffix(".yaml"): _parse(f.read_text("utf-8"), f.name) for f in files}


def load_recipe(name: str, settings: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """Read a recipe by shipped name or path, put `a.b=c` settings on top, and check it whole."""
    layers = _Layers()
    _read(name, layers, origin=None, seen=())
    _put_on_top(settings, layers)
    if seed is not None:
        layers.add({"seed": seed}, f"--seed {seed}")
    return _checked(layers)


def recipe_from(
    values: dict[str, Any], source: str = "recipe", settings: Iterable[str] = ()
) -> Recipe:
    """Check plain values, as they stand in a YAML file or in a run's record; settings on top."""
    layers = _Layers()
    _layer(values, source, layers, origin=None, seen=())
    _put_on_top(settings, layers)
    return _checked(layers)


def _put_on_top(settings: Iterable[str], layers: "_Layers") -> None:
    for setting in sorted(settings, key=lambda text: _FIRST.get(text.partition("=")[0].strip(), 2)):
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


def _checked(layers: _Layers) -> Recipe:
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


def _read(name: str, layers: _Layers, origin: Path | None, seen: tuple[str, ...]) -> None:
    """Read a recipe file into layers, its parents first."""
    text, label, folder = _find(name, origin)
    if label in seen:
        raise BadInput(f"{label}: extends itself ({' → '.join([*seen, label])})")
    _layer(_parse(text, label), label, layers, folder, (*seen, label))


def _layer(
    values: dict[str, Any],
    label: str,
    layers: _Layers,
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
    shipped = shipped_recipes()
    if name not in shipped:
        raise BadInput(
            f"no recipe is called `{name}`{_instead(name, shipped)}"
            " (`frostlab recipes` lists them; a file of your own ends in .yaml)"
        )
    return (
        resources.files("frostlab.recipes").joinpath(f"{name}.yaml").read_text("utf-8"),
        name,
        None,
    )


def _instead(name: str, shipped: Iterable[str]) -> str:
    if name in shipped_comparisons():
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
