"""Reading of untrusted YAML: bounded in size, depth and aliases, with one-line errors.

Recipes, comparisons, groups, the values of --set and the recipe.yaml of runs are read here. The
result has only texts, numbers, booleans, null, lists and mappings, and every key of a mapping is a
text.
"""

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from frostlab.errors import BadInput, first_line
from frostlab.storage import read_text
from frostlab.text import plain, short

_MOST_BYTES = 1 << 20  # the most bytes of a file
_MOST_TEXT = 256 << 10  # the most characters of YAML
MOST_VALUES = 10_000  # the most values of a file; an alias counts as the values that it repeats
MOST_DEPTH = 30  # the most lists and mappings inside each other
_MOST_DIGITS = 100  # the most characters of a number
_MOST_SHOWN = 80  # the most characters of a value in an error message
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping; a missing file raises FileNotFoundError."""
    return parse_mapping(read_text(path, _MOST_BYTES), str(path))


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML text whose content is a mapping, or nothing, which gives an empty mapping."""
    values = parse_yaml(text, where)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadInput(f"{where} should be a mapping of `key: value`, not {type(values).__name__}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; the error for an invalid text is one line that begins with `where`."""
    if len(text) > _MOST_TEXT:
        raise BadInput(f"{where} has more than {_MOST_TEXT >> 10} KiB of YAML")
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{where}{line}: {plain(short(str(error.problem), 200))}") from None
    except Exception as error:  # PyYAML raises errors of many kinds, such as OverflowError
        raise BadInput(f"{where} is not YAML ({first_line(error)})") from None
    check_plain(value, where)
    return value


def check_plain(value: Any, where: str, most: int = MOST_VALUES) -> None:
    """Refuse values that are too many or nested too deeply, and unusual texts and numbers.

    Unusual are texts with a null character or a lone surrogate, and numbers that are infinite, NaN
    or very long. `most` is the largest number of values; lists and mappings count too.
    """
    unchecked: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    count = 0
    while unchecked:
        inner, path = unchecked.pop()
        count += 1
        key = shown_key(".".join(path)) or "the value"
        if count > most:
            raise BadInput(f"{where}: too many values; {most:,} is the most")
        if len(path) > MOST_DEPTH:
            raise BadInput(f"{where}: {key} is nested too deeply; {MOST_DEPTH} levels is the most")
        if isinstance(inner, dict):
            for name in inner:
                _check_text(name, f"{where}: a key of {key}" if path else f"{where}: the key")
            unchecked += [(item, (*path, str(name))) for name, item in reversed(inner.items())]
        elif isinstance(inner, list | tuple):
            items = [(item, (*path, str(index))) for index, item in enumerate(inner[: most + 1])]
            unchecked += reversed(items)
        elif isinstance(inner, str):
            _check_text(inner, f"{where}: {key}")
        elif isinstance(inner, int) and inner.bit_length() > 4 * _MOST_DIGITS:
            raise BadInput(f"{where}: {key} is a number of more than {_MOST_DIGITS} digits")
        elif isinstance(inner, float) and not math.isfinite(inner):
            raise BadInput(f"{where}: {key} = {inner} should be a finite number")


def _check_text(text: Any, what: str) -> None:
    """Refuse a text with a null character or a lone surrogate, and keys that are not texts."""
    if not isinstance(text, str):
        raise BadInput(f"{what} {shown(text)} is not a text")
    if "\0" in text or (not text.isascii() and text.encode(errors="ignore").decode() != text):
        raise BadInput(f"{what} {shown(text)} has a null character or half a surrogate pair")


def shown(value: Any) -> str:
    """Return a value for an error message: one short line."""
    return short(repr(value), _MOST_SHOWN)


def shown_key(text: str) -> str:
    """Return a key for an error message: printable, and one short line."""
    return plain(short(text, _MOST_SHOWN))


class _Loader(yaml.SafeLoader):
    """YAML loader with limits.

    Unlike PyYAML's, it reads 1e-4 as a number and 2024-01-01 as text, and refuses repeated keys.
    """

    # Null, texts, lists and mappings; numbers and booleans are added below the class. Other types,
    # such as !!binary, are refused.
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "str", "seq", "map")
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Parse one value or key, and count it."""
        mark = self.peek_event().start_mark
        self._depth += 1
        self._count += 1
        if self._depth > MOST_DEPTH + 1:
            raise _problem(f"nested too deeply; {MOST_DEPTH} levels is the most", mark)
        if self._count > 2 * MOST_VALUES:  # keys are counted too
            raise _problem(f"too many values; {MOST_VALUES:,} is the most", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; its keys are texts as in the file, even `on` and `5`."""
        if not isinstance(node, yaml.MappingNode):
            raise _problem("should be a mapping of `key: value`", node.start_mark)
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key should be a text, not a list or mapping", key.start_mark)
            if key.tag == f"{_TAG}merge":
                raise _problem("merge keys (<<) are not supported; repeat the keys", key.start_mark)
            if key.value in values:
                raise _problem(f"the key `{shown_key(key.value)}` is given twice", key.start_mark)
            values[key.value] = self.construct_object(value, deep=deep)
        return values

    def construct_scalar_kind(self, node: Any) -> Any:
        """Return a number or boolean; refuse one that is invalid or very long."""
        kind = node.tag.removeprefix(_TAG)
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        problem = _problem(f"{short(text, 40)!r} is not a valid !!{kind}", node.start_mark)
        if len(text) > _MOST_DIGITS:
            raise _problem(
                f"{short(text, 40)!r} has more than {_MOST_DIGITS} characters", node.start_mark
            )
        if not text:
            raise problem
        try:
            return getattr(self, f"construct_yaml_{kind}")(node)
        except (ValueError, LookupError, OverflowError):
            raise problem from None


def _problem(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.construct_scalar_kind)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"),
    list("+-0123456789"),
)
