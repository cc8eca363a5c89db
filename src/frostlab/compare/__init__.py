"""Arms that differ in one thing: what it changes, how sure that is, and what it costs."""

from typing import Any

__all__ = ["Comparison", "compare"]


def __getattr__(name: str) -> Any:
    """Loaded when used: rules and plans need no torch."""
    if name in __all__:
        from frostlab.compare import comparing

        return getattr(comparing, name)
    raise AttributeError(f"module 'frostlab.compare' has no attribute '{name}'")
