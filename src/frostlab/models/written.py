"""Models that functions in a user's own files return, for `frostlab inspect`."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from frostlab.errors import BadInput, first_line, nearest


def written_model(place: str) -> tuple[nn.Module, Any]:
    """Run a user's function, given as FILE.py:FUNCTION; return its model, and its batch or None.

    The name can also be that of a model that the file has built. The file can import the files
    next to it, as it can when Python runs it.
    """
    path, _, function = place.rpartition(":") if ".py:" in place else (place, "", "")
    if not Path(path).is_file():
        raise BadInput(f"{path} is not a file")
    if not function:
        raise BadInput(f"which function builds the model? For example {path}:build")
    with _first_on_the_path(str(Path(path).resolve().parent)):
        return _built(path, function)


def _built(path: str, function: str) -> tuple[nn.Module, Any]:
    name = f"frostlab_written_{Path(path).stem}"  # so that it replaces no module of this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code can fail in many ways
        raise BadInput(f"{path}: {type(error).__name__}: {first_line(error)}") from None
    build = getattr(module, function, None)
    if not callable(build):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise BadInput(f"{path} has no function {function!r}{nearest(function, names)}")
    try:
        built = build if isinstance(build, nn.Module) else build()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{path}:{function}: {type(error).__name__}: {first_line(error)}") from None
    model, batch = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{path}:{function} returned {type(model).__name__}, not a model (nn.Module)"
        )
    return model, batch


@contextmanager
def _first_on_the_path(folder: str) -> Iterator[None]:
    """Let imports find the modules in a folder first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
