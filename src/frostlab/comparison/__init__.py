"""Comparisons of arms that differ in one thing: plans, runs, statistics, verdicts and pages."""
