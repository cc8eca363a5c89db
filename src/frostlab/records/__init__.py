"""Records: a run's folder, environment, telemetry and checkpoints, and the index of runs."""

SCHEMA = 7  # version of a run's records; records of another version are refused
