"""Judging arms: pairs of runs, statistics, verdicts, and the number of looks at the results."""
