"""frostlab: which weights of a transformer learn, and what difference does that make?

Public names are loaded on first use, so that `frostlab --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from frostlab.comparison.run import Comparison, compare, compare_runs, load_comparison
    from frostlab.data.registered import register_data
    from frostlab.errors import (
        BadInput,
        FrostlabError,
        FrozenWeightsMoved,
        LeftOutOfOptimizer,
        NothingLearns,
        StaleOptimizer,
        TrainableWeightsStayed,
        UnfinishedRun,
        UnknownArchitecture,
    )
    from frostlab.experiments.run import GroupResult, compare_group
    from frostlab.flow.measurements import Flow, load_flow
    from frostlab.flow.watch import watch
    from frostlab.integrations.transformers import GradFlowCallback
    from frostlab.pages.write import report
    from frostlab.recipe.load import load_recipe
    from frostlab.recipe.recipe import Recipe
    from frostlab.records.finding.query import runs
    from frostlab.records.folder import RunRecord
    from frostlab.roles.description import fused, register_architecture
    from frostlab.roles.parts import Heads, Part
    from frostlab.roles.read import anatomy
    from frostlab.roles.snapshot import Anatomy
    from frostlab.surgery.adapters import add_lora, merge_adapters
    from frostlab.surgery.audit import Audit, audit
    from frostlab.surgery.freeze import freeze, thaw
    from frostlab.surgery.grow import Growth, grow
    from frostlab.surgery.orthogonal import orthogonalize, randomize
    from frostlab.surgery.save import export, load_trainable, save_trainable
    from frostlab.training.evaluate import register_metric
    from frostlab.training.run import RunFailed
    from frostlab.training.treatment import register_treatment
    from frostlab.use.exits import early_exits
    from frostlab.use.run import Run, load_run, run

_HOMES = {  # public name → the module inside frostlab that defines it
    "Anatomy": "roles.snapshot",
    "Audit": "surgery.audit",
    "BadInput": "errors",
    "Comparison": "comparison.run",
    "Flow": "flow.measurements",
    "FrostlabError": "errors",
    "FrozenWeightsMoved": "errors",
    "GradFlowCallback": "integrations.transformers",
    "GroupResult": "experiments.run",
    "Growth": "surgery.grow",
    "Heads": "roles.parts",
    "LeftOutOfOptimizer": "errors",
    "NothingLearns": "errors",
    "Part": "roles.parts",
    "Recipe": "recipe.recipe",
    "Run": "use.run",
    "RunFailed": "training.run",
    "RunRecord": "records.folder",
    "StaleOptimizer": "errors",
    "TrainableWeightsStayed": "errors",
    "UnfinishedRun": "errors",
    "UnknownArchitecture": "errors",
    "add_lora": "surgery.adapters",
    "anatomy": "roles.read",
    "audit": "surgery.audit",
    "compare": "comparison.run",
    "compare_group": "experiments.run",
    "compare_runs": "comparison.run",
    "early_exits": "use.exits",
    "export": "surgery.save",
    "freeze": "surgery.freeze",
    "fused": "roles.description",
    "grow": "surgery.grow",
    "load_comparison": "comparison.run",
    "load_flow": "flow.measurements",
    "load_recipe": "recipe.load",
    "load_run": "use.run",
    "load_trainable": "surgery.save",
    "merge_adapters": "surgery.adapters",
    "orthogonalize": "surgery.orthogonal",
    "randomize": "surgery.orthogonal",
    "register_architecture": "roles.description",
    "register_data": "data.registered",
    "register_metric": "training.evaluate",
    "register_treatment": "training.treatment",
    "report": "pages.write",
    "run": "use.run",
    "runs": "records.finding.query",
    "save_trainable": "surgery.save",
    "thaw": "surgery.freeze",
    "watch": "flow.watch",
}

__all__ = [
    "Anatomy",
    "Audit",
    "BadInput",
    "Comparison",
    "Flow",
    "FrostlabError",
    "FrozenWeightsMoved",
    "GradFlowCallback",
    "GroupResult",
    "Growth",
    "Heads",
    "LeftOutOfOptimizer",
    "NothingLearns",
    "Part",
    "Recipe",
    "Run",
    "RunFailed",
    "RunRecord",
    "StaleOptimizer",
    "TrainableWeightsStayed",
    "UnfinishedRun",
    "UnknownArchitecture",
    "add_lora",
    "anatomy",
    "audit",
    "compare",
    "compare_group",
    "compare_runs",
    "early_exits",
    "export",
    "freeze",
    "fused",
    "grow",
    "load_comparison",
    "load_flow",
    "load_recipe",
    "load_run",
    "load_trainable",
    "merge_adapters",
    "orthogonalize",
    "randomize",
    "register_architecture",
    "register_data",
    "register_metric",
    "register_treatment",
    "report",
    "run",
    "runs",
    "save_trainable",
    "thaw",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'frostlab' has no attribute '{name}'")
    value = getattr(import_module(f"frostlab.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
