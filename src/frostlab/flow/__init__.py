"""Gradient flow: which parts of a model learn, which do not, and why."""

from typing import TYPE_CHECKING, Any

from frostlab.flow.flow import Flow, load_flow
from frostlab.flow.recorded import flow_of, flows_of
from frostlab.flow.rules import Rules, Verdict

if TYPE_CHECKING:
    from frostlab.flow.beginning import watch
    from frostlab.flow.watching import Watch

__all__ = ["Flow", "Rules", "Verdict", "Watch", "flow_of", "flows_of", "load_flow", "watch"]


def __getattr__(name: str) -> Any:
    """Watching needs torch, reading does not."""
    if name not in ("Watch", "watch"):
        raise AttributeError(f"module 'frostlab.flow' has no attribute '{name}'")
    from frostlab.flow import beginning

    return getattr(beginning, name)
