"""Copies of a model that share its parameters, to run in its place.

Functions that a module holds, such as a `forward` that the user has replaced or a hook, may refer
to the model in their closures, defaults or globals; in the copy they refer to the copy. Of the
hooks, only those that may change a result are in the copy. What cannot be copied, such as a lock,
a file or a generator, is shared.
"""

import copy
import dis
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from frostlab.errors import UnknownArchitecture, first_line

_Cached: type = type(lru_cache(len))
_FUNCTIONS = (FunctionType, MethodType, partial, weakref.ref, _Cached)


# Hooks of these packages compute a weight, such as those of weight_norm.
_OF_WEIGHTS = "torch.nn.utils"
# Hooks of these packages observe, or place weights on devices.
_OF_LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "frostlab.")
_DROPPED = ("_backward_hooks", "_backward_pre_hooks")
_MOST_SHARED = 1000  # values that cannot be copied


class Unwatchable(UnknownArchitecture):
    """A forward pass cannot be watched, whatever its inputs are."""


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the parameters; raise Unwatchable if none exists."""
    given: dict[int, Any] = {id(p): p for p in model.parameters()}
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            given[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if may_return(h))
        given |= {id(vars(module)[name]): OrderedDict() for name in _DROPPED}
    made, memo = _deep_copied(model, given)
    originals = {id(module) for module in model.modules()}
    for path, module in made.named_modules():
        if id(module) in originals:
            raise Unwatchable(
                f"it cannot be copied: a copy of {_place(path)} ({type(module).__name__}) is the "
                "module itself, because of its `__deepcopy__`"
            )
    references = _References(memo)
    for path, module in made.named_modules():
        for name, value in list(vars(module).items()):
            items = value.values() if type(value) is dict else value
            several = type(value) in (list, tuple, dict)
            if isinstance(value, _FUNCTIONS) or (
                several and any(isinstance(item, _FUNCTIONS) for item in items)
            ):
                vars(module)[name] = references.moved(value)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in hooks.items():
                try:
                    hooks[key] = references.moved(copy.deepcopy(hook, memo))
                except Exception as error:  # an object's own code can fail in many ways
                    where = (
                        f"a hook of {_place(path)} ({type(error).__name__}: {first_line(error)})"
                    )
                    raise Unwatchable(f"it cannot be copied, because of {where}") from error
    return made


def kept_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of a module that run in a copy: those that may change a result."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if may_return(hook)]


def may_return(hook: Any) -> bool:
    """Return whether a hook may return something else than None, and so change a result."""
    owner = hook if hasattr(hook, "__module__") else type(hook)
    package = f"{getattr(owner, '__module__', '')}."
    if package.startswith(_OF_LIBRARIES):
        return package.startswith(_OF_WEIGHTS)
    code = getattr(code_holder(hook), "__code__", None)
    if code is None:
        return True
    steps = list(dis.get_instructions(code))
    returned = [
        before.argval if before.opname == "LOAD_CONST" and not step.is_jump_target else step
        for before, step in pairwise(steps)
        if step.opname == "RETURN_VALUE"
    ]
    returned += [step.argval for step in steps if step.opname == "RETURN_CONST"]
    return any(value is not None for value in returned)


def code_holder(hook: Any) -> Any:
    """Return the function that runs when a hook is called."""
    while isinstance(hook, partial):
        hook = hook.func
    if not hasattr(hook, "__code__") and not isinstance(hook, MethodType):
        hook = type(hook).__call__
    return getattr(hook, "__func__", hook)


def _deep_copied(model: nn.Module, given: dict[int, Any]) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy and the memo of `copy.deepcopy`, which maps ids of originals to copies.

    Args:
        given: the same for values that are shared or replaced; what cannot be copied is added.
    """
    for _ in range(_MOST_SHARED):
        memo = dict(given)
        try:
            return copy.deepcopy(model, memo), memo
        except Exception as error:  # an object's own code can fail in many ways
            value, place = _stopped_at(error, model)
            if value is None:
                raise
            if isinstance(value, Tensor) and value.grad_fn is not None:
                given[id(value)] = value.detach().clone()  # a computed weight
            elif isinstance(value, nn.Module | Tensor) or id(value) in given:
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise Unwatchable(f"it cannot be copied, because of {place} ({reason})") from error
            else:
                given[id(value)] = value
    raise Unwatchable("it cannot be copied: it holds too many objects that cannot")


def _stopped_at(error: Exception, model: nn.Module) -> tuple[Any, str]:
    """Return the value at which `copy.deepcopy` has failed, and the attribute that holds it."""
    paths = {id(module): path for path, module in model.named_modules()}
    value, path, attribute, trace = None, "", "", error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is copy.deepcopy.__code__:
            value = frame.f_locals["x"]
            if id(value) in paths:
                path, attribute = paths[id(value)], ""
        elif "key" in frame.f_locals and frame.f_code.co_name == "_deepcopy_dict":
            attribute = attribute or str(frame.f_locals["key"])
        trace = trace.tb_next
    return value, f"`{'.'.join(part for part in (path, attribute) if part)}`"


def _place(path: str) -> str:
    return f"`{path}`" if path else "the model"


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
            for name in names_in(function.__code__)
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
            if is_filled(cell) and not is_filled(copied):
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


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals that a function, or a function inside it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
