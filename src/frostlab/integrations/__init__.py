"""Callbacks for loops that are not ours; Lightning's is in `frostlab.integrations.lightning`."""

from frostlab.integrations.transformers import GradFlowCallback

__all__ = ["GradFlowCallback"]
