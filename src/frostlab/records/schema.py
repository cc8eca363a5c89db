"""The schema of what frostlab writes and reads again: typed, and checked key by key.

`read(Result, values, where)` turns parsed JSON into a dataclass. Values that do not fit are refused
in one line that names the file and the key.
"""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from frostlab.errors import BadInput, nearest

Schema = TypeVar("Schema")

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def read(schema: type[Schema], values: object, where: object) -> Schema:
    """Return parsed JSON as a dataclass, or refuse it in a line that names the key."""
    return _dataclass(schema, values, f"{where}: ", ())


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def _dataclass(schema: Any, values: object, where: str, path: tuple[str, ...]) -> Any:
    if not isinstance(values, Mapping):
        raise _misfit(values, "an object", where, path)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in values:
        if key not in fields:
            name = ".".join((*path, str(key)))
            raise BadInput(f"{where}{name} is not a key{nearest(str(key), fields)}")
    read_values = {}
    for name, field in fields.items():
        here = (*path, name)
        if name in values:
            read_values[name] = _value(_hints(schema)[name], values[name], where, here)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise BadInput(f"{where}{'.'.join(here)} is missing")
    return schema(**read_values)


def _value(hint: Any, value: object, where: str, path: tuple[str, ...]) -> Any:
    """Return a value as its annotation says, JSON's lists as tuples where tuples are wanted."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where, path)
    if origin in (Union, types.UnionType):
        return _union(args, value, where, path)
    if origin is Literal:
        if value not in args:
            raise _misfit(value, " or ".join(map(repr, args)), where, path)
        return value
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise _misfit(value, "a list", where, path)
        if origin is tuple and len(args) != len(value) and args[-1] is not Ellipsis:
            raise _misfit(value, f"a list of {len(args)}", where, path)
        inner = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(value)
        return origin(
            _value(kind, item, where, (*path, str(index)))
            for index, (kind, item) in enumerate(zip(inner, value, strict=True))
        )
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(value, "an object", where, path)
        return {key: _value(args[1], item, where, (*path, str(key))) for key, item in value.items()}
    if not _is_a(value, hint):
        raise _misfit(value, _WORDS.get(hint, str(hint)), where, path)
    return value


def _union(kinds: tuple[Any, ...], value: object, where: str, path: tuple[str, ...]) -> Any:
    """Return the value as the first kind that it fits; the error is that of the last one."""
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return _value(kind, value, where, path)
        except BadInput:
            continue
    return _value(rest[-1], value, where, path)


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _misfit(value: object, wanted: str, where: str, path: tuple[str, ...]) -> BadInput:
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    return BadInput(f"{where}{'.'.join(path) or 'it'} should be {wanted}, but is {shown}")
