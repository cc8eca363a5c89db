"""Comparisons: arms that differ in one thing, what it changes, and how sure that is."""
