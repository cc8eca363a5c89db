"""The first error of an invalid recipe in one line, with the nearest valid key or value.

Keys, sections and kinds are read from the annotations of `Recipe`, so a new key needs no change
here.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frostlab.errors import nearest
from frostlab.recipe.bounded_yaml import shown, shown_key
from frostlab.recipe.data import data_kind
from frostlab.recipe.recipe import Recipe

_EXPECTED = {  # pydantic's error type → the expected value in plain words
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


def first_problem(error: ValidationError, values: dict[str, Any]) -> tuple[list[Any], str]:
    """Return the path of the first wrong value, and a line that describes its errors.

    A value of a union has an error for each member; the deepest one is the most precise.
    """
    errors = [(_path_of(details, values), details) for details in error.errors()]
    first = errors[0][0]
    related = [(path, details) for path, details in errors if path[: len(first)] == first]
    deepest = max(related, key=lambda item: len(item[0]))[0]
    return deepest, _describe(
        deepest, [details for path, details in related if path == deepest], values
    )


def _path_of(details: ErrorDetails, values: Any) -> list[Any]:
    """Return the path of an error in the user's values, without pydantic's union tags."""
    path: list[Any] = []
    for key in details["loc"]:
        inside = isinstance(values, dict) and key in values
        if inside or (isinstance(values, list) and isinstance(key, int) and key < len(values)):
            path.append(key)
            values = values[key]
    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return path


def _describe(path: list[Any], errors: list[ErrorDetails], values: dict[str, Any]) -> str:
    """Describe the errors of one value in one line that names its key."""
    key, kind = shown_key(".".join(map(str, path))), errors[0]["type"]
    value = _at(values, path)
    if precise := [details for details in errors if details["type"] == "value_error"]:
        reason = str(precise[0].get("ctx", {}).get("error", precise[0]["msg"]))
        return f"{key}: {reason}" if key else reason
    if kind == "extra_forbidden":
        return f"{key} is not a key{_key_suggestion(path, values)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "too_long":
        most = errors[0]["ctx"]["max_length"]
        return f"{key} = {shown(value)} has {len(value)} values; {most} is the most"
    if kind == "union_tag_not_found":
        tag = errors[0]["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag} is missing"
    expected = dict.fromkeys(map(_expectation, errors))
    choices = [choice for details in errors for choice in _choices(details)]
    if kind == "union_tag_invalid":
        key = f"{key}.{errors[0]['ctx']['discriminator']}".replace("'", "")
        value = errors[0]["ctx"]["tag"]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{key} = {shown(value)} should be {' or '.join(expected)}{hint}"


def _expectation(details: ErrorDetails) -> str:
    """Return a text that says which values would be valid instead."""
    if choices := _choices(details):
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    text = _EXPECTED.get(details["type"])
    return text or details["msg"].removeprefix("Input should be ").lower()


def _choices(details: ErrorDetails) -> list[str]:
    """Return the valid names that an error lists; empty if it lists none."""
    context = details.get("ctx", {})
    listed = context.get("expected", context.get("expected_tags", ""))
    return [part.strip(" '") for part in str(listed).replace(" or ", ",").split(",") if part]


def _key_suggestion(path: list[Any], values: dict[str, Any]) -> str:
    """Suggest a close key of the section, else the key in another section, else all keys."""
    section, name = path[:-1], str(path[-1])
    model = _model_at(section, values)
    if hint := nearest(name, model.model_fields if model else ()):
        return hint
    for other, info in Recipe.model_fields.items():
        if [other] != section and any(name in m.model_fields for m in models_in(info.annotation)):
            return f"; did you mean `{other}.{name}`?"
    return f"; there are {', '.join(model.model_fields)}" if model else ""


def _model_at(path: list[Any], values: dict[str, Any]) -> type[BaseModel] | None:
    """Return the pydantic class that checks the values at a path; None if there is none."""
    model: type[BaseModel] | None = Recipe
    for end, key in enumerate(path, 1):
        if isinstance(key, int):
            continue
        if model is None or key not in model.model_fields:
            return None
        # for a list, the class depends on the item, whose index follows in the path
        items = 1 if end < len(path) and isinstance(path[end], int) else 0
        members = list(models_in(model.model_fields[key].annotation))
        model = _member(members, _at(values, path[: end + items]))
    return model


# The kinds of a section


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic classes in an annotation, also inside unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def _member(members: list[type[BaseModel]], values: Any) -> type[BaseModel] | None:
    """Return the class of a union to which the values belong, by their tag (such as `kind`)."""
    if len(members) < 2:
        return next(iter(members), None)
    tag = _tag(members)
    name = values.get(tag) if isinstance(values, dict) else None
    for member in members:
        if name in get_args(member.model_fields[tag].annotation):
            return member
    return next((member for member in members if member.__name__ == data_kind(values)), None)


def _tag(members: list[type[BaseModel]]) -> str:
    """Return the key whose value distinguishes the classes of a union, such as `kind`."""
    shared = [key for key in members[0].model_fields if all(key in m.model_fields for m in members)]
    return next(
        key
        for key in shared
        if any(get_origin(member.model_fields[key].annotation) is Literal for member in members)
    )


def section_tags() -> dict[str, str]:
    """Return the sections that have several kinds, such as `model`, with the key of the kind."""
    unions = {name: list(models_in(info.annotation)) for name, info in Recipe.model_fields.items()}
    return {name: _tag(members) for name, members in unions.items() if len(members) > 1}


def _at(values: Any, path: list[Any]) -> Any:
    """Return the value at a path, or None."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
