"""Running a copy of a model, so that the model and all random generators stay as they are.

`shared_copy` copies the modules and shares the parameters. Functions that a module holds, such as a
`forward` that the user has replaced, may refer to the model in their closures, defaults or globals;
in the copy they refer to the copy. `undisturbed` restores the generators afterwards, and raises an
error if the model itself runs all the same. `seeded` makes passes draw the same random numbers.
"""

import copy
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from frostlab.errors import UnknownArchitecture

_Cached: type = type(lru_cache(len))
_FUNCTIONS = (FunctionType, MethodType, partial, weakref.ref, _Cached)


class RunsItself(UnknownArchitecture):
    """A copy of the model runs modules of the model itself, for example through a global."""


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the parameters."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()  # a computed weight cannot be copied
    made = copy.deepcopy(model, memo)
    references = _References(memo)
    for module in made.modules():
        for name, value in list(vars(module).items()):
            items = value.values() if type(value) is dict else value
            several = type(value) in (list, tuple, dict)
            if isinstance(value, _FUNCTIONS) or (
                several and any(isinstance(item, _FUNCTIONS) for item in items)
            ):
                vars(module)[name] = references.moved(value)
    return made


class _References:
    """Replaces references to a model in functions, which `copy.deepcopy` does not copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo  # as `copy.deepcopy` has left it: id of the original → the copy
        self._originals: list[Any] = []  # keeps them alive, so that no id is used twice

    def moved(self, value: Any) -> Any:
        """Return a value whose references to the model are replaced by references to the copy."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, weakref.ref):
            target = self._memo.get(id(value()))
            return value if target is None else weakref.ref(target)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.moved(value.__func__), self.moved(value.__self__))
        if isinstance(value, partial):
            named = {name: self.moved(item) for name, item in value.keywords.items()}
            made = partial(self.moved(value.func), *map(self.moved, value.args), **named)
            vars(made).update(vars(value))
            return made
        if isinstance(value, _Cached):
            function: Any = self.moved(vars(value)["__wrapped__"])
            settings = vars(value)["cache_parameters"]()
            return self._keep(value, lru_cache(**settings)(function))
        if type(value) is tuple:
            return tuple(map(self.moved, value))
        if type(value) is list:
            return self._keep(value, [self.moved(item) for item in value])
        if type(value) is dict:
            return self._keep(value, {key: self.moved(item) for key, item in value.items()})
        if isinstance(value, Tensor) and value.is_leaf:
            return copy.deepcopy(value, self._memo)
        return value

    def _keep(self, value: Any, made: Any) -> Any:
        self._originals.append(value)
        self._memo[id(value)] = made
        return made

    def _function(self, function: FunctionType) -> FunctionType:
        """Copy a function that refers to the model or has a closure; return others as they are."""
        values = function.__globals__
        names = {
            name: self.moved(values[name])
            for name in _names_in(function.__code__)
            if self._is_of_model(values.get(name))
        }
        cells = function.__closure__ or ()
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if not (names or cells or any(self.moved(item) is not item for item in given)):
            return function
        made = FunctionType(
            function.__code__,
            {**values, **names} if names else values,
            function.__name__,
            closure=tuple(self._cell(cell) for cell in cells) if cells else None,
        )
        self._keep(function, made)
        vars(made).update(vars(function))
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        made.__defaults__ = self.moved(function.__defaults__)
        made.__kwdefaults__ = self.moved(function.__kwdefaults__)
        for cell in cells:
            copied = self._memo[id(cell)]
            if _is_filled(cell) and not _is_filled(copied):
                copied.cell_contents = self.moved(cell.cell_contents)
        return made

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._memo:
            self._keep(cell, CellType())
        made: CellType = self._memo[id(cell)]
        return made

    def _is_of_model(self, value: Any) -> bool:
        """Return whether a global is a module of the model, or a method of one."""
        value = value.__self__ if isinstance(value, MethodType) else value
        return isinstance(value, nn.Module) and id(value) in self._memo


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals that a function, or a function inside it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore all random generators afterwards; raise RunsItself if the model itself runs.

    Meanwhile, code that `torch.compile` has compiled runs eagerly.
    """
    modules = {id(module): type(module).__name__ for module in model.modules()}

    def refuse(module: nn.Module, inputs: Any) -> None:
        if id(module) in modules:
            raise RunsItself(
                f"its forward pass runs a {modules[id(module)]} of the model itself, not of the "
                "copy that is watched: a function or a global variable may refer to that module; "
                "refer to it through `self`"
            )

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    restore = [_restore(generator) for generator in _generators(model)]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for put_back in restore:
            stack.callback(put_back)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
        stack.callback(register_module_forward_pre_hook(refuse).remove)
        yield


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the generators of torch, Python and numpy, and restore them afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpy: Any = sys.modules.get("numpy.random")
    generators = [random] if numpy is None else [random, numpy]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        torch.default_generator.manual_seed(0)
        for generator in generators:
            stack.callback(_restore(generator))
            generator.seed(0)
        yield


def _restore(generator: Any) -> Callable[[], Any]:
    """Return a function that gives a random generator the state that it has now."""
    if hasattr(generator, "getstate"):  # Python's
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if hasattr(generator, "get_state"):  # numpy's older kind
        return partial(generator.set_state, generator.get_state(legacy=False))
    bits = getattr(generator, "bit_generator", generator)
    return partial(setattr, bits, "state", copy.deepcopy(bits.state))


def _generators(model: nn.Module) -> Iterator[Any]:
    """Yield the generators of Python and numpy, and those that the model's code can name.

    The latter are attributes of modules and of their classes, globals of the files that define
    these classes, and globals and closures of functions that modules hold.
    """
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    yield random
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy
        kinds += (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes}
    spaces: list[Any] = [vars(owner) for owner in (*classes, *model.modules())]
    spaces += [vars(sys.modules[name]) for name in files if name in sys.modules]
    for module in model.modules():
        for function in vars(module).values():
            if isinstance(function, FunctionType):
                cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
                spaces += [function.__globals__, {str(id(c)): c.cell_contents for c in cells}]
    seen: set[int] = set()
    for space in spaces:
        for value in list(space.values()):
            if isinstance(value, random.SystemRandom):  # has no state
                continue
            if isinstance(value, kinds) and id(value) not in seen:
                seen.add(id(value))
                yield value
