"""Which settings of modules may decide what a layer does, although its shapes are like others'.

Such a setting is an attribute of a module that differs between layers of a list: a flag, a word, a
function, an entry of a tuple, or a number that the code compares. A leaf is one such value; its
name is the path to it from the module, such as `order[0]` or `config.window`.
"""

import ast
import contextlib
import functools
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ARITHMETIC = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow
_OF_MODULES = set(vars(nn.Module())) | {"_is_hf_initialized"}  # attributes that decide nothing
_IN_TRAINING = re.compile(r"\w*drop\w*")  # numbers that only matter in training mode
_DEEPEST = 4  # levels of objects and lists in which leaves are looked for
_PLAIN = bool | int | float | complex | str | bytes
_MISSING = "missing"
_MOST = 1000  # entries of a list, or of a tensor
Leaves = dict[str, Any]  # name of a leaf → its value


class Deciding:
    """The settings of a model's modules that may decide what its layers do."""

    def __init__(self, model: nn.Module) -> None:
        """Compare the layers of every list of the model."""
        self._known: dict[int, tuple[Any, Leaves]] = {}  # id of a value → it and its leaves
        self._names: dict[type, set[str]] = defaultdict(set)  # leaves that differ between layers
        self._asked: dict[tuple[type, str], bool] = {}
        lists: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
        for path, layer in model.named_modules(remove_duplicate=False):
            parent, _, last = path.rpartition(".")
            if last.isdigit():
                lists[parent].append((last, layer))
        for layers in lists.values():
            alike: dict[tuple[type, str], list[_Member]] = defaultdict(list)
            for number, layer in layers:
                shapes = str([tuple(parameter.shape) for parameter in layer.parameters()])
                for inner, module in layer.named_modules(remove_duplicate=False):
                    alike[type(module), inner].append(_Member(module, number, shapes))
            for (kind, _), members in alike.items():
                self._names[kind] |= self._that_differ(members)

    def of(self, module: nn.Module, number: str = "") -> list[str]:
        """Return the settings of a module that may decide what it does.

        Flags and words always count, other values if they differ between layers.

        Args:
            number: the number of the module's layer. It stands for values that are not known
                because the model is on `meta`, so that they count as different in each layer.
        """
        kind = type(module)
        names = self._names.get(kind, set())
        differing = {re.split(r"[.(\[]", name)[0] for name in names}
        chosen = []
        for attribute, value in _settings(module, number).items():
            if isinstance(value, bool | str) and not _is_number(value) and attribute[0] != "_":
                chosen.append(f"{attribute}={value!r}")
            elif attribute in differing:
                for inner, leaf in self._leaves(value).items():
                    name = attribute + inner
                    if name in names and (not _is_number(leaf) or self._asks(kind, name)):
                        chosen.append(f"{name}={leaf!r}")
        return sorted(chosen)

    def _that_differ(self, members: Sequence["_Member"]) -> set[str]:
        """Return the names of leaves that differ between modules of the same place in layers.

        Numbers may differ between layers of different shapes, such as their widths.
        """
        settings = [_settings(member.module, member.number) for member in members]
        names: set[str] = set()
        for attribute in dict.fromkeys(name for own in settings for name in own):
            if len({id(own.get(attribute)) for own in settings}) == 1:
                continue  # all have the same object
            leaves = [self._leaves(own[attribute]) if attribute in own else {} for own in settings]
            for inner in dict.fromkeys(name for own in leaves for name in own):
                values = [own.get(inner, _MISSING) for own in leaves]
                groups: dict[str, set[str]] = defaultdict(set)
                for member, value in zip(members, values, strict=True):
                    groups[member.shapes if any(map(_is_number, values)) else ""].add(repr(value))
                if any(len(group) > 1 for group in groups.values()):
                    names.add(attribute + inner)
        return names

    def _asks(self, kind: type, leaf: str) -> bool:
        """Return whether a method of a class compares the number of this name, or chooses by it."""
        if kind.__module__.startswith("torch."):
            return False
        if "(" in leaf:  # a number inside a function
            return True
        name = re.sub(r"\[.*?\]", "", leaf).rpartition(".")[2]
        if (kind, name) not in self._asked:
            asks = not _IN_TRAINING.fullmatch(name)
            self._asked[kind, name] = asks and any(_decides(f, name) for f in _methods(kind))
        return self._asked[kind, name]

    def _leaves(self, value: Any, depth: int = 0) -> Leaves:
        """Return the leaves of a value, by what their names have after the value's name."""
        if value is None or isinstance(value, _PLAIN):
            return {"": value}
        if id(value) not in self._known:
            self._known[id(value)] = (value, {})  # it may contain itself
            leaves: Leaves = {"": _name_of(value)}
            if depth < _DEEPEST:
                for name, part in _parts(value):
                    below = self._leaves(part, depth + 1)
                    leaves |= {name + inner: leaf for inner, leaf in below.items()}
            self._known[id(value)] = (value, leaves)
        return self._known[id(value)][1]


@dataclass(frozen=True)
class _Member:
    module: nn.Module
    number: str  # of the layer that it is in
    shapes: str  # of all parameters of the layer


def _settings(module: nn.Module, number: str) -> dict[str, Any]:
    """Return the attributes and buffers of a module by name."""
    settings = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    if not type(module).__module__.startswith("torch."):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and buffer.numel() == 1:
                settings[name] = _Number(f"that of layer {number}")
            elif buffer is not None:
                settings[name] = buffer
    return settings


class _Number(str):
    """A number, or several, as text."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex, _Number)


def _name_of(value: Any) -> str:
    """Return the name of a function, a class, or the class of another object."""
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{named.__qualname__}"
    code = getattr(value, "__code__", None)
    return name if code is None else f"{name} {code.co_names} {code.co_code.hex()}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that is no plain value, with what its name gets at the end."""
    if isinstance(value, nn.Module | type):
        return
    if isinstance(value, Tensor):
        if not value.is_meta and value.numel() <= _MOST:
            yield "[values]", _Number(str(value.tolist()))
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value[:_MOST]))
    elif isinstance(value, set | frozenset):
        yield from ((f"[{part!r}]", True) for part in value if isinstance(part, int | str))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:_MOST])
    elif isinstance(value, functools.partial):
        yield from (("(function)", value.func), ("(kept)", (value.args, value.keywords)))
    elif inspect.ismethod(value):
        yield "(function)", value.__func__
    elif inspect.isfunction(value):
        for i, cell in enumerate(value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it is empty
                yield f"(closed {i})", cell.cell_contents
        yield "(defaults)", value.__defaults__
    elif hasattr(value, "__dict__"):
        of_class = {n: v for n, v in vars(type(value)).items() if isinstance(v, _PLAIN)}
        both = {name: part for name, part in of_class.items() if not name.startswith("__")}
        yield from ((f".{name}", part) for name, part in (both | vars(value)).items())


def _methods(kind: type) -> Iterator[Any]:
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and name != "__init__":
                yield function


def _decides(function: Any, name: str) -> bool:
    """Return whether what a method does may depend on an attribute of this name."""
    try:
        lines = inspect.getsource(function)
        tree = ast.parse(textwrap.dedent(lines)) if name in lines else ast.Module([], [])
    except (OSError, SyntaxError):  # its code cannot be read
        return True
    own = {"config", *function.__code__.co_varnames[:1]}  # a method's first argument: the module
    asked = {  # what is compared or divided with a remainder, such as `(index + 1) % 4 == 0`
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv))
        for inner in ast.walk(node)
    }
    harmless: set[int] = set()  # entries of caches, comparisons with None, and arithmetic
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if not own & _names_of(node.func):
                harmless |= {id(value) for value in node.args}
                harmless |= {id(keyword.value) for keyword in node.keywords}
        elif isinstance(node, ast.Subscript):
            if not own & _names_of(node.value) and not isinstance(node.value, ast.Tuple | ast.List):
                harmless.add(id(node.slice))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, _ARITHMETIC):
            harmless.add(id(node.value))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            harmless.add(id(node.left))
        elif (
            isinstance(node, ast.BinOp)
            and id(node) not in asked
            and isinstance(node.op, _ARITHMETIC)
        ):
            harmless |= {id(node.left), id(node.right)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Load)
        and id(node) not in harmless
        for node in ast.walk(tree)
    )


def _names_of(expression: ast.AST) -> set[str]:
    """Return the names of variables and attributes in an expression."""
    nodes = list(ast.walk(expression))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
