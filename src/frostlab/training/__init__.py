"""Training: one loop, its clocks and its stages."""

from frostlab.training.exits import early_exits
from frostlab.training.failures import RunFailed
from frostlab.training.running import run

__all__ = ["RunFailed", "early_exits", "run"]
