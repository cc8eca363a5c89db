"""frostlab: which weights of a transformer learn, and what does it change?

Names are loaded when first used, so that `frostlab --help` need not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from frostlab.anatomy import Anatomy, Heads, Part, anatomy, describe, fused
    from frostlab.compare import Comparison, compare
    from frostlab.errors import (
        BadInput,
        FrostlabError,
        FrozenWeightsMoved,
        LeftOutOfOptimizer,
        NothingLearns,
        StaleOptimizer,
        UnknownArchitecture,
    )
    from frostlab.flow import Flow, flow_of, load_flow, watch
    from frostlab.integrations.transformers import GradFlowCallback
    from frostlab.recipe import Recipe
    from frostlab.recipe.loading import load_recipe
    from frostlab.records.record import RunRecord
    from frostlab.surgery import (
        Audit,
        Growth,
        audit,
        export,
        freeze,
        grow,
        load_trainable,
        orthogonalize,
        randomize,
        save_trainable,
        thaw,
    )
    from frostlab.training import RunFailed, early_exits, run

__all__ = [
    "Anatomy",
    "Audit",
    "BadInput",
    "Comparison",
    "Flow",
    "FrostlabError",
    "FrozenWeightsMoved",
    "GradFlowCallback",
    "Growth",
    "Heads",
    "LeftOutOfOptimizer",
    "NothingLearns",
    "Part",
    "Recipe",
    "RunFailed",
    "RunRecord",
    "StaleOptimizer",
    "UnknownArchitecture",
    "anatomy",
    "audit",
    "compare",
    "describe",
    "early_exits",
    "export",
    "flow_of",
    "freeze",
    "fused",
    "grow",
    "load_flow",
    "load_recipe",
    "load_trainable",
    "orthogonalize",
    "randomize",
    "run",
    "save_trainable",
    "thaw",
    "watch",
]

_ROOMS = (
    "errors", "recipe", "anatomy", "surgery", "records", "flow", "training", "compare",
    "integrations",
)  # fmt: skip


class _Package(ModuleType):
    """Lets `frostlab.anatomy` be the function, though a folder of that name is imported too."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'frostlab' has no attribute '{name}'")
        for room in _ROOMS:
            module = import_module(f"frostlab.{room}")
            if hasattr(module, name):
                self.__dict__[name] = getattr(module, name)
                return self.__dict__[name]
        raise AttributeError(f"module 'frostlab' has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*__all__, "__version__"]


sys.modules[__name__].__class__ = _Package
