"""What is wrong with a recipe, in one line: the key, the value, and the nearest valid one."""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frostlab.errors import nearest
from frostlab.recipe.conformer import ConformerModel, EnvelopeLoss
from frostlab.recipe.data import BPE, NAMED, SYNTHETIC, Docstrings, Named, Own, PretrainedTokenizer, Synthetic, Words, data_kind
from frostlab.recipe.eeg import EEG, ChallengeEEG, MatlabEEG, MneEEG, SimulatedEEG
from frostlab.recipe.settings import DecoderModel, Evaluate, GPTModel, Optim, PretrainedModel, StepDecay, Supervise, Train, Watch
from frostlab.recipe.stages import Add, StageSettings
from frostlab.recipe.treatment import LowRank, Orthogonalize, Randomize, Scales, Treatment
from frostlab.recipe.whole import Recipe

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
