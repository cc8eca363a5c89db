"""Comparisons of training variants (arms): plans, runs, statistics, verdicts and pages."""
