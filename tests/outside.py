"""Other people's packages, as `make outside` puts them into `.outside`.

torchvision's operators are in a library that was built for another torch than the CPU's, and
without them `import torchvision` fails. Its models do without: it is enough that the names exist.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

# What torchvision says about its operators while it is imported; none of them is called.
OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align",
    "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


def outside(name: str) -> Any:
    """Return a package, or a module of one; where that is not installed the test is skipped."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make outside")
    declare_operators()
    return import_module(name)


@cache
def declare_operators() -> Library | None:
    """Declare torchvision's operators if its library cannot be loaded, and keep them declared."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
        return None
    except OSError:
        library = Library("torchvision", "DEF")
        for name in OPERATORS:
            library.define(f"{name}(Tensor x) -> Tensor")
        return library
