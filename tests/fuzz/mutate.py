"""Fuzz targets and their inputs: valid examples, and mutations of them that a seed determines.

A target names a reader of frostlab. Whatever bytes it gets, it must return, or raise a
FrostlabError with one line. `campaign.py` runs the targets.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["json", "jsonl", "yaml", "bytes"]


@dataclass(frozen=True)
class Target:
    """A reader under test."""

    seeds: Callable[[], list[bytes]]  # small valid examples
    check: Callable[[bytes, Path], None]  # gives the bytes to the reader, inside an empty folder
    kind: Kind = "bytes"  # which mutations of structure to use besides those of bytes


_DEEP = "@deep@"  # stands for a nesting that json.dumps itself could not write
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**400, -(10**400),
    float("nan"), float("inf"), "", "x", "0", "nan", "x" * 5000, "../x", "/etc/passwd", "a/b", ".",
    "\x00", "\x1b[31mred\x1b[0m", "\u202eabc", "\ud800", "<script>alert(1)</script>", "a|b\n# c",
    "[red]x[/red]", [], {}, [[]], [None], [1, 2, 3], ["a"], {"a": 1}, {"": None}, {"schema": 1},
    [0] * 3000, _DEEP,
]  # fmt: skip
_YAML = [
    "on: x", "5: x", "null: x", "? [a]\n: b", "a: !!int ''", "a: !!timestamp x", "a: !!float x",
    "a: !!python/object/apply:os.system [true]", "a: !!binary '!'", "<<: {a: 1}", "<<: 5",
    "a: &a [*a]", "a: &a {b: *a}", "a: *b", "a: &x [1]\nb: [*x, *x, *x]", "a:\n\tb: 1", "%YAML 9.9",
    "--- a\n--- b", "a: .nan", "a: .inf", "a: 1e999", "a: 2026-11-17", "a: 0o777777777777777777777",
    "a: " + "9" * 5000, "[" * 2000, "{a: " * 300, "a: |\n  x", "a: 'x", '"\\ud800": 1', "!!set {a}",
    "a: 1:2:3:4", "a: ~\na: ~", "- " * 500 + "x", "extends: ./x.yaml", "extends: [a, b]",
]  # fmt: skip


def inputs(target: str, spec: Target, seed: int, first: int, count: int) -> Iterator[bytes]:
    """Yield the inputs number `first`, `first` + 1, … of a target; the seed determines them."""
    examples = spec.seeds()
    for number in range(first, first + count):
        rng = random.Random(f"{target}/{seed}/{number}")
        if number < len(examples):
            yield examples[number]
            continue
        data = rng.choice(examples)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            data = _mutated(data, spec.kind, examples, rng)
        yield data


def _mutated(data: bytes, kind: Kind, examples: list[bytes], rng: random.Random) -> bytes:
    if kind != "bytes" and rng.random() < 0.7:
        structured = {"json": _mutate_json, "jsonl": _mutate_lines, "yaml": _mutate_yaml}[kind]
        changed = structured(data, rng)
        if changed is not None:
            return changed
    return _mutate_bytes(data, examples, rng)


def _mutate_bytes(data: bytes, examples: list[bytes], rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 64, 1000)))
    match rng.randrange(9):
        case 0:  # flip a bit
            if start == len(data):
                return data
            return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:start] + rng.randbytes(stop - start) + data[stop:]
        case 3:
            return data[:start] + rng.randbytes(rng.choice((1, 4, 64))) + data[start:]
        case 4:
            return data[:start]
        case 5:
            return data[:stop] + data[start:stop] * rng.choice((1, 3, 100)) + data[stop:]
        case 6:
            fill = rng.choice((b"\x00", b"\xff", b"\x80", b"\n", b'"', b"[", b"9", b"\x1b"))
            return data[:start] + fill * (stop - start) + data[stop:]
        case 7:
            other = rng.choice(examples)
            return data[:start] + other[rng.randrange(len(other) + 1) :]
        case _:
            return rng.choice((b"", b"\x00", data + data, rng.randbytes(200), b"{}", b"[]", b"0"))


def _dumped(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    depth = rng.choice((100, 2000, 100_000))
    text = text.replace(f'"{_DEEP}"', "[" * depth + "]" * depth)
    return text.encode("utf-8", "surrogatepass")


def _mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    try:
        return _dumped(_changed(json.loads(data), rng), rng)
    except (ValueError, RecursionError):
        return None


def _mutate_lines(data: bytes, rng: random.Random) -> bytes | None:
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, rng.choice(lines))
        case _:
            changed = _mutate_json(lines[place], rng)
            if changed is None:
                return None
            lines[place] = changed
    return b"\n".join(lines)


def _mutate_yaml(data: bytes, rng: random.Random) -> bytes | None:
    import yaml

    if rng.random() < 0.4:
        lines = data.split(b"\n")
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(_YAML).encode())
        return b"\n".join(lines)
    try:
        value = _changed(yaml.safe_load(data), rng)
        if rng.random() < 0.3:
            return _dumped(value, rng)  # JSON is YAML, too
        return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, AttributeError,
            yaml.YAMLError):  # fmt: skip
        return None


def _changed(value: Any, rng: random.Random) -> Any:
    """Return a copy in which one node was replaced, removed, renamed, moved or wrapped."""
    places = list(_places(value))
    if not places:
        return rng.choice(_VALUES)
    path = rng.choice(places)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(("", "x", f"{key}_", "schema", "../x", "\x1b"))] = parent.pop(key)
        case 2:
            parent[key] = [parent[key]]
        case 3:
            source = value
            for step in rng.choice(places):
                source = source[step]
            parent[key] = json.loads(json.dumps(source, default=str))
        case _:
            parent[key] = rng.choice(_VALUES)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every node below `value`."""
    if not isinstance(value, dict | list):
        return
    for key, node in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from _places(node, (*path, key))
