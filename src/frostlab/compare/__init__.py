"""Arms that differ in one thing: timing, statistics, limits, verdicts."""
