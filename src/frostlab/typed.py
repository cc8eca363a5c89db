"""Conversion of parsed JSON to dataclasses, checked key by key against their annotations.

The error for an invalid value is one line that names the file and the key. Infinite numbers, NaN
and whole numbers of more than 64 bits are refused: Python's JSON parser accepts them, but
arithmetic with them may fail later.
"""

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from frostlab.errors import BadInput, nearest
from frostlab.storage import parse_json, read_lines

Schema = TypeVar("Schema")

_WORDS = {  # names of JSON types in error messages
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}
_WHOLE = 2**63  # a whole number n should have -_WHOLE <= n < _WHOLE
_NUMBERS = (int, float)
_DEPTH = 32  # the most levels of nested lists and objects in a value annotated as Any
_BATCH = 1 << 14  # bytes of lines that are parsed at once
_KEY = 80  # the most characters of a key in an error message


def read(schema: type[Schema], values: object, where: object) -> Schema:
    """Convert parsed JSON to a dataclass, or refuse it with an error that names the key."""
    return _dataclass(schema, values, f"{where}: ", ())


def read_object(schema: type[Schema], text: bytes | str, where: object) -> Schema:
    """Parse a text as a JSON object and convert it to a dataclass, or refuse it with one line."""
    if (values := parse(text)) is None:
        raise BadInput(f"{where} is not a JSON object")
    return read(schema, values, where)


def parse(text: bytes | str) -> dict[str, Any] | None:
    """Parse a text as a JSON object; return None if it is not a JSON object."""
    try:
        values = parse_json(text, "")
    except BadInput:
        return None
    return values if isinstance(values, dict) else None


def read_objects(
    path: Path, skipped: tuple[bytes, ...] = ()
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the values of each line of a file with one JSON object per line.

    The values are None if the line is not a JSON object. Lines that begin with one of `skipped` are
    left out and not parsed, because parsing takes most of the time. A truncated last line is left
    out, too.
    """
    for batch in _batches(path, skipped):
        yield from zip([number for number, _ in batch], _parsed(batch), strict=True)


def _batches(path: Path, skipped: tuple[bytes, ...]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield batches of lines with their numbers; if reading fails, raise the error afterwards."""
    batch: list[tuple[int, bytes]] = []
    size, problem = 0, None
    try:
        for number, line in enumerate(read_lines(path), 1):
            if line.startswith(skipped) or not line.endswith(b"\n"):
                continue
            batch.append((number, line))
            size += len(line)
            if size > _BATCH:
                yield batch
                batch, size = [], 0
    except BadInput as error:
        problem = error
    yield batch
    if problem is not None:
        raise problem


def _parsed(batch: Sequence[tuple[int, bytes]]) -> list[dict[str, Any] | None]:
    """Return the values of each line; parse all at once, which is faster, if none is damaged."""
    lines = [line for _, line in batch]
    with suppress(BadInput):
        values = parse_json(b"[" + b",".join(lines) + b"]", "")
        if len(values) == len(lines) and set(map(type, values)) <= {dict}:
            return cast("list[dict[str, Any] | None]", values)
    return [parse(line) for line in lines]


def check_schema(values: object, known: int, where: object, advice: str = "") -> dict[str, Any]:
    """Return the JSON object of a file if its key `schema`, the version of its format, is `known`.

    Otherwise refuse it in one line; `advice` is added to the error about another version.
    """
    if not isinstance(values, dict):
        raise BadInput(f"{where} is not a JSON object")
    if "schema" not in values or (version := values["schema"]) != known:
        schema = f"schema {version!r:.40}" if "schema" in values else "no schema"
        raise BadInput(f"{where} has {schema}, and this frostlab reads {known}{advice}")
    return values


def check_numbers(value: object, where: object) -> None:
    """Refuse infinite, NaN or too large numbers, and deep nesting, in JSON of any structure."""
    _check_any(value, f"{where}: ", ())


def _check_any(value: object, where: str, path: tuple[str, ...]) -> None:
    if len(path) > _DEPTH:
        raise BadInput(f"{where}{_dotted(path[:3])} is nested too deeply")
    if type(value) in (int, float):
        _number(value, where, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_any(item, where, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_any(item, where, (*path, str(index)))


@cache
def _fields(schema: type) -> dict[str, tuple[Any, bool, frozenset[type]]]:
    """Return each key's annotation, whether it is required, and the types accepted unchanged."""
    hints = get_type_hints(schema)
    return {
        key.name: (
            hints[key.name],
            key.default is key.default_factory is dataclasses.MISSING,
            _json_types(hints[key.name]),
        )
        for key in dataclasses.fields(schema)
    }


@cache
def _json_types(hint: Any) -> frozenset[type]:
    """Return the Python types of JSON values that an annotation accepts unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*map(_json_types, get_args(hint)))
    return frozenset((int, float) if hint is float else (hint,) if hint in _WORDS else ())


def _dataclass(schema: Any, values: object, where: str, path: tuple[str, ...]) -> Any:
    if isinstance(values, schema):
        return values
    if not isinstance(values, Mapping):
        raise _misfit(values, "an object", where, path)
    fields = _fields(schema)
    for key in values:
        if key not in fields:
            name = _dotted((*path, str(key)))
            raise BadInput(f"{where}{name} is not a key{nearest(str(key)[:_KEY], fields)}")
    read_values = {}
    for name, (hint, required, unchanged) in fields.items():
        if name in values:
            value = values[name]
            kind = type(value)
            if kind in unchanged and (kind not in _NUMBERS or abs(value) < _WHOLE):
                read_values[name] = value  # a fast path for most values; NaN does not take it
            elif hint is Path and isinstance(value, Path):
                read_values[name] = value
            else:
                read_values[name] = _value(hint, value, where, (*path, name))
        elif required:
            raise BadInput(f"{where}{_dotted((*path, name))} is missing")
    return schema(**read_values)


def _value(hint: Any, value: object, where: str, path: tuple[str, ...]) -> Any:
    """Convert a value to its annotated type, for example a JSON list to a tuple."""
    if type(value) in _json_types(hint):
        return _number(value, where, path) if type(value) in (int, float) else value
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        _check_any(value, where, path)
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
        return _sequence(origin, args, value, where, path)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(value, "an object", where, path)
        return {key: _value(args[1], item, where, (*path, str(key))) for key, item in value.items()}
    if not _is_a(value, hint):
        raise _misfit(value, _WORDS.get(hint, str(hint)), where, path)
    return value


def _sequence(
    origin: Any, args: tuple[Any, ...], value: object, where: str, path: tuple[str, ...]
) -> Any:
    if not isinstance(value, list | tuple):
        raise _misfit(value, "a list", where, path)
    if origin is tuple and len(args) != len(value) and args[-1] is not Ellipsis:
        raise _misfit(value, f"a list of {len(args)} values", where, path)
    if origin is list and _are_finite(args[0], value):
        return list(value)  # fast path for thousands of numbers
    kinds = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(value)
    return origin(
        _value(kind, item, where, (*path, str(index)))
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _union(kinds: tuple[Any, ...], value: object, where: str, path: tuple[str, ...]) -> Any:
    """Convert the value to the first type of the union that accepts it."""
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest:
        try:
            return _value(kind, value, where, path)
        except BadInput:
            if kind is rest[-1] and (len(rest) == 1 or isinstance(value, Mapping)):
                raise  # this error names the key inside the value
    raise _misfit(value, " or ".join(map(_wanted, rest)), where, path)


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(kind) or ("a list" if get_origin(kind) in (list, tuple) else "an object")


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _number(value: Any, where: str, path: tuple[str, ...]) -> Any:
    """Return a number that is finite and, if whole, fits in 64 bits."""
    if isinstance(value, int):
        if not -_WHOLE <= value < _WHOLE:
            raise _misfit(value, "a number of at most 64 bits", where, path)
    elif not math.isfinite(value):
        raise _misfit(value, "a finite number", where, path)
    return value


def _are_finite(hint: Any, values: Sequence[Any]) -> bool:
    """Return whether all values fit a numeric annotation: numbers as in `_number`, or None."""
    kinds = _json_types(hint)
    if float not in kinds or str in kinds or not kinds.issuperset(map(type, values)):
        return False
    whole = [value for value in values if type(value) is int]
    if whole and not -_WHOLE <= min(whole) <= max(whole) < _WHOLE:
        return False
    return all(map(math.isfinite, filter(None, values)))


def _dotted(path: tuple[str, ...]) -> str:
    """Return a path of keys for an error message, on one line."""
    text = ".".join(path)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _KEY else f"{text[: _KEY - 1]}…"


def _misfit(value: object, wanted: str, where: str, path: tuple[str, ...]) -> BadInput:
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    return BadInput(f"{where}{_dotted(path) or 'it'} should be {wanted}, but is {shown}")
