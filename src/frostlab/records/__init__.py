"""Records: a run's folder, environment, telemetry and checkpoints, and the index of runs."""
