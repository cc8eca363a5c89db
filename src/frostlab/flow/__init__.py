"""Gradient flow: which parts of a model learn, which do not, and why."""
