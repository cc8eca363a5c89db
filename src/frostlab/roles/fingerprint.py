"""Digests of what decides a model's anatomy: its shapes, its code, its settings and its ties.

Evidence that was found once is used again as long as the digest stays the same. Settings are what
modules and their classes keep besides weights: numbers, text, sequences, functions, other objects,
small tensors of integers, and hooks that may change a result. The values of weights do not count.
"""

import hashlib
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from frostlab.roles.copies import is_filled, kept_hooks, names_in
from frostlab.roles.parts import Slot

# Modules of these packages do not count as the model's code: surgery and PEFT put them in and out.
_LIBRARIES = ("torch.", "peft.", "frostlab.surgery.")
_FOREIGN = ("torch", "builtins", "abc", "typing", "collections")  # packages whose methods stay
# torch's modules that PEFT puts in, and those whose only settings are the shapes of their weights
_WITHOUT_SETTINGS = (
    nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict,
    nn.ParameterList, nn.ParameterDict, nn.Sequential,
)  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, hooks, mode, …
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_DEEPEST = 9  # levels of nested values; an object's attributes are two levels below it
_MOST = 1000  # entries of a sequence or dict that count
_STDLIB = sysconfig.get_path("stdlib")
_MOST_VALUES = 100_000  # values of a model that count
_SMALL = 256  # tensors of integers with at most this many entries count
# A number for each class and each function: what is defined again gets a new one.
_NUMBERS: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
_next_number = itertools.count()


def digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def code_digest(model: nn.Module, slots: Iterable[Slot]) -> str:
    """Return a digest of a model's shapes, classes and forward functions."""
    shapes = sorted((slot.name, slot.shape) for slot in slots)
    empty = any(parameter.is_meta for parameter in model.parameters())  # then a copy is read
    codes = [(_number(_class_of(m)), _number(m.forward)) for m in _own_modules(model)]
    return digest(shapes, empty, codes)


def state_digest(model: nn.Module, slots: Sequence[Slot]) -> str:
    """Return a digest of all that decides a model's anatomy, except for files it reads."""
    groups: dict[int, list[str]] = {}
    for slot in slots:
        groups.setdefault(id(slot.pieces[0].parameter), []).append(slot.name)
    ties = sorted(sorted(names) for names in groups.values() if len(names) > 1)
    return digest(code_digest(model, slots), ties, _Settings(model).facts())


def _own_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if not type(m).__module__.startswith(_LIBRARIES)]


def _class_of(module: nn.Module) -> type:
    """Return a module's class; if frostlab has split the module, the class that it had before."""
    kind = type(module)
    return kind.__bases__[1] if hasattr(module, "_frostlab_frozen") else kind


def _number(code: Any) -> int:
    """Return the number of a class or function; another one of the same name has another number."""
    function = getattr(code, "__func__", code)
    try:
        return _NUMBERS.setdefault(function, next(_next_number))
    except TypeError:  # compiled code, to which there are no weak references
        return id(function)


class _Settings:
    """The settings of a model, as nested tuples that `repr` can print."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = {id(module): place for place, module in enumerate(model.modules())}
        self._seen: dict[int, int] = {}  # id of a value → its number
        self._alive: list[Any] = []  # so that no id is used twice

    def facts(self) -> list[Any]:
        said: list[Any] = []
        classes: dict[type, None] = {}
        for module in self._model.modules():
            kind = type(module)
            if kind in _WITHOUT_SETTINGS or kind.__module__.startswith(_LIBRARIES[1:]):
                said.append([self._said(hook) for hook in kept_hooks(module)])
                continue
            classes |= dict.fromkeys(_class_of(module).__mro__)
            said.append((_number(_class_of(module)), *self._of_module(module)))
        for kind in classes:
            if kind.__module__.partition(".")[0] not in _FOREIGN:
                said.append((_number(kind), self._named(dict(vars(kind)), 0)))
        return said

    def _of_module(self, module: nn.Module) -> list[Any]:
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        hooks = [self._said(hook) for hook in kept_hooks(module)]
        if type(module).__module__.startswith(_LIBRARIES):
            return [self._named(own, 0), hooks]  # buffers, such as a BatchNorm's, do not count
        return [self._named(own, 0), self._named(module._buffers, 0), hooks]

    def _said(self, value: Any, depth: int = 0) -> Any:
        try:
            return self._told(value, depth)
        except Exception:  # an object's own code can fail in many ways
            return _number(type(value))

    def _told(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._seen:
            return "#", self._seen[id(value)]
        if depth > _DEEPEST or len(self._seen) > _MOST_VALUES:
            return _number(type(value))
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if isinstance(value, nn.Module):
            return "module", self._places.get(id(value))
        if isinstance(value, type) and _is_users(_file_of(value)):  # may be used as settings
            return _number(value), self._named(dict(vars(value)), depth)
        if isinstance(value, type | CodeType):
            return _number(value)
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, dict):
            return self._named(value, depth)
        if isinstance(value, list | tuple):
            return len(value), [self._said(item, depth + 1) for item in value[:_MOST]]
        if isinstance(value, set | frozenset):
            return sorted(repr(self._said(item, depth + 1)) for item in value)
        if callable(value) or isinstance(value, staticmethod | classmethod | property):
            return self._function(value, depth)
        if isinstance(value, Tensor):
            return _numbers_in(value)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return value.tolist() if value.size <= _SMALL else value.shape
        return _number(type(value)), self._attributes(value, depth)

    def _named(self, values: dict[Any, Any], depth: int) -> list[Any]:
        items = list(dict.items(values))[:_MOST]
        return [(self._said(name, depth + 1), self._said(item, depth + 1)) for name, item in items]

    def _attributes(self, value: Any, depth: int) -> list[Any]:
        own = getattr(value, "__dict__", None)
        own = dict(own) if isinstance(own, dict) else {}
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        own |= {name: getattr(value, name, None) for name in slots}
        if isinstance(value, deque):
            own[""] = list(value)
        if _is_users(_file_of(type(value))):  # attributes that an object shares with its class
            own["class"] = type(value)
        return self._named(own, depth + 1)

    def _function(self, value: Any, depth: int) -> Any:
        """Return the code of a function, and the values that it has been given."""
        if isinstance(value, FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or () if is_filled(c)]
            given = [cells, value.__defaults__, value.__kwdefaults__]
            own = (_number(value.__code__), id(value.__globals__))
            if _is_users(value.__code__.co_filename):
                names = sorted({*names_in(value.__code__)} & value.__globals__.keys())
                given.append({name: value.__globals__[name] for name in names})
            return own, [self._said(item, depth + 1) for item in given]
        parts: list[Any] = [getattr(value, "__func__", None)]
        if isinstance(value, MethodType):
            parts.append(value.__self__)
        elif isinstance(value, partial):
            parts += [value.func, value.args, value.keywords]
        elif isinstance(value, property):
            parts += [value.fget]
        said = [self._said(item, depth + 1) for item in parts]
        name = str(getattr(value, "__qualname__", ""))
        return name, _number(type(value)), said, self._attributes(value, depth)


def _is_users(file: str) -> bool:
    """Return whether a file, or a cell of a notebook, is not of an installed package."""
    return bool(file) and "site-packages" not in file and not file.startswith(_STDLIB)


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    file = str(getattr(module, "__file__", None) or "")
    return file or ("<cell>" if kind.__module__ == "__main__" else "")


def _numbers_in(tensor: Tensor) -> Any:
    """Return a small tensor's integers; for any other tensor, its kind of number."""
    if tensor.is_floating_point() or tensor.is_meta or type(tensor) is not Tensor:
        return tensor.dtype
    return tensor.tolist() if tensor.numel() <= _SMALL else tensor.dtype
