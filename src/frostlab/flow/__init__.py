"""Gradient flow: which parts of a model learn, which do not, and why."""

from frostlab.flow.flow import Flow, load_flow
from frostlab.flow.rules import Rules, Verdict
from frostlab.flow.watching import Watch, watch

__all__ = ["Flow", "Rules", "Verdict", "Watch", "load_flow", "watch"]
