"""Running a copy of a model, so that the model and all random generators stay as they are.

`shared_copy` (`copies.py`) makes the copy. `undisturbed` restores the generators afterwards,
and raises an error if the model itself runs all the same. `seeded` makes passes draw the same
random numbers.
`Unwritten` restores parameters that a pass has written into.
"""

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from frostlab.roles.copies import Unwatchable, code_holder, is_filled, kept_hooks, names_in

# functions that write into an argument, although their names do not say so
_WRITERS = {"batch_norm", "instance_norm"}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore all random generators afterwards; raise Unwatchable if the model itself runs.

    Lists, dicts and sets in which hooks collect something are restored, too. Meanwhile, code that
    `torch.compile` or `torch.jit.script` has compiled runs eagerly.
    """
    modules = {id(module): type(module).__name__ for module in model.modules()}

    def refuse(module: nn.Module, inputs: Any) -> None:
        if id(module) in modules:
            raise Unwatchable(
                f"its forward pass runs a {modules[id(module)]} of the model itself, not of the "
                "copy that is watched: a function or a global variable may refer to that module; "
                "refer to it through `self`"
            )

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    restore = [_restore(generator) for generator in _generators(model)]
    restore += [_refill(collection) for collection in _collections(model)]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for put_back in restore:
            stack.callback(put_back)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
        stack.enter_context(_scripts_run_eagerly())
        stack.callback(register_module_forward_pre_hook(refuse).remove)
        yield


@contextmanager
def _scripts_run_eagerly() -> Iterator[None]:
    """Run functions that `torch.jit.script` has compiled as the Python that they were made from.

    What happens inside compiled functions cannot be seen.
    """
    kind: Any = torch.jit.ScriptFunction
    compiled = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(function, "_torchdynamo_inline", None)  # torch.compile goes by it, too
        if source is None:
            return compiled(function, *args, **kwargs)
        return source(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = compiled


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


def _refill(collection: Any) -> Callable[[], None]:
    """Return a function that gives a list, dict or set the entries that it has now."""
    entries = collection.copy()

    def refill() -> None:
        collection.clear()
        (collection.extend if isinstance(collection, list) else collection.update)(entries)

    return refill


def _collections(model: nn.Module) -> Iterator[Any]:
    """Yield the lists, dicts and sets that are globals of hooks which run in a copy."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for hook in kept_hooks(module):
            function = code_holder(hook)
            for name in names_in(function.__code__) if isinstance(function, FunctionType) else ():
                value = function.__globals__.get(name)
                if type(value) in (list, dict, set):
                    found[id(value)] = value
    yield from found.values()


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
                cells = [cell for cell in function.__closure__ or () if is_filled(cell)]
                spaces += [function.__globals__, {str(id(c)): c.cell_contents for c in cells}]
    seen: set[int] = set()
    for space in spaces:
        for value in list(space.values()):
            if isinstance(value, random.SystemRandom):  # has no state
                continue
            if isinstance(value, kinds) and id(value) not in seen:
                seen.add(id(value))
                yield value


class Unwritten:
    """Restores the values of parameters that a forward pass writes into, to the bit.

    Before a call that may write, `before` saves the parameters whose memory the call can reach. It
    goes by the name of the function and its arguments, so it saves too much rather than too little.
    """

    def __init__(self, model: nn.Module) -> None:
        self._data = [(parameter, parameter.data) for parameter in model.parameters()]
        self._in: dict[int, list[Tensor]] = {}  # memory → parameters in it that are not saved yet
        for _, data in self._data:
            self._in.setdefault(_memory(data), []).append(data)
        self._saved: list[tuple[Tensor, Tensor]] = []

    def before(
        self, name: str, args: Any, kwargs: Mapping[str, Any], tensors: Iterable[Tensor]
    ) -> None:
        """Save the parameters that a call of this name may write into."""
        in_place = name.startswith(("__i", "__set", "_foreach")) or (
            name.endswith("_") and not name.endswith("__")
        )
        given = [*args[3:4], kwargs.get("max_norm")] if name.startswith("embedding") else []
        norms = any(limit is not None for limit in given)  # then it scales rows of its weight
        if in_place or norms or name in _WRITERS or kwargs.get("out") is not None:
            for tensor in tensors:
                self._saved += [(data, data.clone()) for data in self._in.pop(_memory(tensor), ())]

    def restore(self) -> None:
        for parameter, data in self._data:
            if _memory(parameter) != _memory(data) or parameter.shape != data.shape:
                parameter.data = data  # the pass has set `parameter.data`
        for data, values in self._saved:
            data.copy_(values)


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that holds a tensor's values."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse or wrapped tensor
        return 0
