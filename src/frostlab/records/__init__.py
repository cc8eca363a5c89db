"""Records: a run's folder, its environment and telemetry, its checkpoints, the index of runs."""

from frostlab.records.record import RunRecord

__all__ = ["RunRecord"]
