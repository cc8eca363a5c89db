"""Records: a run's folder, its environment and telemetry, its checkpoints, the index of runs."""
