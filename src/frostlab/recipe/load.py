"""Recipes from YAML: shipped or a user's own, with `extends:` and `--set` on top."""

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frostlab.errors import BadInput, nearest
from frostlab.recipe.data import (
    BPE,
    EEG,
    NAMED,
    SYNTHETIC,
    ChallengeEEG,
    Corpus,
    Docstrings,
    MatlabEEG,
    MneEEG,
    Named,
    Own,
    PretrainedTokenizer,
    SimulatedEEG,
    Synthetic,
    Words,
    data_kind,
)
from frostlab.recipe.model import (
    PRESETS,
    ConformerModel,
    DecoderModel,
    EnvelopeLoss,
    GPTModel,
    PretrainedModel,
)
from frostlab.recipe.recipe import Add, Recipe, StageSettings
from frostlab.recipe.settings import Evaluate, Optim, StepDecay, Supervise, Train, Watch
from frostlab.recipe.treatment import LowRank, Orthogonalize, Randomize, Scales, Treatment

_KIND = {"model": "kind", "tokenizer": "kind", "data": "name"}
_BY_PATH = {"eeg-simulated": "eeg-challenge"}  # what a path means beside data that are made
_KEY = re.compile(r"\b[a-z]+\.[a-z_]+\b|\btokenizer\b")


@dataclass
class Layers:
    """A recipe's keys so far, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, values: dict[str, Any], source: str) -> None:
        values = self._found_by_path(values)
        for section, kind in _KIND.items():
            given, known = values.get(section), self.values.get(section)
            if isinstance(given, dict) and isinstance(known, dict) and kind in given:
                anew = {key: known[key] for key in known if self._was_set(section, key)}
                self.values[section] = known if given[kind] == known.get(kind) else anew
        self._forget_duration(values.get("train"))
        self._forget_switches(values.get("model"))
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

    def _forget_switches(self, given: Any) -> None:
        """A preset replaces what a parent spelled out; a setting beside it stays."""
        known = self.values.get("model")
        if isinstance(given, dict) and isinstance(known, dict):
            for key in PRESETS.get(str(given.get("preset")), {}):
                if not self._was_set("model", key):
                    known.pop(key, None)

    def _was_set(self, section: str, key: str) -> bool:
        return self.sources.get((section, str(key)), "").startswith("--set ")

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


_LOOKS = 20  # measured steps a stage
_EXAMPLES = 500  # to evaluate on, at most


def shortened(recipe: Recipe, steps: int) -> list[str]:
    """Settings for so many steps in all, shared among stages, watched and evaluated at the end."""
    each = max(1, steps // max(1, len(recipe.stages)))
    settings = [
        f"train.steps={each}",
        f"evaluate.every={each}",
        f"watch.every_n_steps={looks_every(each)}",
    ]
    if recipe.stages:
        stages = [stage.model_dump(mode="json", exclude_defaults=True) for stage in recipe.stages]
        cut = [{**stage, "steps": each, "epochs": None} for stage in stages]
        settings.append(f"stages={json.dumps(cut)}")
    warmup = recipe.optim.warmup
    if warmup >= 1:  # the share it has of the whole run
        settings.append(f"optim.warmup={min(0.5, warmup / (recipe.train.steps or 10 * warmup)):g}")
    if isinstance(recipe.data, Corpus):
        limit = min(recipe.data.evaluation_limit or _EXAMPLES, _EXAMPLES)
        settings.append(f"data.evaluation_limit={limit}")
    return settings


def looks_every(steps: int) -> int:
    """How often so many steps are watched."""
    return max(1, steps // _LOOKS)


_KINDS: dict[tuple[str, Any], type[BaseModel]] = {
    ("data", "docstrings"): Docstrings,
    ("data", "synthetic"): Synthetic,
    ("data", "named"): Named,
    ("data", "own"): Own,
    ("data", "eeg-simulated"): SimulatedEEG,
    ("data", "eeg-challenge"): ChallengeEEG,
    ("data", "eeg-matlab"): MatlabEEG,
    ("data", "eeg-mne"): MneEEG,
    ("tokenizer", "bpe"): BPE,
    ("tokenizer", "words"): Words,
    ("tokenizer", "pretrained"): PretrainedTokenizer,
    ("model", "gpt"): GPTModel,
    ("model", "decoder"): DecoderModel,
    ("model", "pretrained"): PretrainedModel,
    ("model", "conformer"): ConformerModel,
    ("init", "orthogonalize"): Orthogonalize,
    ("init", "randomize"): Randomize,
    ("peft", "lora"): LowRank,
    ("peft", "dora"): LowRank,
    ("peft", "ia3"): Scales,
}
_SECTIONS: dict[str, type[BaseModel]] = {
    "treatment": Treatment,
    "optim": Optim,
    "schedule": StepDecay,
    "train": Train,
    "loss": EnvelopeLoss,
    "supervise": Supervise,
    "evaluate": Evaluate,
    "watch": Watch,
    "stages": StageSettings,
    "add": Add,
}
_DATA_NAMES = ("docstrings", "docstrings-pairs", *SYNTHETIC, *NAMED, "own", *EEG)
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a section of `key: value`",
    "model_type": "a section of `key: value`",
    "model_attributes_type": "a section of `key: value`",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
}


def first_complaint(error: ValidationError, values: dict[str, Any]) -> tuple[list[Any], str]:
    """The first thing wrong with `values`: its path in them, and a line that says what."""
    found = [(_path(details, values), details) for details in error.errors()]
    first = found[0][0]
    inside = [(path, details) for path, details in found if path[: len(first)] == first]
    deepest = max(inside, key=lambda item: len(item[0]))[0]
    same = [details for path, details in inside if path == deepest]
    return deepest, _line(deepest, same, values)


def _path(details: ErrorDetails, values: Any) -> list[Any]:
    """The location in what was written: pydantic's names of union members taken out."""
    path: list[Any] = []
    for key in details["loc"]:
        inside = isinstance(values, dict) and key in values
        if inside or (isinstance(values, list) and isinstance(key, int) and key < len(values)):
            path.append(key)
            values = values[key]
    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return path


def _line(path: list[Any], errors: list[ErrorDetails], values: dict[str, Any]) -> str:
    key, kind = ".".join(map(str, path)), errors[0]["type"]
    value = _at(values, path)
    if kind == "value_error":
        reason = str(errors[0].get("ctx", {}).get("error", errors[0]["msg"]))
        return f"{key}: {reason}" if key else reason
    if kind == "extra_forbidden":
        return f"{key} is not a key{_nearest_key(path, values)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "too_long":
        return f"{key} = {value!r} is {len(value)} values, not {errors[0]['ctx']['max_length']}"
    if kind == "union_tag_not_found":
        tag = errors[0]["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag} is missing"
    wanted = dict.fromkeys(_wanted(path, details) for details in errors)
    choices = [choice for details in errors for choice in _choices(path, details)]
    if kind == "union_tag_invalid":
        key, value = (
            f"{key}.{errors[0]['ctx']['discriminator']}".replace("'", ""),
            errors[0]["ctx"]["tag"],
        )
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{key} = {value!r} should be {' or '.join(wanted)}{hint}"


def _choices(path: list[Any], details: ErrorDetails) -> list[str]:
    if path == ["data", "name"]:
        return list(_DATA_NAMES)
    context = details.get("ctx", {})
    listed = context.get("expected", context.get("expected_tags", ""))
    return [part.strip(" '") for part in str(listed).replace(" or ", ",").split(",") if part]


def _wanted(path: list[Any], details: ErrorDetails) -> str:
    if choices := _choices(path, details):
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    known = _WANTED.get(details["type"])
    return known or details["msg"].removeprefix("Input should be ").lower()


def _nearest_key(path: list[Any], values: dict[str, Any]) -> str:
    """The closest key of the same section, else a key of that name in another."""
    section, name = path[:-1], str(path[-1])
    known = _class_of(section, values)
    if hint := nearest(name, known.model_fields if known else ()):
        return hint
    everywhere = [*_SECTIONS.items(), *((top, kind) for (top, _), kind in _KINDS.items())]
    for top, kind in everywhere:
        if top in Recipe.model_fields and name in kind.model_fields and [top] != section:
            return f"; did you mean `{top}.{name}`?"
    return f"; there are {', '.join(known.model_fields)}" if known else ""


def _class_of(path: list[Any], values: dict[str, Any]) -> type[BaseModel] | None:
    names = [key for key in path if isinstance(key, str)]
    if not names:
        return Recipe
    there, section = _at(values, path), names[-1]
    if section == "data":
        return _KINDS["data", data_kind(there)]
    key = "method" if section in ("init", "peft") else "kind"
    tag = there.get(key) if isinstance(there, dict) else None
    return _KINDS.get((section, tag)) or _SECTIONS.get(section)


def _at(values: Any, path: list[Any]) -> Any:
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
